# SPDX-License-Identifier: Apache-2.0
"""Ranks of other nodes that die are named at once, on every node; those that leave are not missed."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import pid_of, state_of, until
from programs import PYTHON, environment

import weft
from weft import _core
from weft.testing.ranks import Rank, run_ranks

RANKS, LOST = 4, 1
SOON_S = 30.0  # far below the deadline of 120 s: test machines are busy
CALLS = ("barrier", "all_reduce", "broadcast")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nodes of two ranks unless a test says otherwise; the silence that the engine notices is not what is tested."""
    monkeypatch.setenv("WEFT_PROXY_PROVIDER", "fabric:tcp")
    monkeypatch.setenv("WEFT_RANKS_PER_NODE", "2")
    monkeypatch.setenv("WEFT_PEER_DEAD_S", "60")
    _core.config_reload()
    yield monkeypatch
    monkeypatch.undo()
    _core.config_reload()


def lose_one(rank: Rank, call: str, how: str) -> tuple[str, float]:
    comm = weft.Communicator(rank.group, timeout_s=120)
    data = torch.ones(1000)
    comm.all_reduce(data)
    comm.barrier()
    rank.meet()
    if rank.rank == LOST:
        time.sleep(0.3)  # the others wait for it
        if how == "status":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        while True:
            if call == "barrier":
                comm.barrier()
            elif call == "broadcast":
                comm.broadcast(data, LOST)
            else:
                comm.all_reduce(data)
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("call", "how", "words"),
    [
        *((call, "killed", "was killed by signal 9") for call in CALLS),
        ("all_reduce", "status", "exited with status 7"),
    ],
)
def test_every_node_hears_how_a_rank_died(call: str, how: str, words: str) -> None:
    results = run_ranks(RANKS, lose_one, call, how, lost={LOST}, deadline_s=90, with_gpus=False)
    for rank in set(range(RANKS)) - {LOST}:
        message, waited_s = results[rank]
        assert f"rank {LOST} (pid " in message and words in message, (rank, message)
        assert waited_s < SOON_S


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_alone_on_its_node_has_closed_its_connection(
    call: str, settings: pytest.MonkeyPatch
) -> None:
    settings.setenv("WEFT_RANKS_PER_NODE", "1")
    _core.config_reload()
    results = run_ranks(3, lose_one, call, "killed", lost={LOST}, deadline_s=90, with_gpus=False)
    for rank in (0, 2):
        message, waited_s = results[rank]
        # Here all nodes are one host, so that engines see how the process ended; of real nodes, they do not.
        known = "closed its connection" in message or "was killed by signal 9" in message
        assert f"rank {LOST} (pid " in message and known, message
        assert waited_s < SOON_S


def lose_rank_0(rank: Rank) -> str:
    comm = weft.Communicator(rank.group, timeout_s=120)
    comm.barrier()
    rank.meet()
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(weft.PeerLost) as raised:
        while True:
            comm.barrier()
    return str(raised.value)


def test_rank_0_is_missed_too() -> None:
    results = run_ranks(RANKS, lose_rank_0, lost={0}, deadline_s=90, with_gpus=False)
    for rank in (1, 2, 3):
        assert "rank 0 (pid " in results[rank], results[rank]
    assert "was killed by signal 9" in results[1]
    assert "closed its connection" in results[2] or "was killed by signal 9" in results[2]


def leave_apart(rank: Rank, first: int) -> None:
    for _ in range(2):
        comm = weft.Communicator(rank.group, timeout_s=120)
        comm.all_reduce(torch.ones(100))
        comm.barrier()
        if rank.rank != first:
            time.sleep(0.3)
        del comm


@pytest.mark.parametrize("first", range(0, RANKS, 2))
def test_ranks_that_leave_one_after_the_other_are_not_missed(first: int) -> None:
    run_ranks(RANKS, leave_apart, first, deadline_s=90, with_gpus=False)


def stop_one(rank: Rank) -> float:
    comm = weft.Communicator(rank.group, timeout_s=6)
    comm.barrier()
    pid = pid_of(rank, LOST)
    rank.meet()
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        comm.barrier()
    assert f"rank {LOST}" in str(raised.value) and "killed" not in str(raised.value)
    return time.monotonic() - began


def test_a_stopped_rank_of_another_node_keeps_the_deadline() -> None:
    results = run_ranks(RANKS, stop_one, lost={LOST}, deadline_s=90, with_gpus=False)
    assert all(results[rank] >= 5.9 for rank in (2, 3))


def wait_in_vain(rank: Rank, pid: int) -> str:
    comm = weft.Communicator(rank.group, timeout_s=5)
    comm.barrier()
    rank.meet()
    if rank.rank == 0:
        threading.Timer(0.3, os.kill, (pid, signal.SIGSTOP)).start()
    else:
        until(lambda: state_of(pid) == "T")
    with pytest.raises(weft.PeerLost) as raised:
        comm.barrier()
    return str(raised.value)


def stop_the_one_that_serves(rank: Rank) -> str:
    """Rank 0 is stopped while it waits, until the others have given it up; its process serves the rendezvous."""
    pid = pid_of(rank, 0)
    message = wait_in_vain(rank, pid)
    gc.collect()  # leaves the rendezvous
    (rank.folder / f"left-{rank.rank}").touch()
    if rank.rank == 1:
        until(lambda: len(list(rank.folder.glob("left-*"))) == RANKS - 1)
        os.kill(pid, signal.SIGCONT)
    return message


def test_one_that_was_stopped_hears_the_rendezvous_that_it_serves() -> None:
    messages = run_ranks(RANKS, stop_the_one_that_serves, deadline_s=90, with_gpus=False)
    assert "does not answer" not in messages[0] and "rank 1" in messages[0], messages[0]
    for rank in (1, 2, 3):
        assert "rank 0" in messages[rank], messages[rank]


def work(rank: Rank) -> None:
    comm = weft.Communicator(rank.group, timeout_s=60)
    data = torch.ones(1000)
    comm.barrier()
    assert torch.equal(comm.all_reduce(data), torch.full((1000,), float(rank.size)))
    comm.barrier()


def test_ranks_that_cannot_hear_of_each_other_work_all_the_same(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("WEFT_INTERFACE", "no-such-interface")
    _core.config_reload()
    run_ranks(RANKS, work, deadline_s=90, with_gpus=False)


# ---- a link that is unplugged: one rank in a network namespace of its own

RANK = """
import json, sys, time
import torch, weft
from weft.runtime.bootstrap import TcpAddress
rank, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = weft.Communicator(TcpAddress(address, rank, 2), timeout_s=100)
data = torch.ones(1000)
comm.all_reduce(data)
open(f"{folder}/ready-{rank}", "w").close()
began = time.monotonic()
try:
    while True:
        comm.barrier()
        time.sleep(0.01)
except weft.PeerLost as error:
    print(json.dumps({"message": str(error), "waited_s": time.monotonic() - began}), flush=True)
import os
os._exit(0)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, 10.97.0.1 and 10.97.0.2 at its ends."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2")
    names = [f"weft-test-{os.getpid()}-{end}" for end in "ab"]
    links = [f"wft{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for end, (name, link) in enumerate(zip(names, links, strict=True)):
            run("ip", "link", "set", link, "netns", name)
            run("ip", "-n", name, "addr", "add", f"10.97.0.{end + 1}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield [*names, *links]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_an_unplugged_link_is_noticed_on_both_sides(spaces: list[str], tmp_path: Path) -> None:
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        env = {
            **environment(),
            "WEFT_RANKS_PER_NODE": "1",
            "WEFT_PEER_DEAD_S": "2",
            "WEFT_HEARTBEAT_S": "0.5",
            "WEFT_INTERFACE": spaces[2 + rank],
            "WEFT_PROXY_NICS": f"{spaces[2 + rank]}@10.97.0.{rank + 1}",
            "WEFT_JOB_SECRET": "a secret of this test",
        }
        command = [
            "ip",
            "netns",
            "exec",
            spaces[rank],
            *PYTHON,
            "-c",
            RANK,
            str(rank),
            "10.97.0.1:29611",
        ]
        ranks.append(
            subprocess.Popen(
                [*command, str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        until = time.monotonic() + 200
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until, "ranks have not begun"
            assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
            time.sleep(0.05)
        run("ip", "-n", spaces[1], "link", "set", spaces[3], "down")
        reports: list[Any] = []
        for rank in ranks:
            said, errors = rank.communicate(timeout=60)
            assert said, errors
            reports.append(json.loads(said.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, story in enumerate(reports):
        assert f"rank {1 - rank}" in story["message"], story
        assert story["waited_s"] < SOON_S
    assert any("has not been heard of for 2 s" in story["message"] for story in reports), reports


# ---- the farewell of a dead peer: ranks in process namespaces of their own, as on machines of their own

LEAVER = """
import os, sys, time
import torch, weft
from weft.runtime.bootstrap import TcpAddress
rank, address = int(sys.argv[1]), sys.argv[2]
comm = weft.Communicator(TcpAddress(address, rank, 3), timeout_s=100)
data = torch.ones(1000)
try:
    comm.all_reduce(data)
    if rank == 1:
        os._exit(7)
    while True:
        comm.all_reduce(data)
except weft.PeerLost as error:
    assert "rank 1 (pid " in str(error), error
    del error
began = time.monotonic()
del comm
print(time.monotonic() - began, flush=True)
os._exit(0)
"""
FAREWELL_S = 5.0  # how long a rank waits for the farewell of one that lives


def seconds_to_leave() -> float:
    """Return how long the slower of two survivors takes to let go of its communicator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [*APART, sys.executable, "-c", LEAVER, str(rank), address],
            env={**os.environ, "WEFT_RANKS_PER_NODE": "1", "WEFT_JOB_SECRET": "a secret of this test"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        reports = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert reports[0][0] and reports[2][0], reports
    return max(float(reports[0][0]), float(reports[2][0]))


APART = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.mark.timeout(180)
def test_nobody_waits_for_the_farewell_of_the_dead() -> None:
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("process namespaces are not allowed here")
    # A busy machine may be slow now and then; who waits for the farewell is so every time.
    assert any(seconds_to_leave() < FAREWELL_S for _ in range(3))
