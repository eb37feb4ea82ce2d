# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different calls: every one gets an error that says who called what, nobody a wrong number.

Deadlines are short where a case has to wait for one. What a rank says depends on who came first: the last of them sees
what all have called, so at least one error names the calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft import _core
from weft.collectives.calls import Collectives
from weft.collectives.variants import parse_choice
from weft.errors import Error
from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank, RankPool, run_ranks

WAIT_S = 0.5
MESSAGES = 4096  # elements of four messages by reference, more than a slot of LL holds

# What an odd rank calls, and what the others do.
Calls = Callable[[Collectives, bool], object]
CALLS: dict[str, tuple[Calls, str, str]] = {
    "type": (
        lambda c, odd: c.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
        "all_reduce of 4 float64 sum",
        "all_reduce of 4 float32 sum",
    ),
    "operation": (
        lambda c, odd: c.all_reduce(torch.ones(4), "max" if odd else "sum"),
        "all_reduce of 4 float32 max",
        "all_reduce of 4 float32 sum",
    ),
    "collective": (
        lambda c, odd: c.all_gather(torch.ones(4)) if odd else c.all_reduce(torch.ones(4)),
        "all_gather of 4 float32",
        "all_reduce of 4 float32 sum",
    ),
    "count": (
        lambda c, odd: c.all_reduce(torch.ones(5 if odd else 4)),
        "all_reduce of 5 float32 sum",
        "all_reduce of 4 float32 sum",
    ),
    "very different counts": (
        lambda c, odd: c.all_reduce(torch.ones(1 << 20 if odd else 4)),
        "all_reduce of 1048576 float32 sum",
        "all_reduce of 4 float32 sum",
    ),
    "root of a broadcast": (
        lambda c, odd: c.broadcast(torch.ones(4), int(odd)),
        "broadcast of 4 float32 with root 1",
        "broadcast of 4 float32 with root 0",
    ),
    "root of a reduce": (
        lambda c, odd: c.reduce(torch.ones(4), int(odd)),
        "reduce of 4 float32 sum with root 1",
        "reduce of 4 float32 sum with root 0",
    ),
    "root of a scatter": (
        lambda c, odd: c.scatter(torch.ones(c.size * 2) if c.rank == odd else None, torch.ones(2), int(odd)),
        "scatter of 2 float32 with root 1",
        "scatter of 2 float32 with root 0",
    ),
    "parts": (
        lambda c, odd: (
            c.all_to_all(torch.ones(c.size, 2)) if odd else c.reduce_scatter(torch.ones(c.size, 2))
        ),
        "all_to_all of 2 float32",
        "reduce_scatter of 2 float32 sum",
    ),
    "splits": (
        lambda c, odd: c.all_to_all(
            torch.ones(c.size * (3 if odd else 2)),
            input_splits=[3 if odd else 2] * c.size,
            output_splits=[3 if odd else 2] * c.size,
        ),
        "all_to_all of 3 float32",
        "all_to_all of 2 float32",
    ),
    "a message": (
        lambda c, odd: c.recv(torch.ones(5), 0) if odd else c.rank == 0 and c.send(torch.ones(4), 1),
        "recv of 5 float32",
        "send of 4 float32",
    ),
    "type of a message": (
        lambda c, odd: (
            c.recv(torch.ones(4, dtype=torch.int32), 0) if odd else c.rank == 0 and c.send(torch.ones(4), 1)
        ),
        "recv of 4 int32",
        "send of 4 float32",
    ),
}
# As texts of parse_choice(), and the elements that ranks pass.
WAYS = {
    **{f"allreduce_1step {protocol}": (4, 5) for protocol in ("Simple", "LL", "LL128")},
    **{f"allreduce_allpairs {protocol}": (MESSAGES, 4 * MESSAGES) for protocol in ("Simple", "LL", "LL128")},
    "allreduce_allpairs LL exchange": (4, 600),
    "allreduce_1step LL exchange": (4, 5),
    "allreduce_allpairs Simple staged": (MESSAGES, 4 * MESSAGES),
    "allreduce_allpairs Simple exchange": (MESSAGES, 4 * MESSAGES),
}


@pytest.fixture(scope="module", params=(2, 3))
def pool(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with RankPool(request.param, with_gpus=False) as ranks:
        yield ranks


def _attempt(act: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "", act()
    except Error as error:
        return str(error), None


def _after(rank: Rank, first: Callable[[Collectives, bool, Communicator], object]) -> list[str]:
    """Make calls that differ, and then a right one; return the errors of both."""
    comm = Communicator(rank.group, timeout_s=60)
    calls = Collectives(comm.core, WAIT_S)
    assert calls.all_reduce(torch.ones(3))[0] == rank.size or True  # loads what calls share
    comm.barrier()
    errors = [_attempt(lambda: first(calls, bool(rank.rank % 2), comm))[0]]
    error, result = _attempt(lambda: calls.all_reduce(torch.full((4,), rank.rank + 1.0)))
    if not error:
        assert result.tolist() == [rank.size * (rank.size + 1) / 2] * 4
    fresh = Collectives(comm.core, 30)
    for count in (4, 70_000):
        ones = torch.ones(count)
        assert torch.equal(fresh.all_reduce(ones.clone()), ones * rank.size)
    return [*errors, error]


def _named(rank: Rank, name: str) -> list[str]:
    return _after(rank, lambda calls, odd, _: CALLS[name][0](calls, odd))


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_are_errors_that_name_them(pool: RankPool, name: str) -> None:
    _, odd, even = CALLS[name]
    answers = pool.run(_named, name)
    everything = [error for errors in answers for error in errors]
    assert any(f"called {odd}" in error and f"called {even}" in error for error in everything), answers
    if "message" in name:
        assert answers[1][0]  # the sender of a message may be long gone
    elif "root" in name:
        assert all(any(errors) for errors in answers), answers  # roots have nobody to wait for
    else:
        assert all(all(errors) for errors in answers), answers


def _later(rank: Rank) -> list[str]:
    """Make calls that differ, and then right ones of other kinds; return all errors."""
    calls = Collectives(Communicator(rank.group, timeout_s=60).core, WAIT_S)
    calls.all_reduce(torch.ones(3))
    rank.meet()  # who is still in that call may see what comes after it
    odd = torch.float64 if rank.rank % 2 else torch.float32
    return [
        _attempt(act)[0]
        for act in (
            lambda: calls.all_reduce(torch.ones(4, dtype=odd)),
            lambda: calls.all_gather(torch.ones(6)),
            lambda: calls.broadcast(torch.ones(7), 1),
            lambda: calls.all_reduce(torch.ones(0)),
            lambda: calls.all_to_all(torch.ones(rank.size, 2), algorithm=None),
        )
    ]


def test_later_calls_say_that_they_were_refused_and_where_ranks_diverged(pool: RankPool) -> None:
    refused = (
        "all_gather of 6 float32",
        "broadcast of 7 float32 with root 1",
        None,
        "all_to_all of 2 float32",
    )
    answers = pool.run(_later)
    for first, *later in answers:
        assert first and "not made" not in first, answers
        for name, error in zip(refused, later, strict=True):
            if name is None:
                continue  # nothing is called without elements
            assert error.startswith(f"{name}: not made, as "), answers
            assert error.endswith(first), answers
    diverged = f"{refused[0]}: not made, as the calls of the ranks diverged before: rank "
    texts = [later[0] for _, *later in answers if later[0].startswith(diverged)]
    assert any(
        "collective 2: rank" in text and "called all_reduce of 4 float32 sum" in text for text in texts
    ), answers


def _by(rank: Rank, way: str) -> list[str]:
    def act(calls: Collectives, odd: bool, comm: Communicator) -> object:
        count = WAYS[way][odd]
        window = Window(comm, 1 << 20)  # for exchanges in place
        tensor = window.tensor(rank.rank, (count,), torch.float32)
        tensor.fill_(rank.rank + 1)
        comm.barrier()
        choice = parse_choice(way, rank.size, True)
        before = _attempt(lambda: calls.all_reduce(tensor, algorithm=choice))[0]
        # What lies beyond the own tensor is as it was: a peer with more elements has not written here.
        assert not window.tensor(rank.rank, (2 * MESSAGES,), torch.float32, 1 << 19).any()
        if not odd:
            rest = window.tensor(rank.rank, (4 * MESSAGES - count + 4,), torch.float32, count * 4)
            assert not rest.any()
        if before:
            raise Error(before)
        return tensor

    return _after(rank, act)


@pytest.mark.parametrize("way", WAYS)
def test_no_way_mixes_calls(pool: RankPool, way: str) -> None:
    answers = pool.run(_by, way)
    assert all(all(errors) for errors in answers), answers
    few, many = WAYS[way]
    assert any(
        f"called all_reduce of {few} float32 sum" in error
        and f"called all_reduce of {many} float32 sum" in error
        for errors in answers
        for error in errors
    ), answers


def _two_algorithms(rank: Rank) -> list[str]:
    way = ("allreduce_1step LL", "allreduce_allpairs LL")
    return _after(
        rank,
        lambda calls, odd, _: calls.all_reduce(
            torch.ones(64), algorithm=parse_choice(way[odd], rank.size, True)
        ),
    )


def test_algorithms_that_differ_are_named(pool: RankPool) -> None:
    answers = pool.run(_two_algorithms)
    assert all(all(errors) for errors in answers), answers
    assert any(
        "by allreduce_1step" in error and "by allreduce_allpairs" in error
        for errors in answers
        for error in errors
    ), answers


def _missed(rank: Rank) -> tuple[list[str], bool]:
    """A broadcast whose roots differ leaves a message unread; the same broadcast later must not take it."""
    comm = Communicator(rank.group, timeout_s=60)
    calls = Collectives(comm.core, WAIT_S)
    errors = []
    for root, value in ((rank.rank % 2, 1.0), (0, 2.0)):
        comm.barrier()
        tensor = torch.full((4,), value if rank.rank == 0 else 0.0)
        errors.append(_attempt(lambda t=tensor, r=root: calls.broadcast(t, r))[0])
    return errors, bool((tensor == 1).any())


def test_a_message_of_an_earlier_call_is_not_taken(pool: RankPool) -> None:
    answers = pool.run(_missed)
    assert not any(took for _, took in answers), answers
    assert any(answers[1][0]), answers


def _checked(rank: Rank, name: str) -> list[str]:
    os.environ["WEFT_CHECK"] = "1"
    _core.config_reload()
    try:
        calls = Collectives(Communicator(rank.group, timeout_s=60).core, 60)
        errors = []
        for _ in range(2):
            errors.append(_attempt(lambda: CALLS[name][0](calls, bool(rank.rank % 2)))[0])
            assert calls.all_reduce(torch.ones(5))[0] == rank.size  # nothing has happened
        return errors
    finally:
        del os.environ["WEFT_CHECK"]
        _core.config_reload()


@pytest.mark.parametrize("name", [name for name in CALLS if "message" not in name and name != "splits"])
def test_checked_calls_are_refused_at_once_and_leave_nothing(pool: RankPool, name: str) -> None:
    _, odd, even = CALLS[name]
    for errors in pool.run(_checked, name):
        assert all(f"called {odd}" in error and f"called {even}" in error for error in errors), errors


def _buckets(rank: Rank) -> list[str]:
    import weft  # noqa: F401 - registers the backend

    dist.destroy_process_group()
    rank.group = None
    dist.init_process_group(
        "weft",
        init_method=f"file://{rank.folder}/.weft",
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=8),
    )
    dist.all_reduce(torch.ones(1))
    errors = []
    if rank.rank == 0:
        ops = [dist.P2POp(dist.isend, torch.ones(4), 1), dist.P2POp(dist.irecv, torch.ones(4), 1)]
    else:
        ops = [dist.P2POp(dist.irecv, torch.ones(5), 0), dist.P2POp(dist.isend, torch.ones(4), 0)]

    def batch() -> None:
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    errors.append(_attempt_any(batch))
    order = (100, 30) if rank.rank else (30, 100)  # as gradients that became ready in another order
    for elems in order:
        errors.append(_attempt_any(lambda n=elems: dist.all_reduce(torch.ones(n))))
    return errors


def _attempt_any(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:  # torch wraps what a work raised
        return str(error)
    return ""


def test_torch_backend_tells_orders_of_buckets_apart() -> None:
    answers = run_ranks(2, _buckets, with_gpus=False)
    assert "send of 4 float32" in answers[1][0] and "recv of 5 float32" in answers[1][0], answers
    assert all(all(errors[1:]) for errors in answers), answers
    assert any("all_reduce of 30" in error and "all_reduce of 100" in error for e in answers for error in e)
