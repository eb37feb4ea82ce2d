# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every GPU architecture, without a GPU, and spills nothing to local memory.

sm_90a gets every typical set of constants; the other architectures get those that cover all choices of code.
``pytest -rP`` shows the registers, stack and shared memory of each.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from kernel_cases import (
    Case,
    all_cases,
    covering_cases,
    is_for_hosts,
    is_for_one_architecture,
    needs_sources,
    sample_cases,
)

from weft import _core
from weft.errors import Error
from weft.runtime import nvrtc

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
FULL_SWEEP = "sm_90a"
# A division of 64 bits is a check, a division of 32 and a call of a long routine besides, which operands that fit 32
# bits never need. It would stand on the path of every step of these kernels.
WITHOUT_WIDE_DIVISIONS = {"run_program"}

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find().nvrtc is None, reason="no NVRTC (pip install nvidia-cuda-nvrtc)"
)


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


@dataclass(frozen=True)
class Compilation:
    """One kernel for one architecture, by NVRTC."""

    case: Case
    architecture: str

    def __str__(self) -> str:
        return f"{self.case}-{self.architecture}"

    @property
    def is_in_sample(self) -> bool:
        return self.architecture == FULL_SWEEP and self.case in sample_cases()

    def run(self) -> _core.Compiled:
        return _core.compile_kernel(self.case.key(), self.architecture)


def compilations() -> list[Compilation]:
    """Return what is compiled."""
    covering = set(covering_cases())
    table = _core.kernel_table()

    def is_compiled(case: Case, architecture: str) -> bool:
        if is_for_one_architecture(table[case.row]):
            return architecture == FULL_SWEEP and case in covering
        return architecture == FULL_SWEEP or case in covering

    return [
        Compilation(case, architecture)
        for case in all_cases()
        for architecture in ARCHITECTURES
        if is_compiled(case, architecture)
    ]


def check_usage(compiled: _core.Compiled) -> None:
    """Spills, and whatever the compiler warns of, are failures."""
    assert compiled.cubin[:4] == b"\x7fELF"
    usage = parse_usage(compiled.log)
    print(f"{usage}, cubin of {len(compiled.cubin)} bytes")
    assert usage.spill_bytes == 0, compiled.log
    assert "warning" not in compiled.log, compiled.log


def test_the_list_has_kernels() -> None:
    names = {row.name for row in _core.kernel_table()}
    assert {"dispatch_rows", "combine_rows"} <= names


def test_every_kernel_and_choice_is_compiled_for_every_architecture() -> None:
    table = _core.kernel_table()

    def choices(architecture: str) -> set[tuple[int, tuple[str, str] | None]]:
        cases = [made.case for made in compilations() if made.architecture == architecture]
        return {(case.row, choice) for case in cases for choice in [None, *case.choices()]}

    rows = {index for index, row in enumerate(table) if not is_for_hosts(row) and not needs_sources(row)}
    assert {case for case, _ in choices(FULL_SWEEP)} == rows
    everywhere = {made for made in choices(FULL_SWEEP) if not is_for_one_architecture(table[made[0]])}
    assert all(
        choices(architecture) == everywhere for architecture in ARCHITECTURES if architecture != FULL_SWEEP
    )


@needs_nvrtc
@pytest.mark.parametrize("compiling", compilations(), ids=str, indirect=True)
def test_kernel_compiles_without_spills(
    compiling: Future[_core.Compiled], request: pytest.FixtureRequest
) -> None:
    compiled = compiling.result()
    check_usage(compiled)
    kernel = request.node.callspec.params["compiling"].case.key().name
    if kernel in WITHOUT_WIDE_DIVISIONS:
        assert not re.findall(rb"(?:div|rem)_[su]64", compiled.cubin)


def test_spills_are_noticed() -> None:
    usage = parse_usage(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas         .     120 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem\n"
    )
    assert usage == Usage(registers=32, stack_bytes=120, spill_bytes=24, shared_bytes=1024)


@needs_nvrtc
def test_source_that_does_not_compile_shows_the_log() -> None:
    wrong = all_cases()[0].key(name="no_such_kernel")
    with pytest.raises(Error, match="no_such_kernel") as raised:
        _core.compile_kernel(wrong, "sm_90a")
    assert raised.value.code == "system"


def test_the_source_asserts_the_sizes_that_the_host_uses() -> None:
    source = _core.kernel_source(all_cases()[0].key())
    assert re.search(r"static_assert\(sizeof\(weft::LayoutArgs\) == \d+\)", source)


@needs_nvrtc
@pytest.mark.parametrize("name", ["low_latency_dispatch", "low_latency_combine"])
def test_low_latency_over_ports_spills_nothing(name: str) -> None:
    """Ranks of a node map each other, all others are behind proxies."""
    mesh = "HybridMesh<weft::MappedMesh, weft::ProxyMesh>"
    (index,) = [
        at for at, row in enumerate(_core.kernel_table()) if (row.name, row.mesh_type) == (name, mesh)
    ]
    typical = _core.kernel_table()[index].typical.split(";")[0].strip()
    check_usage(_core.compile_kernel(Case(index, typical).key(), FULL_SWEEP))
