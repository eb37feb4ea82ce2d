# SPDX-License-Identifier: Apache-2.0
"""Tests on real GPUs, one rank each; skipped with a reason where there are fewer than two."""

from __future__ import annotations

import pytest
from gpu_ranks import num_ranks_here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test of this folder where the machine has fewer than two GPUs."""
    if num_ranks_here() >= 2:
        return
    reason = f"needs 2 or more GPUs, this machine has {num_ranks_here()}"
    for item in items:
        if "tests/gpu" in str(
            item.path
        ):  # before the marks of the test itself: this is the reason that counts
            item.add_marker(pytest.mark.skipif(True, reason=reason), append=False)
