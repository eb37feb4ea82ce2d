# SPDX-License-Identifier: Apache-2.0
"""Messages that bypass their slots: read from a peer's window or process, or stored at their destination."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable

import pytest
import torch
from collective_memory import Empty, in_window, mixed, ordinary
from random_programs import random_algorithm, run_against_contract

from weft import _core
from weft.collectives.calls import Collectives
from weft.collectives.direct import direct_messages
from weft.collectives.executor import Call, Executor
from weft.collectives.library import build, entries
from weft.collectives.rows import ELEMENTS
from weft.errors import Error
from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank, run_ranks


def _check(rank: Rank, memory: Callable[[Rank, Communicator], Empty], reads: int) -> None:
    os.environ["WEFT_PROCESS_READS"] = str(reads)
    _core.config_reload()
    comm = Communicator(rank.group, timeout_s=30)
    empty = functools.partial(memory(rank, comm), dtype=torch.float32)
    executor = Executor(comm.core, direct_bytes=16)
    for seed in range(40):
        run_against_contract(
            executor, random_algorithm(seed, rank.size), rank.rank, (1, 5, 300)[seed % 3], empty
        )
    for name, entry in entries().items():
        if entry.applies(rank.size):
            algorithm = build(name, rank.size).compile()
            for elems in (3, 40_001):
                run_against_contract(executor, algorithm, rank.rank, elems, empty)


@pytest.mark.parametrize("reads", [1, 0])
@pytest.mark.parametrize("memory", [ordinary, in_window, mixed])
def test_programs_are_exact_wherever_their_buffers_are(
    memory: Callable[[Rank, Communicator], Empty], reads: int
) -> None:
    run_ranks(4, _check, memory, reads, deadline_s=200)


def _overwritten_at_once(rank: Rank) -> None:
    """What a call read may change as soon as the call has returned, and results may be used at once."""
    comm = Collectives(Communicator(rank.group, timeout_s=30).core)
    for turn in range(60):
        own = torch.full((rank.size * 30_000,), float(turn * 10 + rank.rank))
        gathered = comm.all_gather(own)
        own.fill_(-1.0)
        wanted = [float(turn * 10 + r) for r in range(rank.size)]
        assert gathered[:, 0].tolist() == wanted and gathered[:, -1].tolist() == wanted
        gathered.fill_(-2.0)
        own.fill_(float(turn + rank.rank))
        comm.all_reduce(own)
        assert own.unique().tolist() == [float(rank.size * turn + sum(range(rank.size)))]


def test_buffers_belong_to_the_caller_again_when_a_call_returns() -> None:
    run_ranks(4, _overwritten_at_once)


def test_who_may_bypass_a_slot() -> None:
    ring = direct_messages(build("allgather_ring", 4).compile())
    assert len(ring.sends) == 12 and all(s.may_refer and s.may_store for s in ring.sends.values())
    # The sum arrives where the input lies that was sent: nobody may read the input later, all may be stored for.
    one_step = direct_messages(build("allreduce_1step", 4, inplace=True).compile())
    assert one_step.sends and not any(send.may_refer for send in one_step.sends.values())
    # What is added to the receiver's own chunk has no destination of its own.
    reduced = direct_messages(build("reducescatter_allpairs", 4).compile())
    assert all(send.may_refer and not send.may_store for send in reduced.sends.values())


def _peer_dies(rank: Rank) -> str:
    comm = Collectives(Communicator(rank.group, timeout_s=60).core, timeout_s=6.0)
    big = torch.ones(1 << 20)
    comm.all_reduce(big)
    rank.meet()
    if rank.rank == 2:
        os._exit(3)
    with pytest.raises(Error) as caught:
        for _ in range(3):
            comm.all_reduce(big)
    return str(caught.value)


def test_a_rank_that_dies_is_named() -> None:
    stories = run_ranks(3, _peer_dies, lost=[2])
    assert any("rank 2" in story for story in stories if story), stories


def _loses_its_rights(rank: Rank) -> tuple[str, str]:
    comm = Collectives(Communicator(rank.group, timeout_s=30).core, timeout_s=6.0)
    algorithm, mine = build("alltoall_allpairs", rank.size).compile(), torch.ones(rank.size, 1 << 18)
    comm.all_to_all(mine, algorithm=algorithm)
    if rank.rank == 1:
        os.setresuid(65534, 65534, 65534)
    with pytest.raises(Error) as caught:
        comm.all_to_all(mine, algorithm=algorithm)
    return caught.value.code, str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root's rights to lose")
def test_a_rank_that_may_not_read_others_any_more_says_so() -> None:
    (others_code, others), (code, mine) = run_ranks(2, _loses_its_rights, with_gpus=False)
    assert code == "system" and "Operation not permitted" in mine and "is running" in mine, mine
    assert others_code == "peer_lost" and "rank 1" in others, others


def _passes_a_window_that_a_peer_destroyed(rank: Rank) -> tuple[str, str]:
    comm = Communicator(rank.group, timeout_s=30)
    collectives = Collectives(comm.core, timeout_s=6.0)
    window: Window | None = Window(comm, 1 << 20)
    own = window.tensor(rank.rank, (1 << 16,), torch.float32) if window else torch.empty(0)
    own.fill_(rank.rank)
    assert collectives.all_gather(own)[:, 0].tolist() == [0.0, 1.0, 2.0]
    if rank.rank == 1:
        own, window = torch.ones(1 << 16), None
        gc.collect()
    try:
        collectives.all_gather(own)
    except Error as error:
        return error.code, str(error)
    return "", ""


def test_a_window_that_some_rank_has_destroyed_is_named() -> None:
    reports = run_ranks(3, _passes_a_window_that_a_peer_destroyed)
    assert (
        reports[1][0] == "closed" and "memory of window" in reports[1][1] and "destroyed" in reports[1][1]
    ), reports
    # Either of the others may see first that its fellow, which saw rank 1's end, takes back what it offered.
    for code, text in (reports[0], reports[2]):
        assert code == "peer_lost" and ("rank 1" in text or "had given up this call" in text), reports


def _stores_only_where_it_still_can(rank: Rank) -> list[float]:
    """Return what a rank receives in a window that the sender has destroyed: through the slots then."""
    comm = Communicator(rank.group, timeout_s=30)
    executor = Executor(comm.core, direct_bytes=16)
    algorithm = build("allreduce_1step", rank.size, inplace=True).compile()
    loaded = executor.load(algorithm)
    window: Window | None = Window(comm, 1 << 20)
    data = window.tensor(rank.rank, (1 << 16,), torch.float32) if window else torch.empty(0)
    if rank.rank == 0:
        data, window = torch.empty(1 << 16), None
        gc.collect()
    for _ in range(2):
        data.fill_(rank.rank + 1)
        executor.run(loaded, Call(data.data_ptr(), data.data_ptr(), data.numel(), ELEMENTS["float32"]))
    return [data.min().item(), data.max().item()]


def test_a_sender_without_the_window_takes_the_slot() -> None:
    assert run_ranks(2, _stores_only_where_it_still_can) == [[3.0, 3.0]] * 2
