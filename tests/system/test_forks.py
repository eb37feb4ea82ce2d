# SPDX-License-Identifier: Apache-2.0
"""Children that programs fork: they refuse what their parent made, end at once, and leave the parent alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PYTHON, ROOT, run_program, torchrun
from test_transfer_programs import skip_unless_usable

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
SECRET = {"WEFT_JOB_SECRET": "a secret of these tests"}


@pytest.mark.parametrize("provider", ["loopback", "fabric:tcp", "fabric:shm"])
def test_engines_outlive_children_of_every_kind(provider: str, tmp_path: Path) -> None:
    if provider.startswith("fabric:"):
        skip_unless_usable(provider.removeprefix("fabric:"))
    ran = run_program([*PYTHON, str(HERE / "forked_engines.py"), provider], tmp_path, more=SECRET)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stdout + ran.stderr
    assert ran.stderr == ""


def test_ranks_outlive_children_of_every_kind(tmp_path: Path) -> None:
    ran = run_program([*torchrun(2), str(HERE / "forked_ranks.py")], tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "done\n" * 2), ran.stdout + ran.stderr


@needs_compiler
def test_cpu_ranks_open_no_cuda_driver_and_children_do_not_call_their_parents(tmp_path: Path) -> None:
    """A real driver ended a child that called it (SIGSEGV in cuInit); this one has the names, and counts."""
    header = (ROOT / "src" / "base" / "cuda_driver.h").read_text()
    names = re.findall(r"WEFT_CUDA_FUNCTION\([\s\\]*\w+,[\s\\]*(cu\w+)\)", header)
    counted = {
        "cuInit": 'FILE* calls = fopen(getenv("CUDA_CALLS"), "a"); fputc(\'+\', calls); fclose(calls);',
        "cuDeviceGetCount": "*(int*)first = 1;",
    }
    source = tmp_path / "cuda.c"
    lines = [f"int {name}(void* first) {{ {counted.get(name, '')} return 0; }}" for name in names]
    source.write_text("\n".join(["#include <stdio.h>", "#include <stdlib.h>", *lines, ""]))
    compile_it = ["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    subprocess.run(compile_it, check=True, timeout=60)
    settings = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_CALLS": str(tmp_path / "calls")}
    ran = run_program([sys.executable, str(HERE / "cuda_in_forks.py")], tmp_path, more=settings)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.fullmatch(
        r"no CUDA: process \d+ opened the driver before it forked this one, .*\ndone\n", ran.stdout
    )
