# SPDX-License-Identifier: Apache-2.0
"""Compares what Weft makes with files in this folder; ``pytest --update`` rewrites them for review."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def check_golden(request: pytest.FixtureRequest, name: str, made: str) -> None:
    """Fail unless the file ``name`` holds exactly ``made``, or write it when --update is given."""
    path = FOLDER / name
    if request.config.getoption("--update"):
        path.write_text(made)
        return
    assert path.exists(), f"no golden file {name}: run pytest tests/golden --update and review it"
    assert made == path.read_text(), (
        f"differs from {name}: if that is meant, run pytest tests/golden --update"
    )
