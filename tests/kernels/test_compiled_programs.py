# SPDX-License-Identifier: Apache-2.0
"""Collective programs with their steps as constants compile for every GPU architecture, without spills."""

from __future__ import annotations

import pytest
from test_compile_all import ARCHITECTURES, needs_nvrtc, parse_usage

from weft import _core
from weft.collectives.direct import direct_messages
from weft.collectives.library import build
from weft.collectives.rows import program_rows

PROTOCOLS = {"Simple": 0, "LL": 1, "LL128": 2}
# A step takes NVRTC some seconds. The three protocols share everything but their wires, so one goes through all
# architectures; the others show that theirs compile as constants, too.
CASES = [
    *(("allreduce_1step", "LL", architecture) for architecture in ARCHITECTURES),
    ("allgather_allpairs", "Simple", "sm_90a"),
    ("reducescatter_allpairs", "LL128", "sm_90a"),
]


def key(name: str, ranks: int, protocol: str, rank: int = 1) -> _core.KernelKey:
    """Return the key that the runner compiles for this rank's program, float32 sums."""
    algorithm = build(name, ranks, protocol=protocol).compile()
    row = next(row for row in _core.kernel_table() if row.name == "run_program")
    return _core.KernelKey(
        file=row.file,
        name="run_compiled",
        args_type=row.args_type,
        mesh_type=row.mesh_type,
        shape=[("element", 0), ("reduction", 0), ("protocol", PROTOCOLS[protocol])],
        threads_per_block=row.threads_per_block,
        prelude=_core.program_source(*program_rows(algorithm, rank, direct_messages(algorithm))),
    )


@needs_nvrtc
@pytest.mark.parametrize(("name", "protocol", "architecture"), CASES)
def test_compiled_program_compiles_without_spills(name: str, protocol: str, architecture: str) -> None:
    compiled = _core.compile_kernel(key(name, 2, protocol), architecture)
    usage = parse_usage(compiled.log)
    print(f"{architecture}: {usage}, cubin of {len(compiled.cubin)} bytes")
    assert usage.spill_bytes == 0, compiled.log


def test_the_source_holds_every_step_as_constants() -> None:
    algorithm = build("allreduce_1step", 3, protocol="LL").compile()
    source = _core.program_source(*program_rows(algorithm, 0, direct_messages(algorithm)))
    # Two sums into the same chunks are one visit.
    visits = sum(len(block.steps) for block in algorithm.ranks[0].blocks) - 1
    assert source.count("const ProgramStep steps[] = {") == visits
    assert "a.steps" not in source
