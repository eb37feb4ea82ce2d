# SPDX-License-Identifier: Apache-2.0
"""The suites that every machine runs over stand-ins, in guests over the real thing; and ranks of two machines."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from guests import NIC_SLOT, ROOT, Guest, Job

NEWER = ROOT / "build" / "mpich" / "lib" / "mpich" / "libfabric.so.1"
# label of the backend, guest that runs it, libfabric
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


def start(name: str, guests: list[Guest], binary: Path) -> Job:
    """Start the C++ suites of a provider in its guest."""
    guest, label, library = SUITES[name]
    report = f"/ctl/{label}-{'newer' if library else 'system'}.xml"
    variables = f"WEFT_LIBFABRIC={library} " if library else ""
    return guests[guest].start(
        f"cd /tmp; {variables}{binary} --gtest_brief=1 --gtest_filter='*/{label}' --gtest_output=xml:{report}; "
        f"status=$?; cp {report} /ctl/report.xml; exit $status"
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
        pytest.skip("no libfabric 2 in build/mpich; .ci/run deep installs it")
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


@pytest.mark.timeout(600)
def test_ranks_of_two_machines_get_right_results(guests: list[Guest], python: str) -> None:
    more = f"{python.replace('PYTHONPATH=', f'PYTHONPATH={ROOT}/tests/system:')}"
    variables = (
        "MASTER_ADDR=10.9.0.1 MASTER_PORT=29600 WEFT_INTERFACE=net0 GLOO_SOCKET_IFNAME=net0 WEFT_PROXY_PROVIDER=verbs "
        "WEFT_PEER_DEAD_S=120 OMP_NUM_THREADS=1"
    )
    program = Path(__file__).with_name("ranks.py")
    jobs = [guest.start(f"{variables} {more} {program} {2 * i} 2 4") for i, guest in enumerate(guests)]
    said = "".join(job.wait(550) for job in jobs)
    for rank in range(4):
        for what in ("collectives of 100000 floats", "high throughput", "low latency", "elastic"):
            assert f"right {rank} {what}" in said, said


NICS = """
from weft.transfer import nics
for provider in ("verbs", "fabric:verbs"):
    for nic in nics(provider):
        print(provider, nic.name, nic.pci, nic.gbit_per_s, nic.unusable_because or "usable")
"""


@pytest.mark.quick
def test_a_guest_is_a_machine_of_its_own_with_two_nics(guests: list[Guest], python: str) -> None:
    names = {guest.run("cat /proc/sys/kernel/random/boot_id; hostname") for guest in guests}
    assert len(names) == 2
    said = guests[0].run(f"{python} -c '{NICS}'")
    assert said.splitlines() == [
        f"{provider} rxe{card} 0000:00:{NIC_SLOT + card:02x}.0 2.5 usable"
        for provider in ("verbs", "fabric:verbs")
        for card in (0, 1)
    ]
