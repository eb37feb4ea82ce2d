# SPDX-License-Identifier: Apache-2.0
"""The suites that every machine runs over stand-ins, in guests over the real thing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from guests import ROOT, Guest, Job

NEWER = ROOT / "build" / "mpich" / "lib" / "mpich" / "libfabric.so.1"
# guest that runs it, label of the backend, libfabric
SUITES = {
    "verbs": (0, "verbs", None),
    "fabric:verbs": (1, "fabric_verbs", None),
    "fabric:verbs of libfabric 2": (0, "fabric_verbs", NEWER),
}
SUITE_SECONDS = 500.0


@pytest.fixture(scope="module")
def running(pytestconfig: pytest.Config, cluster: object) -> dict[str, Job]:
    """Return the suites that have been started, by name; each guest runs one at a time."""
    return {}


def suites_of(label: str, binary: Path) -> str:
    """Return the filter for what runs over a provider: the suites of the engine, and over verbs that of channels."""
    listed = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    channels = [line.split(".")[0] for line in listed.splitlines() if f"k{label.capitalize()}>" in line]
    return ":".join([f"*/{label}", *(f"{suite}.*" for suite in channels)])


def start(name: str, guests: list[Guest], binary: Path) -> Job:
    """Start the C++ suites of a provider in its guest."""
    guest, label, library = SUITES[name]
    report = f"/ctl/{label}-{'newer' if library else 'system'}.xml"
    variables = f"WEFT_LIBFABRIC={library} " if library else ""
    options = f"--gtest_brief=1 --gtest_filter='{suites_of(label, binary)}' --gtest_output=xml:{report}"
    return guests[guest].start(
        f"cd /tmp; {variables}{binary} {options}; status=$?; cp {report} /ctl/report.xml; exit $status"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUITES)
def test_the_suites_of_the_engine_pass(
    name: str, guests: list[Guest], running: dict[str, Job], pytestconfig: pytest.Config
) -> None:
    binary = Path(pytestconfig.getoption("--cpp-tests") or "none").resolve()
    if not binary.is_file():
        pytest.skip("C++ tests are not built")
    library = SUITES[name][2]
    if library is not None and not library.is_file():
        pytest.skip("no libfabric 2 in build/mpich: PyPI has it (tools/newer-libfabric)")
    for other in ("verbs", "fabric:verbs", name):
        if other not in running:
            running[other] = start(other, guests, binary)
    _, said = running[name].wait_status(SUITE_SECONDS)
    cases = list(ElementTree.parse(running[name].guest.folder / "report.xml").iter("testcase"))
    failed = [
        f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find("failure") is not None
    ]
    ran = [case for case in cases if case.get("status") == "run" and case.find("skipped") is None]
    print(f"{name}: {len(ran)} ran, {len(cases) - len(ran)} were skipped")
    assert not failed, f"{failed}\n{said[-4000:]}"
    assert len(ran) >= 20, said[-4000:]
