# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every GPU architecture, without a GPU, and spills nothing to local memory.

The kernels and their typical constants are the rows of src/jit/host_kernels.cc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from weft import _core
from weft.errors import Error
from weft.runtime import nvrtc

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")

pytestmark = pytest.mark.skipif(nvrtc.find().nvrtc is None, reason="no NVRTC (pip install nvidia-cuda-nvrtc)")


@dataclass(frozen=True)
class Usage:
    """What ptxas says that a kernel takes: registers and bytes per thread, static shared memory per block."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def parse_usage(log: str) -> Usage:
    """Read the report of ``ptxas -v``; the entry point's part comes last."""
    stack = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    assert stack and registers, f"no report of resources in the compiler's log:\n{log}"
    spills = sum(int(stores) + int(loads) for _, stores, loads in stack)
    shared = re.findall(r"(\d+) bytes smem", log)
    return Usage(int(registers[-1]), max(int(s[0]) for s in stack), spills, int(shared[-1]) if shared else 0)


def cases() -> list[tuple[int, str]]:
    """Return (row of the kernel list, one of its typical sets of constants)."""
    rows = enumerate(_core.kernel_table())
    return [(index, constants.strip()) for index, row in rows for constants in row.typical.split(";")]


def key_of(index: int, constants: str, **changed: object) -> _core.KernelKey:
    row = _core.kernel_table()[index]
    fields = {
        "file": row.file,
        "name": row.name,
        "args_type": row.args_type,
        "mesh_type": row.mesh_type,
        "shape": [(name, int(value)) for name, value in (c.split("=") for c in constants.split())],
        "threads_per_block": row.threads_per_block,
    }
    return _core.KernelKey(**(fields | changed))


def label(case: tuple[int, str]) -> str:
    row = _core.kernel_table()[case[0]]
    return "-".join([row.name, row.mesh_type, *re.findall(r"=(\d+)", case[1])])


def test_the_list_has_kernels() -> None:
    names = {row.name for row in _core.kernel_table()}
    assert {"dispatch_rows", "combine_rows"} <= names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", cases(), ids=label)
def test_kernel_compiles_without_spills(case: tuple[int, str], architecture: str) -> None:
    compiled = _core.compile_kernel(key_of(*case), architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    usage = parse_usage(compiled.log)
    print(f"{architecture}: {usage}, cubin of {len(compiled.cubin)} bytes")
    assert usage.spill_bytes == 0, compiled.log


def test_spills_are_noticed() -> None:
    usage = parse_usage(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas         .     120 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem\n"
    )
    assert usage == Usage(registers=32, stack_bytes=120, spill_bytes=24, shared_bytes=1024)


def test_source_that_does_not_compile_shows_the_log() -> None:
    wrong = key_of(*cases()[0], name="no_such_kernel")
    with pytest.raises(Error, match="no_such_kernel") as raised:
        _core.compile_kernel(wrong, "sm_90a")
    assert raised.value.code == "system"
