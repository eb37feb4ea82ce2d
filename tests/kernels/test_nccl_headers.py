# SPDX-License-Identifier: Apache-2.0
"""Kernels with ports through NCCL's GIN compile by NVRTC with NCCL's own headers, for every back end; those of the
installed NCCL. With --thorough every kernel does, and with five releases that PyPI has (tools/nccl_headers.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_cases import Case, cases_with_sources
from nccl_device_code import (
    ARCHITECTURES,
    BACKENDS,
    DEV_COMM_BYTES,
    LEAST,
    MESHES,
    compile_channel_loop,
    has_backend,
    sources_of,
    version_of,
)
from test_compile_all import check_usage, parse_usage

from weft import _core
from weft.errors import Error
from weft.runtime import nvrtc

# They hold much while they wait, and what helps meanwhile is a call: what it takes is spilled around it.
SPILL_IN_WAITS = {"two_level_dispatch", "two_level_combine"}
MOST_SPILLED_BYTES = 512

ROOT = Path(__file__).parents[2]


def _installed() -> Path | None:
    folders = (folder / "nccl" / "include" for folder in nvrtc._nvidia_packages())
    found = next((folder for folder in folders if (folder / "nccl_device").exists()), None)
    return found if found and version_of(found) >= LEAST else None


INCLUDE = _installed()
pytestmark = pytest.mark.skipif(
    INCLUDE is None or nvrtc.find().nvrtc is None or not hasattr(_core, "measure"),
    reason="no NCCL with GIN's headers (2.30.3 or newer), no NVRTC, or no measure/ in this build",
)


@dataclass(frozen=True)
class WithGin:
    """One kernel with the installed headers of NCCL's GIN of type PROXY, for one architecture."""

    case: Case

    def __str__(self) -> str:
        return str(self.case)

    @property
    def is_thorough(self) -> bool:
        return "ring_send-NcclMesh" not in str(self)

    def run(self) -> _core.Compiled:
        assert INCLUDE
        return _core.compile_kernel(self.case.key(sources=sources_of(INCLUDE, "PROXY")), ARCHITECTURES[0])


@pytest.mark.parametrize("mesh_type", MESHES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_of_a_channel_compiles(backend: str, architecture: str, mesh_type: str) -> None:
    assert INCLUDE
    if not has_backend(INCLUDE, backend):
        pytest.skip(f"NCCL {version_of(INCLUDE)} has no {backend}")
    if (architecture, mesh_type) != (ARCHITECTURES[0], MESHES[0]) and backend != "PROXY":
        pytest.skip("once is enough: nothing in it depends on the architecture or on mapped peers")
    check_usage(compile_channel_loop(sources_of(INCLUDE, backend), mesh_type, architecture))


@pytest.mark.parametrize(
    "compiling", [WithGin(case) for case in cases_with_sources("NcclMesh")], ids=str, indirect=True
)
def test_kernel_spills_nothing_but_what_is_known(
    compiling: Future[_core.Compiled], request: pytest.FixtureRequest
) -> None:
    compiled = compiling.result()
    if request.node.callspec.params["compiling"].case.key().name not in SPILL_IN_WAITS:
        return check_usage(compiled)
    usage = parse_usage(compiled.log)
    assert usage.spill_bytes <= MOST_SPILLED_BYTES, compiled.log
    assert "warning" not in compiled.log, compiled.log


def test_releases_of_pypi_compile(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("--thorough: a minute each, and 1 GB from PyPI")
    versions = ",".join(".".join(map(str, version)) for version in DEV_COMM_BYTES)
    ping = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "nvidia-nccl-cu13"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ping.returncode:
        pytest.skip("PyPI cannot be reached")
    tool = [
        sys.executable,
        str(ROOT / "tools/nccl_headers.py"),
        "--versions",
        versions,
        "--keep",
        str(tmp_path),
    ]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_is_part_of_a_kernels_name_in_the_cache(tmp_path: Path) -> None:
    assert INCLUDE
    shutil.copytree(INCLUDE, tmp_path / "include")
    common = tmp_path / "include/nccl_device/gin/proxy/gin_proxy_device_host_common.h"
    common.write_text(common.read_text() + "// another text\n")
    names = {
        compile_channel_loop(sources_of(folder, backend), MESHES[0], ARCHITECTURES[0]).cache_name
        for folder, backend in ((INCLUDE, "PROXY"), (tmp_path / "include", "PROXY"), (INCLUDE, "GPI"))
    }
    assert len(names) == 3


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
        compile_channel_loop(sources_of(tmp_path / "include", "PROXY"), MESHES[0], ARCHITECTURES[0])


def test_headers_of_another_layout_than_the_librarys_are_refused() -> None:
    assert INCLUDE
    with pytest.raises(Error, match="ncclDevComm, as the library fills it"):
        compile_channel_loop(sources_of(INCLUDE, "PROXY", dev_comm_bytes=232), MESHES[0], ARCHITECTURES[0])


def test_a_folder_without_headers_is_named(tmp_path: Path) -> None:
    with pytest.raises(Error, match="has no device headers of NCCL"):
        sources_of(tmp_path, "PROXY", dev_comm_bytes=0)
