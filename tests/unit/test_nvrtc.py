# SPDX-License-Identifier: Apache-2.0
"""Where the compiler for kernels is found, over the layouts that NVIDIA's packages have had."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.runtime import nvrtc


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``nvidia`` package folder, and no CUDA in the system."""
    folder = tmp_path / "site-packages/nvidia"
    monkeypatch.setattr(nvrtc, "_nvidia_packages", lambda: [folder])
    monkeypatch.setattr(nvrtc, "SYSTEM_CUDA", tmp_path / "cuda")
    return folder


def test_nothing_installed_is_no_error(packages: Path) -> None:
    found = nvrtc.find()
    assert found.nvrtc is None
    assert found.include_dirs == ()


def test_one_folder_for_all_since_cuda_13(packages: Path) -> None:
    lib = packages / "cu13/lib"
    touch(lib / "libnvrtc.so.13", lib / "libnvrtc.alt.so.13", lib / "libnvrtc-builtins.so.13.0")
    touch(packages / "cu13/include/cuda_bf16.h")
    found = nvrtc.find()
    assert found.nvrtc == lib / "libnvrtc.so.13"
    assert found.include_dirs == (packages / "cu13/include",)


def test_a_folder_per_package_before(packages: Path) -> None:
    touch(packages / "cuda_nvrtc/lib/libnvrtc.so.12", packages / "cuda_runtime/include/cuda_bf16.h")
    found = nvrtc.find()
    assert found.nvrtc == packages / "cuda_nvrtc/lib/libnvrtc.so.12"
    assert found.include_dirs == (packages / "cuda_runtime/include",)


def test_the_newest_comes_first(packages: Path) -> None:
    touch(packages / "cuda_nvrtc/lib/libnvrtc.so.12")
    touch(packages / "cu9/lib/libnvrtc.so.9", packages / "cu14/lib/libnvrtc.so.14")
    assert nvrtc.find().nvrtc == packages / "cu14/lib/libnvrtc.so.14"


def test_the_system_comes_last(packages: Path) -> None:
    system = nvrtc.SYSTEM_CUDA
    touch(system / "lib64/libnvrtc.so", system / "lib64/libnvrtc.so.13", system / "lib64/libnvrtc.so.13.0.88")
    touch(system / "include/cuda_bf16.h")
    found = nvrtc.find()
    assert found.nvrtc == system / "lib64/libnvrtc.so.13"
    assert found.include_dirs == (system / "include",)
    touch(packages / "cu13/lib/libnvrtc.so.13")
    assert nvrtc.find().nvrtc == packages / "cu13/lib/libnvrtc.so.13"


def test_device_sources_are_found() -> None:
    assert (nvrtc.find().device_dir / "kernels/target/cuda.h").is_file()
