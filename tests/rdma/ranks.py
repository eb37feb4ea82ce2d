# SPDX-License-Identifier: Apache-2.0
"""Ranks of one guest, forked from one process that has imported torch, which takes a guest a minute.

    ranks.main: WHAT FIRST RANKS WORLD PROVIDER LIBFABRIC   # ranks FIRST to FIRST + RANKS - 1 of WORLD; guest 1 has 0

calls: each rank runs every collective, and a dispatch with its combine in each mode, over the proxy transport, and
checks the results. It prints "right RANK WHAT" for each. killed: rank VICTIM kills itself, and the others say whom
they miss.
Ends with 0 if all was right. Ranks of both guests get the same process numbers.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from expert_calls import MODES, Calls
from warm import SECRET, configure

import weft

TIMEOUT_S = 240.0
VICTIM = 3
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
FIRST_PID = 20_000
SETTINGS = {
    "MASTER_ADDR": "10.9.0.1",
    "MASTER_PORT": "29600",
    "GLOO_SOCKET_IFNAME": "net0",
    "WEFT_INTERFACE": "net0",
    "WEFT_PROXY_NICS": "rxe0",  # the guests' two cables are not joined
    "WEFT_PEER_DEAD_S": "120",
    "WEFT_JOB_SECRET": SECRET,
}


def say(*words: object) -> None:
    """Print a line at once, whole: ranks share the file."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def collectives(comm: weft.Communicator) -> None:
    """Check each collective with some sizes."""
    rank, ranks = comm.rank, comm.size
    for elems in (1, 4099, 100_000):
        every = torch.stack([(torch.arange(elems * ranks) % 13 + r).float() for r in range(ranks)])
        own, parts = every[rank].clone(), every.view(ranks, ranks, elems)
        assert torch.equal(comm.all_reduce(own.clone()), every.sum(0))
        assert torch.equal(comm.all_gather(own), every)
        assert torch.equal(comm.reduce_scatter(own.view(ranks, elems)).flatten(), parts.sum(0)[rank])
        assert torch.equal(comm.all_to_all(own.view(ranks, elems)), parts[:, rank])
        assert torch.equal(comm.broadcast(own.clone(), 1), every[1])
        say("right", rank, "collectives of", elems, "floats")
    own = torch.full(
        (1_000_000,), rank + 1.0
    )  # some megabytes under way at once: packets wait longer than a NIC does
    assert torch.equal(comm.all_reduce(own), torch.full_like(own, ranks * (ranks + 1) / 2))
    say("right", rank, "all_reduce of 1000000 floats")
    comm.barrier()


def calls(rank: int, ranks: int) -> None:
    """Check what two machines conclude of each other, collectives, and a dispatch and combine in each mode."""
    comm = weft.Communicator(timeout_s=TIMEOUT_S)
    assert comm.nodes == [0, 0, 1, 1], comm.nodes
    ways = [comm.transport_to(peer) for peer in range(ranks) if peer != rank]
    assert sorted(map(str, ways)) == ["mapped", "proxy", "proxy"], ways
    say("right", rank, "nodes", os.getpid())
    collectives(comm)
    for mode in MODES:
        made = Calls(mode, dist.group.WORLD, rank, ranks, TIMEOUT_S)
        for _ in range(2):
            made.dispatch()
            made.combine()
        say("right", rank, mode)


def killed(rank: int, ranks: int) -> None:
    """Lose a rank of the other machine, or of this one, whose process number a rank of the other one has, too."""
    comm = weft.Communicator(timeout_s=TIMEOUT_S)
    own = torch.ones(4099)
    try:
        for i in range(1000):
            comm.all_reduce(own.clone())
            if (rank, i) == (VICTIM, 5):
                os.kill(os.getpid(), signal.SIGKILL)
    except weft.PeerLost as error:
        say("lost", rank, error)


def main() -> int:
    """Fork the ranks, and wait for them."""
    what: Callable[[int, int], None] = {"calls": calls, "killed": killed}[sys.argv[1]]
    first, count, world = (int(word) for word in sys.argv[2:5])
    provider, library = sys.argv[5:]
    configure(SETTINGS | {"WEFT_PROXY_PROVIDER": provider, "WEFT_LIBFABRIC": library})
    torch.set_num_threads(1)
    children = {}
    for i, rank in enumerate(range(first, first + count)):
        LAST_PID.write_text(str(FIRST_PID + 1000 * i))
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
                dist.init_process_group("gloo", rank=rank, world_size=world)
                what(rank, world)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children[child] = rank
    ended = {rank: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, rank in children.items()}
    if what is killed:
        ended.pop(VICTIM, None)
    return max(status & 255 for status in ended.values())


if __name__ == "__main__":
    sys.exit(main())
