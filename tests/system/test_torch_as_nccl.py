# SPDX-License-Identifier: Apache-2.0
"""What torch's backend "nccl" takes and "gloo" does not: lists of uneven sizes, and messages to oneself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from weft_group import join

from weft.testing.ranks import Rank, run_ranks

RANKS = 3
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def _join(rank: Rank, device: str, limit_s: float = 60) -> torch.device:
    join(rank, limit_s)
    if device == "cuda":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def _check_gather(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
    me = dist.get_rank()
    for is_async in (False, True):
        parts = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        parts[0] = torch.zeros((*shapes[0], 2), dtype=dtype, device=device)[..., 0]  # strided
        given = torch.full(shapes[me], me + 1, dtype=dtype, device=device)
        work = dist.all_gather(parts, given, async_op=is_async)
        if is_async:
            work.wait()
        assert all((part == rank + 1).all() for rank, part in enumerate(parts))


def _check_reduce(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, op: dist.ReduceOp, want: int
) -> None:
    """Rank r gives (r + 1) * 100 + q for rank q; ``want`` is the reduction of all (r + 1) * 100."""
    me = dist.get_rank()
    for is_async in (False, True):
        given = [
            torch.full(shape, (me + 1) * 100 + q, dtype=dtype, device=device)
            for q, shape in enumerate(shapes)
        ]
        before = [part.clone() for part in given]
        out = torch.zeros((*shapes[me], 2), dtype=dtype, device=device)[..., 0]  # strided
        work = dist.reduce_scatter(out, given, op, async_op=is_async)
        if is_async:
            work.wait()
        assert (out == want + me * (dist.get_world_size() if op == dist.ReduceOp.SUM else 1)).all()
        assert all(torch.equal(part, was) for part, was in zip(given, before, strict=True))


def _uneven(rank: Rank, kind: str) -> None:
    device = _join(rank, kind)
    for shapes in ([(1,), (7,), (33, 3)], [(100_003,), (0,), (5, 1)]):
        for dtype in (torch.float32, torch.uint8, torch.complex64):
            _check_gather(shapes, dtype, device)
        _check_reduce(shapes, torch.float32, device, dist.ReduceOp.SUM, 600)
        _check_reduce(shapes, torch.complex64, device, dist.ReduceOp.SUM, 600)
        _check_reduce(shapes, torch.int64, device, dist.ReduceOp.MAX, 300)
        _check_reduce(shapes, torch.float64, device, dist.ReduceOp.AVG, 200)
    # Two ranks agree on a size, and the third has another in its place of the list.
    other = [torch.zeros(size, device=device) for size in ((1, 2, 3) if rank.rank else (1, 4, 3))]
    with pytest.raises(RuntimeError, match=r"called broadcast of 4 float32.* called broadcast of 2 float32"):
        dist.all_gather(other, torch.zeros(rank.rank + 1, device=device))
        dist.all_reduce(torch.zeros(1, device=device))  # ranks that had sent all they should know it by now
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_uneven_sizes(device: str) -> None:
    run_ranks(RANKS, _uneven, device, with_group=False)


def _to_itself(rank: Rank, kind: str) -> None:
    device = _join(rank, kind)
    n, me = rank.size, rank.rank
    dist.all_reduce(torch.ones(1, device=device))
    for receives_first in (False, True):
        ops = []
        got = {(q, k): torch.zeros(5, device=device) for q in range(n) for k in range(3)}
        for (q, k), target in got.items():
            given = torch.full((5,), 100.0 * me + 10 * q + k, device=device)
            pair = [dist.P2POp(dist.isend, given, q), dist.P2POp(dist.irecv, target, q)]
            ops += reversed(pair) if receives_first else pair
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for (q, k), target in got.items():
            assert (target == 100 * q + 10 * me + k).all(), (q, k, target)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_messages_to_oneself_in_a_batch(device: str) -> None:
    run_ranks(RANKS, _to_itself, device, with_group=False)


def _wrong_to_itself(rank: Rank) -> None:
    _join(rank, "cpu", 1)
    me, t = rank.rank, torch.ones(3)
    sent, received = dist.isend(t, me), dist.irecv(torch.ones(4), me)
    for work in (sent, received):
        with pytest.raises(
            RuntimeError, match="send of 3 float32 with tag 0 to itself, and recv of 4 float32"
        ):
            work.wait()
    with pytest.raises(RuntimeError, match="a receive of the rank's own had no send in 1 s"):
        dist.irecv(t, me).wait()
    with pytest.raises(RuntimeError, match="a send of the rank's own had no receive in 1 s"):
        dist.isend(t, me).wait()
    got = torch.zeros(3)
    works = [dist.irecv(got, me), dist.isend(t * 7, me)]  # what was given up is not received
    for work in works:
        work.wait()
    assert (got == 7).all()
    dist.destroy_process_group()


def test_messages_to_oneself_that_do_not_fit() -> None:
    run_ranks(2, _wrong_to_itself, with_group=False)
