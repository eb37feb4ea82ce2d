# SPDX-License-Identifier: Apache-2.0
"""``weft bench channel`` as users start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import WEFT, run_program

from weft import _core
from weft.bench.report import check_document

QUICK = ["--quick", "--rounds", "1", "--json", "out.json"]


def test_every_call_is_measured_and_checked_beside_the_raw_loop(tmp_path: Path) -> None:
    usable = [
        nic for nic in _core.transfer_find_provider("fabric:tcp").probe() if not nic["unusable_because"]
    ]
    networks = "tcp,mapped" if usable else "mapped"
    ran = run_program([*WEFT, "bench", "channel", *QUICK, "--provider", networks], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    calls = {"put_with_signal", "signal", "add", "put", "put_flush"}
    for network in networks.split(","):
        rows = [row for row in document["rows"] if row.get("provider", "").endswith(network)]
        assert {row["call"] for row in rows} == calls
        assert all(row["checked"] and row["us"] > 0 for row in rows)
        assert all((row["floor_us"] is not None) == (network == "tcp") for row in rows)
    fifo = {row["producers"]: row for row in document["rows"] if row["call"] == "fifo"}
    assert set(fifo) == {1, 4} and all(row["mops"] > 0 for row in fifo.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calls", "pull"], "--calls: got ['pull']"),
        (["--provider", "fabric:none"], "provider: got"),
        (["--rounds", "0"], "--rounds: got 0"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    ran = run_program([*WEFT, "bench", "channel", *options], tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"weft: {message}") and len(ran.stderr.splitlines()) == 1
