# SPDX-License-Identifier: Apache-2.0
"""``weft doctor``: every part is named, and what is missing comes with what it is for and what helps."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import WEFT, environment, run_program

from weft import _core, cli
from weft.runtime import doctor
from weft.runtime.findings import Finding
from weft.transfer import nics


def report(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Finding]:
    assert cli.main(["doctor", "--json"]) == status
    found = [Finding(**fields) for fields in json.loads(capsys.readouterr().out)]
    return {finding.what.partition(" (")[0]: finding for finding in found}


def test_every_provider_is_named_with_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    for name in _core.transfer_provider_names():
        (finding,) = (finding for finding in found.values() if name in _words(finding))
        assert finding.state == ("missing" if finding.why else "ok")
    assert found["provider loopback"].state == "ok"


def _words(finding: Finding) -> list[str]:
    return finding.what.replace(";", "").split()


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
    findings = [Finding(**fields) for fields in json.loads(ran.stdout)]
    (finding,) = (finding for finding in findings if provider in _words(finding))
    assert finding.state == "missing" and "/nowhere/lib.so" in finding.why
    assert packages in finding.remedy
    remedies = [finding.remedy for finding in findings if finding.remedy]
    assert len(remedies) == len(set(remedies)), "one fix is said once"


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


def test_what_one_command_mends_is_one_finding() -> None:
    ways = [
        Finding("missing", f"provider {name}", f"transfers over {network}", "no library", "install it")
        for name, network in (("a", "copper"), ("b", "glass"))
    ]
    other = Finding("missing", "a loom", "weaving", "none in the house", "buy one")
    one, last = doctor.merged([ways[0], other, ways[1]])
    assert (one.what, one.serves, one.remedy) == (
        "provider a; b",
        "transfers over copper; glass",
        "install it",
    )
    assert last == other
    assert doctor.merged([Finding("ok", "x", "y"), Finding("ok", "z", "y")]) == [
        Finding("ok", "x", "y"),
        Finding("ok", "z", "y"),
    ]


def test_lines_say_what_helps() -> None:
    finding = Finding("missing", "a loom", "weaving", "none in the house", "buy one")
    assert doctor.lines(finding) == [
        "missing  a loom: weaving",
        "         none in the house",
        "         -> buy one",
    ]


def test_the_doctor_needs_no_torch(tmp_path: Path) -> None:
    script = "import sys; from weft import cli; cli.main(['doctor']); sys.exit('torch' in sys.modules)"
    ran = run_program([sys.executable, "-c", script], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "provider loopback" in ran.stdout


def test_an_engine_over_a_provider_that_is_unusable_names_the_package_and_those_that_work(
    tmp_path: Path,
) -> None:
    script = "from weft.transfer import TransferEngine; TransferEngine('fabric:tcp')"
    ran = run_program([WEFT[0], "-c", script], tmp_path, more={"WEFT_LIBFABRIC": "/nowhere/libfabric.so.1"})
    assert ran.returncode == 1
    said = ran.stderr.splitlines()[-1]
    assert "got fabric:tcp (unusable here: libfabric: /nowhere/libfabric.so.1: cannot open" in said
    assert "Debian's package libfabric1 or PyPI's mpich" in said
    assert "allowed: one that is usable here: " in said and "loopback" in said.rpartition(":")[2]


# ---- open ports

OPENS = """
import sys
from weft.transfer import TransferEngine
engines = [TransferEngine("fabric:tcp", [sys.argv[1]]) for _ in range(2)]
print("ready", flush=True)
sys.stdin.read()
"""


def ports_of(pid: int, folder: Path) -> list[dict[str, str]]:
    listed = run_program([*WEFT, "doctor", "--json"], folder)
    found: list[dict[str, str]] = json.loads(listed.stdout)
    return [one for one in found if one["what"].startswith("port ") and f"process {pid} " in one["serves"]]


@pytest.mark.parametrize("secret", ["", "a secret of sixteen or more"])
@pytest.mark.parametrize("is_local", [False, True])
def test_open_ports_are_named_with_who_reaches_them(secret: str, is_local: bool, tmp_path: Path) -> None:
    usable = [nic.name for nic in nics("fabric:tcp") if not nic.unusable_because]
    chosen = [name for name in usable if name.endswith(("@127.0.0.1", "@::1")) == is_local]
    if not chosen:
        pytest.skip("fabric:tcp has no such interface here")
    with subprocess.Popen(
        [sys.executable, "-c", OPENS, chosen[0]],
        env=environment() | {"WEFT_JOB_SECRET": secret},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin and program.stdout and program.stderr
        try:
            assert program.stdout.readline() == "ready\n", program.stderr.read()
            found = ports_of(program.pid, tmp_path)
        finally:
            program.stdin.close()
        said = program.stderr.read()
    assert sum(len(re.findall(r":[0-9]+", one["what"])) for one in found) >= 2
    is_open = not secret and not is_local
    for one in found:
        assert one["state"] == ("missing" if is_open else "ok"), one
        assert ("open to this host alone" if is_local else "open to the network of ") in one["what"]
        assert ("WEFT_JOB_SECRET=auto" in one["remedy"]) == is_open
    # Once, of two engines.
    assert said.count("without a secret: whoever reaches") == (1 if is_open else 0), said
