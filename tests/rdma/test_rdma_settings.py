# SPDX-License-Identifier: Apache-2.0
"""Machines that are set up otherwise, limits that are reached, and strangers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guests import Guest
from test_outages import SECONDS, start

LOCKS_NO_MORE = "setpriv --bounding-set=-ipc_lock,-sys_resource env"
OPEN = 'from weft.transfer import TransferEngine; TransferEngine("{}")'
PLACES = """
from weft.transfer import nics
for provider in ("verbs", "fabric:verbs"):
    for nic in nics(provider):
        print(provider, nic.name, nic.unusable_because or "usable")
"""


@pytest.mark.quick
def test_links_of_different_mtu_meet(guests: list[Guest]) -> None:
    guests[1].run("ip link set net0 mtu 1500")
    owner, writer = start(guests, "verbs", "--seconds 2")
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)


# Prints the traffic classes of the packets of RoCE that come, once there are some.
CLASSES = """
import socket, time
line = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
line.bind(("net0", 0x0800))
line.settimeout(60)
print("listens", flush=True)
seen = []
while len(seen) < 50:
    packet = line.recv(100)
    if packet[9] == socket.IPPROTO_UDP and packet[22:24] == (4791).to_bytes(2, "big"):
        seen.append(packet[1])
print(sorted(set(seen)))
"""


def test_partition_service_level_and_traffic_class_are_those_of_the_settings(
    guests: list[Guest], python: str
) -> None:
    looker = guests[0].start(f"{python} -c '{CLASSES}'")
    looker.until("listens", SECONDS)
    variables = ("WEFT_PKEY=0xffff", "WEFT_SERVICE_LEVEL=5", "WEFT_TRAFFIC_CLASS=96")
    owner, writer = start(guests, "verbs", "--seconds 4 " + " ".join(f"--set {pair}" for pair in variables))
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)
    assert "[96]" in looker.wait(SECONDS)


def test_a_partition_that_a_port_is_not_in_is_named(guests: list[Guest], python: str) -> None:
    said = guests[0].run(f"WEFT_PKEY=0x8001 {python} -c '{PLACES}'")
    why = "port 1 is not in the partition of P_Key 0x8001 (WEFT_PKEY)"
    assert said.splitlines()[:2] == [f"verbs rxe0 {why}", f"verbs rxe1 {why}"], said


@pytest.fixture
def without_address(guests: list[Guest]) -> Iterator[Guest]:
    """Return a guest whose first interface has a link-local address alone."""
    guests[0].run("ip -4 address flush dev net0; sleep 1")
    yield guests[0]
    guests[0].run("ip address add 10.9.0.1/24 dev net0; sleep 1")


def test_a_device_without_a_routable_address_is_called_so_by_both_providers(
    without_address: Guest, python: str
) -> None:
    said = without_address.run(f"{python} -c '{PLACES}'")
    assert said.splitlines() == [
        "verbs rxe0 its port has no usable GID",
        "verbs rxe1 usable",
        "fabric:verbs rxe0 its interface has no address of IP but a link-local one",
        "fabric:verbs rxe1 usable",
    ]


def test_a_limit_of_locked_memory_is_named(guests: list[Guest], python: str) -> None:
    job = guests[0].start(f"ulimit -l 64; {LOCKS_NO_MORE} {python} -c '{OPEN.format('verbs')}'")
    _, said = job.wait_status(SECONDS)

    assert "ibv_reg_mr on rxe0 (ulimit -l: 64 KiB of locked memory): Cannot allocate memory" in said, said


# A group of processes that may have so many objects of a device: queue pairs, completion queues, regions.
LIMITED = (
    "mkdir -p /tmp/cg && mount -t cgroup2 none /tmp/cg; echo +rdma > /tmp/cg/cgroup.subtree_control; "
    "mkdir -p /tmp/cg/few; "
)


@pytest.mark.parametrize(("objects", "call"), [(1, "ibv_create_cq"), (4, "datagram queue pair")])
def test_a_limit_of_the_device_is_named(guests: list[Guest], python: str, objects: int, call: str) -> None:
    limit = f"echo 'rxe0 hca_object={objects}' > /tmp/cg/few/rdma.max; echo $$ > /tmp/cg/few/cgroup.procs; "
    job = guests[0].start(f"{LIMITED}{limit}{python} -c '{OPEN.format('verbs')}'")
    status, said = job.wait_status(SECONDS)
    assert status != 0 and call in said and "rxe0" in said, said


STRANGER = """
import os, random, socket, sys
ports = [int(word) for word in sys.argv[1:]]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(3000):
    udp.sendto(os.urandom(random.randrange(1, 1400)), ("10.9.0.1", 4791))
for port in ports:
    for _ in range(20):
        try:
            line = socket.create_connection(("10.9.0.1", port), 2)
            line.sendall(os.urandom(100))
            line.close()
        except OSError:
            pass
"""


def test_strangers_are_not_heard(guests: list[Guest], python: str) -> None:
    owner, writer = start(guests, "verbs", "--seconds 8 --dead 60")
    listening = guests[0].run("ss -Hltn | awk '{print $4}' | sed 's/.*://' | sort -u")
    guests[1].run(f"{python} -c '{STRANGER}' {' '.join(listening.split())}")
    writer.wait(SECONDS)
    assert "done" in owner.wait(SECONDS)
