# SPDX-License-Identifier: Apache-2.0
"""Kernels under a weak memory model (tests/weak): its litmus tests, scenarios, and faults of order that are caught."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # the first builds the program
ROOT = Path(__file__).resolve().parents[2]
# Sites that must be among the mutants, and are caught: the kinds of fault that other libraries shipped.
CAUGHT = [
    r"src/transports/mapped/channel\.cuh:\d+ store_release: made relaxed",  # a signal that publishes nothing
    r"src/transports/mapped/channel\.cuh:\d+ store_release: of gpu scope",  # ... or to its own GPU alone
    r"kernels/core/wait\.cuh:\d+ load_acquire: made relaxed",
    r"kernels/core/grid\.cuh:\d+ block\.sync: dropped",  # blocks finish before their rows
    r"row_pipe_in_bulk\.h:\d+ wait_written: waits for sources only",  # rows that a signal overtakes
    r"row_pipe_in_bulk\.h:\d+ wait_read: waits for one group less",  # a stage that is loaded over
    r"row_pipe_in_bulk\.h:\d+ fence_async: dropped",  # what a warp acquired, its copies need not see
]


def weak_order(*arguments: str) -> str:
    command = [sys.executable, ROOT / "tools/weak-order", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_litmus_tests_have_their_verdicts() -> None:
    lines = weak_order("--litmus").splitlines()
    assert len(lines) > 80
    assert all(line.startswith("ok ") for line in lines)


def test_kernels_run_a_minute_without_failure() -> None:
    assert "no failure" in weak_order("--minutes", "1")


@pytest.fixture(scope="module")
def mutants() -> list[str]:
    return weak_order("--list").splitlines()


@pytest.mark.parametrize("site", CAUGHT)
def test_faults_of_order_are_caught(site: str, mutants: list[str]) -> None:
    chosen = [line.split()[0] for line in mutants if re.search(site, line)]
    assert chosen, "no scenario comes by such a site"
    assert any("1 mutants, 0 not caught" in _tried(number) for number in chosen)


def _tried(number: str) -> str:
    command = [sys.executable, ROOT / "tools/weak-order", "--mutant", number, "--seconds", "30"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False).stdout
