# SPDX-License-Identifier: Apache-2.0
"""Programs written with rotations(): what they mean, and that what is proven of one rank holds for all."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import random
from collections.abc import Callable, Iterable

import pytest

from weft.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Buffer,
    Program,
    ProgramError,
    VerificationError,
    chunk,
    create_scratch,
    rotations,
    verify,
)
from weft.collectives.compiler import compile_proven
from weft.collectives.ir import Algorithm, Block, RotatedRanks, Span
from weft.collectives.library import build
from weft.collectives.xml import from_xml
from weft.collectives.xml_write import to_xml

Ranks = Callable[[int], Iterable[int]]


def _all_gather(n: int, ranks: Ranks, inplace: bool = False) -> Program:
    with Program("ring", AllGather(n, 2, inplace)) as program:
        for rank in ranks(n):
            c = chunk(rank, Buffer.input, 0, 2).copy(rank, Buffer.output, rank * 2)
            for step in range(1, n):
                c = c.copy((rank + step) % n)
    return program


def _all_reduce(n: int, ranks: Ranks, inplace: bool = False) -> Program:
    """Every owner adds what comes to its scratch, chunk by chunk, and tells the others."""
    with Program("pairs", AllReduce(n, n, inplace)) as program:
        for rank in ranks(n):
            for step in range(1, n):
                owner = (rank + step) % n
                chunk(rank, Buffer.input, owner).copy(owner, "came", step - 1)
        for owner in ranks(n):
            acc = chunk(owner, Buffer.input, owner).copy(owner, Buffer.output, owner)
            for step in range(1, n):
                acc = acc.reduce(chunk(owner, "came", step - 1))
            for step in range(1, n):
                acc.copy((owner + step) % n)
    return program


def _all_to_all(n: int, ranks: Ranks, inplace: bool = False) -> Program:
    assert not inplace
    with Program("pairs", AllToAll(n, 2)) as program:
        for rank in ranks(n):
            for step in range(n):
                to = (rank + step) % n
                chunk(rank, Buffer.input, to * 2, 2).copy(to, Buffer.output, rank * 2)
    return program


_PROGRAMS = (_all_gather, _all_reduce, _all_to_all)


def _rotated(n: int) -> Iterable[int]:
    return rotations()


@pytest.fixture
def one_rank_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = importlib.import_module(
        "weft.collectives.compiler.lower"
    )  # the package has a function of that name
    monkeypatch.setattr(lower, "_FEW_STEPS", 0)


def _both_forms(name: Callable[..., Program]) -> tuple[bool, ...]:
    return (False,) if name is _all_to_all else (False, True)


@pytest.mark.parametrize("write", _PROGRAMS)
def test_loops_and_rotations_compute_the_same(write: Callable[..., Program]) -> None:
    for n in (2, 3, 5, 8):
        for inplace in _both_forms(write):
            looped, rotated = (write(n, ranks, inplace).compile() for ranks in (range, _rotated))
            assert sorted(_moves(looped)) == sorted(_moves(rotated))


def _moves(algorithm: Algorithm) -> list[tuple[object, ...]]:
    return [
        (rank, step.op.value, str(step.src), str(step.dst), step.count)
        for rank, _, _, step in algorithm.steps()
    ]


@pytest.mark.parametrize("write", _PROGRAMS)
@pytest.mark.usefixtures("one_rank_for_all")
def test_one_rank_stands_for_all(write: Callable[..., Program]) -> None:
    for n in (2, 3, 7):
        for inplace in _both_forms(write):
            algorithm, report = compile_proven(write(n, _rotated, inplace))
            assert isinstance(algorithm.ranks, RotatedRanks)
            assert verify(algorithm.unrotated()) == report
            text = to_xml(algorithm)
            assert text == to_xml(algorithm.unrotated())
            assert verify(from_xml(text)).messages == report.messages


@pytest.mark.usefixtures("one_rank_for_all")
@pytest.mark.parametrize("name", ["allgather_ring", "reducescatter_ring", "allreduce_a100_ring"])
def test_instances_of_one_rank(name: str) -> None:
    for n, instances in ((2, 3), (5, 2)):
        algorithm = build(name, n, instances=instances).compile()
        assert isinstance(algorithm.ranks, RotatedRanks)
        assert verify(algorithm) == verify(algorithm.unrotated())
        assert to_xml(algorithm) == to_xml(algorithm.unrotated())


@pytest.mark.usefixtures("one_rank_for_all")
@pytest.mark.parametrize("write", _PROGRAMS)
def test_wrong_programs_are_refused_as_for_all_ranks(write: Callable[..., Program]) -> None:
    random.seed(write.__name__)
    verdicts = []
    for _ in range(80):
        good = write(random.choice((3, 4)), _rotated).compile()
        assert isinstance(good.ranks, RotatedRanks)
        first = copy.deepcopy(good.ranks.first)
        _change(first.blocks, random.choice(_CHANGES))
        algorithm = dataclasses.replace(good, ranks=RotatedRanks(first, good.ranks.rotation))
        # Of several mistakes, either may meet another one first.
        assert (_verdict(algorithm) == "proven") == (_verdict(algorithm.unrotated()) == "proven")
        verdicts.append(_verdict(algorithm))
    assert {"proven", "structure", "result"} <= set(verdicts) and len(set(verdicts)) >= 4


def _verdict(algorithm: Algorithm) -> str:
    try:
        verify(algorithm)
    except VerificationError as error:
        return error.kind
    return "proven"


_CHANGES = ("order", "source", "place", "waits", "peer", "gone", "twice")


def _change(blocks: list[Block], change: str) -> None:
    """Change a step of rank 0's, and so the same of all ranks."""
    block = random.choice([block for block in blocks if block.steps])
    at = random.randrange(len(block.steps))
    step = block.steps[at]
    if change == "order":
        random.shuffle(block.steps)
    elif change == "source":
        block.steps[at] = dataclasses.replace(step, src=Span(step.src.buffer, step.src.index ^ 1))
    elif change == "place":
        block.steps[at] = dataclasses.replace(step, dst=Span(step.dst.buffer, step.dst.index ^ 1))
    elif change == "waits":
        block.steps[at] = dataclasses.replace(step, depends=())
    elif change == "peer" and block.send >= 0:
        block.send = 1 if block.send == 2 else 2
    elif change == "gone":
        del block.steps[at]
    elif change == "twice":
        block.steps.insert(at, step)


def test_a_thousand_ranks() -> None:
    algorithm, report = compile_proven(build("allgather_ring", 1000))
    assert report.steps == 1_001_000 and report.messages == 999_000 and report.result_checked
    last = algorithm.ranks[999]
    assert [(block.send, block.recv) for block in last.blocks if block.send >= 0] == [(0, 998)]


def test_what_cannot_be_rotated_is_refused() -> None:
    with (
        pytest.raises(ProgramError, match="no rotation is known of Broadcast"),
        Program("b", Broadcast(4)),
    ):
        next(iter(rotations()))
    with Program("mixed", AllGather(4)):
        chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0)
        with pytest.raises(ProgramError, match="operations of single ranks"):
            next(iter(rotations()))
    with Program("mixed", AllGather(4)):
        for rank in rotations():
            chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank)
        with pytest.raises(ProgramError, match="outside of rotations"):
            chunk(0, Buffer.input, 0)
    with Program("wide", AllReduce(4, 4)):
        for rank in rotations():
            with pytest.raises(ProgramError, match="belong to several ranks"):
                chunk(rank, Buffer.input, 0, 4).copy(rank, Buffer.output, 0)
    with Program("shift", AllReduce(4, 1, inplace=True)):
        for rank in rotations():
            with pytest.raises(ProgramError, match="every rank would overwrite"):
                chunk(rank, Buffer.input, 0).copy(rank + 1)
    with Program("late", AllReduce(4, 4)):
        for rank in rotations():
            chunk(rank, Buffer.input, 0).copy(rank, "came", 0)
            with pytest.raises(ProgramError, match="per_rank of came"):
                create_scratch(rank, "came", per_rank=1)
