# SPDX-License-Identifier: Apache-2.0
"""Windows from Python: views, growth, refusals, lifetimes."""

from __future__ import annotations

import gc

import pytest
import torch

import weft
from weft.errors import Error
from weft.runtime.bootstrap import SingleRank
from weft.testing.ranks import Rank, run_ranks


def _ring(rank: Rank) -> None:
    comm = weft.Communicator(rank.group)
    window = weft.Window(comm, 3 * 5 * 2)
    right = (comm.rank + 1) % comm.size
    window.tensor(right, (3, 5), torch.bfloat16).fill_(comm.rank)
    comm.barrier()
    left = (comm.rank + comm.size - 1) % comm.size
    assert window.tensor(comm.rank, (3, 5), torch.bfloat16).eq(left).all()
    address = window.address(right)
    window.grow(1 << 20)
    assert window.num_bytes == 1 << 20
    assert window.address(right) == address
    window.tensor(right, (1,), torch.uint8, offset=(1 << 20) - 1).fill_(7)
    comm.barrier()
    assert window.tensor(comm.rank, (1,), torch.uint8, offset=(1 << 20) - 1).item() == 7
    comm.barrier()


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_store_into_each_others_memory(ranks: int) -> None:
    run_ranks(ranks, _ring)


def test_views_keep_the_window_alive() -> None:
    window = weft.Window(weft.Communicator(SingleRank()), 4096)
    view = window.tensor(0, (4096,), torch.uint8)
    del window
    gc.collect()
    view.fill_(3)
    assert view.sum().item() == 3 * 4096


def test_views_outside_are_refused() -> None:
    window = weft.Window(weft.Communicator(SingleRank()), 4096)
    assert window.tensor(0, (0, 7), torch.float32).shape == (0, 7)
    for rank, shape, offset, what in [
        (0, (4097,), 0, "offset, bytes"),
        (0, (1,), 4096, "offset, bytes"),
        (0, (2**62,), 2**62, "offset, bytes"),
        (1, (1,), 0, "rank"),
        (-1, (1,), 0, "rank"),
    ]:
        with pytest.raises(Error, match=what):
            window.tensor(rank, shape, torch.uint8, offset=offset)
    with pytest.raises(Error, match="offset: got 2, allowed: a multiple of 4"):
        window.tensor(0, (1,), torch.float32, offset=2)


def test_zero_bytes_are_refused() -> None:
    with pytest.raises(Error, match="bytes: got 0"):
        weft.Window(weft.Communicator(SingleRank()), 0)
