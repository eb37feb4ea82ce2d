# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # ranks are forked from this process, and a fork inherits no OpenMP threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files, not compare")
    parser.addoption(
        "--random-programs",
        type=int,
        default=120,
        help="random collective programs to verify, run and mutate; 1000 for a thorough run",
    )
