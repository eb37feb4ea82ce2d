# SPDX-License-Identifier: Apache-2.0
"""Runs the C++ tests, one GoogleTest suite per test, so that one summary covers both languages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build"


def newest_binary() -> Path | None:
    built = sorted(BUILD.glob("*/weft_tests"), key=lambda path: path.stat().st_mtime)
    return next((path for path in reversed(built) if "san" not in path.parent.name), None)


BINARY = newest_binary()


def suites() -> list[str]:
    if BINARY is None:
        return []
    listed = subprocess.run([BINARY, "--gtest_list_tests"], capture_output=True, text=True, check=True)
    return [
        line.split()[0] for line in listed.stdout.splitlines() if line and line[0].isalnum() and "." in line
    ]


@pytest.mark.skipif(BINARY is None, reason="C++ tests are not built (apt install libgtest-dev libgmock-dev)")
@pytest.mark.parametrize("suite", suites())
def test_cpp(suite: str) -> None:
    assert BINARY is not None
    ran = subprocess.run(
        [BINARY, f"--gtest_filter={suite}*", "--gtest_brief=1"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
