# SPDX-License-Identifier: Apache-2.0
"""A rank that comes when the others have given up gets an error, never what they left behind.

The others wait until their deadline, raise, and then write garbage over their buffers, which are theirs again. Only
then does the late rank make its call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft import _core
from weft.collectives.calls import Collectives
from weft.collectives.variants import parse_variant
from weft.errors import PeerLost
from weft.runtime.communicator import Communicator, Window
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

LATE = 1
WAIT_S = 0.1  # the others' deadline, and nothing has to be ready by then
MAKING_S = 5.0  # their deadline where they make their buffers with it, too
FAR_S = 100.0
GARBAGE = -777.0
FEW, MANY = 3, 40_000  # less than a vector; several slices, and large enough for messages by reference
ALL_REDUCES = (
    "allreduce_1step LL exchange",
    "allreduce_allpairs LL exchange",
    "allreduce_allpairs Simple exchange",
    "allreduce_allpairs Simple staged",
    *(f"allreduce_{name} {wire}" for name in ("1step", "allpairs") for wire in ("Simple", "LL", "LL128")),
    "allreduce_allpairs LL compiled",
    "allreduce_a100_ring Simple",
    "allreduce_a100_ring LL",
    "allreduce_a100_ring LL128",
)
OTHERS = {
    "all_gather": (
        "allgather_allpairs LL exchange",
        "allgather_allpairs Simple exchange",
        "allgather_allpairs Simple staged",
        "allgather_allpairs Simple",
        "allgather_ring LL",
        "allgather_ring Simple",
    ),
    "reduce_scatter": (
        "reducescatter_allpairs LL exchange",
        "reducescatter_allpairs Simple exchange",
        "reducescatter_allpairs Simple staged",
        "reducescatter_allpairs Simple",
        "reducescatter_ring LL",
        "reducescatter_ring Simple",
    ),
    "all_to_all": (
        "alltoall_allpairs LL exchange",
        "alltoall_allpairs Simple exchange",
        "alltoall_allpairs Simple staged",
        "alltoall_allpairs Simple",
    ),
}


class Ranks:
    """One rank's side of many late calls over one communicator."""

    def __init__(self, rank: Rank, in_window: bool) -> None:
        self.rank = rank
        self.comm = Communicator(rank.group, timeout_s=FAR_S)
        self.window = Window(self.comm, 4 << 20) if in_window else None
        self.cases = 0

    def tensor(self, values: torch.Tensor, at: int) -> torch.Tensor:
        if self.window is None:
            return values.clone()
        place = self.window.tensor(self.rank.rank, tuple(values.shape), values.dtype, at * (2 << 20))
        return place.copy_(values)

    def late(self, label: object, call: Callable[[Collectives], Any], mine: list[torch.Tensor]) -> Any:
        """Make the call, late on one rank. Return what it gave; None where it raised."""
        self.cases += 1
        is_late = self.rank.rank == LATE
        calls = Collectives(self.comm.core, WAIT_S)
        self.comm.barrier()
        if is_late:
            wait_for_others(self.rank, self.cases)
        result = None
        with contextlib.suppress(PeerLost):
            result = call(calls).clone()
        if is_late and result is not None:
            with pytest.raises(PeerLost):  # one that has all it needs hears of it in the next call
                call(calls)
        for tensor in mine if not is_late else ():
            tensor.fill_(GARBAGE)
        say_it_is_over(self.rank, self.cases)
        self.comm.barrier()
        assert is_late or result is None, (label, "did not wait for the late rank")
        return result


def say_it_is_over(rank: Rank, case: object) -> None:
    (rank.folder / f"over-{case}-{rank.rank}").touch()


def wait_for_others(rank: Rank, case: object) -> None:
    give_up = time.monotonic() + FAR_S
    while not all((rank.folder / f"over-{case}-{r}").exists() for r in range(rank.size) if r != LATE):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def _values(rank: int, elems: int) -> torch.Tensor:
    return ((torch.arange(elems) * 7 + rank * 5) % 13 + 1).float()


def _all_reduces(rank: Rank, in_window: bool) -> None:
    ranks, n = Ranks(rank, in_window), rank.size
    for way in ALL_REDUCES:
        if in_window and "LL" in way:
            continue  # lines go through slots wherever the buffers are
        choice = parse_variant(way).choice(n, False)
        for elems in (FEW, MANY) if way.endswith("LL exchange") else (MANY,):
            given = ranks.tensor(_values(rank.rank, elems), 0)
            out = ranks.tensor(torch.zeros(elems), 1)
            result = ranks.late(
                (way, elems),
                lambda c, g=given, o=out, w=choice: c.all_reduce(g, algorithm=w, out=o),
                [given, out],
            )
            expected = sum(_values(r, elems) for r in range(n))
            assert result is None or torch.equal(result, expected), (way, elems)


def _others(rank: Rank, in_window: bool) -> None:
    ranks, n, me = Ranks(rank, in_window), rank.size, rank.rank
    for name, ways in OTHERS.items():
        for way in ways:
            choice, elems = parse_variant(way).choice(n, False), MANY
            if in_window and "LL" in way:
                continue
            everyone = torch.stack([_values(r, n * elems) for r in range(n)])
            own, parts = everyone[me], everyone.view(n, n, elems)
            if name == "all_gather":
                given, expected = own, everyone
            elif name == "reduce_scatter":
                given, expected = own.view(n, elems), parts.sum(0)[me].view(1, elems)
            else:
                given, expected = own.view(n, elems), parts[:, me]
            given = ranks.tensor(given, 0)
            out = ranks.tensor(torch.zeros(expected.shape), 1)
            result = ranks.late(
                (way, elems),
                lambda c, g=given, o=out, w=choice, f=name: getattr(c, f)(g, algorithm=w, out=o),
                [given, out],
            )
            assert result is None or torch.equal(result, expected), (way, elems)


@pytest.mark.parametrize("in_window", [False, True], ids=["anywhere", "window"])
def test_no_way_of_all_reduce_gives_a_late_rank_what_others_left(in_window: bool) -> None:
    run_ranks(3, _all_reduces, in_window, deadline_s=200, with_gpus=False)


@pytest.mark.parametrize("in_window", [False, True], ids=["anywhere", "window"])
def test_no_other_call_gives_a_late_rank_what_others_left(in_window: bool) -> None:
    run_ranks(3, _others, in_window, deadline_s=200, with_gpus=False)


CASE = MoeCase((6, 9, 4), 128, 3, 6, empty_share=0)
MOST_TOKENS = 16


class HighThroughput:
    """The two calls of a round trip, and whether what the first gave is right."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank.rank
        self.buffer = weft.Buffer(rank.group, 8 << 20, timeout_s=MAKING_S)

    def dispatch(self) -> Any:
        topk_idx = CASE.topk_idx(self.rank)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, CASE.num_experts)
        weights = CASE.topk_weights(self.rank)
        x = CASE.x(self.rank)
        return self.buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, topk_idx, weights)

    def combine(self, received: Any) -> None:
        self.buffer.combine(received[0], received[4])

    def is_right(self, received: Any) -> bool:
        rows = oracle.ht_dispatch(CASE.routes(), CASE.num_experts, self.rank)
        return torch.equal(received[0], rows.take(CASE.all_x()))


class LowLatency:
    """The same in low-latency mode, for tokens that travel as lines or with words after them."""

    def __init__(self, rank: Rank, line_tokens: int) -> None:
        os.environ["WEFT_LOW_LATENCY_LINE_TOKENS"] = str(line_tokens)
        _core.config_reload()
        self.rank = rank.rank
        size = weft.Buffer.get_low_latency_rdma_size_hint(
            MOST_TOKENS, CASE.hidden, rank.size, CASE.num_experts
        )
        self.buffer = weft.Buffer(rank.group, 0, size, low_latency_mode=True, timeout_s=MAKING_S)

    def dispatch(self) -> Any:
        return self.buffer.low_latency_dispatch(
            CASE.x(self.rank), CASE.topk_idx(self.rank), MOST_TOKENS, CASE.num_experts, use_fp8=False
        )

    def combine(self, received: Any) -> None:
        weights = CASE.topk_weights(self.rank)
        self.buffer.low_latency_combine(received[0], CASE.topk_idx(self.rank), weights, received[2])

    def is_right(self, received: Any) -> bool:
        tokens = oracle.ll_dispatch(CASE.routes(), CASE.num_experts, self.rank)
        return received[1].tolist() == [sum(len(t) for t in sources) for sources in tokens]


def _late_round_trip(rank: Rank, mode: str) -> None:
    """One rank comes to its dispatch when the others have given up."""
    one = HighThroughput(rank) if mode == "ht" else LowLatency(rank, 0 if mode == "words" else -1)
    is_late = rank.rank == LATE
    torch.distributed.barrier(group=rank.group)
    if is_late:
        wait_for_others(rank, mode)
    with pytest.raises(PeerLost):
        received = one.dispatch()
        assert is_late and one.is_right(received)
        one.combine(received)
    say_it_is_over(rank, mode)
    torch.distributed.barrier(group=rank.group)  # a rank that leaves would be named for that


@pytest.mark.parametrize("mode", ["ht", "words", "lines"])
def test_a_late_dispatch_gives_what_was_sent_and_the_combine_after_it_raises(mode: str) -> None:
    run_ranks(3, _late_round_trip, mode, deadline_s=60, with_gpus=False)
