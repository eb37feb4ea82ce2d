# SPDX-License-Identifier: Apache-2.0
"""``weft profile nccl``: what calls of Weft's libnccl cost the host.

    weft profile nccl --ranks 4 --elements 256

The calling thread's processor time without that in kernels, on CPU ranks that are processes; the median of rank 0 for
each call, in microseconds. A C++ compiler (c++) makes the program that calls: what Python adds would be most of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from weft import nccl_path
from weft.errors import Error
from weft.runtime.endings import OwnedFolder
from weft.runtime.tables import integer_from

_DEADLINE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile nccl``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=integer_from(1), default=2)
    parser.add_argument(
        "--elements", type=integer_from(1), default=256, help="float32, of a rank (default 256)"
    )
    parser.add_argument("--calls", type=integer_from(1), default=2000, help="of each (default 2000)")


def run(args: argparse.Namespace) -> int:
    """Compile the program, and run it. Returns its status."""
    library = nccl_path.library()
    owned = OwnedFolder("weft-profile-")
    try:
        program = _compiled(library, owned.path / "nccl_calls")
        numbers = [str(number) for number in (args.ranks, args.elements, args.calls)]
        variables = os.environ | {"WEFT_NCCL_DEVICE": "cpu", "WEFT_NCCL_LIBRARY": "none"}
        return subprocess.run([program, *numbers], env=variables, timeout=_DEADLINE_S).returncode
    except subprocess.TimeoutExpired:
        raise Error(
            f"profile nccl: {args.ranks} ranks did not end within {_DEADLINE_S:g} s", "system"
        ) from None
    finally:
        owned.remove()


def _compiled(library: Path, program: Path) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        raise Error("profile nccl: a C++ compiler (c++) is missing", "unsupported")
    source = Path(__file__).with_name("nccl_calls.cc")
    folder = library.parent
    command = [compiler, "-std=c++17", "-O2", f"-I{folder}", str(source), "-o", str(program)]
    command += [str(library), f"-Wl,-rpath,{folder.resolve()}"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
    if built.returncode:
        raise Error(f"profile nccl: {compiler} refuses {source}: {built.stderr[:2000]}", "system")
    return program
