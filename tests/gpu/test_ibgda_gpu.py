# SPDX-License-Identifier: Apache-2.0
"""Queues of the ibgda transport in pinned memory, written by two GPUs and served by a model of the NIC (C++)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _binary() -> Path:
    built = sorted(ROOT.glob("build/*/weft_tests"), key=os.path.getmtime)
    if not built:
        pytest.skip("the C++ tests are not built (tools/dev-build, with libgtest-dev)")
    return built[-1]


def test_a_model_of_the_nic_understands_what_gpus_write() -> None:
    ran = subprocess.run(
        [str(_binary()), "--gtest_filter=IbgdaGpu.*"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SKIPPED" not in ran.stdout, ran.stdout
