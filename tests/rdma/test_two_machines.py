# SPDX-License-Identifier: Apache-2.0
"""What is concluded from a host, where there are two of them; and what users run between machines."""

from __future__ import annotations

import pytest
from guests import NIC_SLOT, Guest
from test_outages import LIBRARIES, SECONDS, place, start
from traffic import LOST
from warm import SECRET

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


def test_machines_share_no_memory_but_clocks_may_differ(guests: list[Guest]) -> None:
    said = [guest.run("date +%s; ls /dev/shm | wc -l; touch /dev/shm/weft-probe") for guest in guests]
    assert [words.split()[1] for words in said] == ["0", "0"]
    guests[1].run("date -s @1000000000; rm /dev/shm/weft-probe")
    try:
        owner, writer = start(guests, "verbs", "--seconds 3 --dead 5")
        writer.wait(SECONDS)
        assert "done" in owner.wait(SECONDS)
    finally:
        guests[1].run(f"date -s @{said[1].split()[0]}; rm -f /dev/shm/weft-probe")
        guests[0].run("rm /dev/shm/weft-probe")


def test_shared_memory_reaches_no_engine_of_another_machine(guests: list[Guest]) -> None:
    jobs = [guests[0].fork("traffic", "owner fabric:shm --connect 8")]
    jobs.append(guests[1].fork("traffic", "writer fabric:shm 10.9.0.1 --connect 8"))
    for job, other in zip(jobs, ("writer", "owner"), strict=True):
        status, said = job.wait_status(SECONDS)
        assert status == LOST and f"no answer of peer '{other}'" in said and "over fabric:shm" in said, said


def run_ranks(guests: list[Guest], what: str, provider: str = "verbs") -> str:
    """Run two ranks on each guest, and return what they say."""
    name, library = place(provider)
    for guest in guests:
        guest.warm("ranks")
    jobs = [guest.fork("ranks", f"{what} {2 * i} 2 4 {name} {library}") for i, guest in enumerate(guests)]
    return "".join(job.wait(SECONDS * 2) for job in jobs)


@pytest.mark.torch
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("provider", ["verbs", *LIBRARIES])
def test_ranks_of_two_machines_get_right_results(guests: list[Guest], provider: str) -> None:
    said = run_ranks(guests, "calls", provider)
    every = (
        "nodes",
        "collectives of 100000 floats",
        "all_reduce of 1000000",
        "high throughput",
        "low latency",
        "elastic",
    )
    for rank in range(4):
        for what in every:
            assert f"right {rank} {what}" in said, said
    pids = [line.split()[-1] for line in said.splitlines() if " nodes " in line]
    assert len(pids) == 4 and len(set(pids)) == 2, "ranks of both machines have the same process numbers"


@pytest.mark.torch
@pytest.mark.timeout(1500)
def test_a_killed_rank_is_blamed_and_not_its_namesake_on_the_other_machine(guests: list[Guest]) -> None:
    said = run_ranks(guests, "killed")
    for rank in (0, 1, 2):
        (line,) = [line for line in said.splitlines() if line.startswith(f"lost {rank} ")]
        assert "rank 3" in line, said


@pytest.mark.torch
@pytest.mark.timeout(1500)
def test_the_guide_of_a_kv_cache_works_between_machines(guests: list[Guest]) -> None:
    decode = guests[0].fork("guide", "decode")
    prefill = guests[1].fork("guide", "prefill 10.9.0.1")
    prefill.wait(SECONDS * 2)
    assert decode.wait(SECONDS).endswith(
        "layer 0 arrived\nlayer 1 arrived\nlayer 2 arrived\nlayer 3 arrived\n"
    )


@pytest.mark.timeout(1500)
def test_the_transfer_benchmark_measures_between_machines(guests: list[Guest], python: str) -> None:
    line = f"WEFT_PEER_DEAD_S=120 WEFT_JOB_SECRET='{SECRET}' {python} -m weft bench transfer"
    options = "--provider verbs --quick --rounds 1 --no-pin --calls write"
    server = guests[0].start(f"{line} server --host 10.9.0.1 --port 7100 {options}")
    server.until("10.9.0.1:7100", SECONDS)
    said = guests[1].start(f"{line} client 10.9.0.1:7100 {options}").wait(SECONDS * 2)
    server.wait(SECONDS)
    assert "write" in said, said


TORCHRUN = """
import torch, torch.distributed as dist, weft
dist.init_process_group("gloo")
comm = weft.Communicator(timeout_s=200)
got = comm.all_reduce(torch.full((4099,), comm.rank + 1.0))
assert (got == 3).all() and comm.nodes == [0, 1]
print("right", comm.rank)
"""


@pytest.mark.timeout(1500)
def test_torchrun_starts_ranks_of_two_machines(guests: list[Guest], python: str) -> None:
    program = "/tmp/torchrun.py"
    settings = (
        "WEFT_INTERFACE=net0 GLOO_SOCKET_IFNAME=net0 WEFT_PROXY_PROVIDER=verbs WEFT_PROXY_NICS=rxe0 "
        f"WEFT_PEER_DEAD_S=120 WEFT_JOB_SECRET='{SECRET}' OMP_NUM_THREADS=1"
    )
    line = (
        f"printf '%s' '{TORCHRUN}' > {program}; {settings} {python} -m torch.distributed.run --nnodes 2 "
        f"--nproc-per-node 1 --master-addr 10.9.0.1 --master-port 29700 --node-rank"
    )
    jobs = [guest.start(f"{line} {i} {program}") for i, guest in enumerate(guests)]
    said = "".join(job.wait(SECONDS * 2) for job in jobs)
    assert "right 0" in said and "right 1" in said, said
