# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls of backend "weft" on the CPU: they do not block, keep their order, and end well."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from weft_group import join

from weft.errors import PeerLost
from weft.testing.ranks import Rank, run_ranks


def _threads() -> list[str]:
    ours = ("weft-collectives", "weft-send", "weft-recv")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


def _no_thread_left(within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while _threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not _threads()


def _message_between(rank: Rank) -> None:
    """Rank 0 begins a collective and sends; rank 1 comes to the collective only when it has what was sent."""
    join(rank)
    x, y = torch.full((1000,), float(rank.rank + 1)), torch.full((3,), 7.0)
    if rank.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match=r"rank 0, all_reduce: not finished in the 0.05 s of wait"):
            work.wait(timedelta(seconds=0.05))
        dist.send(y, 1)
        assert work.wait()
        assert work.is_completed()
        assert work.get_future().value()[0] is x
    else:
        y.zero_()
        dist.recv(y, 0)
        assert (y == 7).all()
        dist.all_reduce(x)
    assert (x == 3).all()
    dist.destroy_process_group()
    assert _no_thread_left(), _threads()


def test_a_message_may_go_before_an_asynchronous_collective_ends() -> None:
    run_ranks(2, _message_between, with_group=False)


def _many(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, float(rank.rank)
    works = []
    for turn in range(5):
        t = torch.full((50,), me + turn)
        works.append((dist.all_reduce(t, async_op=True), t, torch.full((50,), n * turn + n * (n - 1) / 2.0)))
        b = torch.full((4, 6), me)[:, ::2]
        works.append((dist.broadcast(b, turn % n, async_op=True), b, torch.full((4, 3), float(turn % n))))
        flat = torch.empty(n * 2)
        work = dist.all_gather_into_tensor(flat, torch.full((2,), me), async_op=True)
        works.append((work, flat, torch.arange(float(n)).repeat_interleave(2)))
    now = torch.ones(3)
    dist.all_reduce(now)  # after all that were begun before
    assert all(work.is_completed() for work, _, _ in works)
    assert (now == n).all()
    for work, got, want in reversed(works):
        work.wait()
        assert torch.equal(got, want)

    parts = [torch.empty(2, dtype=torch.complex64) for _ in range(n)]
    gathered = dist.all_gather(parts, torch.full((2,), me * 1j), async_op=True)
    out = torch.empty(2)
    scattered = dist.scatter(
        out, [torch.full((2,), float(q)) for q in range(n)] if me == 1 else None, 1, async_op=True
    )
    barrier = dist.barrier(async_op=True)
    for work in (barrier, scattered, gathered):
        work.wait()
    assert [part[0].imag for part in parts] == list(range(n))
    assert (out == me).all()

    # Callbacks may call on, and what they call belongs between their call and the next.
    t, second = torch.ones(2), torch.ones(2)

    def then(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        dist.all_reduce(t, async_op=True).get_future().wait()
        dist.all_reduce(t)
        return future.value()[0]

    chained = dist.all_reduce(second, async_op=True).get_future().then(then)
    last = dist.all_reduce(now, async_op=True)
    assert (chained.wait() == n).all()
    last.wait()
    assert (t == n * n).all()

    together = [torch.full((length,), me) for length in (3, 4)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in together:
            dist.all_reduce(tensor)
    manager.wait()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in together:
            dist.broadcast(tensor, 2, async_op=True)
    manager.wait()
    assert all((tensor == n * (n - 1) / 2).all() for tensor in together)

    with torch.inference_mode():
        inferred = torch.full((4, 2), me).t()
        dist.broadcast(inferred, 1, async_op=True).wait()
        assert (inferred == 1).all()
    summed = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert (summed == n).all()
    dist.destroy_process_group()
    assert _no_thread_left(), _threads()


def test_asynchronous_calls_keep_their_order_and_results() -> None:
    run_ranks(3, _many, with_group=False)


def _wrong(rank: Rank) -> list[str]:
    join(rank)
    said = []
    bad = torch.ones(3)
    for call in (
        lambda is_async: dist.all_reduce(bad, dist.ReduceOp.BAND, async_op=is_async),
        lambda is_async: dist.all_reduce(torch.ones(3 + rank.rank), async_op=is_async),
    ):
        for is_async in (False, True):
            try:
                work = call(is_async)
                assert is_async
            except RuntimeError as error:
                said.append(str(error))
                continue
            with pytest.raises(RuntimeError) as caught:
                work.wait()
            said.append(str(caught.value))
            assert work.is_completed()
    dist.destroy_process_group()
    return said


def test_errors_come_from_wait_with_the_words_of_a_synchronous_call() -> None:
    for said in run_ranks(2, _wrong, with_group=False):
        assert "BAND" in said[0] or "op: got" in said[0]
        assert said[1].split(" at ")[0] == said[0].split(" at ")[0]
        assert "called all_reduce of" in said[2]
        # Ranks have diverged: the call after says so, and what it was itself.
        assert "all_reduce of" in said[3] and "not made" in said[3]


def _lost(rank: Rank) -> list[str]:
    """Rank 1 stays away: rank 0 waits for one deadline, however many calls it has begun."""
    join(rank, 3)
    t = torch.ones(4)
    dist.all_reduce(t)
    if rank.rank == 1:
        time.sleep(8)
        return []
    works = [dist.all_reduce(t, async_op=True) for _ in range(4)]
    dist.destroy_process_group()
    said = []
    for work in works:
        with pytest.raises(PeerLost, match="rank 1") as raised:
            work.wait()
        said.append(str(raised.value))
    assert _no_thread_left(), _threads()
    return said


def test_the_end_waits_for_one_deadline_only() -> None:
    """Of four calls under way one waits, and the others end with its error, said once."""
    first, *others = run_ranks(2, _lost, with_group=False)[0]
    assert "not run" not in first
    assert [said.count("not run") for said in others] == [1] * 3


def _ddp(rank: Rank) -> None:
    """A rank that goes away is named where a training step of the others ends."""
    join(rank, 3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    if rank.rank == 1:
        return
    with pytest.raises(RuntimeError, match="rank 1"):
        model(torch.ones(3, 4)).sum().backward()


def test_ddp_says_whom_it_waited_for() -> None:
    run_ranks(2, _ddp, with_group=False)


def _profiled(rank: Rank) -> list[str]:
    join(rank)
    t = torch.ones(4)
    with torch.autograd.profiler.profile() as profile:
        work = dist.all_reduce(t, async_op=True)
        dist.all_reduce(torch.ones(2))
        work.wait()
    dist.destroy_process_group()
    return [
        f"{event.name} {event.input_shapes} {event.is_async}"
        for event in profile.function_events
        if "weft:all" in event.name
    ]


def test_profilers_see_asynchronous_calls() -> None:
    for events in run_ranks(2, _profiled, with_group=False):
        assert len(events) == 2, events
        assert all(event.startswith("weft:all_reduce") and event.endswith("True") for event in events)


def test_a_program_that_ends_with_calls_under_way_ends(tmp_path: Path) -> None:
    """Nobody waits for them, and nobody destroys the group."""
    program = """
        import sys, torch, torch.distributed as dist, weft
        rank = int(sys.argv[1])
        dist.init_process_group("weft", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
        total = torch.ones(1000)
        dist.all_reduce(total, async_op=True).get_future().add_done_callback(lambda _: print(total[0].item()))
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=100)
        assert (rank.returncode, out) == (0, "2.0\n"), err
