# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_program, torchrun

from weft import _core, cli


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_info_names_each_transport_and_why_it_is_unusable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _core.transports
    broken = {**real("cpu")[0], "name": "carrier", "unusable_because": "no pigeon"}
    monkeypatch.setattr(_core, "transports", lambda device: [*real(device), broken])
    shown = out_of(capsys)
    assert "mapped" in shown
    assert "no: no pigeon" in shown


def test_info_says_why_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> list[dict[str, Any]]:
        raise cli.Error("no CUDA driver: not plugged in", "unsupported")

    monkeypatch.setattr(_core, "gpus", none)
    assert "GPUs: none (no CUDA driver: not plugged in)" in out_of(capsys)


def test_info_shows_gpus_and_links(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu(ordinal: int) -> dict[str, Any]:
        return {
            "ordinal": ordinal,
            "name": "Loom 9000",
            "pci_address": f"0000:{ordinal}b:00.0",
            "bytes": 141 << 30,
            "sms": 132,
            "compute_capability": "9.0",
            "numa_node": -1,
            "nvlinks": 18,
            "can_share_vmm": True,
            "can_share_fabric": False,
            "can_rdma": True,
        }

    def link(src: int, dst: int) -> dict[str, bool]:
        return {"can_access": (src, dst) != (2, 0), "has_atomics": src != 1, "is_nvlink": dst == 1}

    real = _core.transports
    monkeypatch.setattr(_core, "gpus", lambda: [gpu(0), gpu(1), gpu(2)])
    monkeypatch.setattr(_core, "gpu_link", link)
    monkeypatch.setattr(_core, "transports", lambda device: real("cpu"))
    shown = out_of(capsys)
    for text in (
        "Loom 9000",
        "141 ",
        "NVLink x18",
        "PCIe, no atomics",
        "vmm, ipc",
        "Transports of cuda:0",
    ):
        assert text in shown, text
    facts = json.loads(out_of(capsys, "--json"))
    assert facts["links"][2][0]["can_access"] is False


def test_config_shows_what_the_environment_changed() -> None:
    script = "import sys; from weft import cli; sys.exit(cli.main(['info', '--config', '--json']))"
    environment = {"WEFT_TIMEOUT_S": "7500ms", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    rows = {row["variable"]: row for row in json.loads(ran.stdout)["config"]}
    assert rows["WEFT_TIMEOUT_S"]["value"] == "7.5"
    assert rows["WEFT_TIMEOUT_S"]["source"] == "environment"
    assert rows["WEFT_LOG"]["source"] == "default"


def test_config_table_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out_of(capsys, "--config")
    for row in _core.config_table():
        assert row[0] in shown


def test_info_needs_no_torch() -> None:
    script = (
        "import sys; from weft import cli; cli.main(['info', '--json']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


def test_info_says_which_interface_and_network_are_taken_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_INTERFACE", "lo")
    monkeypatch.setenv("WEFT_PROXY_PROVIDER", "loopback")
    _core.config_reload()
    shown = json.loads(out_of(capsys, "--json"))
    assert shown["interface"] == {"name": "lo", "address": "127.0.0.1", "why": "it was asked for by name"}
    (proxy,) = [row for row in shown["transports"]["cpu"] if row["name"] == "proxy"]
    assert proxy["details"].startswith("loopback (WEFT_PROXY_PROVIDER) on loop0 (the ")
    where = "hear of each other on lo@127.0.0.1 (WEFT_INTERFACE): it was asked for by name"
    assert where in " ".join(out_of(capsys).split())
    monkeypatch.setenv("WEFT_INTERFACE", "pigeon0")
    _core.config_reload()
    assert "no interface (WEFT_INTERFACE): interface: got 'pigeon0'" in " ".join(out_of(capsys).split())
    monkeypatch.undo()
    _core.config_reload()


def test_the_plan_says_which_way_each_peer_goes(tmp_path: Path) -> None:
    """Two nodes of this host: 2 ranks and 1."""
    more = {"WEFT_RANKS_PER_NODE": "2", "WEFT_PROXY_PROVIDER": "fabric:tcp"}
    ran = run_program([*torchrun(3), "-m", "weft", "info", "--plan"], tmp_path, more=more)
    rows = [line.split() for line in ran.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "0", "cpu", "1", "(mapped)", "2", "(proxy)"],
        ["1", "0", "cpu", "0", "(mapped)", "2", "(proxy)"],
        ["2", "1", "cpu", "0-1", "(proxy)"],
    ], ran.stdout + ran.stderr
    ran = run_program([*torchrun(3), "-m", "weft", "info", "--plan", "--json"], tmp_path, more=more)
    reports = json.loads(ran.stdout)["plan"]
    assert [one["node"] for one in reports] == [0, 0, 1]
    assert reports[1]["peers"]["2"] == {"transport": "proxy", "reach": "port"}, reports


def test_one_rank_is_told_how_to_see_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torchrun ... -m weft info --plan" in out_of(capsys, "--plan")
