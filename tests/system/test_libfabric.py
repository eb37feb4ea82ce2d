# SPDX-License-Identifier: Apache-2.0
"""Which libfabric is taken, and what people are told where it is one that does not outlive the death of a peer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from weft import _core, cli
from weft.errors import Error
from weft.runtime.findings import Finding

# A release of libfabric that knows no network.
_SOURCE = """
unsigned fi_version(void) { return 2u << 16 | MINOR; }
int fi_getinfo(unsigned v, const char* n, const char* s, unsigned long long f, const void* h, void** i) { return -61; }
void fi_freeinfo(void* i) {}
void* fi_dupinfo(const void* i) { return 0; }
int fi_fabric(void* a, void** f, void* c) { return -61; }
const char* fi_strerror(int e) { return "nothing here"; }
"""
_VERSIONS = """
FABRIC_1.0 { global: fi_version; fi_strerror; };
FABRIC_1.1 { global: fi_fabric; } FABRIC_1.0;
FABRIC_1.3 { global: fi_getinfo; fi_freeinfo; fi_dupinfo; } FABRIC_1.1;
"""
_ASK = "import sys; sys.prefix = sys.argv[1]; from weft import _core; print(*_core.libfabric())"


def build(folder: Path, minor: int, more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fabric.c").write_text(_SOURCE + more)
    (folder / "versions").write_text(_VERSIONS)
    library = folder / "libfabric.so.1"
    options = [f"-DMINOR={minor}", "-shared", "-fPIC", f"-Wl,--version-script={folder / 'versions'}"]
    subprocess.run(["c++", "-x", "c", *options, str(folder / "fabric.c"), "-o", str(library)], check=True)
    return library


def system_is_sound() -> bool:
    try:
        return bool(_core.libfabric()[2])
    except Error:
        return False


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_package_goes_before_an_old_libfabric_of_the_system_and_the_user_before_both(
    tmp_path: Path,
) -> None:
    packaged = build(tmp_path / "lib" / "mpich", 77)
    named = build(tmp_path / "named", 78)
    ask = [sys.executable, "-c", _ASK, str(tmp_path)]
    reports = run_program(ask, tmp_path, more={"WEFT_LIBFABRIC": str(named)})
    assert reports.stdout.split() == [str(named), "2.78", "True"], reports.stderr
    if system_is_sound():
        pytest.skip("the system's libfabric is a sound one")
    found = run_program(ask, tmp_path)
    assert found.stdout.split() == [str(packaged), "2.77", "True"], found.stderr
    packaged.write_text("damaged")
    assert run_program(ask, tmp_path).stdout.split()[-1:] in ([], ["False"])


def test_people_are_told_of_an_old_libfabric(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "libfabric", lambda: ("/lib/libfabric.so.1", "1.17", False))
    assert cli.main(["doctor", "--json"]) == 0
    found = [Finding(**fields) for fields in json.loads(capsys.readouterr().out)]
    (finding,) = (one for one in found if one.what.startswith("libfabric"))
    assert finding.state == "missing" and "release 1.17 (/lib/libfabric.so.1)" in finding.why
    assert finding.remedy.startswith("pip install mpich") and "WEFT_LIBFABRIC" in finding.remedy
    assert cli.main(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "use libfabric 1.17 (/lib/libfabric.so.1); weft doctor says why" in shown


_TAKES_SIGNALS = """
#include <signal.h>
#include <unistd.h>
static void end(int number) { _exit(77); }
static void take(void) { signal(SIGINT, end); signal(SIGTERM, end); signal(SIGSEGV, end); }
__attribute__((constructor)) static void loaded(void) { take(); }
"""
_KEEP = """
import os, signal
from weft import _core
signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
try:
    _core.transfer_find_provider("fabric:tcp").probe()
except Exception:
    pass
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("which", ["one that takes signals", "the one that is here"])
def test_signals_stay_those_of_the_program(which: str, tmp_path: Path) -> None:
    """Release 1.17 takes SIGTERM and SIGINT: commands ended with status 1, and left their folders."""
    more = {}
    if which == "one that takes signals":
        if shutil.which("c++") is None:
            pytest.skip("no C++ compiler")
        more = {"WEFT_LIBFABRIC": str(build(tmp_path / "named", 78, _TAKES_SIGNALS))}
    said = run_program([sys.executable, "-c", _KEEP], tmp_path, more=more)
    assert (said.returncode, said.stdout) == (0, "mine\n"), said.stderr
