# SPDX-License-Identifier: Apache-2.0
"""What a run of the tests says at its end."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import summary

ROOT = Path(__file__).parents[2]
SKIP = re.compile(r"(?:GTEST_SKIP\(\) << |pytest\.skip\(\s*f?|reason=f?)\"([^\"]+)\"")


def test_all_that_can_run_ran_where_nothing_was_skipped() -> None:
    assert summary.of(7, Counter()) == ("7 of 7 tests that this machine can run ran here", [])


def test_reasons_that_a_command_removes_count_as_tests_that_can_run() -> None:
    reasons = Counter(
        {
            "C++ tests are not built: apt-get install libgtest-dev libgmock-dev, then tools/run-tests": 1,
            "could not import 'matplotlib': No module named 'matplotlib'": 3,
            "needs 2 or more GPUs, this machine has 0": 166,
        }
    )
    title, lines = summary.of(10, reasons)
    assert title == "10 of 14 tests that this machine can run ran here; 170 skipped"
    assert [line.split()[0] for line in lines if line[0] == " "] == ["3", "1", "166"]


@pytest.mark.parametrize(
    ("reason", "is_removable"),
    [
        ("libfabric's headers are not installed (package libfabric-dev)", True),
        ("no NVRTC (pip install nvidia-cuda-nvrtc)", True),
        ("build/cp311/weft_tests is older than src/moe/buffer.cc: run tools/run-tests", True),
        ("--thorough: more nodes", True),
        ("needs ip, of iproute2", True),
        ("needs two GPUs", False),
        ("this kernel has no transparent huge pages", False),
        ("ports have no addresses", False),
        ("network namespaces are not allowed here: Operation not permitted", False),
    ],
)
def test_a_reason_says_whether_this_machine_can_run_the_test(reason: str, is_removable: bool) -> None:
    assert bool(summary.REMOVABLE.search(reason)) == is_removable


def test_reasons_of_the_tree_are_told_apart() -> None:
    files = [
        path
        for pattern in ("*.py", "*.cc")
        for path in (ROOT / "tests").rglob(pattern)
        if path != Path(__file__).resolve()
    ]
    reasons = {reason for path in files for reason in SKIP.findall(path.read_text())}
    removable = {reason for reason in reasons if summary.REMOVABLE.search(reason)}
    assert len(reasons) > 30
    assert len(removable) > 10
    assert not [reason for reason in removable if "GPU" in reason]
