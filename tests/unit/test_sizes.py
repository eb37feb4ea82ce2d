# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", ROOT / "tools" / "check_sizes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_within_its_limit(sizes: ModuleType) -> None:
    assert sizes.breaches(ROOT) == []


@pytest.mark.parametrize(("path", "limit"), [("kernels/moe/a.cuh", 700), ("python/weft/a.py", 700)])
def test_a_line_too_many_is_named(sizes: ModuleType, tmp_path: Path, path: str, limit: int) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("//\n" * limit)
    assert sizes.breaches(tmp_path) == []
    file.write_text("//\n" * (limit + 1))
    assert sizes.breaches(tmp_path) == [
        f"{path}: {limit + 1} lines, allowed in {path.split('/')[0]}: {limit}"
    ]
