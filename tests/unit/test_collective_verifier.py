# SPDX-License-Identifier: Apache-2.0
"""The verifier: every library algorithm passes, every broken program is rejected for the right reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from broken_programs import Broken, broken_programs

from weft import cli
from weft.collectives import VerificationError, interpreter, verify
from weft.collectives.library import Entry, entries
from weft.errors import Error


@pytest.mark.parametrize("case", broken_programs(), ids=lambda case: case.name)
def test_broken_program_is_rejected_for_the_right_reason(case: Broken) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(case.algorithm)
    assert caught.value.kind == case.kind, caught.value
    assert case.says in str(caught.value)


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.name)
def test_library_algorithm_is_verified_for_2_to_16_ranks(
    entry: Entry, request: pytest.FixtureRequest
) -> None:
    # n*n chunks; the largest alone take a minute.
    is_short = entry.name == "allreduce_a100_allpairs" and not request.config.getoption("--thorough")
    most = 9 if is_short else 16
    ranks = [n for n in range(2, most + 1) if entry.applies(n)]
    assert ranks
    for n in ranks:
        for inplace in entry.forms:
            algorithm = entry.program(n, inplace=inplace, protocol="LL" if n % 2 else "Simple").compile()
            report = verify(algorithm)
            assert report.result_checked and report.steps > 0


def test_instances_are_verified_or_refused() -> None:
    refused = []
    for name, entry in entries().items():
        n = next(n for n in range(4, 17) if entry.applies(n))
        try:
            algorithm = entry.program(n, instances=2, protocol="LL").compile()
        except Error as error:
            assert "instances" in str(error)
            refused.append(name)
            continue
        assert verify(algorithm).result_checked
        assert algorithm.chunks == 2 * entry.program(n).collective.chunks
    assert "allgather_allpairs" not in refused and "allreduce_allpairs" not in refused


def test_deadlock_story_names_the_circle() -> None:
    case = next(case for case in broken_programs() if case.name.startswith("both ranks receive"))
    with pytest.raises(VerificationError) as caught:
        verify(case.algorithm)
    story = str(caught.value)
    assert (
        "rank 0, block 1, step 0 (r from rank 1)" in story
        and "rank 1, block 1, step 0 (r from rank 0)" in story
    )


def test_compile_command_interprets_every_step_once_per_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = 0
    execute = interpreter.Interpreter._execute

    def counted(self: Any, running: Any, step: Any) -> None:
        nonlocal ran
        ran += 1
        execute(self, running, step)

    monkeypatch.setattr(interpreter.Interpreter, "_execute", counted)
    for ranks in (4, 16):
        ran = 0
        out = str(tmp_path / "ring.xml")
        assert cli.main(["compile", "allgather_ring", "--ranks", str(ranks), "-o", out]) == 0
        assert ran == ranks * (ranks + 1)  # a copy and one step per chunk on every rank


@pytest.mark.parametrize(("ranks", "nodes"), [(12, 3), (16, 4), (64, 8)])
def test_hierarchical_program_is_verified(ranks: int, nodes: int) -> None:
    # On three nodes and more a chunk comes through some ranks twice and turns elsewhere the second time.
    algorithm = entries()["hierarchical_allreduce"].program(ranks, nodes=nodes).compile()
    assert verify(algorithm).result_checked
