# SPDX-License-Identifier: Apache-2.0
"""Finds what kernels are compiled with: NVRTC, CUDA's headers, and Weft's own device sources.

NVRTC comes with PyTorch, as the packages nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl;
they are found on ``sys.path`` without importing torch. Libraries are opened by absolute path, since a bare
name may find another release.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

SYSTEM_CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Toolchain:
    """Paths for the JIT. ``nvrtc`` is None where there is none; ``include_dirs`` hold CUDA's headers."""

    nvrtc: Path | None
    include_dirs: tuple[Path, ...]
    device_dir: Path


def find() -> Toolchain:
    """Return the newest NVRTC of the installed packages, else the system's, with its headers."""
    for library, include_dirs in _candidates():
        return Toolchain(library, include_dirs, _device_dir())
    return Toolchain(None, (), _device_dir())


def install(core: ModuleType) -> None:
    """Tell the core where the toolchain is. Called when it is first imported; it is no error to find none."""
    found = find()
    core.set_toolchain(
        nvrtc=str(found.nvrtc or ""),
        include_dirs=[str(folder) for folder in found.include_dirs],
        device_dir=str(found.device_dir),
    )


def _candidates() -> Iterator[tuple[Path, tuple[Path, ...]]]:
    for root in _nvidia_packages():
        # CUDA 13 and newer share one folder; before, each package had its own.
        for folder in sorted(root.glob("cu[0-9]*"), key=_number, reverse=True):
            if library := _newest_nvrtc(folder / "lib"):
                yield library, _existing(folder / "include", folder / "include/cccl")
        if library := _newest_nvrtc(root / "cuda_nvrtc/lib"):
            yield library, _existing(root / "cuda_runtime/include", root / "cuda_cccl/include")
    if library := _newest_nvrtc(SYSTEM_CUDA / "lib64"):
        yield library, _existing(SYSTEM_CUDA / "include", SYSTEM_CUDA / "include/cccl")


def _nvidia_packages() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in (spec.submodule_search_locations if spec else None) or []]


def _newest_nvrtc(folder: Path) -> Path | None:
    # libnvrtc.so.13, not libnvrtc.so.13.0.88 (the same file) nor libnvrtc.alt.so.13.
    libraries = [
        path for path in folder.glob("libnvrtc.so.*") if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)
    ]
    return max(libraries, key=_number, default=None)


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[-1])


def _existing(*folders: Path) -> tuple[Path, ...]:
    return tuple(folder for folder in folders if folder.is_dir())


def _device_dir() -> Path:
    # Beside the extension in an installed package; beside this source in an editable one.
    core = importlib.util.find_spec("weft._core")
    beside = Path(core.origin).parent if core and core.origin else Path(__file__).parents[1]
    places = [beside / "device", Path(__file__).resolve().parents[1] / "device"]
    return next((place for place in places if (place / "kernels").is_dir()), places[0])
