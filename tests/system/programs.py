# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start as users do: another Python, in a folder of its own, with the same Weft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import weft

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable]
WEFT = [*PYTHON, "-m", "weft"]


def torchrun(num_ranks: int) -> list[str]:
    """Return the command that starts what follows on so many ranks."""
    return [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def environment() -> dict[str, str]:
    """Return this process's environment, in which a program of another folder finds the same Weft."""
    path = [str(Path(weft.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_program(
    command: list[str], folder: Path, timeout_s: float = 240, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``, with ``more`` in its environment, and return what it printed."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment() | (more or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
