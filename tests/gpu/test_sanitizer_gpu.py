# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in a small job of two ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.skipif(not Path(_TOOL).exists(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("check", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(check: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [_TOOL, "--tool", check, "--target-processes", "all", "--error-exitcode", "99", *launcher]
    environment = {**os.environ, "WEFT_TIMEOUT_S": "100"}  # instrumented kernels are slow
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("small_job.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert said.count("all agreed") == 2
    assert "ERROR SUMMARY: 0 errors" in said or "0 hazards displayed" in said, said[-2000:]
