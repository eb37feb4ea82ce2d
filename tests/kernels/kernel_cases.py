# SPDX-License-Identifier: Apache-2.0
"""The kernels of src/jit/kernel_list.h with each of their typical sets of constants, as test parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from weft import _core

# Constants that choose between pieces of code. The others are sizes: numbers in the same code.
CHOICES = {
    "accumulate",
    "element",
    "exchange",
    "out_element",
    "padding",
    "payload",
    "protocol",
    "reduction",
    "reply",
    "scale_words",
    "weights",
    "vec_aligned",
}


@dataclass(frozen=True)
class Case:
    """A row of the kernel list and one of its sets of constants, such as ``row_bytes=16 top_k=1``."""

    row: int
    constants: str

    def __str__(self) -> str:
        row = _core.kernel_table()[self.row]
        return "-".join([row.name, row.mesh_type, *re.findall(r"=(\d+)", self.constants)])

    def choices(self) -> set[tuple[str, str]]:
        """Return the constants that choose code, with their values."""
        return {
            (name, value) for name, value in re.findall(r"(\w+)=(\d+)", self.constants) if name in CHOICES
        }

    def key(self, **changed: object) -> _core.KernelKey:
        """Return the key that the library would compile, with the fields in ``changed`` replaced."""
        row = _core.kernel_table()[self.row]
        constants = (constant.split("=") for constant in self.constants.split())
        fields: dict[str, object] = {
            "file": row.file,
            "name": row.name,
            "args_type": row.args_type,
            "mesh_type": row.mesh_type,
            "shape": [(name, int(value)) for name, value in constants],
            "threads_per_block": row.threads_per_block,
        }
        return _core.KernelKey(**(fields | changed))


# Their code for ports is large, and takes long to compile for each mesh. What GPUs mostly run is compiled by
# test_low_latency_over_ports_spills_nothing().
WITH_PORTS_FOR_HOSTS = {"run_program", "low_latency_dispatch", "low_latency_combine"}


def is_for_hosts(row: _core.KernelRow) -> bool:
    """Return whether a kernel is left out of the cases for GPUs."""
    return bool(row.name in WITH_PORTS_FOR_HOSTS and row.mesh_type != "MappedMesh")


def needs_sources(row: _core.KernelRow) -> bool:
    """Return whether a kernel is compiled with what its transport brings: test_nccl_headers, test_nvshmem_link."""
    return "NcclMesh" in row.mesh_type or "NvshmemMesh" in row.mesh_type


def is_for_one_architecture(row: _core.KernelRow) -> bool:
    """Return whether a kernel's code for other meshes covers the architectures: all write NICs alike, and jitter
    only waits before it calls the mesh behind it."""
    return "IbgdaMesh" in row.mesh_type or "JitterMesh" in row.mesh_type


def _cases(with_sources: bool) -> list[Case]:
    rows = [
        (index, row)
        for index, row in enumerate(_core.kernel_table())
        if not is_for_hosts(row) and needs_sources(row) == with_sources
    ]
    return [Case(index, constants.strip()) for index, row in rows for constants in row.typical.split(";")]


def all_cases() -> list[Case]:
    """Return every case that GPUs run with Weft's own headers alone, in the order of the list."""
    return _cases(with_sources=False)


def cases_with_sources(mesh: str) -> list[Case]:
    """Return the other cases that GPUs run with ports of one kind: the last of each kernel, which is the largest."""
    table = _core.kernel_table()
    cases = [case for case in _cases(with_sources=True) if mesh in table[case.row].mesh_type]
    return list({case.row: case for case in cases}.values())


@cache
def sample_cases() -> frozenset[Case]:
    """Return one case of each kernel, the last, which is the largest, with the first mesh that it is built for."""
    table = _core.kernel_table()
    sample: dict[str, Case] = {}
    for case in all_cases():
        name = table[case.row].name
        if name not in sample or sample[name].row == case.row:
            sample[name] = case
    return frozenset(sample.values())


def covering_cases() -> list[Case]:
    """Return some cases of each kernel in which every choice has each of the values that all cases give it."""
    covering: list[Case] = []
    for row in range(len(_core.kernel_table())):
        # The last ones are the largest.
        cases = [case for case in reversed(all_cases()) if case.row == row]
        if not cases:
            continue
        open_choices = set().union(*(case.choices() for case in cases))
        chosen = cases[:1]
        while missing := open_choices - set().union(*(case.choices() for case in chosen)):
            chosen.append(max(cases, key=lambda case: len(case.choices() & missing)))
        covering += reversed(chosen)
    return covering
