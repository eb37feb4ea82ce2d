# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of collectives lie: ordinary memory, this rank's window, or both by turns."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank

Empty = Callable[[int, torch.dtype], torch.Tensor]
_WINDOW_BYTES = 48 << 20


def ordinary(rank: Rank, comm: Communicator) -> Empty:
    """Return a maker of tensors as torch makes them."""
    return lambda elems, dtype: torch.empty(elems, dtype=dtype)


def in_window(rank: Rank, comm: Communicator) -> Empty:
    """Return a maker of tensors in this rank's window, at places that differ from rank to rank."""
    window = Window(comm, _WINDOW_BYTES)
    at = [4096 * rank.rank]

    def empty(elems: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = -(-elems * dtype.itemsize // 256) * 256
        if at[0] + num_bytes > _WINDOW_BYTES:
            at[0] = 0
        at[0] += num_bytes
        return window.tensor(rank.rank, (elems,), dtype, at[0] - num_bytes)

    return empty


def mixed(rank: Rank, comm: Communicator) -> Empty:
    """Return a maker that takes the window or ordinary memory by turns, in another order on every rank."""
    makers, generator = (in_window(rank, comm), ordinary(rank, comm)), random.Random(rank.rank)
    return lambda elems, dtype: makers[generator.random() >= 0.7](elems, dtype)
