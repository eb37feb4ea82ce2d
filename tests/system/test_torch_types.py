# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over backend "weft": reductions and element types beyond those of most models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft_group import join

from weft.testing.ranks import Rank, run_ranks

INTEGERS = [
    getattr(torch, name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
    if hasattr(torch, name)
]
MOVED = [
    getattr(torch, name)
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
]
SIZES = (1, 7, 17, 4099)  # elements of one rank's part: below, beside and beyond whole vectors
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _bits(rank: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's values: any bits that the type may have."""
    generator = torch.Generator().manual_seed(1000 * elems + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elems,), generator=generator).bool()
    nbytes = elems * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _bitwise_of(op: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return what torch computes, over bytes, as it has no such operation for all types."""
    found = functools.reduce(op, [tensor.view(torch.uint8) for tensor in tensors])
    return found.view(tensors[0].dtype)


def _bit_reductions(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, rank.rank
    for dtype in INTEGERS:
        for elems in SIZES:
            every = [_bits(q, elems * n, dtype) for q in range(n)]
            for op, act in BITWISE.items():
                want = _bitwise_of(act, every)
                got = every[me].clone()
                dist.all_reduce(got, op)
                assert _same(got, want), (dtype, elems, op)
                got = every[me].clone()
                dist.reduce(got, n - 1, op)
                assert _same(got, want if me == n - 1 else every[me]), (dtype, elems, op)
                part = torch.empty(elems, dtype=dtype)
                dist.reduce_scatter_tensor(part, every[me].clone(), op)
                assert _same(part, want.view(n, -1)[me]), (dtype, elems, op)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        with pytest.raises(ValueError, match=f"op: got band of {dtype}, allowed: band of integers and"):
            dist.all_reduce(torch.ones(3, dtype=dtype), dist.ReduceOp.BAND)
    dist.all_reduce(t := torch.ones(3))  # the group goes on
    assert (t == n).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_of_integers_are_reduced(ranks: int) -> None:
    run_ranks(ranks, _bit_reductions, with_group=False)


def _short_integers(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, rank.rank
    for dtype in (torch.int16, torch.uint16):
        for elems in SIZES:
            every = [_bits(q, elems * n, dtype) for q in range(n)]
            wide = torch.stack([values.to(torch.int64) for values in every])
            wants = {
                dist.ReduceOp.SUM: wide.sum(0),
                dist.ReduceOp.PRODUCT: functools.reduce(lambda a, b: a * b & 0xFFFF, wide),
                dist.ReduceOp.MIN: wide.amin(0),
                dist.ReduceOp.MAX: wide.amax(0),
            }
            for op, want in wants.items():
                got = every[me].clone()
                dist.all_reduce(got, op)
                assert torch.equal(got.to(torch.int64) & 0xFFFF, want & 0xFFFF), (dtype, elems, op)
            few = [values.to(torch.int64) % 100 for values in every]
            got = few[me].to(dtype)
            dist.all_reduce(got, dist.ReduceOp.AVG)
            assert torch.equal(got.to(torch.int64), torch.stack(few).sum(0) // n)
            part = torch.empty(elems, dtype=dtype)
            dist.reduce_scatter_tensor(part, every[me].clone())
            want = wide.sum(0).view(n, -1)[me]
            assert torch.equal(part.to(torch.int64) & 0xFFFF, want & 0xFFFF)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_16_bit_integers_wrap(ranks: int) -> None:
    run_ranks(ranks, _short_integers, with_group=False)


def _moves(rank: Rank) -> None:
    join(rank)
    for dtype in (*INTEGERS, *MOVED):
        for elems in SIZES:
            _move(rank, dtype, elems)
    for dtype in MOVED:
        with pytest.raises(ValueError, match=f"op: got sum of {dtype}, allowed: moves of it alone"):
            dist.all_reduce(torch.zeros(4, dtype=dtype))
    dist.destroy_process_group()


def _move(rank: Rank, dtype: torch.dtype, elems: int) -> None:
    n, me = rank.size, rank.rank
    every = [_bits(q, elems * n, dtype) for q in range(n)]
    first = [values[:elems].clone() for values in every]
    mine = every[me]

    def new(count: int = elems) -> torch.Tensor:
        return torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)

    got = mine.clone()
    dist.broadcast(got, n - 1)
    assert _same(got, every[n - 1])
    parts = [new(elems * n) for _ in range(n)]
    dist.all_gather(parts, mine)
    assert all(map(_same, parts, every))
    flat = new(elems * n * n)
    dist.all_gather_into_tensor(flat, mine)
    assert _same(flat, torch.cat(every))
    gathered = [new(elems * n) for _ in range(n)] if me == 0 else None
    dist.gather(mine, gathered, 0)
    assert gathered is None or all(map(_same, gathered, every))
    got = new()
    dist.scatter(got, list(every[0].view(n, -1)) if me == 0 else None, 0)
    assert _same(got, every[0].view(n, -1)[me])
    got = new(elems * n)
    dist.all_to_all_single(got, mine)
    assert _same(got, torch.cat([values.view(n, -1)[me] for values in every]))
    sizes = [elems * (q + 1) for q in range(n)]  # rank q sends (q + 1) parts to each
    uneven = torch.cat([first[me]] * (me + 1) * n)
    got = new(sum(sizes))
    dist.all_to_all_single(got, uneven, sizes, [sizes[me]] * n)
    assert _same(got, torch.cat([first[q] for q in range(n) for _ in range(q + 1)]))
    outs = [new() for _ in range(n)]
    dist.all_to_all(outs, [values.clone() for values in mine.view(n, -1)])
    assert all(_same(outs[q], every[q].view(n, -1)[me]) for q in range(n))
    got = new()
    ops = [dist.P2POp(dist.isend, first[me], (me + 1) % n), dist.P2POp(dist.irecv, got, (me - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert _same(got, first[(me - 1) % n])


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_type_is_moved(ranks: int) -> None:
    run_ranks(ranks, _moves, with_group=False)


def _premul(factor: Any) -> Any:
    return dist._make_nccl_premul_sum(factor)


def _premultiplied_sums(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, rank.rank
    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64)
    for dtype in types:
        for elems in SIZES:
            for factor in (0.5, torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)):
                _premultiply(rank, dtype, elems, factor)
    own = _premul(float(me + 1))  # each rank its own factor
    dist.all_reduce(t := torch.ones(5), own)
    assert (t == n * (n + 1) / 2).all()
    t = torch.eye(4).to_sparse()
    dist.all_reduce(t, _premul(0.25))
    assert torch.equal(t.to_dense(), torch.eye(4) * 0.25 * n)
    with pytest.raises(
        ValueError, match=r"op: got PREMUL_SUM of torch.int32, allowed: PREMUL_SUM of floating"
    ):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), _premul(2.0))
    with pytest.raises(
        ValueError, match=r"op's factor: got torch.complex64\[1\] on cpu, allowed: one real number"
    ):
        dist.all_reduce(torch.ones(3), _premul(torch.ones(1, dtype=torch.complex64)))
    dist.destroy_process_group()


def _premultiply(rank: Rank, dtype: torch.dtype, elems: int, factor: Any) -> None:
    n, me = rank.size, rank.rank
    values = (torch.arange(elems * n) % 2).float()
    given = [(values + q).to(dtype) for q in range(n)]
    want = ((values * n + sum(range(n))) * 0.5).to(dtype)  # halves of small integers: exact in each type
    op = _premul(factor)

    def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert torch.equal(got.to(torch.complex128), wanted.to(torch.complex128)), (dtype, elems, factor)

    got = given[me].clone()
    dist.all_reduce(got, op)
    check(got, want)
    got = given[me].clone()
    dist.all_reduce(got, op, async_op=True).wait()
    check(got, want)
    got = given[me].clone()
    dist.reduce(got, 0, op)
    check(got, want if me == 0 else given[me])
    part, source = torch.empty(elems, dtype=dtype), given[me].clone()
    dist.reduce_scatter_tensor(part, source, op)
    check(part, want.view(n, -1)[me])
    check(source, given[me])
    part.zero_()
    dist.reduce_scatter(part, list(source.view(n, -1)), op)
    check(part, want.view(n, -1)[me])
    uneven = [source[: q + 1] if elems * n > q else source for q in range(n)]
    part = torch.empty(uneven[me].numel(), dtype=dtype)
    dist.reduce_scatter(part, uneven, op)
    check(part, want[: uneven[me].numel()])
    outs = [torch.empty(elems, dtype=dtype) for _ in range(2)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, source, op)
    check(outs[1], want.view(n, -1)[me])
    both = [given[me].clone() for _ in range(2)]
    with dist._coalescing_manager():
        for each in both:
            dist.all_reduce(each, op)
    check(both[1], want)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_are_premultiplied(ranks: int) -> None:
    run_ranks(ranks, _premultiplied_sums, with_group=False)


def _divided_gradients(rank: Rank) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(rank)
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (rank.size,)))
    model.set_gradient_divide_factor(5.0)  # type: ignore[operator]
    model(torch.full((2, 6), float(rank.rank + 1))).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    found = gradient.full_tensor()  # type: ignore[attr-defined]
    dist.destroy_process_group()
    return [float(value) for value in found.flatten()]


def test_fsdp_divides_gradients_by_a_factor_of_its_own() -> None:
    want = 2 * (1 + 2) / 5  # two rows on each of two ranks
    for gradient in run_ranks(2, _divided_gradients, with_group=False):
        assert gradient == pytest.approx([want] * 18)
