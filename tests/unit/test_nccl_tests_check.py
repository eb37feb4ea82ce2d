# SPDX-License-Identifier: Apache-2.0
"""tools/nccl-tests-check: what it reads from programs of nccl-tests, of which scripts stand in for two."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "nccl-tests-check"
_LINES = """#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong
        1024           256     float    none       0    21.96    0.05    0.05      0    14.48    0.07    0.07{wrong}
    33554432       8388608     float    none       0   145.28  230.96  230.96      0   129.76  258.59  258.59    N/A
# Out of bounds values : 0 OK
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("nccl_tests_check", str(TOOL))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    return module


def _program(folder: Path, name: str, text: str, code: int = 0) -> None:
    program = folder / f"{name}_perf"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    program.chmod(0o755)


def test_rows_are_what_the_programs_print(tool: ModuleType, tmp_path: Path) -> None:
    _program(tmp_path, "broadcast", _LINES.format(wrong="      0"))
    rows, failed = tool.measure(["broadcast"], 2, 1, time.monotonic() + 60)
    assert not failed and [row.bytes for row in rows] == [1024, 33554432]
    assert (rows[0].us, rows[0].baselines) == (21.96, {"nccl": 21.96})
    assert rows[0].extra == {
        "in_place_us": 14.48,
        "nccl_in_place_us": 14.48,
        "nccl_us_min": 21.96,
        "nccl_us_max": 21.96,
    }
    assert all(row.checked for row in rows)


def test_medians_of_rounds_count(tool: ModuleType, tmp_path: Path) -> None:
    """Each round of the program takes longer: Weft's are the first, third and fifth."""
    runs = tmp_path / "runs"
    line = f"1024 256 float none 0 $(wc -l < {runs}) 0 0 0 $((10 + $(wc -l < {runs}))) 0 0 0"
    program = tmp_path / "scatter_perf"
    program.write_text(f"#!/bin/sh\necho >> {runs}\necho {line}\n")
    program.chmod(0o755)
    (row,), failed = tool.measure(["scatter"], 2, 3, time.monotonic() + 60)
    assert not failed and list(row.samples_us) == [1, 3, 5]
    assert (row.us, row.extra["in_place_us"], row.baselines["nccl"]) == (3, 13, 4)
    assert (row.extra["nccl_us_min"], row.extra["nccl_us_max"]) == (2, 6)


def test_wrong_results_and_failures_are_told(tool: ModuleType, tmp_path: Path) -> None:
    _program(tmp_path, "reduce", _LINES.format(wrong="      3"))
    rows, failed = tool.measure(["reduce"], 2, 1, time.monotonic() + 60)
    assert failed and [row.checked for row in rows] == [False, True]
    _program(tmp_path, "gather", "", 3)
    assert tool.measure(["gather"], 2, 1, time.monotonic() + 60) == ([], True)
    assert tool.measure(["gather"], 2, 1, time.monotonic()) == ([], True)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "src/common.mk" in done.stderr
