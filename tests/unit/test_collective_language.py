# SPDX-License-Identifier: Apache-2.0
"""The language: meaning, and errors that point at the user's line."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from weft import cli
from weft.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Buffer,
    Check,
    Chunk,
    Collective,
    MSCCLProgram,
    Program,
    ProgramError,
    chunk,
    verify,
)
from weft.collectives.ir import Op
from weft.collectives.library import build
from weft.collectives.topology import fully_connected, line


def _here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"test_collective_language.py:{frame.f_back.f_lineno + offset}"


def test_fused_ring_is_the_contracts_example() -> None:
    with Program("ring", AllReduce(3, 1, inplace=True)) as program:
        acc = chunk(0, Buffer.input, 0)
        for rank in (1, 2):
            acc = chunk(rank, Buffer.input, 0).reduce(acc)
        for rank in (0, 1):
            acc = acc.copy(rank)
    algorithm = program.compile()
    kinds = [[step.op.value for block in p.blocks for step in block.steps] for p in algorithm.ranks]
    assert kinds == [["s", "rcs"], ["rrs", "r"], ["rrcs"]]


def test_custom_collective_of_the_contract() -> None:
    class Bcast(Collective):
        def __init__(self, n: int, k: int, root: int) -> None:
            super().__init__(n, k, inplace=True)
            self.root = root

        def init_buffers(self):  # type: ignore[no-untyped-def]
            def row(r: int):  # type: ignore[no-untyped-def]
                return [Chunk(self.root, c) if r == self.root else None for c in range(self.chunk_factor)]

            rows = [row(r) for r in range(self.num_ranks)]
            return [{Buffer.input: b, Buffer.output: b} for b in rows]

        def check(self, prog):  # type: ignore[no-untyped-def]
            return all(
                prog.buffers[r][Buffer.input][c] == Chunk(self.root, c)
                for r in range(self.num_ranks)
                for c in range(self.chunk_factor)
            )

    with MSCCLProgram("bcast", fully_connected(4), Bcast(4, 4, 0), 1) as program:
        for c in range(1, 4):
            chunk(0, Buffer.input, c).copy(c, Buffer.input, c)
        for c in range(4):
            for d in range(1, 4):
                if d != c:
                    chunk(c, Buffer.input, c).copy(d, Buffer.input, c)
        assert Check()
    algorithm = program.compile()
    for rank in range(1, 4):
        forwards = [s for b in algorithm.ranks[rank].blocks for s in b.steps if s.op is Op.RECV_COPY_SEND]
        assert len(forwards) == 1


def test_stale_reference_is_an_error_at_its_line() -> None:
    with Program("stale", AllReduce(2, 1, inplace=True)):
        old = chunk(0, Buffer.input, 0)
        chunk(1, Buffer.input, 0).copy(0)
        with pytest.raises(ProgramError, match="stale") as caught:
            old.copy(1)
        assert str(caught.value).startswith(_here(-1))


def test_an_empty_slot_is_named_where_it_was_asked_for() -> None:
    with (
        pytest.raises(ProgramError) as caught,
        Program("empty", AllReduce(2, 1)),
    ):
        nothing = chunk(1, Buffer.output, 0)
        nothing.copy(0)
    here = _here()
    line = int(here.split(":")[1])
    assert str(caught.value).startswith(
        f"test_collective_language.py:{line - 1}: no chunk to copy: chunk(1, 'o', 0)"
    )
    assert f"test_collective_language.py:{line - 2} is None" in str(caught.value)


def test_mistakes_name_the_line() -> None:
    with Program("mistakes", AllGather(3), line(3)):
        one = chunk(0, Buffer.input, 0)
        for act, says in (
            (lambda: chunk(3, Buffer.input, 0), "rank 3 is not one of the 3 ranks"),
            (lambda: chunk(0, Buffer.output, 2, 2), "that buffer has 3 chunks"),
            (lambda: one.copy(2, Buffer.output, 0), "no link from rank 0 to rank 2"),
            (lambda: one.split(2), "do not divide into 2 parts"),
            (lambda: one.reduce(5), "reduce: got 5"),
            (lambda: one.reduce(chunk(1, Buffer.output, 0)), "is None, since nothing was written there yet"),
            (lambda: one.copy(1, Buffer.output, 0, ch=40), "ch: got 40"),
        ):
            with pytest.raises(ProgramError, match="test_collective_language") as caught:
                act()
            assert says in str(caught.value)
        assert chunk(1, Buffer.output, 0) is None


def test_what_can_never_be_verified_is_refused_while_it_is_written() -> None:
    """Compiling what needs more blocks than the verifier takes would last half a minute, and more."""
    for ranks, instances in ((200, 1), (100, 8)):
        with pytest.raises(
            ProgramError, match=f"connections: got .* allowed: 16384 blocks of all {ranks} ranks"
        ):
            build("allreduce_1step", ranks, instances=instances)
    build("allreduce_1step", 100)
    with pytest.raises(ProgramError, match="ranks: got 20000, allowed: up to 16384"):
        build("allreduce_1step", 20_000)


def test_program_that_does_something_else_is_refused() -> None:
    with Program("half", AllGather(2)) as program:
        chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0)
    with pytest.raises(ProgramError, match="does not do AllGather") as caught:
        program.compile()
    assert "should hold" in str(caught.value)


def test_second_peer_in_a_named_block_is_an_error() -> None:
    with Program("peers", AllToAll(3)) as program:
        for rank in range(3):
            chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, rank)
            for step in (1, 2):
                peer = (rank + step) % 3
                chunk(rank, Buffer.input, peer).copy(peer, Buffer.output, rank, sendtb=0, recvtb=1, ch=0)
    with pytest.raises(ProgramError, match="this operation needs"):
        program.compile()


def test_reduction_between_different_indices_uses_the_receivers_slot() -> None:
    class Shifted(Collective):
        def before(self, rank):  # type: ignore[no-untyped-def]
            return [Chunk(rank, 0), Chunk(rank, 1)]

        def after(self, rank):  # type: ignore[no-untyped-def]
            return [Chunk(1, 0) + Chunk(0, 1), None] if rank == 1 else [None, None]

    with Program("shifted", Shifted(2, 2)) as program:
        mine = chunk(1, Buffer.input, 0).copy(1, Buffer.output, 0)
        mine.reduce(chunk(0, Buffer.input, 1))
    algorithm = program.compile()
    assert verify(algorithm).result_checked


def test_orders_that_disagree_move_to_another_channel() -> None:
    with Program("orders", AllGather(2, 2)) as program:
        for rank in (0, 1):
            for c in (0, 1):
                chunk(rank, Buffer.input, c).copy(rank, Buffer.output, 2 * rank + c)
            for c in (0, 1):
                chunk(rank, Buffer.input, c).copy(1 - rank, Buffer.output, 2 * rank + c, ch=c)
    assert program.compile().channels == 2


@pytest.mark.parametrize(
    ("last_line", "says"),
    [
        ("chunk(0, Buffer.output, 0).copy(1)", "bad.py:3: no chunk to copy"),
        ("chunk(0, Buffer.input, 0).copy(9)", "bad.py:3: rank 9 is not one"),
        ("chunk(0, Buffer.input, 0).copy(", "bad.py:3: SyntaxError"),
        ("import no_such_module", "bad.py:3: ModuleNotFoundError"),
    ],
)
def test_weft_compile_names_the_line_of_any_mistake(
    last_line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bad.py"
    program.write_text(f"from weft.collectives import *\nwith Program('p', AllGather(2)):\n    {last_line}\n")
    assert cli.main(["compile", str(program)]) == 1
    assert says in capsys.readouterr().err
