# SPDX-License-Identifier: Apache-2.0
"""Collective programs with their steps as constants compile for every GPU architecture, without spills."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from test_compile_all import ARCHITECTURES, check_usage, needs_nvrtc

from weft import _core
from weft.collectives.average import ended_sums
from weft.collectives.direct import direct_messages
from weft.collectives.ir import Algorithm
from weft.collectives.library import build
from weft.collectives.rows import REDUCTIONS, program_rows

PROTOCOLS = {"Simple": 0, "LL": 1, "LL128": 2}


def source_of(algorithm: Algorithm, rank: int) -> str:
    """Return the source of this rank's program."""
    sums = ended_sums(algorithm)
    return str(_core.program_source(*program_rows(sums, rank, direct_messages(sums.algorithm))))


def key(name: str, ranks: int, protocol: str, rank: int = 1, op: str = "sum") -> _core.KernelKey:
    """Return the key that the runner compiles for this rank's program of float32."""
    algorithm = build(name, ranks, protocol=protocol).compile()
    row = next(row for row in _core.kernel_table() if row.name == "run_program")
    return _core.KernelKey(
        file=row.file,
        name="run_compiled",
        args_type=row.args_type,
        mesh_type=row.mesh_type,
        shape=[("element", 0), ("reduction", REDUCTIONS[op]), ("protocol", PROTOCOLS[protocol])],
        threads_per_block=row.threads_per_block,
        prelude=source_of(algorithm, rank),
    )


@dataclass(frozen=True)
class Compilation:
    """A program of two ranks as a kernel of its own, by NVRTC."""

    name: str
    protocol: str
    architecture: str
    op: str = "sum"

    def __str__(self) -> str:
        return f"{self.name}-{self.protocol}-{self.op}-{self.architecture}"

    def run(self) -> _core.Compiled:
        return _core.compile_kernel(key(self.name, 2, self.protocol, op=self.op), self.architecture)


# A step takes NVRTC some seconds. The three protocols share everything but their slots, so one goes through all
# architectures; the others show that theirs compile as constants, too.
CASES = [
    *(Compilation("allreduce_1step", "LL", architecture) for architecture in ARCHITECTURES),
    Compilation("allgather_allpairs", "Simple", "sm_90a"),
    Compilation("reducescatter_allpairs", "LL128", "sm_90a", "average"),
]


@needs_nvrtc
@pytest.mark.parametrize("compiling", CASES, ids=str, indirect=True)
def test_compiled_program_compiles_without_spills(compiling: Future[_core.Compiled]) -> None:
    check_usage(compiling.result())


def test_the_source_holds_every_step_as_constants() -> None:
    algorithm = build("allreduce_1step", 3, protocol="LL").compile()
    source = source_of(algorithm, 0)
    # Two sums into the same chunks are one visit.
    visits = sum(len(block.steps) for block in algorithm.ranks[0].blocks) - 1
    assert source.count("const ProgramStep steps[] = {") == visits
    assert "a.steps" not in source
