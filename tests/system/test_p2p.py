# SPDX-License-Identifier: Apache-2.0
"""The split all-to-all against plain indexing: shapes, types, layouts, micro-batches, faults, bad arguments."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from moe_checks import barrier
from p2p_checks import (
    POISON,
    Form,
    check_received,
    check_sums,
    exchange,
    expected_places,
    make,
    results_of,
    rows_of,
)
from port_nodes import nodes, tokens_of
from programs import WEFT, run_program, torchrun

import weft
from weft.errors import Error
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool, run_ranks

MOST = 16
# Of micro-batches in flight: for a long run, under ThreadSanitizer say, many; seeds let several runs share it.
ROUNDS, SEED = int(os.environ.get("P2P_ROUNDS", "10")), int(os.environ.get("P2P_SEED", "0"))
ROUNDS_A_RUN = 100  # which has one deadline
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HALF, FLOAT = torch.float16, torch.float32
FORMS = (
    Form(),
    Form(padding=16),
    Form(FLOAT, FLOAT, FLOAT, padding=3, exact=True),
    Form(HALF, HALF, HALF, exact=True),
    Form(FP8, BF16, BF16, scale_words=5, padding=8),
    Form(torch.uint8, HALF, FLOAT, scale_words=1),
    Form(BF16, BF16, FLOAT, per_expert=100),
    Form(FLOAT, BF16, HALF, scale_words=2, per_expert=90, exact=True),
    Form(BF16, FLOAT, FLOAT),
)
# Ranks, of which so many make a node, and the network between nodes; 0: all map each other.
PLACES = (
    (1, 0, ""),
    (3, 0, ""),
    (5, 0, ""),
    (4, 2, "fabric:tcp"),
    (5, 3, "fabric:shm"),
    (3, 1, "fabric:tcp"),
)


@pytest.fixture(scope="module", params=PLACES, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, per_node, provider = request.param
    if not per_node:
        with RankPool(num_ranks, with_gpus=False) as ranks:
            yield ranks
        return
    with nodes(per_node, provider), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


def _exchanges(rank: Rank, case: MoeCase, form: Form, rounds: int = 2, most: int = MOST) -> None:
    """Some exchanges one after another, on an object that others of the pool have used before, or not."""
    with make(rank, case, form, most) as a2a:
        for _ in range(rounds):
            exchange(rank, a2a, case, form)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_every_type_and_layout(pool: RankPool, form: Form) -> None:
    pool.run(
        _exchanges, MoeCase(tokens_of(pool.num_ranks, 9, 0, 14), hidden=64, top_k=3, num_experts=7), form
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (0,)},
        {"tokens": (0, 16)},
        {"routing": "one expert", "empty_share": 0.0, "top_k": 1},
        {"routing": "none"},
        {"routing": "any", "top_k": 5},
        {"hidden": 7168, "top_k": 8, "num_experts": 16},
        {"num_experts": 2, "top_k": 2},  # ranks without an expert
        {"hidden": 8, "top_k": 1},
    ],
    ids=str,
)
def test_edges(pool: RankPool, change: dict[str, Any]) -> None:
    tokens = tokens_of(pool.num_ranks, *change.pop("tokens", (5, 8, 3)))
    case = MoeCase(tokens, **({"hidden": 64, "top_k": 4, "num_experts": 8} | change))
    pool.run(_exchanges, case, Form(padding=4))


@drawn(max_examples=6)
@given(data=st.data())
def test_any_shape_matches_plain_indexing(pool: RankPool, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    tokens = tuple(data.draw(st.integers(0, MOST)) for _ in range(pool.num_ranks))
    routing = data.draw(st.sampled_from(("distinct", "distinct", "any", "none")))
    top_k, experts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    case = MoeCase(
        tokens,
        16 * data.draw(st.integers(1, 40)),
        top_k,
        experts,
        routing,
        seed=data.draw(st.integers(0, 99)),
    )
    most = max(*tokens, 1) if data.draw(st.booleans()) else MOST
    repeats = routing == "any" or top_k > experts  # a token may name an expert more than once
    if form.per_expert is not None and (repeats or sum(tokens) > form.per_expert):
        return  # more rows than an expert has room for, perhaps
    if repeats:
        most *= top_k
    pool.run(_exchanges, case, form, 2, most)


# ---- what a call can do besides


def _on_few(rank: Rank) -> None:
    """num_sms bounds the threads here; an object with all threads is used in turns with one that has few."""
    case = MoeCase(tokens_of(rank.size, 9, 0, 14), 64, 3, 7)
    for form in (Form(padding=4), Form(FLOAT, FLOAT, FLOAT, exact=True)):
        with make(rank, case, form, MOST, num_sms=1) as few, make(rank, case, form, MOST) as all_of_them:
            for a2a in (few, all_of_them, few):
                exchange(rank, a2a, case, form)
                exchange(rank, a2a, case, form, accumulate=True)


def test_few_sms_give_the_same_rows(pool: RankPool) -> None:
    pool.run(_on_few)


def _in_bulk(rank: Rank) -> None:
    """Rows of one piece and of several, batches of one token and of three; a rank has none."""
    for form in (
        Form(),
        Form(padding=16),
        Form(FP8, BF16, BF16, scale_words=5, padding=8),
        Form(per_expert=300),
    ):
        for hidden, tokens in ((64, (9, 0, 14)), (3200, (140, 0, 300))):
            case = MoeCase(tokens_of(rank.size, *tokens), hidden, 3, 7)
            with make(rank, case, form, max(tokens), num_sms=2) as a2a:
                exchange(rank, a2a, case, form)
                exchange(rank, a2a, case, form, accumulate=True)


def test_rows_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What few SMs of a GPU run, on the CPU."""
    monkeypatch.setenv("WEFT_LOW_LATENCY_BULK", "always")
    run_ranks(3, _in_bulk, with_gpus=False)


def _other_sms(rank: Rank) -> None:
    with pytest.raises(Error, match="num_sms: got"):
        make(rank, MoeCase((3,) * rank.size, 64, 2, 4), Form(), MOST, num_sms=rank.rank + 1)


def test_numbers_of_sms_that_differ_are_told() -> None:
    run_ranks(2, _other_sms, with_gpus=False)


def _bounded(rank: Rank) -> None:
    """bound_m hides the last tokens: nobody gets them, and their sums are zero."""
    case, form = MoeCase(tokens_of(rank.size, 7, 12), 64, 3, 6), Form()
    with make(rank, case, form, MOST) as a2a:
        for bound in (5, 0, 100):
            me = rank.rank
            x, ids, weights = case.x(me), case.topk_idx(me), case.topk_weights(me)
            handle = a2a.dispatch_send(
                x, ids.to(torch.int32), weights, bound_m=torch.tensor([bound], dtype=torch.int32)
            )
            rows = a2a.dispatch_recv(handle)
            routes = [case.topk_idx(source)[:bound] for source in range(rank.size)]
            per = -(-case.num_experts // rank.size)
            assert rows.num_tokens.tolist() == [
                sum(int((route == expert).sum()) for route in routes)
                for expert in range(me * per, min((me + 1) * per, case.num_experts))
            ]
            a2a.combine_send(rows.x, handle)
            out = a2a.combine_recv(handle)
            share = (weights * (ids >= 0)).sum(1, keepdim=True)
            share[min(bound, len(x)) :] = 0
            torch.testing.assert_close(out.float(), x.float() * share, rtol=2e-2, atol=2e-2)


def _added(rank: Rank) -> None:
    case = MoeCase(tokens_of(rank.size, 7, 12), 64, 3, 6)
    for form in (Form(), Form(exact=True), Form(out_dtype=FLOAT), Form(HALF, HALF, BF16, exact=True)):
        with make(rank, case, form, MOST) as a2a:
            exchange(rank, a2a, case, form, accumulate=True)


def _into_the_callers(rank: Rank) -> None:
    """Outputs of the caller's, scales in columns; nothing but the rows is written."""
    case, form = MoeCase(tokens_of(rank.size, 7, 12), 64, 3, 6), Form(FP8, scale_words=3, padding=4)
    me = rank.rank
    with make(rank, case, form, MOST) as a2a:
        room = a2a.max_recv_tokens
        x = torch.full((room, 64), POISON).to(FP8)
        scale = torch.full((3, room), POISON).t()
        counts = torch.full((a2a.num_local_experts,), -1, dtype=torch.int32)
        handle = a2a.dispatch_send(
            rows_of(case, form, me),
            case.topk_idx(me),
            case.topk_weights(me),
            case.scales(me, 6)[:, ::2].contiguous(),
        )
        rows = a2a.dispatch_recv(handle, x, scale, counts)
        assert rows.x is x
        assert rows.num_tokens is counts
        _, _, places = expected_places(case, form, me, rank.size)
        written = {place[0] for place in places}
        for row, _, source, token, _ in places:
            assert torch.equal(scale[row], case.scales(source, 6)[token, ::2])
        untouched = [row for row in range(room) if row not in written]
        assert bool((x.float()[untouched] == POISON).all())
        assert bool((scale[untouched] == POISON).all())
        a2a.combine_send(results_of(case, form, me, rank.size, rows), handle)
        out = torch.full((case.tokens[me], 64), POISON, dtype=BF16)
        assert a2a.combine_recv(handle, out) is out
        check_sums(case, form, me, out)


def _combined_twice(rank: Rank) -> None:
    """The same rows come back twice, the second time with other weights."""
    case, form = MoeCase(tokens_of(rank.size, 7, 12), 64, 3, 6), Form()
    me = rank.rank
    with make(rank, case, form, MOST) as a2a:
        handle = a2a.dispatch_send(case.x(me), case.topk_idx(me), case.topk_weights(me))
        rows = a2a.dispatch_recv(handle)
        y = results_of(case, form, me, rank.size, rows)
        a2a.combine_send(y, handle)
        check_sums(case, form, me, a2a.combine_recv(handle))
        a2a.combine_send(y, handle, torch.ones(case.tokens[me], 3))
        twice = a2a.combine_recv(handle)
        a2a.combine_send(y, handle, torch.zeros(case.tokens[me], 3))
        assert not bool(a2a.combine_recv(handle).any())
        assert bool(twice.any()) or case.tokens[me] == 0


def _capacity(rank: Rank) -> None:
    """Too many rows for what one rank has are an error there, of the next exchange nobody suffers."""
    case, form = MoeCase((6,) * rank.size, 64, 1, rank.size, "one expert", empty_share=0.0), Form()
    me, arguments = rank.rank, (case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank))
    for options, message in (
        ({"max_recv_tokens": 4}, r"max_recv_tokens: got 4, allowed: at least the \d+ rows"),
        ({"max_tokens_per_expert": 5}, r"max_tokens_per_expert: got 5, allowed: at least the \d+ rows"),
    ):
        with make(rank, case, form, MOST, **options) as a2a:
            for few in (False, True):
                ids = arguments[1].clone()
                if few:
                    ids[0 if me else 3 :] = -1
                handle = a2a.dispatch_send(arguments[0], ids, arguments[2])
                if me == 0 and not few:
                    with pytest.raises(Error, match=message):
                        a2a.dispatch_recv(handle)
                    assert 6 * rank.size > 5
                else:
                    rows = a2a.dispatch_recv(handle)
                    assert rows.num_tokens.tolist() == ([3] if me == 0 else [0] * a2a.num_local_experts)


def _drawn_tokens(draw: random.Random, num_ranks: int) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 3, MOST)) for _ in range(num_ranks))


def _in_flight(rank: Rank, depth: int, rounds: int, seed: int) -> None:
    """Micro-batches of random sizes, as many as are allowed at once, their phases in a drawn order."""
    order = random.Random(seed + 7)  # the same on all ranks
    case_of = random.Random(seed + 11)
    form = Form(padding=2)
    first = MoeCase((0,) * rank.size, 48, 3, 5)
    with make(rank, first, form, MOST, max_in_flight=depth) as a2a:
        for _ in range(rounds):
            cases = [
                MoeCase(
                    tuple(case_of.choice((0, 1, 3, MOST)) for _ in range(rank.size)),
                    48,
                    3,
                    5,
                    seed=case_of.randint(0, 999),
                )
                for _ in range(depth)
            ]
            _interleave(rank, a2a, cases, form, order)


def _interleave(
    rank: Rank, a2a: weft.P2PAllToAll, cases: list[MoeCase], form: Form, order: random.Random
) -> None:
    me, ranks = rank.rank, rank.size
    handles: dict[int, Any] = {}
    for i, case in enumerate(cases):
        handles[i] = a2a.dispatch_send(case.x(me), case.topk_idx(me), case.topk_weights(me))
    results: dict[int, torch.Tensor] = {}
    for i in order.sample(list(range(len(cases))) * 3, 3 * len(cases)):
        case, handle = cases[i], handles[i]
        if handle.phase == "dispatch_send":
            rows = a2a.dispatch_recv(handle)
            check_received(case, form, me, ranks, rows)
            results[i] = results_of(case, form, me, ranks, rows)
            rows.x.fill_(float("nan"))  # who still reads it shows
        elif handle.phase == "dispatch_recv":
            a2a.combine_send(results.pop(i), handle)
        else:
            check_sums(case, form, me, a2a.combine_recv(handle))


@pytest.mark.parametrize(
    "check", [_bounded, _added, _into_the_callers, _combined_twice, _capacity], ids=lambda c: c.__name__
)
def test_whatever_a_call_can_do(pool: RankPool, check: Callable[..., None]) -> None:
    pool.run(check)


@pytest.mark.timeout(300 + ROUNDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_micro_batches_in_flight_stay_apart(pool: RankPool, depth: int) -> None:
    for first in range(0, ROUNDS, ROUNDS_A_RUN):
        pool.run(_in_flight, depth, min(ROUNDS - first, ROUNDS_A_RUN), SEED + first)


def test_a_prefill_of_4096_tokens() -> None:
    for per_node in (0, 1):
        case, form = MoeCase((4096, 4000), 32, 2, 6), Form(padding=128)
        if not per_node:
            run_ranks(2, _exchanges, case, form, 1, 4096, with_gpus=False)
            continue
        with nodes(per_node, "fabric:shm"):
            run_ranks(2, _exchanges, case, form, 1, 4096, with_gpus=False)


# ---- groups of ranks that hold the same tokens


def _with_dp(rank: Rank, dp_size: int) -> None:
    groups, me = rank.size // dp_size, rank.rank // dp_size
    case, form = MoeCase(tokens_of(groups, 9, 0, 14), 64, 3, 7), Form(padding=4)
    with make(rank, case, form, MOST, dp_size=dp_size) as a2a:
        assert (a2a.dp_rank, a2a.num_dp_groups) == (me, groups)
        for _ in range(2):
            exchange(Rank(me, groups, rank.folder, rank.group), a2a, case, form)


@pytest.mark.parametrize("dp_size", [2, 4])
def test_groups_with_the_same_tokens(dp_size: int) -> None:
    run_ranks(4, _with_dp, dp_size, with_gpus=False)


# ---- faults

LOST, TIMEOUT_S = 1, 6.0  # ranks wait for one another on busy machines, too
FAULTY = MoeCase((6, 9, 4), 128, 3, 6, empty_share=0)
PHASES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


class _Steps:
    """The phases of one exchange by their names."""

    def __init__(self, a2a: weft.P2PAllToAll, rank: int) -> None:
        self.a2a, self.rank = a2a, rank

    def run(self, phase: str) -> None:
        me, a2a = self.rank, self.a2a
        if phase == "dispatch_send":
            self.handle = a2a.dispatch_send(FAULTY.x(me), FAULTY.topk_idx(me), FAULTY.topk_weights(me))
        elif phase == "dispatch_recv":
            self.rows = a2a.dispatch_recv(self.handle)
        elif phase == "combine_send":
            a2a.combine_send(self.rows.x, self.handle)
        else:
            a2a.combine_recv(self.handle)


def _lose_one(rank: Rank, phase: str, number: int) -> tuple[str, float]:
    """One rank gets the signal before a phase; the others go on until they miss it."""
    a2a = make(rank, FAULTY, Form(), MOST, timeout_s=100.0 if number == signal.SIGKILL else TIMEOUT_S)
    steps = _Steps(a2a, rank.rank)
    for step in PHASES * 2:
        if step == phase and hasattr(steps, "handle"):
            break
        steps.run(step)
    barrier(rank)
    if rank.rank == LOST:
        os.kill(os.getpid(), number)
    start = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        for step in PHASES[PHASES.index(phase) :] + PHASES * 2:
            steps.run(step)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_lost_between_phases_is_named(phase: str, number: int) -> None:
    results = run_ranks(3, _lose_one, phase, number, lost={LOST}, with_gpus=False)
    for rank in (0, 2):
        message, waited_s = results[rank]
        assert f"rank {LOST}" in message, message
        assert waited_s < 60, message


def _late(rank: Rank) -> None:
    """A rank that is late by more than a moment, but less than the deadline, is no error."""
    with make(rank, FAULTY, Form(), MOST) as a2a:
        steps = _Steps(a2a, rank.rank)
        for step in PHASES * 2:
            if rank.rank == LOST:
                time.sleep(0.4)
            steps.run(step)


def test_a_late_rank_is_waited_for() -> None:
    run_ranks(3, _late, with_gpus=False)


# ---- bad arguments


def _refused(rank: Rank) -> None:
    case, form, me = FAULTY, Form(), rank.rank
    x, ids, weights = case.x(me), case.topk_idx(me), case.topk_weights(me)
    with make(rank, case, form, MOST) as a2a:
        for message, change in (
            (r"^x: got float32\[", {"x": x.float()}),
            (r"^x: .*hidden_dim, 128", {"x": x[:, :64].contiguous()}),
            (r"^x: got 17 tokens, allowed: at most max_num_tokens, 16", {"x": x.new_zeros(17, 128)}),
            (r"^topk_idx: got float32", {"topk_idx": weights}),
            (r"^topk_idx: ", {"topk_idx": ids[:, :2].contiguous()}),
            (r"^topk_idx: got expert 6", {"topk_idx": ids * 0 + 6}),
            (r"^topk_weights: ", {"topk_weights": weights.double()}),
            (r"^x_scale: .*None without hidden_dim_scale", {"x_scale": weights}),
            (r"^bound_m: ", {"bound_m": torch.tensor([3, 4], dtype=torch.int32)}),
        ):
            with pytest.raises(Error, match=message):
                a2a.dispatch_send(**{"x": x, "topk_idx": ids, "topk_weights": weights, **change})
        handle = a2a.dispatch_send(x, ids, weights)
        with pytest.raises(Error, match=r"^handle: .*combine_send\(\) after dispatch_recv"):
            a2a.combine_send(x, handle)
        for message, change in (
            (r"^out_x: ", {"out_x": x.new_zeros(4, 64)}),
            (r"^out_x: .*experts, rows, hidden", {"out_x": x.new_zeros(5, 40, 128)}),
            (r"^out_x_scale: ", {"out_x_scale": x}),
            (r"^out_num_tokens: ", {"out_num_tokens": torch.zeros(1, dtype=torch.int32)}),
        ):
            with pytest.raises(Error, match=message):
                a2a.dispatch_recv(handle, **change)
        rows = a2a.dispatch_recv(handle)
        with pytest.raises(Error, match=r"^handle: .*dispatch_recv\(\) after dispatch_send"):
            a2a.dispatch_recv(handle)
        with pytest.raises(Error, match=r"^expert_y: "):
            a2a.combine_send(rows.x.double(), handle)
        with pytest.raises(Error, match=r"^expert_y: .*at most 256 bytes"):
            a2a.combine_send(rows.x.float(), handle)
        a2a.combine_send(rows.x, handle)
        with pytest.raises(Error, match=r"^accumulate: "):
            a2a.combine_recv(handle, accumulate=True)
        with pytest.raises(Error, match=r"^out_tokens: "):
            a2a.combine_recv(handle, x.float())
        a2a.combine_recv(handle)
        with pytest.raises(Error, match=r"^handle: got None"):
            a2a.combine_recv(None)
        exchange(rank, a2a, case, form)  # nothing of all that was sent
    with pytest.raises(Error, match="used after destroy"):
        a2a.dispatch_send(x, ids, weights)
    with pytest.raises(Error, match="used after destroy"):
        a2a.combine_recv(handle)


def test_what_is_wrong_is_named_and_nothing_is_sent() -> None:
    run_ranks(3, _refused, with_gpus=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_tokens", 0),
        ("num_experts", 2.5),
        ("hidden_dim", 3),
        ("num_experts_per_token", 0),
        ("out_dtype", torch.int32),
        ("in_dtype", "bfloat16"),
        ("hidden_dim_scale", 4),
        ("expert_padding", 0),
        ("max_recv_tokens", 0),
        ("max_private_tokens", 3),
        ("max_in_flight", 0),
        ("dp_size", 2),
        ("exact", 7),
    ],
)
def test_a_wrong_size_is_named(name: str, value: object) -> None:
    sizes = {"max_num_tokens": 8, "num_experts": 4, "hidden_dim": 64, "num_experts_per_token": 2}
    with pytest.raises(Error, match=f"^{name}: "):
        weft.P2PAllToAll(weft.Communicator(device="cpu"), **{**sizes, "device": "cpu", name: value})


def _others_sizes(rank: Rank) -> None:
    """Ranks that mean another exchange are told so, all of them."""
    case = MoeCase((6, 9, 4), 128, 3 if rank.rank else 2, 6)
    with pytest.raises(
        Error, match=r"^num_experts_per_token: got . on rank . and . on rank .*same on all ranks"
    ):
        make(rank, case, Form(), MOST)
    exchange(rank, make(rank, FAULTY, Form(), MOST), FAULTY, Form())


def test_ranks_that_disagree_are_told() -> None:
    run_ranks(3, _others_sizes, with_gpus=False)


def _weights_on_one_rank(rank: Rank) -> None:
    case, form, me = FAULTY, Form(), rank.rank
    with make(rank, case, form, MOST) as a2a:
        handle = a2a.dispatch_send(case.x(me), case.topk_idx(me), case.topk_weights(me))
        y = results_of(case, form, me, rank.size, a2a.dispatch_recv(handle))
        named = r"^topk_weights \(1: given\): rank . was given ., rank . ., allowed: the same on all ranks"
        with pytest.raises(Error, match=named):
            a2a.combine_send(y, handle, case.topk_weights(me) if me == 0 else None)
            a2a.combine_recv(handle)
        exchange(rank, a2a, case, form)


def test_weights_of_a_combine_on_some_ranks_are_named() -> None:
    run_ranks(3, _weights_on_one_rank, with_gpus=False)


def test_bench_has_phases_overlap_and_the_low_latency_calls_beside(tmp_path: Path) -> None:
    with nodes(1, "fabric:tcp"):
        pass  # skips where it is not usable
    sizes = (
        "--tokens 6 --hidden 128 --top-k 2 --experts 6 --iterations 2 --warmup 0 --dtype fp8 --overlap-us 50"
    )
    command = [*WEFT, "bench", "moe", "--mode", "p2p", "--device", "cpu", "--ranks", "3", *sizes.split()]
    nodes_of = ["--ranks-per-node", "2", "--provider", "tcp"]
    ran = run_program([*command, *nodes_of, "--json", "out.json"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = {row["call"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    phases = {f"p2p_{step}.{phase}" for step in ("dispatch", "combine") for phase in ("send", "receive")}
    beside = {"p2p_dispatch.beside", "p2p_combine.beside"}
    assert set(rows) == phases | beside | {"p2p_dispatch", "p2p_combine"}
    for call in ("p2p_dispatch", "p2p_combine"):
        row = rows[call]
        assert row["checked"]
        assert row["floor_us"] > row["network_us"] > 0
        assert row["hidden"] == 128
        assert "low_latency" in row["baselines"]
        overlap = rows[f"{call}.beside"]
        assert overlap["checked"]
        assert overlap["us"] > 0
        assert overlap["product_us"] > 0
        assert overlap["exposed_us"] == pytest.approx(overlap["us"] - overlap["product_us"], abs=0.2)
        assert overlap["hidden_share"] <= 2
    wrong = run_program([*command, "--overlap-us", "-1"], tmp_path)
    assert "overlap-us: got -1" in wrong.stderr


def test_the_example_overlaps_two_halves(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "p2p_overlap.py"
    sizes = ["--device", "cpu", "--tokens", "32", "--hidden", "64", "--trace", "trace.json"]
    ran = run_program([*torchrun(2), str(example), *sizes], tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "the same results" in ran.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {
        name: sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == name and "dur" in e)
        for name in ("attention", "dispatch in flight", "experts", "combine in flight")
    }
    for flight, work in (("dispatch in flight", "attention"), ("combine in flight", "experts")):
        (begin, end), (_, second) = spans[flight][0], spans[work]
        assert begin <= second[0]  # the other half computes
        assert second[1] <= end
