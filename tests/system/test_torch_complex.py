# SPDX-License-Identifier: Apache-2.0
"""Reductions of complex numbers by the torch backend: only those that are the same for each part by itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing.ranks import Rank, run_ranks


def _complex(rank: Rank) -> None:
    group = dist.new_group(list(range(rank.size)), backend="weft")
    given = torch.full((2 * rank.size,), 1 + 2j)
    out = torch.empty(2, dtype=given.dtype)
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        with pytest.raises(weft.Error, match=r"^op: got .*SUM, AVG or PREMUL_SUM of torch.complex64"):
            dist.reduce(given, 0, op, group=group)
        with pytest.raises(weft.Error, match=r"^op: got .*SUM, AVG or PREMUL_SUM of torch.complex64"):
            dist.reduce_scatter_tensor(out, given, op, group=group)
        with pytest.raises(weft.Error, match=r"^op: got .*SUM, AVG or PREMUL_SUM of torch.complex64"):
            dist.reduce_scatter(out, list(given.chunk(rank.size)), op, group=group)
    dist.reduce_scatter_tensor(out, given, group=group)
    assert out.tolist() == [rank.size * (1 + 2j)] * 2


def test_products_and_extremes_of_complex_numbers_are_refused() -> None:
    run_ranks(2, _complex, with_gpus=False)
