# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # ranks are forked from this process, and a fork inherits no OpenMP threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files, not compare")
    parser.addoption(
        "--thorough",
        action="store_true",
        help="1000 random collective programs instead of 120; the largest library algorithm on up to 16 ranks",
    )
