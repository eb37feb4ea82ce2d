# SPDX-License-Identifier: Apache-2.0
"""NCCL's device headers compile by NVRTC, for every back end of GIN; those of the installed NCCL. tools/nccl_headers.py
tries every release that PyPI has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nccl_device_code import (
    ARCHITECTURES,
    BACKENDS,
    KNOWN_SIZES,
    compile_every_call,
    has_backend,
    version_of,
)

from weft.errors import Error
from weft.runtime import nvrtc


def _installed() -> Path | None:
    folders = (folder / "nccl" / "include" for folder in nvrtc._nvidia_packages())
    return next((folder for folder in folders if (folder / "nccl_device").exists()), None)


INCLUDE = _installed()
pytestmark = pytest.mark.skipif(
    INCLUDE is None or nvrtc.find().nvrtc is None, reason="no NCCL with device headers, or no NVRTC"
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_of_gin_compiles(backend: str, architecture: str) -> None:
    assert INCLUDE
    if not has_backend(INCLUDE, backend):
        pytest.skip(f"NCCL {version_of(INCLUDE)} has no {backend}")
    if architecture != ARCHITECTURES[0] and backend != "PROXY":
        pytest.skip("once is enough: nothing in it depends on the architecture")
    sizes = compile_every_call(INCLUDE, backend, architecture)
    assert sizes == KNOWN_SIZES.get(version_of(INCLUDE), sizes)
    assert sizes.dev_comm >= 200 and sizes.window >= 72


def test_sizes_that_hardware_reads_are_asserted(tmp_path: Path) -> None:
    """A release that lays a descriptor out otherwise is refused by the compiler, not used."""
    assert INCLUDE
    shutil.copytree(INCLUDE, tmp_path / "include")
    common = tmp_path / "include/nccl_device/gin/proxy/gin_proxy_device_host_common.h"
    text = common.read_text()
    place = "typedef struct __attribute__((packed, aligned(16))) {"
    assert place in text
    common.write_text(text.replace(place, place + " uint64_t more[2];"))
    with pytest.raises(Error, match="static assertion"):
        compile_every_call(tmp_path / "include", "PROXY", ARCHITECTURES[0])


def test_a_folder_without_headers_is_named(tmp_path: Path) -> None:
    with pytest.raises(Error, match="has no device headers of NCCL"):
        compile_every_call(tmp_path, "PROXY", ARCHITECTURES[0])
