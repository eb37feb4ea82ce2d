# SPDX-License-Identifier: Apache-2.0
"""Tests on real GPUs, one rank each; skipped with a reason where there are fewer than two.

``@pytest.mark.one_gpu`` marks those that one GPU can run, too, with one rank.
"""

from __future__ import annotations

import pytest
from gpu_ranks import num_ranks_here


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_gpu: one GPU is enough, for one rank")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of this folder one at a time, and skip those that the machine has too few GPUs for."""
    here = num_ranks_here()
    for item in items:
        needed = 1 if item.get_closest_marker("one_gpu") else 2
        if "tests/gpu" not in str(item.path):
            continue
        item.add_marker(pytest.mark.alone)  # GPUs are not shared
        if here < needed:
            reason = f"needs {needed} or more GPUs, this machine has {here}"
            # Before the marks of the test itself: this is the reason that counts.
            item.add_marker(pytest.mark.skipif(True, reason=reason), append=False)
