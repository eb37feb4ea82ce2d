# SPDX-License-Identifier: Apache-2.0
"""Large calls over ports, whose buffers are registered at the network for the time of the call."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import torch
from port_nodes import _settings, use_ports  # noqa: F401
from test_collectives_mismatch import _attempt

import weft
from weft import Communicator
from weft.collectives.calls import Collectives
from weft.testing.ranks import Rank, run_ranks

RANKS, LOST = 4, 3
STOPPED = 1
DEADLINE_S, STOP_S = 2.0, 6.0  # the stop outlasts the deadline and the second for what was queued


def _large_calls(rank: Rank) -> None:
    """Calls whose buffers are registered for their time; sources change as soon as a call is over."""
    comm = Communicator(rank.group, timeout_s=60)
    # of four ranks: whole units of 16 bytes in every part, and parts that end within a unit
    for dtype, elems in ((torch.float32, 1 << 16), (torch.float32, 70_001), (torch.uint8, 300_007)):
        every = torch.stack(
            [((torch.arange(elems * rank.size) + r) % 29).to(dtype) for r in range(rank.size)]
        )
        parts = every.view(rank.size, rank.size, elems)  # [from, to]
        own, part = torch.empty_like(every[0]), torch.empty_like(parts[0, 0])
        out, sums = torch.empty_like(own), every.sum(0).to(dtype)
        for turn in range(2):
            own.copy_(every[rank.rank])
            comm.all_to_all(own.view(rank.size, elems), out=out.fill_(99))
            own.fill_(77)
            assert torch.equal(out.view(rank.size, elems), parts[:, rank.rank]), (dtype, elems, turn)
            part.copy_(parts[rank.rank, 0])
            comm.all_gather(part, out=out.fill_(99).view(rank.size, elems))
            part.fill_(77)
            assert torch.equal(out.view(rank.size, elems), parts[:, 0]), (dtype, elems, turn)
            own.copy_(every[rank.rank])
            comm.reduce_scatter(own.view(rank.size, elems), out=part.fill_(99))
            own.fill_(77)
            assert torch.equal(part, sums.view(rank.size, elems)[rank.rank]), (dtype, elems, turn)
            own.copy_(every[rank.rank])
            comm.all_reduce(own, out=out.fill_(99))
            assert torch.equal(out, sums), (dtype, elems, turn)
            comm.all_reduce(own)
            assert torch.equal(own, sums), (dtype, elems, turn)


@pytest.mark.parametrize(
    ("ranks_per_node", "provider"), [(2, "fabric:tcp"), (1, "fabric:tcp"), (2, "fabric:shm")]
)
def test_large_calls_are_right_over_ports(
    ranks_per_node: int, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ports(monkeypatch, ranks_per_node, provider)
    run_ranks(RANKS, _large_calls)


def _large_until_one_dies(rank: Rank) -> str:
    comm = Communicator(rank.group, timeout_s=100)
    data = torch.ones(4 << 20)
    comm.all_to_all(data, out=torch.empty_like(data))
    rank.meet()
    if rank.rank == LOST:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(weft.PeerLost) as raised:
        while True:
            comm.all_to_all(data, out=torch.empty_like(data))
    del data  # nothing reads or writes what was registered
    return str(raised.value)


def test_a_rank_killed_in_a_large_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PEER_DEAD_S", "3")
    monkeypatch.setenv("WEFT_HEARTBEAT_S", "0.5")
    use_ports(monkeypatch, 2, "fabric:tcp")
    results = run_ranks(RANKS, _large_until_one_dies, lost={LOST})
    for rank in range(LOST):
        assert f"rank {LOST}" in results[rank], results[rank]


def _stopped_in_mid_call(rank: Rank, after_s: float) -> str:
    """One rank stands still in mid-call, and goes on when the other has given up and uses its memory again."""
    calls = Collectives(Communicator(rank.group, timeout_s=30).core, DEADLINE_S)
    given, out = (torch.full((8_000_001,), 1, dtype=torch.uint8)[1:] for _ in range(2))
    calls.all_to_all(given, out=out)
    torch.distributed.barrier(group=rank.group)
    began = time.monotonic()
    if rank.rank == STOPPED:
        naps = f"sleep {after_s}; kill -STOP {os.getpid()}; sleep {STOP_S}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", naps])
    with pytest.raises(weft.Error) as raised:
        while True:
            calls.all_to_all(given, out=out)
    if rank.rank == STOPPED:
        assert bool((out == 1).all())  # what came is what was sent, and not what its owner has there now
        return str(raised.value)
    assert time.monotonic() - began < STOP_S, "the stop ended before the call did: nothing was tested"
    given.fill_(55)
    out.fill_(77)
    time.sleep(STOP_S + after_s + 1 - (time.monotonic() - began))
    assert bool((out == 77).all()), "a peer wrote to memory that the failed call had given back"
    return str(raised.value)


@pytest.mark.parametrize("after_s", [0.2, 0.25, 0.3])
def test_memory_of_a_failed_call_is_its_users_again(after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ports(monkeypatch, 1, "fabric:tcp")
    messages = run_ranks(2, _stopped_in_mid_call, after_s, with_gpus=False, deadline_s=90)
    assert f"rank {STOPPED}" in messages[1 - STOPPED], messages


# What an odd rank calls, and what the others do: large enough to be registered, or not.
DIFFERENT: dict[str, tuple[Callable[[Collectives, bool], object], str, str]] = {
    "both registered": (
        lambda c, odd: c.all_to_all(torch.ones(c.size, 1 << (18 if odd else 19))),
        "all_to_all of 262144 float32",
        "all_to_all of 524288 float32",
    ),
    "one registered": (
        lambda c, odd: c.all_to_all(torch.ones(c.size, 1 << (12 if odd else 15))),
        "all_to_all of 4096 float32",
        "all_to_all of 32768 float32",
    ),
    "collective": (
        lambda c, odd: (
            c.all_gather(torch.ones(1 << 19)) if odd else c.reduce_scatter(torch.ones(c.size, 1 << 19))
        ),
        "all_gather of 524288 float32",
        "reduce_scatter of 524288 float32 sum",
    ),
}


def _different(rank: Rank, name: str) -> list[str]:
    """Make calls that differ, and then the same; return the errors of both. The communicator stays of use."""
    comm = Communicator(rank.group, timeout_s=60)
    calls = Collectives(comm.core, 20)
    calls.all_reduce(torch.ones(3))
    comm.barrier()
    errors = [_attempt(lambda: DIFFERENT[name][0](calls, bool(rank.rank % 2)))[0]]
    errors.append(_attempt(lambda: calls.all_reduce(torch.ones(4)))[0])
    fresh = Collectives(comm.core, 30)
    ones = torch.ones(rank.size, 1 << 17)
    for _ in range(3):
        assert torch.equal(fresh.all_to_all(ones), ones)
    return errors


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("name", DIFFERENT)
def test_large_calls_that_differ_are_errors_that_name_them(
    name: str, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ports(monkeypatch, ranks_per_node, "fabric:tcp")
    answers = run_ranks(2 * ranks_per_node, _different, name, with_gpus=False)
    _, odd, even = DIFFERENT[name]
    assert all(any(errors) for errors in answers), answers
    # Ranks of one node read what the others called; those of different nodes see that it was another call.
    firsts = [errors[0] or errors[1] for errors in answers]
    story = f"called {odd}", f"called {even}"
    assert any("is of another call" in first or all(part in first for part in story) for first in firsts), (
        answers
    )
    assert not any("waited" in first for first in firsts), answers
