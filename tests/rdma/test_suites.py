# SPDX-License-Identifier: Apache-2.0
"""The suites that every machine runs over stand-ins, in guests over the real thing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from guests import NEWER_LIBFABRIC, Guest, Job

# guest that runs it, label of the backend, libfabric
SUITES = {
    "verbs": (0, "verbs", None),
    "fabric:verbs": (1, "fabric_verbs", None),
    "fabric:verbs of libfabric 2": (0, "fabric_verbs", NEWER_LIBFABRIC),
}
SUITE_SECONDS = 500.0


@pytest.fixture(scope="module")
def running(pytestconfig: pytest.Config, cluster: object) -> dict[str, Job]:
    """Return the suites that have been started, by name; each guest runs one at a time."""
    return {}


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Return the suites that are to run."""
    here = [item for item in request.session.items if Path(item.path) == Path(__file__)]
    return [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]


def suites_of(label: str, binary: Path) -> str:
    """Return the filter for what runs over a provider: the suites of the engine, and over verbs that of channels."""
    listed = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    channels = [line.split(".")[0] for line in listed.splitlines() if f"k{label.capitalize()}>" in line]
    return ":".join([f"*/{label}", *(f"{suite}.*" for suite in channels)])


def start(name: str, guests: list[Guest], binary: Path, rounds: int) -> Job:
    """Start the C++ suites of a provider in its guest, all in one process, `rounds` times."""
    guest, label, library = SUITES[name]
    variables = f"WEFT_LIBFABRIC={library} " if library else ""
    options = f"--gtest_brief=1 --gtest_repeat={rounds} --gtest_filter='{suites_of(label, binary)}'"
    return guests[guest].start(
        f"cd /tmp; {variables}exec {binary} {options} --gtest_output=xml:/ctl/{report_of(name)}"
    )


def report_of(name: str) -> str:
    """Return the name of the file, in a guest's folder, that says what became of each test."""
    return name.replace(":", "_").replace(" ", "_") + ".xml"


@pytest.mark.timeout(0)  # each job has its own
@pytest.mark.parametrize("name", SUITES)
def test_the_suites_of_the_engine_pass(
    name: str,
    guests: list[Guest],
    running: dict[str, Job],
    chosen: list[str],
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    binary = Path(pytestconfig.getoption("--cpp-tests") or "none").resolve()
    if not binary.is_file():
        pytest.skip("C++ tests are not built")
    library = SUITES[name][2]
    if library is not None and not library.is_file():
        pytest.skip("no libfabric 2 in build/mpich: PyPI has it (tools/newer-libfabric)")
    rounds = pytestconfig.getoption("--suite-rounds")
    for other in chosen:
        if other not in running and (other == name or SUITES[other][0] != SUITES[name][0]):
            running[other] = start(other, guests, binary, rounds)
    status, said = running[name].wait_status(SUITE_SECONDS * rounds)
    report = running[name].guest.folder / report_of(name)
    assert report.is_file(), f"ended with {status}:\n{said[-4000:]}"
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find("failure") is not None
    ]
    ran = [case for case in cases if case.get("status") == "run" and case.find("skipped") is None]
    record_property("suite", f"{name}: {len(ran) - len(failed)} of {len(cases)} passed")
    assert status == 0 and not failed, f"ended with {status}: {failed}\n{said[-4000:]}"
    assert len(ran) >= 20, said[-4000:]
