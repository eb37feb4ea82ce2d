# SPDX-License-Identifier: Apache-2.0
"""Ranks that die are named at once, with the signal or status; ranks that leave are not missed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import kills
import pytest
import torch

import weft
from weft.collectives.variants import parse_variant
from weft.testing.ranks import Rank, run_ranks

SOON_S = 30.0  # far below the deadline of 120 s: test machines are busy
LOST = kills.LOST


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", range(len(kills.PHASES)), ids=kills.PHASES)
def test_a_killed_rank_is_named_in_every_call(phase: int) -> None:
    """A fourth of the places; which calls meet which phase is chosen so that all of both occur."""
    for number, call in enumerate(kills.CALLS):
        if number % len(kills.PHASES) != phase:
            continue
        place = kills.Place(call, kills.PHASES[(phase + number // 4) % 4])
        place.run(0.01)
        assert place.wrong == 0 and place.found == kills.RANKS - 1
        assert place.slowest_s < SOON_S


def end_badly(rank: Rank, how: str) -> tuple[str, float]:
    comm = weft.Communicator(rank.group, timeout_s=120)
    data = torch.ones(1000)
    comm.all_reduce(data)
    rank.meet()
    if rank.rank == LOST:
        if how == "status":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        comm.all_reduce(data)
    with pytest.raises(weft.PeerLost):  # every later call says so too
        comm.all_reduce(data)
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "words"),
    [("status", "exited with status 7"), ("terminated", "was killed by signal 15")],
)
def test_the_error_says_how_it_died(how: str, words: str) -> None:
    results = run_ranks(3, end_badly, how, lost={LOST}, deadline_s=90, with_gpus=False)
    for rank in (0, 2):
        message, waited_s = results[rank]
        assert message.startswith(f"rank {rank}, collective ")
        assert f"rank {LOST} (pid " in message
        assert words in message
        assert waited_s < SOON_S


def stop_one(rank: Rank, timeout_s: float) -> tuple[str, float]:
    comm = weft.Communicator(rank.group, timeout_s=timeout_s)
    data = torch.ones(1000)
    comm.all_reduce(data)
    pid = kills.pid_of(rank, LOST)
    rank.meet()
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGSTOP)
    kills.until(lambda: kills.state_of(pid) == "T")
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        comm.all_reduce(data)
    return str(raised.value), time.monotonic() - began


def test_a_stopped_rank_keeps_the_deadline() -> None:
    timeout_s = 6.0
    results = run_ranks(3, stop_one, timeout_s, lost={LOST}, deadline_s=90, with_gpus=False)
    for rank in (0, 2):
        message, waited_s = results[rank]
        assert waited_s >= timeout_s
        assert "was killed" not in message
    assert any(
        f"rank {LOST} (pid " in results[rank][0] and "is stopped" in results[rank][0] for rank in (0, 2)
    )


def stand_still(rank: Rank, timeout_s: float) -> str:
    """One rank waits in its call, stands still for three deadlines, and goes on; the others come meanwhile."""
    comm = weft.Communicator(rank.group, timeout_s=timeout_s)
    given, out = torch.ones(3, 1000), torch.zeros(1, 1000)
    way = parse_variant("reducescatter_allpairs Simple").choice(rank.size, False)
    comm.collectives.reduce_scatter(given, algorithm=way, out=out)
    pid = kills.pid_of(rank, LOST)
    rank.meet()
    if rank.rank == LOST:
        naps = f"sleep 0.5; kill -STOP {os.getpid()}; sleep {3 * timeout_s}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", naps])
    else:
        kills.until(lambda: kills.state_of(pid) == "T")
    with pytest.raises(weft.PeerLost) as raised:
        for _ in range(2):  # the others may have what they need for the first
            comm.collectives.reduce_scatter(given, algorithm=way, out=out)
    return str(raised.value)


def test_a_rank_that_stood_still_reads_that_the_others_gave_it_up() -> None:
    """Its first block to look waits for another of its own, which says nothing of the others."""
    messages = run_ranks(3, stand_still, 4.0, deadline_s=90, with_gpus=False)
    assert "given up by rank" in messages[LOST] or "had given up this call" in messages[LOST]


def work_and_return(rank: Rank, seed: int) -> None:
    world = kills.World(rank)
    for _ in range(3):
        world.combine()
        world.low_latency_combine()
        world.all_reduce()
    world.barrier()
    if rank.rank == seed % rank.size:
        time.sleep(0.02)


def test_ranks_that_return_at_different_times_are_not_missed() -> None:
    for seed in range(3):
        run_ranks(3, work_and_return, seed, deadline_s=90, with_gpus=False)


# A rank of its own interpreter, without torch: leaves as `how` says right after its last barrier.
LEAVER = """
import sys, time
import weft
from weft.runtime.bootstrap import TcpAddress
rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = weft.Communicator(TcpAddress("127.0.0.1:" + port, rank, 3), timeout_s=100)
for _ in range(20):
    comm.barrier()
if rank == 0 and how == "forgets":
    del comm
elif rank == 0 and how == "exits":
    sys.exit(0)
elif rank == 0 and how == "at once":
    import os
    os._exit(0)
"""


def run_leavers(how: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVER, str(rank), port, how], stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    for rank, process in enumerate(ranks):
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, f"rank {rank}: {errors}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["returns", "forgets", "exits", "at once"])
def test_the_last_barrier_outlives_those_that_leave(how: str) -> None:
    for _ in range(2):
        run_leavers(how)
