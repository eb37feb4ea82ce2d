# SPDX-License-Identifier: Apache-2.0
"""``weft profile``, each way that runs on CPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import WEFT, run_program

from weft import nccl_path
from weft.errors import Error
from weft.profile import COMMANDS

SMALL = ("--hidden", "512", "--experts", "8", "--ranks", "2")


def profiled(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a profile; return what it wrote."""
    name, *rest = arguments
    ran = run_program([*WEFT, "profile", name, "--json", "profile.json", *rest], folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    assert f"weft profile {name}" in document["command"]
    assert "WEFT_JOB_SECRET" not in document["command"]
    return document


def has_libnccl() -> bool:
    try:
        return nccl_path.library().is_file()
    except Error:
        return False


def test_host_says_where_the_time_of_a_call_goes(tmp_path: Path) -> None:
    calls = ("--device", "cpu", "--tokens", "4", "--batches", "1", "--calls", "barrier,low_latency")
    document = profiled(tmp_path, "host", *SMALL, *calls)
    rows = {row["call"]: row for row in document["rows"]}
    assert rows.keys() == {"barrier", "low_latency pair", "low_latency pair, hooks"}
    for row in rows.values():
        assert row["enqueue_us"] > 0 and "in_core_us" in row and row["python_calls"] > 0
    assert any("torch.empty" in note for note in document["notes"])


def test_first_use_has_an_empty_and_a_full_cache(tmp_path: Path) -> None:
    (row,) = profiled(tmp_path, "first-use", "--device", "cpu", "--ranks", "2")["rows"]
    assert row["transport"] == "auto"
    assert row["empty_ms"].keys() == row["full_ms"].keys() >= {"buffer", "low_latency_first"}


def test_constants_compares_every_setting(tmp_path: Path) -> None:
    options = ("--tokens", "2", "--dtype", "bf16", "--iterations", "1")
    rows = profiled(tmp_path, "constants", *SMALL, *options)["rows"]
    assert {row["constants"] for row in rows} == {"never", "sizes", "calls"}
    assert {row["call"] for row in rows} == {"ll_dispatch", "ll_combine"}


def test_sides_are_measured_by_turns(tmp_path: Path) -> None:
    bench = ("moe", "--device", "cpu", "--mode", "ll", "--tokens", "2", *SMALL, "--iterations", "1")
    sides = ("--rounds", "1", "--side", "plain:", "--side", "words:WEFT_LOW_LATENCY_LINE_TOKENS=0")
    document = profiled(tmp_path, "sides", *sides, "--", *bench)
    assert document["sides"] == ["plain", "words"]
    assert all(row["us"].keys() == {"plain", "words"} for row in document["rows"])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")
@pytest.mark.skipif(not has_libnccl(), reason="this build is without libnccl")
def test_nccl_times_every_call(tmp_path: Path) -> None:
    options = ("--ranks", "2", "--elements", "16", "--calls", "20")
    ran = run_program([*WEFT, "profile", "nccl", *options], tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = [line.strip("| ").split(" | ") for line in ran.stdout.splitlines() if line.startswith("|")]
    assert {"AllReduce", "AllGather", "AlltoAll", "Broadcast"} <= {name for name, _ in rows}
    assert all(float(us) > 0 for _, us in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there are no GPUs")
def test_phases_needs_gpus(tmp_path: Path) -> None:
    ran = run_program([*WEFT, "profile", "phases"], tmp_path)
    assert ran.returncode == 1
    assert ran.stderr == "weft: ranks: got 0, allowed: 2 or more GPUs; torch sees 0\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_it_is_for(name: str, tmp_path: Path) -> None:
    ran = run_program([*WEFT, "profile", name, "--help"], tmp_path)
    assert ran.returncode == 0 and f"``weft profile {name}``: " in ran.stdout
