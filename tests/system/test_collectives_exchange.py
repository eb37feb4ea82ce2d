# SPDX-License-Identifier: Apache-2.0
"""The exchange kernel: collectives as a whole, by lines, in place and by stages, against plain torch.

Memory outside windows, and parts that are no whole vectors, go by stages where a choice says in place.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from collective_memory import Empty, in_window, mixed, ordinary

from weft.collectives.calls import Collectives
from weft.collectives.variants import Choice, parse_variant
from weft.errors import Error, PeerLost
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks

# Elements of one part: less than a vector, ragged, what needs several rounds of both blocks, whole vectors.
SIZES = (1, 5, 64, 1003, 9001, 16_384)


def _values(rank: int, elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(elems) * 7 + rank * 5) % 13 % 3 + 1).to(dtype)


def _choices(name: str, ranks: int, *, inplace: bool = False) -> list[Choice]:
    ways = (
        ("LL exchange",) if name == "allreduce_1step" else ("LL exchange", "Simple exchange", "Simple staged")
    )
    return [parse_variant(f"{name} {way}").choice(ranks, inplace) for way in ways]


def _every_exchange(rank: Rank, memory: Callable[[Rank, Communicator], Empty]) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    call, empty = Collectives(comm.core), memory(rank, comm)
    n, me = rank.size, rank.rank

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return empty(tensor.numel(), tensor.dtype).copy_(tensor.reshape(-1)).view(tensor.shape)

    def blank(*shape: int) -> torch.Tensor:
        return place(torch.full(shape, -1.0))

    for elems in SIZES:
        everyone = torch.stack([_values(r, elems * n) for r in range(n)])
        own, parts = everyone[me], everyone.view(n, n, elems)
        for name in ("allreduce_1step", "allreduce_allpairs"):
            for choice in _choices(name, n, inplace=True):
                label = choice.label(), elems
                given, out = place(own), blank(elems * n)
                assert torch.equal(call.all_reduce(given, algorithm=choice, out=out), everyone.sum(0)), label
                assert torch.equal(given, own), label
                comm.barrier()
                assert torch.equal(call.all_reduce(given, algorithm=choice), everyone.sum(0)), label
        for choice in _choices("allgather_allpairs", n):
            out = blank(n, elems * n)
            assert torch.equal(call.all_gather(place(own), algorithm=choice, out=out), everyone), (
                choice,
                elems,
            )
            out = place(torch.where(torch.arange(n)[:, None] == me, own, -1.0))
            assert torch.equal(call.all_gather(out[me], algorithm=choice, out=out), everyone), (choice, elems)
        for choice in _choices("reducescatter_allpairs", n):
            found = call.reduce_scatter(place(own.view(n, elems)), algorithm=choice, out=blank(1, elems))
            assert torch.equal(found[0], parts.sum(0)[me]), (choice.label(), elems)
            given = place(own.view(n, elems))
            found = call.reduce_scatter(given, algorithm=choice, out=given[me : me + 1])
            assert torch.equal(found[0], parts.sum(0)[me]), (choice.label(), elems)
        for choice in _choices("alltoall_allpairs", n):
            found = call.all_to_all(place(own.view(n, elems)), algorithm=choice, out=blank(n, elems))
            assert torch.equal(found, parts[:, me]), (choice.label(), elems)


@pytest.mark.parametrize("memory", [ordinary, in_window, mixed])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_exchange_agrees_with_torch(ranks: int, memory: Callable[[Rank, Communicator], Empty]) -> None:
    run_ranks(ranks, _every_exchange, memory, deadline_s=200)


def test_exchange_of_nine_ranks_adds_more_sources_than_are_under_way() -> None:
    run_ranks(9, _every_exchange, in_window, deadline_s=280)


def _types(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    call = Collectives(comm.core)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.float64):
        for op in ("sum", "product", "min", "max", "average"):
            everyone = torch.stack([_values(r, 103, dtype).double() for r in range(rank.size)])
            wanted = {
                "sum": everyone.sum(0),
                "product": everyone.prod(0),
                "min": everyone.amin(0),
                "max": everyone.amax(0),
                "average": everyone.mean(0),
            }[op]
            for choice in _choices("allreduce_allpairs", rank.size, inplace=True):
                found = call.all_reduce(_values(rank.rank, 103, dtype), op, algorithm=choice)
                exact = wanted if dtype.is_floating_point else wanted.trunc()
                assert torch.equal(found.double(), exact.to(dtype).double()), (dtype, op, choice.label())


def test_every_type_and_reduction() -> None:
    run_ranks(2, _types)


def _averages(rank: Rank) -> None:
    """Every type's average has the bits of its sum, divided."""
    comm = Communicator(rank.group, timeout_s=60)
    call, from_window = Collectives(comm.core), in_window(rank, comm)
    names = [
        f"{kind}{bits}" for kind, sizes in (("int", (8, 32, 64)), ("float", (16, 32, 64))) for bits in sizes
    ]
    for name in (*names, "uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(rank.rank)
        given = (torch.randn(rank.size, 1001, generator=generator) * 9).to(dtype)
        for empty in (from_window, ordinary(rank, comm)):

            def place(tensor: torch.Tensor, empty: Empty = empty) -> torch.Tensor:
                return empty(tensor.numel(), tensor.dtype).copy_(tensor.reshape(-1)).view(tensor.shape)

            for choice in (
                *_choices("allreduce_1step", rank.size, inplace=True),
                *_choices("allreduce_allpairs", rank.size, inplace=True),
            ):
                found = call.all_reduce(place(given), "average", algorithm=choice)
                total = call.all_reduce(place(given), "sum", algorithm=choice)
                assert _same_bits(found, _divided(total, rank.size)), (name, choice.label())
            for choice in _choices("reducescatter_allpairs", rank.size):
                found = call.reduce_scatter(place(given), "average", algorithm=choice)
                total = call.reduce_scatter(place(given), "sum", algorithm=choice)
                assert _same_bits(found, _divided(total, rank.size)), (name, choice.label())


def _divided(total: torch.Tensor, divisor: int) -> torch.Tensor:
    if not total.dtype.is_floating_point:
        return total.div(divisor, rounding_mode="trunc")
    wide = total if total.dtype.itemsize >= 4 else total.float()
    return (wide / divisor).to(total.dtype)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def test_averages_have_the_bits_of_divided_sums() -> None:
    run_ranks(3, _averages, deadline_s=200)


def _in_step(rank: Rank) -> list[bytes]:
    """Calls of all kinds and sizes in a row, whose rounds and rendezvous share counters; sums that round."""
    comm = Communicator(rank.group, timeout_s=60)
    call, empty = Collectives(comm.core), mixed(rank, comm)
    generator, chooser = torch.Generator().manual_seed(rank.rank), random.Random(7)
    names = ("allreduce_1step", "allreduce_allpairs")
    results = []
    for _ in range(60):
        choice = chooser.choice([c for name in names for c in _choices(name, rank.size, inplace=True)])
        tensor = empty(chooser.choice((3, 200, 4096, 40_000)), torch.float32)
        tensor.copy_(torch.randn(tensor.numel(), generator=generator) * 1e3)
        call.all_reduce(tensor, algorithm=choice)
        results.append(tensor.numpy().tobytes())
        # Nobody fills memory again that others still write: all_reduce ends when all have written.
    return results


def test_calls_of_all_kinds_follow_each_other_and_all_ranks_get_the_same_bits() -> None:
    first, *others = run_ranks(3, _in_step, deadline_s=200)
    assert all(other == first for other in others)


def _missing(rank: Rank, way: str) -> str:
    comm = Communicator(rank.group, timeout_s=60)
    patient, impatient = (Collectives(comm.core, timeout_s=seconds) for seconds in (60, 0.5))
    choice = parse_variant(f"allgather_allpairs {way}").choice(rank.size, False)
    patient.all_gather(torch.ones(64), algorithm=choice)
    rank.meet()
    story = ""
    if rank.rank != 1:
        with pytest.raises(PeerLost) as caught:
            impatient.all_gather(torch.ones(64), algorithm=choice)
        story = str(caught.value)
    rank.meet()
    return story


@pytest.mark.parametrize("way", ["LL exchange", "Simple exchange", "Simple staged"])
def test_a_rank_that_stays_away_is_named(way: str) -> None:
    story = run_ranks(2, _missing, way)[0]
    assert "all_gather" in story and "for rank 1" in story


def _not_an_exchange(rank: Rank) -> None:
    call = Collectives(Communicator(rank.group, timeout_s=30).core)
    for text, allowed in (
        ("allreduce_a100_ring LL exchange", "an exchange"),
        ("allreduce_a100_ring Simple staged", "an exchange"),
        ("allreduce_allpairs LL staged", "Simple"),
    ):
        with pytest.raises(Error, match=f"allowed: {allowed}"):
            call.all_reduce(torch.ones(8), algorithm=parse_variant(text).choice(rank.size, True))


def test_a_program_that_is_no_exchange_is_refused() -> None:
    run_ranks(2, _not_an_exchange)
