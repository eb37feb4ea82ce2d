# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on: the machine, and the versions of everything that took part."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import weft

MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, cores, memory, and the GPUs if torch is loaded."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Weft, Python, and the packages that a figure may depend on."""
    found = {"weft": weft.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "deep_ep", "nixl", *MOONCAKE):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    driver = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.[\d.]*\d", driver.read_text()) if driver.is_file() else None
    if version is not None:
        found["nvidia_driver"] = version[0]
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]
