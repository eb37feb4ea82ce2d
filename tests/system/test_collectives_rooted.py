# SPDX-License-Identifier: Apache-2.0
"""Exchanges with a root, against plain torch: broadcast, reduce, gather and scatter by lines, in place and by stages.

Plans are made and run by the executor, so that inputs and outputs lie apart, or in place, on any memory.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_memory import Empty, in_window, mixed, ordinary

from weft.collectives.call_checks import DTYPES
from weft.collectives.calls import Collectives
from weft.collectives.exchanges import EXCHANGES, LINES, PLACES, STAGES
from weft.collectives.executor import Call, Executor
from weft.collectives.rows import REDUCTIONS
from weft.collectives.variants import parse_choice, parse_variant
from weft.errors import Error, PeerLost
from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank, RankPool, run_ranks

# Elements of one part: less than a vector, ragged, what needs several rounds of both blocks, and whole vectors, of
# which the last make several pieces of bulk copies for each owner of a share.
SIZES = (1, 5, 64, 1003, 9001, 16_384, 40_000)
WAYS = (LINES, PLACES, STAGES)
NAMES = ("broadcast", "reduce", "gather", "scatter")


@dataclasses.dataclass
class Case:
    """One call as one rank sees it: what it has, where the output goes, and what is there afterwards."""

    given: torch.Tensor
    into: torch.Tensor
    wanted: torch.Tensor | None  # None: the output stays as it was


def _values(ranks: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(elems) * 7
    return torch.stack([((numbers + 5 * r) % 13 % 3 + 1) for r in range(ranks)]).to(dtype)


class Rooted:
    """Runs the calls of one communicator."""

    def __init__(self, rank: Rank, memory: Callable[[Rank, Communicator], Empty]) -> None:
        self.comm = Communicator(rank.group, timeout_s=60)
        self.executor = Executor(self.comm.core)
        self.empty, self.me, self.size = memory(rank, self.comm), rank.rank, rank.size

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor.reshape(-1))

    def blank(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty(elems, dtype).fill_(99)

    def case(self, name: str, elems: int, root: int, inplace: bool, dtype: torch.dtype, total: Any) -> Case:
        """Return buffers whose parts have ``elems``; ``total(every)`` is what a reduce gives."""
        is_root, n, me = self.me == root, self.size, self.me
        every = _values(n, elems * n if name == "scatter" else elems, dtype)
        given = self.place(every[me])
        if name == "broadcast":
            into = given if inplace else self.blank(elems, dtype)
            return Case(given, into, every[root])
        if name == "reduce":
            into = given if inplace else self.blank(elems, dtype)
            return Case(given, into, total(every) if is_root else None)
        if name == "gather":
            into = self.blank(n * elems if is_root else elems, dtype)
            if inplace and is_root:
                given = into[me * elems : (me + 1) * elems].copy_(given)
            return Case(given, into, every.reshape(-1) if is_root else None)
        part = slice(me * elems, (me + 1) * elems)
        into = given[part] if inplace and is_root else self.blank(elems, dtype)
        return Case(given, into, every[root][part])

    def run(self, name: str, case: Case, elems: int, root: int, way: int, op: str = "sum") -> None:
        planned = self.plan(name, case, elems, root, way, op)
        kept, there = case.given.clone(), case.into.clone()
        planned.run(case.given.data_ptr(), case.into.data_ptr(), 0)
        label = name, elems, root, way, op, case.given.dtype
        assert _same(case.into, there if case.wanted is None else case.wanted), label
        shares_memory = (
            case.into.data_ptr() < case.given.data_ptr() + case.given.nbytes
            and case.given.data_ptr() < case.into.data_ptr() + case.into.nbytes
        )
        assert shares_memory or _same(case.given, kept), label

    def plan(self, name: str, case: Case, elems: int, root: int, way: int, op: str = "sum") -> Any:
        call = Call(0, 0, elems, DTYPES[case.given.dtype], REDUCTIONS[op])
        return self.executor.plan_exchange(EXCHANGES[f"{name}_flat"], call, way, root)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def _sum(every: torch.Tensor) -> torch.Tensor:
    return every.sum(0).to(every.dtype)


def _every_call(rank: Rank, memory: Callable[[Rank, Communicator], Empty]) -> None:
    calls = Rooted(rank, memory)
    for elems in SIZES:
        for way in WAYS:
            for root in range(rank.size):
                for name in NAMES:
                    for inplace in (False, True):
                        case = calls.case(name, elems, root, inplace, torch.float32, _sum)
                        calls.comm.barrier()  # peers may still write where this one lay
                        calls.run(name, case, elems, root, way)


@pytest.mark.parametrize("memory", [ordinary, in_window, mixed])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_from_every_root(ranks: int, memory: Callable[[Rank, Communicator], Empty]) -> None:
    run_ranks(ranks, _every_call, memory, with_gpus=False, deadline_s=280)


def _large(rank: Rank) -> None:
    """Shares of so many pieces that owners pass the first on while the root still sends."""
    calls = Rooted(rank, in_window)
    for elems in (200_004, 1_000_000):
        for root in (0, rank.size - 1):
            for name in NAMES[: 2 if elems > 500_000 else 4]:
                for inplace in (False, True):
                    case = calls.case(name, elems, root, inplace, torch.float32, _sum)
                    calls.comm.barrier()
                    calls.run(name, case, elems, root, PLACES)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_large_calls(ranks: int) -> None:
    run_ranks(ranks, _large, with_gpus=False, deadline_s=200)


def _of_many(rank: Rank) -> None:
    calls = Rooted(rank, mixed)
    for elems in (5, 1003, 40_000):
        for way in WAYS:
            for root in (0, 4, rank.size - 1):
                for name in NAMES:
                    case = calls.case(name, elems, root, root == 4, torch.float32, _sum)
                    calls.comm.barrier()
                    calls.run(name, case, elems, root, way)


def test_nine_ranks_of_which_eight_own_shares() -> None:
    run_ranks(9, _of_many, with_gpus=False, deadline_s=280)


_TOTALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda every: every.sum(0),
    "product": lambda every: every.prod(0),
    "min": lambda every: every.amin(0),
    "max": lambda every: every.amax(0),
    "average": lambda every: every.mean(0),
}


def _types(rank: Rank) -> None:
    calls = Rooted(rank, mixed)
    names = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 32, 64)]
    for name in names:
        dtype = getattr(torch, name)
        for op, total in _TOTALS.items():

            def reduced(every: torch.Tensor, total: Any = total, dtype: torch.dtype = dtype) -> torch.Tensor:
                exact = total(every.double())
                return (exact if dtype.is_floating_point else exact.trunc()).to(dtype)

            for way in WAYS:
                case = calls.case("reduce", 208, rank.size - 1, False, dtype, reduced)
                calls.comm.barrier()
                calls.run("reduce", case, 208, rank.size - 1, way, op)
        for call in ("broadcast", "gather", "scatter"):
            for way in WAYS:
                case = calls.case(call, 103, 1, False, dtype, None)
                calls.comm.barrier()
                calls.run(call, case, 103, 1, way)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_type_and_reduction(ranks: int) -> None:
    run_ranks(ranks, _types, with_gpus=False, deadline_s=200)


def _in_step(rank: Rank) -> None:
    """Planned calls of all kinds, ways and roots in a row with others that share their rounds, without barriers."""
    calls = Rooted(rank, in_window)
    chance = random.Random(11)
    elems, plans = (3, 1004, 9000, 40_000), []
    symmetric = [
        ("allgather_allpairs", LINES),
        ("allreduce_allpairs", PLACES),
        ("allreduce_allpairs", STAGES),
    ]
    for _ in range(40):
        name, count, root = chance.choice(NAMES), chance.choice(elems), chance.randrange(rank.size)
        case = calls.case(name, count, root, chance.random() < 0.5, torch.float32, _sum)
        plans.append((name, case, count, root, chance.choice(WAYS)))
        calls.comm.barrier()
    own, out = torch.full((512,), rank.rank + 1.0), torch.empty(512 * rank.size)
    for name, case, count, root, way in plans:
        calls.run(name, case, count, root, way)
        other, other_way = chance.choice(symmetric)
        call = Call(0, 0, own.numel(), DTYPES[own.dtype])
        planned = calls.executor.plan_exchange(EXCHANGES[other], call, other_way)
        planned.run(own.data_ptr(), out.data_ptr(), 0)
        numbers = torch.arange(1.0, rank.size + 1)
        if other == "allgather_allpairs":
            assert torch.equal(out.view(rank.size, -1)[:, 0], numbers)
        else:
            assert (out[:512] == numbers.sum()).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_of_all_kinds_follow_each_other(ranks: int) -> None:
    run_ranks(ranks, _in_step, with_gpus=False, deadline_s=200)


def _through_calls(rank: Rank) -> None:
    """The same by the methods that users call, and repeats of a kept signature."""
    comm = Communicator(rank.group, timeout_s=60)
    call, n, me = Collectives(comm.core), rank.size, rank.rank
    every = _values(n, 1200, torch.float32)
    for way in ("LL exchange", "Simple exchange", "Simple staged"):
        for root in range(n):

            def choice(name: str, inplace: bool, way: str = way, root: int = root) -> Any:
                return parse_variant(f"{name}_flat {way}").choice(n, inplace, root)

            mine = every[me].clone()
            assert torch.equal(call.broadcast(mine, root, algorithm=choice("broadcast", True)), every[root])
            mine = every[me].clone()
            call.reduce(mine, root, algorithm=choice("reduce", True))
            assert torch.equal(mine, every.sum(0) if me == root else every[me])
            found = call.gather(every[me].clone(), root, algorithm=choice("gather", False))
            assert found is None if me != root else torch.equal(found, every)
            out, parts = torch.empty(1200 // n), every[root].view(n, -1)
            call.scatter(every[me] if me == root else None, out, root, algorithm=choice("scatter", False))
            assert torch.equal(out, parts[me])


@pytest.mark.parametrize("ranks", [2, 3])
def test_users_calls_take_exchanges(ranks: int) -> None:
    run_ranks(ranks, _through_calls, with_gpus=False)


def _other_root(rank: Rank) -> None:
    calls = Rooted(rank, ordinary)
    case = calls.case("broadcast", 4, 0, True, torch.float32, None)
    for root in (-1, rank.size):
        with pytest.raises(Error, match=f"root: got {root}, allowed: a rank of {rank.size}"):
            calls.plan("broadcast", case, 4, root, LINES)


def test_a_root_that_is_no_rank_is_refused() -> None:
    run_ranks(2, _other_root, with_gpus=False)


@pytest.fixture(scope="module", params=(2, 3))
def pool(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with RankPool(request.param, with_gpus=False) as ranks:
        yield ranks


def _roots_differ(rank: Rank, name: str, way: str, elems: int) -> tuple[str, bool]:
    comm = Communicator(rank.group, timeout_s=60)
    calls, window = Collectives(comm.core, 0.5), Window(comm, 4 << 20)
    tensor = window.tensor(rank.rank, (elems,), torch.float32)
    tensor.fill_(rank.rank + 1.0)
    root = rank.rank % 2
    choice = parse_choice(f"{name}_flat {way}", rank.size, True)
    choice = dataclasses.replace(
        choice, algorithm=parse_variant(f"{name}_flat {way}").choice(rank.size, True, root).algorithm
    )
    comm.barrier()
    try:
        getattr(calls, name)(tensor, root, algorithm=choice)
        story = ""
    except Error as error:
        story = str(error)
    comm.barrier()
    return story, bool((tensor == rank.rank + 1.0).all())


@pytest.mark.parametrize("way", ["LL exchange", "Simple exchange", "Simple staged"])
@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_roots_that_differ_are_named_and_do_not_mix(pool: RankPool, name: str, way: str) -> None:
    answers = pool.run(_roots_differ, name, way, 4096)
    assert all(story for story, _ in answers), answers
    # A third rank has the root of the first, and may have got what that sent.
    assert all(is_kept for _, is_kept in answers[:2]), answers
    assert any("with root 0" in story and "with root 1" in story for story, _ in answers), answers


def _away(rank: Rank, name: str, way: str, who: int) -> str:
    comm = Communicator(rank.group, timeout_s=60)
    window = Window(comm, 4 << 20)
    tensor = window.tensor(rank.rank, (50_000,), torch.float32)
    choice = parse_variant(f"{name}_flat {way}").choice(rank.size, True, 1)
    getattr(Collectives(comm.core, timeout_s=60), name)(tensor, 1, algorithm=choice)
    rank.meet()
    story = ""
    if rank.rank != who:
        with pytest.raises(PeerLost) as caught:
            getattr(Collectives(comm.core, timeout_s=0.5), name)(tensor, 1, algorithm=choice)
        story = str(caught.value)
    rank.meet()
    return story


@pytest.mark.parametrize("who", [1, 2])
@pytest.mark.parametrize("way", ["LL exchange", "Simple exchange", "Simple staged"])
@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_a_rank_that_stays_away_is_named(name: str, way: str, who: int) -> None:
    story = run_ranks(3, _away, name, way, who, with_gpus=False)[0]
    assert f"{name}" in story and f"for rank {who}" in story, story
