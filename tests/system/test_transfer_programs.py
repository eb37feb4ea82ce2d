# SPDX-License-Identifier: Apache-2.0
"""``weft bench transfer`` and the transfer examples as users start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, WEFT, environment, run_program

from weft.bench.report import check_document
from weft.transfer import nics

QUICK = ["--quick", "--rounds", "1", "--no-pin"]


def skip_unless_usable(provider: str) -> None:
    unusable = [nic.unusable_because for nic in nics(f"fabric:{provider}")]
    if all(unusable):
        pytest.skip(unusable[0])


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_bench_transfer_measures_checks_and_writes(provider: str, tmp_path: Path) -> None:
    skip_unless_usable(provider)
    files = ["--json", "out.json", "--plot", "out.png"]
    ran = run_program(
        [*WEFT, "bench", "transfer", "--local", "--provider", provider, *QUICK, *files], tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    calls = {row["call"] for row in document["rows"]}
    assert calls == {"write", "write_imm_latency", "write_rate", "paged_write", "read", "scatter"}
    assert all(row["checked"] and row["baselines"]["raw"] > 0 for row in document["rows"])
    assert (tmp_path / "out.png").is_file()


def test_bench_transfer_runs_as_server_and_client(tmp_path: Path) -> None:
    skip_unless_usable("tcp")
    server = subprocess.Popen(
        [*WEFT, "bench", "transfer", "server", "--no-pin"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip().rsplit(":", 1)[1]
        client = ["bench", "transfer", "client", f"127.0.0.1:{port}", "--calls", "write_rate", *QUICK]
        ran = run_program([*WEFT, *client], tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert server.wait(30) == 0
    finally:
        server.kill()


@pytest.mark.parametrize("provider", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("example", "sizes"),
    [
        ("transfer_kv_cache.py", ["--layers", "3", "--tokens", "256"]),
        ("transfer_weight_broadcast.py", ["--workers", "2", "--megabytes", "4", "--updates", "2"]),
    ],
)
def test_examples_verify_what_they_move(
    example: str, sizes: list[str], provider: str, tmp_path: Path
) -> None:
    skip_unless_usable(provider)
    command = [sys.executable, str(ROOT / "examples" / example), "--provider", provider, *sizes]
    ran = run_program(command, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verified" in ran.stdout
