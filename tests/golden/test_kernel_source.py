# SPDX-License-Identifier: Apache-2.0
"""The source that is generated for a kernel: a refactor leaves it identical."""

from __future__ import annotations

import pytest

from golden import check_golden
from weft import _core


def key(**changed: object) -> _core.KernelKey:
    fields: dict[str, object] = {
        "file": "kernels/moe/some_kernel.cuh",
        "name": "some_kernel",
        "args_type": "SomeArgs",
        "mesh_type": "MappedMesh",
        "shape": [("row_bytes", 14336), ("top_k", 8), ("least", -1)],
        "threads_per_block": 512,
        "blocks_per_sm": 2,
    }
    return _core.KernelKey(**(fields | changed))


def test_source_of_a_kernel_that_the_host_lacks(request: pytest.FixtureRequest) -> None:
    check_golden(request, "kernel_source.cu", _core.kernel_source(key()))


def test_source_without_constants_or_mesh_header(request: pytest.FixtureRequest) -> None:
    made = _core.kernel_source(key(shape=[], mesh_type="NoMesh", blocks_per_sm=1))
    check_golden(request, "kernel_source_plain.cu", made)
