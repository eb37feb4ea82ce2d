# SPDX-License-Identifier: Apache-2.0
"""Ranks of one guest, forked from one process that has imported torch, which takes a guest a minute or more.

    python ranks.py FIRST RANKS WORLD       # ranks FIRST to FIRST + RANKS - 1 of WORLD; guest 1 has rank 0

Each rank runs every collective, and a dispatch with its combine in each mode, over the proxy transport, and checks the
results. Prints "right RANK WHAT" for each, and ends with 0 if all were right.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist
from expert_calls import MODES, Calls

import weft

TIMEOUT_S = 240.0


def collectives(rank: int, ranks: int) -> None:
    """Check each collective with some sizes."""
    comm = weft.Communicator(timeout_s=TIMEOUT_S)
    for elems in (1, 4099, 100_000):
        every = torch.stack([(torch.arange(elems * ranks) % 13 + r).float() for r in range(ranks)])
        own, parts = every[rank].clone(), every.view(ranks, ranks, elems)
        assert torch.equal(comm.all_reduce(own.clone()), every.sum(0))
        assert torch.equal(comm.all_gather(own), every)
        assert torch.equal(comm.reduce_scatter(own.view(ranks, elems)).flatten(), parts.sum(0)[rank])
        assert torch.equal(comm.all_to_all(own.view(ranks, elems)), parts[:, rank])
        assert torch.equal(comm.broadcast(own.clone(), 1), every[1])
        print(f"right {rank} collectives of {elems} floats\n", end="", flush=True)
    comm.barrier()


def experts(rank: int, ranks: int) -> None:
    """Check a dispatch and its combine in each mode, twice."""
    for mode in MODES:
        calls = Calls(mode, dist.group.WORLD, rank, ranks, TIMEOUT_S)
        for _ in range(2):
            calls.dispatch()
            calls.combine()
        print(f"right {rank} {mode}\n", end="", flush=True)


def main() -> int:
    """Fork the ranks, and wait for them."""
    first, count, world = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    children = []
    for rank in range(first, first + count):
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
                dist.init_process_group("gloo", rank=rank, world_size=world)
                collectives(rank, world)
                experts(rank, world)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255 for child in children)


if __name__ == "__main__":
    sys.exit(main())
