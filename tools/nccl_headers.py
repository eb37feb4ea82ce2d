# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels with ports through GIN for each back end, with the headers of every NCCL on PyPI from 2.30.3 on.

Usage: python tools/nccl_headers.py [--package nvidia-nccl-cu13] [--versions 2.30.7,2.32.3] [--keep FOLDER]

Downloads one wheel after the other by pip and keeps its headers alone; some 200 to 300 MB each. Prints a line for
each release, back end and architecture: how long the compiler took. Exits with 1 where one does not compile, or
ncclDevComm does not take what the library of that release says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))
from nccl_device_code import (
    ARCHITECTURES,
    BACKENDS,
    LEAST,
    MESHES,
    compile_channel_loop,
    has_backend,
    sources_of,
    version_of,
)

from weft.errors import Error


def versions_on_pypi(package: str) -> list[str]:
    """Return the releases that have windows for device code, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in out.splitlines() if line.startswith("Available versions:"))
    found = [version.strip() for version in line.split(":", 1)[1].split(",")]
    return sorted((v for v in found if "post" not in v and numbers(v) >= LEAST), key=numbers)


def numbers(version: str) -> tuple[int, ...]:
    """Return (2, 28, 9) of "2.28.9"."""
    return tuple(int(part) for part in version.split("."))


def headers_of(package: str, version: str, folder: Path) -> Path:
    """Download a wheel into a folder that goes, and return its headers in ``folder``."""
    target = folder / version
    include = target / "nvidia" / "nccl" / "include"
    if include.exists():
        return include
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*command, f"{package}=={version}"], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = [n for n in packed.namelist() if n.startswith("nvidia/nccl/include/")]
            packed.extractall(target, names)
    return include


def try_release(include: Path) -> bool:
    """Compile for every back end and architecture; return whether all went well."""
    version = version_of(include)
    went = True
    for backend in (name for name in BACKENDS if has_backend(include, name)):
        for architecture in ARCHITECTURES:
            what = f"{'.'.join(map(str, version)):8}{backend:7}{architecture:9}"
            start = time.monotonic()
            try:
                compile_channel_loop(sources_of(include, backend), MESHES[0], architecture)
            except Error as error:
                print(what, "FAILED:", str(error)[:2000])
                went = False
                continue
            print(what, f"{time.monotonic() - start:.1f} s")
    return went


def main() -> int:
    """Try all releases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", default="nvidia-nccl-cu13")
    parser.add_argument("--versions", help="with commas between (default: all that PyPI has)")
    parser.add_argument("--keep", type=Path, help="folder where headers are kept, and looked for first")
    args = parser.parse_args()
    versions = args.versions.split(",") if args.versions else versions_on_pypi(args.package)
    with tempfile.TemporaryDirectory() as gone:
        folder = args.keep or Path(gone)
        return 0 if all([try_release(headers_of(args.package, v, folder)) for v in versions]) else 1


if __name__ == "__main__":
    sys.exit(main())
