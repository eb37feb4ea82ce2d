# SPDX-License-Identifier: Apache-2.0
"""Ranks of several machines: network namespaces with cables between, started as on real ones by torchrun."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from programs import PYTHON, environment, run_program

from weft.testing import machines
from weft.testing.machines import Machines

pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=f"no machines: {machines.why_not()}")

QUIET = {
    "WEFT_PEER_DEAD_S": "3",
    "WEFT_HEARTBEAT_S": "0.5",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
}

# One write for each line: ranks that share an output do not cut each other's lines.
EVERY_CALL = r"""
import torch, weft
comm = weft.Communicator()
n, me = comm.size, comm.rank
print(f"rank {me} nodes {comm.nodes}\n", end="", flush=True)
for elems in (1, 4099, 300_001):
    every = torch.stack([(torch.arange(elems * n) % 13 + r).float() for r in range(n)])
    own = every[me].clone()
    assert torch.equal(comm.all_reduce(own.clone()), every.sum(0))
    assert torch.equal(comm.all_gather(own), every)
    parts = every.view(n, n, elems)
    assert torch.equal(comm.reduce_scatter(own.view(n, elems)).flatten(), parts.sum(0)[me])
    assert torch.equal(comm.all_to_all(own.view(n, elems)), parts[:, me])
    assert torch.equal(comm.broadcast(own.clone(), 1), every[1])
comm.barrier()
print(f"right {me}\n", end="", flush=True)
"""

FOREVER = """
import os, sys, time, torch, weft
comm = weft.Communicator(timeout_s=60)
data = torch.ones(100_000)
began = time.monotonic()
try:
    for turn in range(10**9):
        total = comm.all_reduce(data.clone())
        assert total[0] == comm.size, total[0]
        if turn and turn % 20 == 0:
            open(f"{sys.argv[1]}/going{comm.rank}", "a").write(".")
        if os.path.exists(f"{sys.argv[1]}/stop") and comm.all_reduce(torch.ones(1) * comm.rank)[0] >= 0:
            break
except weft.PeerLost as error:
    print("lost:", error, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "program.py"


def _start(made: Machines, ranks: int, program: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start the ranks of every machine by the variables of a launcher, in the order of ranks."""
    size = made.count * ranks
    meet = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29600", "WORLD_SIZE": str(size)}
    return [
        made.start(
            rank // ranks,
            [*PYTHON, str(program), *arguments],
            env=environment() | QUIET | meet | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]


def _printed(workers: list[subprocess.Popen[str]], timeout_s: float = 200) -> list[str]:
    until = time.monotonic() + timeout_s
    return [worker.communicate(timeout=max(until - time.monotonic(), 1))[0] for worker in workers]


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (4, 1)])
def test_every_call_is_right_over_machines(count: int, ranks: int, program: Path) -> None:
    program.write_text(EVERY_CALL)
    with Machines(count) as made:
        printed = _printed(_start(made, ranks, program))
    nodes = [rank // ranks for rank in range(count * ranks)]
    for rank in range(count * ranks):
        assert f"rank {rank} nodes {nodes}" in printed[rank], printed
        assert f"right {rank}" in printed[rank], printed


def test_the_log_says_which_network_was_taken_and_why(program: Path) -> None:
    program.write_text("import weft; weft.Communicator()")
    with Machines(2) as made:
        meet = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29600", "WORLD_SIZE": "2"}
        workers = [
            made.start(
                rank,
                [*PYTHON, str(program)],
                env=environment() | QUIET | meet | {"RANK": str(rank), "WEFT_LOG": "info"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        printed = _printed(workers)
    only = "the only one that is up and leads to other machines"
    assert f"a rendezvous of ranks on eth0 (10.77.0.1): {only}" in printed[0], printed
    assert "a rendezvous of ranks" not in printed[1]
    for at, text in enumerate(printed):
        assert "0 ranks mapped, 1 through proxy: fabric:tcp (the first that is usable) on " in text, text
        assert f"eth0@10.77.0.{at + 1} (the first that is usable" in text, text


def _marks(folder: Path, ranks: int) -> list[int]:
    """The marks that each rank's program has written: FOREVER writes one for 20 calls."""
    files = [folder / f"going{rank}" for rank in range(ranks)]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def _wait_for_marks(
    folder: Path, least: Sequence[int], workers: Sequence[subprocess.Popen[str]] = ()
) -> None:
    """Wait until every rank has written its least number of marks, while none of the workers ends."""
    until = time.monotonic() + 200
    while any(has < wanted for has, wanted in zip(_marks(folder, len(least)), least, strict=True)):
        if any(worker.poll() is not None for worker in workers):
            raise AssertionError(_printed(list(workers)))
        assert time.monotonic() < until, (_marks(folder, len(least)), least)
        time.sleep(0.05)


def test_a_cable_that_is_pulled_for_good_names_the_ranks_behind_it(program: Path, tmp_path: Path) -> None:
    program.write_text(FOREVER)
    with Machines(2) as made:
        workers = _start(made, 1, program, str(tmp_path))
        _wait_for_marks(tmp_path, [1, 1], workers)
        made.unplug(1)
        began = time.monotonic()
        printed = _printed(workers)
        assert time.monotonic() - began < 40
    for rank in range(2):
        assert "lost: " in printed[rank] and f"rank {1 - rank}" in printed[rank], printed


def test_a_cable_that_is_back_in_time_is_not_noticed(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TCP asks again after twice as long each time, so it may ask during the second gap, and then only 3 s later.
    monkeypatch.setitem(QUIET, "WEFT_PEER_DEAD_S", "8")
    program.write_text(FOREVER)
    with Machines(2) as made:
        workers = _start(made, 1, program, str(tmp_path))
        _wait_for_marks(tmp_path, [1, 1], workers)
        for _ in range(2):
            made.unplug(1)
            time.sleep(1)
            made.plug(1)
            time.sleep(1)
        _wait_for_marks(tmp_path, [marks + 2 for marks in _marks(tmp_path, 2)], workers)
        for worker in workers:
            worker.kill()


NO_WAY = """
import time, weft
began = time.monotonic()
try:
    weft.Communicator(weft.runtime.bootstrap.TcpAddress("10.99.0.1:29600", 1, 2), timeout_s=60)
except weft.PeerLost as error:
    print(round(time.monotonic() - began), error, flush=True)
"""


def test_an_address_without_a_way_to_it_is_told_in_the_first_seconds(program: Path) -> None:
    program.write_text(NO_WAY)
    with Machines(1) as made:
        (printed,) = _printed(_start(made, 1, program))
    seconds, _, message = printed.partition(" ")
    assert int(seconds) <= 10, printed
    assert "for rank 0 at 10.99.0.1:29600" in message and "unreachable" in message, printed


def test_the_command_runs_torchrun_everywhere(tmp_path: Path, program: Path) -> None:
    program.write_text(EVERY_CALL)
    command = [
        *PYTHON,
        "-m",
        "weft.testing.machines",
        "--machines",
        "2",
        "--ranks",
        "1",
        "--",
        str(program),
    ]
    ran = run_program(command, tmp_path, more=QUIET)
    assert ran.returncode == 0, ran.stderr
    assert "2 machines, 10.77.0.1 to 10.77.0.2" in ran.stdout and "right 1" in ran.stdout
