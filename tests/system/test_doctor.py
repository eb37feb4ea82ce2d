# SPDX-License-Identifier: Apache-2.0
"""``weft doctor``: every part is named, and what is missing comes with what it is for and what helps."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from programs import WEFT, run_program

from weft import _core, cli
from weft.runtime import doctor


def report(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, doctor.Finding]:
    assert cli.main(["doctor", "--json"]) == status
    found = [doctor.Finding(**fields) for fields in json.loads(capsys.readouterr().out)]
    return {finding.what.partition(" (")[0]: finding for finding in found}


def test_every_provider_is_named_with_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    for name in _core.transfer_provider_names():
        finding = found[f"provider {name}"]
        assert finding.state == ("missing" if finding.why else "ok")
    assert found["provider loopback"].state == "ok"


@pytest.mark.parametrize(
    ("variable", "provider", "packages"),
    [
        ("WEFT_LIBFABRIC", "fabric:tcp", "libfabric1"),
        ("WEFT_LIBIBVERBS", "verbs", "libibverbs1 ibverbs-providers"),
    ],
)
def test_a_missing_library_comes_with_its_package(
    variable: str, provider: str, packages: str, tmp_path: Path
) -> None:
    ran = run_program([*WEFT, "doctor", "--json"], tmp_path, more={variable: "/nowhere/lib.so"})
    assert ran.returncode == 0, ran.stderr
    (finding,) = (line for line in json.loads(ran.stdout) if line["what"] == f"provider {provider}")
    assert finding["state"] == "missing" and "/nowhere/lib.so" in finding["why"]
    assert packages in finding["remedy"]


def test_missing_python_packages_come_with_pip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    gone = ("torch", "matplotlib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = report(capsys)
    assert found["torch"].remedy.startswith("pip install torch")
    assert found["matplotlib"].remedy == "pip install matplotlib"
    assert "g++" in found["C++ compiler"].remedy


def test_two_owners_of_deep_ep_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda name: True)
    assert report(capsys, status=1)["deep_ep"].state == "wrong"


def test_lines_say_what_helps() -> None:
    finding = doctor.Finding("missing", "a loom", "weaving", "none in the house", "buy one")
    assert doctor.lines(finding) == [
        "missing  a loom: weaving",
        "         none in the house",
        "         -> buy one",
    ]


def test_the_doctor_needs_no_torch(tmp_path: Path) -> None:
    script = "import sys; from weft import cli; cli.main(['doctor']); sys.exit('torch' in sys.modules)"
    ran = run_program([WEFT[0], "-c", script], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "provider loopback" in ran.stdout
