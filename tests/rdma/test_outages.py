# SPDX-License-Identifier: Apache-2.0
"""What happens to traffic between two machines when the network, or one of them, is gone for a while or for good."""

from __future__ import annotations

import time

import pytest
from guests import NEWER_LIBFABRIC, Guest, Job
from traffic import LOST

SECONDS = 240  # for a job to end: guests are slow
LIBRARIES = {  # what a test calls a provider over one of the two generations of libfabric
    "fabric:verbs of libfabric 1": ("fabric:verbs", "libfabric.so.1"),
    "fabric:verbs of libfabric 2": ("fabric:verbs", NEWER_LIBFABRIC),
}
PROVIDERS = ["verbs", *LIBRARIES, "fabric:tcp"]


def place(provider: str) -> tuple[str, str]:
    """Return the name of a provider and what WEFT_LIBFABRIC is for it; skip where there is no such libfabric."""
    name, library = LIBRARIES.get(provider, (provider, "libfabric.so.1"))
    if library is NEWER_LIBFABRIC and not NEWER_LIBFABRIC.is_file():
        pytest.skip("no libfabric 2 in build/mpich: PyPI has it (tools/newer-libfabric)")
    return name, str(library)


def start(guests: list[Guest], provider: str, options: str, blocks: int = 3) -> tuple[Job, Job]:
    """Start the owner in guest 1 and the writer in guest 2, and wait until some blocks have passed."""
    provider, library = place(provider)
    options += f" --set WEFT_LIBFABRIC={library}"
    for guest in guests:
        guest.warm("traffic")
    owner = guests[0].fork("traffic", f"owner {provider} {options}")
    writer = guests[1].fork("traffic", f"writer {provider} 10.9.0.1 {options}")
    writer.until(f"block {blocks} ", SECONDS)
    return owner, writer


def lost(job: Job, name: str) -> str:
    """Return why `name` is lost, which the job must end with."""
    status, said = job.wait_status(SECONDS)
    (line,) = [line for line in said.splitlines() if line.startswith("lost ")] or [said]
    assert status == LOST and f"peer '{name}' is lost: " in line, said
    assert "Flushed" not in line, said  # what ended the connection, and not what that did to the rest
    return line


def longest(said: str) -> float:
    """Return the longest time that a block took."""
    return float(said.split("longest")[1])


# Without a secret: with one, immediates travel as messages where a NIC does not prove whose they are.
@pytest.mark.quick
@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_immediate_and_message_comes_once(guests: list[Guest], provider: str) -> None:
    owner, writer = start(guests, provider, "--seconds 4 --set WEFT_JOB_SECRET=")
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)


@pytest.mark.parametrize("which", [0, 1])
def test_an_outage_shorter_than_peer_dead_s_only_takes_longer(guests: list[Guest], which: int) -> None:
    owner, writer = start(guests, "verbs", "--seconds 12 --dead 30")
    guests[which].run("ip link set net0 down; sleep 3; ip link set net0 up")
    said = writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)
    assert longest(said) > 2, said


@pytest.mark.parametrize(
    ("which", "off", "on"),
    [(1, "set_link card0 off", "set_link card0 on"), (0, "stop", "cont")],
    ids=["a cable is out", "a guest is paused"],
)
def test_a_while_without_a_peer_only_takes_longer(guests: list[Guest], which: int, off: str, on: str) -> None:
    owner, writer = start(guests, "verbs", "--seconds 12 --dead 30")
    guests[which].monitor(off)
    time.sleep(4)
    guests[which].monitor(on)
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)


def test_an_outage_longer_than_peer_dead_s_names_the_peer_on_both_sides(guests: list[Guest]) -> None:
    owner, writer = start(guests, "verbs", "--seconds 60 --dead 4")
    guests[1].run("ip link set net0 down")
    for job, name in ((owner, "writer"), (writer, "owner")):
        assert "no sign of life for 4 s" in lost(job, name)


@pytest.mark.parametrize("provider", LIBRARIES)
def test_an_outage_that_the_nic_gives_up_on_names_the_peer(guests: list[Guest], provider: str) -> None:
    _, writer = start(guests, provider, "--seconds 600 --dead 200 --timeout 300")
    guests[1].run("ip link set net0 down")
    assert "no sign of life" not in lost(writer, "owner")


@pytest.mark.quick
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_killed_owner_is_noticed_long_before_peer_dead_s(guests: list[Guest], provider: str) -> None:
    _, writer = start(guests, provider, "--seconds 600 --dead 300 --timeout 500")
    guests[0].run("busybox killall -9 owner")
    assert "no sign of life" not in lost(writer, "owner")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_killed_writer_is_noticed_by_an_owner_that_only_waits(guests: list[Guest], provider: str) -> None:
    owner, _ = start(guests, provider, "--seconds 600 --dead 300 --timeout 500 --pause 5", blocks=1)
    time.sleep(1)  # nothing is under way then
    guests[1].run("busybox killall -9 writer")
    assert "no sign of life" not in lost(owner, "writer")


# rxe ends a read early when its answers change places or come twice: its bytes are missing (docs/reliability.md).
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("loss 2%", ""),
        ("duplicate 5%", "--no-reads"),
        ("delay 20ms 10ms", "--no-reads"),
        ("delay 10ms reorder 25% 50%", "--no-reads"),
        ("loss 5% delay 5ms 5ms", "--no-reads"),
    ],
)
def test_a_bad_network_changes_nothing_but_the_time(guests: list[Guest], fault: str, options: str) -> None:
    for guest in guests:
        guest.run(f"modprobe sch_netem; tc qdisc add dev net0 root netem {fault}")
    owner, writer = start(guests, "verbs", f"--seconds 5 --dead 60 {options}")
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)


def test_of_two_nics_one_may_die(guests: list[Guest]) -> None:
    owner, writer = start(guests, "verbs", "--seconds 16 --dead 5 --nics rxe0,rxe1 --again --pause 0.1")
    guests[1].run("ip link set net1 down")
    said = writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)
    failed = [line for line in said.splitlines() if line.startswith("again ")]
    assert all("rxe1" in line for line in failed), said
    assert len(failed) <= 2, said  # it was used until it was given up, and not after that


def test_a_guest_that_is_paused_too_long_is_lost_and_blames_nobody_else(guests: list[Guest]) -> None:
    owner, writer = start(guests, "verbs", "--seconds 600 --dead 4")
    guests[0].monitor("stop")
    try:
        assert "no sign of life for 4 s" in lost(writer, "owner")
    finally:
        guests[0].monitor("cont")
    lost(owner, "writer")


@pytest.mark.last
def test_a_machine_that_is_gone_is_lost_after_peer_dead_s(guests: list[Guest]) -> None:
    _, writer = start(guests, "verbs", "--seconds 600 --dead 4")
    guests[0].kill()
    assert "no sign of life for 4 s" in lost(writer, "owner")
