# SPDX-License-Identifier: Apache-2.0
"""Custom collectives: run on tensors, through XML and in the benchmark, in place and out of place."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch
from programs import ROOT, WEFT, run_program
from random_programs import mutated, random_algorithm, run_against_contract

from weft import _core
from weft.collectives import Algorithm, VerificationError, load, verify
from weft.collectives.calls import Collectives
from weft.collectives.executor import Executor
from weft.collectives.flow import run_limit
from weft.collectives.ir import PROTOCOLS, RING_SLOTS, SLOT_PAYLOAD_BYTES
from weft.collectives.library import build
from weft.collectives.plan_json import from_plan
from weft.collectives.plan_write import to_plan
from weft.collectives.xml import from_xml
from weft.collectives.xml_write import to_xml
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks

SAMPLES = ROOT / "tests" / "samples" / "collectives"


def _example(name: str, folder: Path) -> str:
    """Write an example of docs/collectives.md to a file and return its name."""
    page = (ROOT / "docs" / "collectives.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / f"{name}.py").write_text(next(block for block in blocks if f" {name}.py\n" in block))
    return f"{name}.py"


def _halo(folder: Path, ranks: int) -> Algorithm:
    from weft.collectives.files import read_source

    return read_source(str(folder / _example("halo", folder)), ranks)


def _runs(rank: Rank, halo: Algorithm) -> None:
    collectives = Collectives(Communicator(rank.group, timeout_s=60).core)
    field = torch.arange(30.0) + 100 * rank.rank
    wanted = field.clone()
    wanted[:10] += torch.arange(20.0, 30.0) + 100 * (rank.rank - 1) if rank.rank else 0
    wanted[20:] += torch.arange(10.0) + 100 * (rank.rank + 1) if rank.rank < rank.size - 1 else 0
    for algorithm in (halo, from_xml(to_xml(halo))):
        assert torch.equal(collectives.run(algorithm, field), wanted)
        out = torch.empty(30)
        assert collectives.run(algorithm, field, out) is out and torch.equal(out, wanted)
        with pytest.raises(Error, match="input's elements: got 31, allowed: a multiple of 3"):
            collectives.run(algorithm, torch.empty(31))
        with pytest.raises(Error, match=r"output: got .*allowed: memory apart"):
            collectives.run(algorithm, field, field)
    in_place = build("allreduce_allpairs", rank.size, inplace=True).compile()
    alone = dataclasses.replace(in_place, outofplace=False)
    tensor = torch.ones(rank.size * 4)
    assert collectives.run(alone, tensor) is tensor and (tensor == rank.size).all()
    with pytest.raises(Error, match="works in place"):
        collectives.run(alone, tensor, torch.empty(rank.size * 4))
    with pytest.raises(
        Error, match=r"algorithm: got str 'ring', allowed: an Algorithm, .*weft.collectives.load"
    ):
        collectives.run("ring", tensor)  # type: ignore[arg-type]
    broken = dataclasses.replace(halo, ranks=halo.ranks[:1] * rank.size)
    with pytest.raises(VerificationError):
        collectives.run(broken, field)


def test_custom_program_runs_on_tensors(tmp_path: Path) -> None:
    run_ranks(3, _runs, _halo(tmp_path, 3))


SUM = """
from weft.collectives import AllReduce, Buffer, Program, chunk

def program(ranks):
    with Program("sum", AllReduce(ranks, inplace=True)):
        total = chunk(0, Buffer.input, 0)
        for rank in range(1, ranks):
            total = total.reduce(chunk(rank, Buffer.input, 0))
        for rank in range(1, ranks):
            total.copy(rank, Buffer.input, 0)
"""


def _runs_from_files(rank: Rank, folder: Path) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    own = torch.arange(12.0) + rank.rank
    total = torch.stack([torch.arange(12.0) + q for q in range(rank.size)]).sum(0)
    for name in ("sum.xml", "sum.json", "sum.py"):
        algorithm = load(folder / name, rank.size)
        assert torch.equal(comm.all_reduce(own.clone(), algorithm=algorithm), total), name
        assert torch.equal(comm.collectives.run(algorithm, own.clone()), total), name
    with pytest.raises(Error, match=r"algorithm: got sum, which .*allowed: one for allgather"):
        comm.all_gather(own, algorithm=algorithm)
    with pytest.raises(
        Error, match=r"algorithm: got str .*allowed: an Algorithm, .*weft.collectives.load\(path\)"
    ):
        comm.all_reduce(own, algorithm=str(folder / "sum.xml"))  # type: ignore[arg-type]


def test_a_file_runs_on_tensors(tmp_path: Path) -> None:
    program = build("allreduce_allpairs", 3).compile()
    (tmp_path / "sum.xml").write_text(to_xml(program))
    (tmp_path / "sum.json").write_text(to_plan(program))
    (tmp_path / "sum.py").write_text(SUM)
    run_ranks(3, _runs_from_files, tmp_path)


def _check_slots(rank: Rank) -> None:
    core = Communicator(rank.group, timeout_s=60).core
    runner = _core.CollectiveRunner.create(core, channels=2)
    assert runner.ring_slots == RING_SLOTS
    for number, protocol in enumerate(PROTOCOLS):
        # At least: a program that is said to run up to some size runs there.
        assert runner.payload_bytes(number) >= SLOT_PAYLOAD_BYTES[protocol], protocol
    assert [runner.payload_bytes(n) for n in range(2)] == [SLOT_PAYLOAD_BYTES[p] for p in PROTOCOLS[:2]]


def test_slots_are_those_that_the_verifier_counts_with() -> None:
    run_ranks(2, _check_slots)


def _limited(rank: Rank, algorithm: Algorithm) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core, direct_bytes=1 << 30)
    limit = run_limit(algorithm)
    assert limit is not None
    most = limit.most_bytes // algorithm.chunks // 4
    for elems in (4, most):
        run_against_contract(executor, algorithm, rank.rank, elems)
    for elems in (5, most + 4):
        with pytest.raises(Error, match="it would hang from 4194305 bytes on"):
            run_against_contract(executor, algorithm, rank.rank, elems)


def test_program_runs_up_to_the_size_at_which_it_would_hang() -> None:
    algorithm = from_xml((SAMPLES / "sixteen_chunks_a_step.xml").read_text())
    run_ranks(2, _limited, algorithm)


def _through_files(rank: Rank, first: int, count: int) -> int:
    executor = Executor(Communicator(rank.group, timeout_s=60).core, direct_bytes=16)
    accepted = 0
    for seed in range(first, first + count):
        algorithm = random_algorithm(seed, rank.size)
        dialect = "microsoft" if seed % 2 else "azure"
        again = from_xml(to_xml(algorithm, dialect))
        assert verify(again).result_checked and again.ranks == _without_lines(algorithm, again)
        run_against_contract(executor, again, rank.rank, 5)
        planned = from_plan(to_plan(algorithm))
        assert verify(planned).result_checked
        run_against_contract(executor, planned, rank.rank, 5)
        if not any(True for _ in again.steps()):
            continue
        changed = mutated(again, random.Random(seed))
        try:
            verify(changed)
        except VerificationError:
            continue
        run_against_contract(executor, changed, rank.rank, 3)
        accepted += 1
    return accepted


def _without_lines(algorithm: Algorithm, named: Algorithm) -> list[object]:
    """Return the programs of ``algorithm`` with the places in files of ``named``."""
    ranks: list[object] = []
    for program, other in zip(algorithm.ranks, named.ranks, strict=True):
        blocks = [
            dataclasses.replace(
                block,
                steps=[
                    dataclasses.replace(step, where=twin.where)
                    for step, twin in zip(block.steps, theirs.steps, strict=True)
                ],
            )
            for block, theirs in zip(program.blocks, other.blocks, strict=True)
        ]
        ranks.append(dataclasses.replace(program, blocks=blocks))
    return ranks


@pytest.mark.parametrize(("ranks", "first"), [(2, 5000), (3, 6000), (4, 7000)])
def test_random_programs_survive_xml_and_plans_with_their_contracts(
    ranks: int, first: int, request: pytest.FixtureRequest
) -> None:
    count = 334 if request.config.getoption("--thorough") else 20
    assert max(run_ranks(ranks, _through_files, first, count, deadline_s=280)) > 0


def test_root_survives_xml() -> None:
    for name in ("broadcast_flat", "reduce_chain", "gather_flat", "scatter_flat"):
        algorithm = build(name, 3, root=2).compile()
        again = from_xml(to_xml(algorithm))
        assert again.contract is not None and again.contract.root == 2 and verify(again).result_checked


def test_benchmark_of_a_custom_collective(tmp_path: Path) -> None:
    name = _example("halo", tmp_path)
    assert run_program([*WEFT, "compile", name, "--ranks", "3", "-o", "halo.xml"], tmp_path).returncode == 0
    command = [*WEFT, "bench", "collective", "--algorithm", "halo.xml", "--device", "cpu"]
    ran = run_program([*command, "-b", "3K", "-e", "12K", "-n", "3", "--json", "r.json"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert '"custom"' in (tmp_path / "r.json").read_text()
