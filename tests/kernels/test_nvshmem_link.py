# SPDX-License-Identifier: Apache-2.0
"""Kernels with ports through NVSHMEM are compiled without its headers, and linked with the installed device library by
nvJitLink. With --thorough every kernel is, and with older releases that PyPI has."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kernel_cases import Case, cases_with_sources
from test_compile_all import parse_usage

from weft import _core
from weft.errors import Error
from weft.runtime import nvrtc

ARCHITECTURES = ("sm_90a", "sm_100a")
MESHES = ("NvshmemMesh", "HybridMesh<weft::MappedMesh, weft::NvshmemMesh>")
RELEASES = ("3.4.5", "3.6.5", "3.8.0")  # of PyPI: the oldest that is taken, and newer ones
HOST_LIBRARY = "lib/libnvshmem_host.so.3"


def _version_of(home: Path) -> str:
    text = (home / "include/non_abi/nvshmem_version.h").read_text()
    words = [line.split() for line in text.splitlines()]
    found = {line[1]: line[2] for line in words if len(line) > 2 and line[0] == "#define"}
    return ".".join(found[f"NVSHMEM_VENDOR_{part}_VERSION"] for part in ("MAJOR", "MINOR", "PATCH"))


def _installed() -> Path | None:
    homes = (folder / "nvshmem" for folder in nvrtc._nvidia_packages())
    return next((home for home in homes if (home / "lib/libnvshmem_device.a").exists()), None)


HOME = _installed()
pytestmark = pytest.mark.skipif(
    HOME is None or nvrtc.find().nvrtc is None or not hasattr(_core, "measure"),
    reason="no NVSHMEM with its device library (pip install nvidia-nvshmem-cu13), no NVRTC, or no measure/",
)


def _sources(home: Path | None, version: str | None = None) -> _core.DeviceSources:
    assert home
    return _core.nvshmem_device_sources(str(home / HOST_LIBRARY), version or _version_of(home))


def _compile(row_of: _core.KernelRow, sources: _core.DeviceSources, architecture: str) -> _core.Compiled:
    for index, row in enumerate(_core.kernel_table()):
        if (row.name, row.mesh_type) == (row_of.name, row_of.mesh_type):
            constants = row.typical.split(";")[-1].strip()
            return _core.compile_kernel(Case(index, constants).key(sources=sources), architecture)
    raise AssertionError(f"no {row_of.name} for {row_of.mesh_type}")


def _row(name: str, mesh_type: str) -> _core.KernelRow:
    return next(row for row in _core.kernel_table() if (row.name, row.mesh_type) == (name, mesh_type))


@pytest.mark.parametrize("mesh_type", MESHES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_call_of_a_channel_links(architecture: str, mesh_type: str) -> None:
    compiled = _compile(_row("channel_loop_run", mesh_type), _sources(HOME), architecture)
    # What NVSHMEM fills in when the module is loaded, and the version that it checks then.
    assert b"nvshmemi_device_state_d" in compiled.cubin
    assert b"nvshmemi_device_lib_version_d" in compiled.cubin
    assert b"weft_nvshmem_put_warp" in compiled.cubin
    assert parse_usage(compiled.log).spill_bytes == 0, compiled.log


@pytest.mark.parametrize("mesh_type", MESHES)
@pytest.mark.parametrize("name", ["low_latency_combine", "low_latency_dispatch", "run_program"])
def test_kernels_with_functions_apart_link(name: str, mesh_type: str, request: pytest.FixtureRequest) -> None:
    """The linker refuses a function that takes more registers than the kernel's threads leave it."""
    if name != "low_latency_combine" and not request.config.getoption("--thorough"):
        pytest.skip("--thorough: one is enough, and each takes seconds")
    compiled = _compile(_row(name, mesh_type), _sources(HOME), ARCHITECTURES[0])
    print(parse_usage(compiled.log))


def test_every_kernel_links(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("--thorough: a minute")
    cases = cases_with_sources("NvshmemMesh")
    assert len(cases) > 10
    for case in cases:
        compiled = _core.compile_kernel(case.key(sources=_sources(HOME)), ARCHITECTURES[0])
        assert parse_usage(compiled.log).spill_bytes == 0, f"{case}: {compiled.log}"


def test_releases_of_pypi_link(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("--thorough: 500 MB from PyPI")
    for version in RELEASES:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", f"nvidia-nvshmem-cu13=={version}"]
        done = subprocess.run([*download, "-d", str(tmp_path / version)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip("PyPI cannot be reached")
        (wheel,) = (tmp_path / version).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(tmp_path / version)
        home = tmp_path / version / "nvidia/nvshmem"
        for architecture in ARCHITECTURES:
            _compile(_row("channel_loop_run", MESHES[0]), _sources(home), architecture)


def test_a_release_is_part_of_a_kernels_name_in_the_cache(tmp_path: Path) -> None:
    assert HOME
    home = tmp_path / "other"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(HOME / "include")
    archive = (HOME / "lib/libnvshmem_device.a").read_bytes()
    made_at = slice(24, 36)  # of the first member: a date in decimal, which plays no part
    changed = archive[: made_at.start] + b"7".ljust(12) + archive[made_at.stop :]
    assert changed != archive
    (home / "lib/libnvshmem_device.a").write_bytes(changed)
    row = _row("ring_send", MESHES[0])
    names = {_compile(row, _sources(one), ARCHITECTURES[0]).cache_name for one in (HOME, home)}
    assert len(names) == 2


def test_the_device_library_of_another_release_is_refused_with_both_versions() -> None:
    with pytest.raises(Error, match=rf"has the device library of NVSHMEM {_version_of(HOME)}.* is 9\.9\.9"):
        _sources(HOME, "9.9.9")


def test_a_folder_without_a_device_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(Error, match=f"no device library of NVSHMEM 3.8.0 .*{tmp_path}"):
        _sources(tmp_path, "3.8.0")


def test_a_missing_linker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NVJITLINK", "/nowhere/libnvJitLink.so.13")
    _core.config_reload()
    try:
        with pytest.raises(Error, match=r"no nvJitLink to link kernels with.*/nowhere/libnvJitLink"):
            _compile(_row("ring_receive", MESHES[0]), _sources(HOME), ARCHITECTURES[0])
    finally:
        monkeypatch.delenv("WEFT_NVJITLINK")
        _core.config_reload()


def test_an_archive_without_the_calls_is_refused_with_the_linkers_words(tmp_path: Path) -> None:
    assert HOME
    (tmp_path / "lib").mkdir()
    (tmp_path / "include").symlink_to(HOME / "include")
    (tmp_path / "lib/libnvshmem_device.a").write_bytes(b"!<arch>\n")
    with pytest.raises(Error, match=r"linking ring_send .*libnvshmem_device\.a"):
        _compile(_row("ring_send", MESHES[0]), _sources(tmp_path), ARCHITECTURES[0])
