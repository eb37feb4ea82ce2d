# SPDX-License-Identifier: Apache-2.0
"""Experts over nodes when something fails in every mode: a machine or a rank is gone between dispatch and combine, a
cable is out for longer and for shorter than the deadline, a rank is late, a proxy's thread does not run."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_calls import MODES, Calls
from port_nodes import nodes
from test_machines import _printed, _start, _wait_for_marks

import weft
from weft.testing import machines
from weft.testing.machines import Machines
from weft.testing.ranks import Rank, RankPool, run_ranks

LOST_NODE = {2, 3}


def _until_a_node_dies(rank: Rank, mode: str) -> tuple[str, float]:
    calls = Calls(mode, rank.group, rank.rank, rank.size, 100.0)
    calls.dispatch()
    calls.combine()
    calls.dispatch()
    torch.distributed.barrier(group=rank.group)
    if rank.rank in LOST_NODE:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        for _ in range(3):
            calls.combine()
            calls.dispatch()
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("mode", MODES[1:])  # high throughput: test_ports_high_throughput.py
def test_a_node_that_dies_before_the_combine_is_named_before_the_deadline(mode: str) -> None:
    with nodes(2, "fabric:tcp", WEFT_PEER_DEAD_S="3", WEFT_HEARTBEAT_S="0.5"):
        results = run_ranks(4, _until_a_node_dies, mode, lost=LOST_NODE, with_gpus=False)
    for message, waited_s in results[:2]:
        assert any(f"rank {gone}" in message for gone in LOST_NODE), message
        assert waited_s < 60, message


def _each_is_late(rank: Rank) -> None:
    for mode in MODES:
        calls = Calls(mode, rank.group, rank.rank, rank.size, 30.0)
        for late in (0, 3):
            time.sleep(1.2 if rank.rank == late else 0)
            calls.dispatch()
            time.sleep(1.2 if rank.rank == 3 - late else 0)
            calls.combine()
        torch.distributed.barrier(group=rank.group)


def _other_nodes(rank: Rank, mode: str) -> str:
    os.environ["WEFT_RANKS_PER_NODE"] = "1" if rank.rank == 1 else "2"
    weft._core.config_reload()
    with pytest.raises(weft.Error) as raised:
        Calls(mode, rank.group, rank.rank, rank.size, 10.0)
    return str(raised.value)


def test_late_ranks_are_waited_for_and_other_nodes_are_named() -> None:
    with nodes(2, "fabric:tcp"), RankPool(4, with_gpus=False) as pool:
        pool.run(_each_is_late)
        for mode in MODES[1:]:
            for message in pool.run(_other_nodes, mode):
                assert "WEFT_RANKS_PER_NODE" in message, message


# ---- a thread that does not run

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL = 0x40000000  # __WALL: threads, too


def _ptrace(request: int, thread: int) -> bool:
    """Return False for a thread that has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(request, thread, 0, 0) >= 0:
        return True
    if ctypes.get_errno() == errno.ESRCH:
        return False
    pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _stopped(threads: list[int]) -> Iterator[None]:
    """Stop threads of another process meanwhile. One that is still held when its process dies keeps it from ending."""
    held: list[int] = []
    try:
        held += [thread for thread in threads if _ptrace(_SEIZE, thread)]
        assert held
        for thread in held:
            _ptrace(_INTERRUPT, thread)
        yield
    finally:
        for thread in held:
            until = time.monotonic() + 10
            while os.waitpid(thread, os.WNOHANG | _ALL)[0] == 0 and time.monotonic() < until:
                time.sleep(0.01)
            _ptrace(_DETACH, thread)


def _threads_of_proxies(rank: Rank) -> list[int]:
    """Make the buffers; return the threads of this process that this started: the proxies' among them."""
    before = {int(name) for name in os.listdir("/proc/self/task")}
    for mode in MODES:
        rank.kept[mode] = Calls(mode, rank.group, rank.rank, rank.size, 30.0)
        rank.kept[mode].dispatch()  # all that starts at the first call has started
        rank.kept[mode].combine()
    return [int(name) for name in os.listdir("/proc/self/task") if int(name) not in before]


def _rounds(rank: Rank) -> None:
    for mode in MODES:
        for _ in range(3):
            rank.kept[mode].dispatch()
            rank.kept[mode].combine()


def test_calls_go_on_without_the_threads_of_proxies() -> None:
    """Who waits carries out what the stopped threads of rank 1 would have."""
    with nodes(2, "fabric:tcp"), RankPool(4, with_gpus=False) as pool:
        threads = pool.run(_threads_of_proxies)[1]
        time.sleep(0.5)  # they nap, and hold no turn
        with _stopped(threads):
            pool.run(_rounds)
        pool.run(_rounds)


# ---- cables

CABLE = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "system")!r})
import torch, weft
from expert_calls import MODES, Calls
torch.distributed.init_process_group("gloo")
folder, timeout_s = sys.argv[1], float(sys.argv[2])
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
buffers = {{mode: Calls(mode, torch.distributed.group.WORLD, rank, ranks, timeout_s) for mode in MODES}}
for calls in buffers.values():
    calls.dispatch()
    calls.combine()
    calls.dispatch()
torch.distributed.barrier()
open(f"{{folder}}/going{{rank}}", "w").write(".")
while not os.path.exists(f"{{folder}}/pulled"):
    time.sleep(0.02)
for mode, calls in buffers.items():
    began = time.monotonic()
    try:
        for _ in range(3):
            calls.combine()
            calls.dispatch()
        print("right", mode, flush=True)
    except weft.PeerLost as error:
        print("lost", mode, round(time.monotonic() - began), error, flush=True)
print("done", flush=True)
os._exit(0)
"""

needs_machines = pytest.mark.skipif(bool(machines.why_not()), reason=f"no machines: {machines.why_not()}")


def _pull(folder: Path, back_after_s: float, timeout_s: float) -> list[str]:
    program = folder / "program.py"
    program.write_text(CABLE)
    with Machines(2) as made:
        workers = _start(made, 2, program, str(folder), str(timeout_s))
        _wait_for_marks(folder, [1] * 4, workers)
        made.unplug(1)
        (folder / "pulled").touch()
        if back_after_s:
            time.sleep(back_after_s)
            made.plug(1)
        return _printed(workers)


@needs_machines
def test_a_cable_that_is_out_for_a_moment_between_dispatch_and_combine_is_not_noticed(tmp_path: Path) -> None:
    for printed in _pull(tmp_path, 1.0, 60.0):
        assert [line for line in printed.splitlines() if line.startswith("right")] == [
            f"right {mode}" for mode in MODES
        ], printed


@needs_machines
def test_a_machine_that_vanishes_between_dispatch_and_combine_is_named_in_every_mode(tmp_path: Path) -> None:
    printed = _pull(tmp_path, 0, 20.0)
    for rank, text in enumerate(printed):
        lost = [line for line in text.splitlines() if line.startswith("lost")]
        assert len(lost) == len(MODES), printed
        gone = (2, 3) if rank < 2 else (0, 1)
        assert all(any(f"rank {other}" in line for other in gone) for line in lost), text
