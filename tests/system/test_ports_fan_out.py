# SPDX-License-Identifier: Apache-2.0
"""Low-latency tokens that cross the network once for each node, beside those that cross once for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from moe_checks import barrier
from port_nodes import _settings, network_bytes, nodes, sum_over, tokens_of  # noqa: F401
from test_moe_ll import (
    MOST_TOKENS,
    check_drawn_round_trip,
    check_ll_round_trip,
    check_masks,
    check_two_outstanding,
    ll_buffer,
)

import weft
from weft import cli
from weft.errors import Error
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool, run_ranks
from weft.testing.round_trips import BF16, FORMATS, Format, outputs_of

# Ranks, of which so many make a node, and the network: pairs, uneven nodes, a node of three beside one of one.
PLACES = ((4, 2, "fabric:tcp"), (5, 3, "fabric:shm"), (4, 3, "fabric:tcp"))


@pytest.fixture(
    scope="module", params=[(*place, way) for place in PLACES for way in ("node", "direct")], ids=str
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, ranks_per_node, provider, way = request.param
    if way == "direct" and request.param[:3] != PLACES[0] and not request.config.getoption("--thorough"):
        pytest.skip(
            "--thorough: once per rank over more nodes; test_ports_experts.py has what the planner takes"
        )
    with (
        nodes(ranks_per_node, provider, WEFT_LOW_LATENCY_FANOUT=way),
        RankPool(num_ranks, with_gpus=False) as ranks,
    ):
        yield ranks


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("hooks", [False, True])
def test_round_trip_in_every_format(pool: RankPool, form: Format, hooks: bool) -> None:
    case = MoeCase(tokens_of(pool.num_ranks, 9, 0, 16), hidden=512, top_k=3, num_experts=8)
    pool.run(check_ll_round_trip, case, form, MOST_TOKENS, hooks)


@drawn(max_examples=8)
@given(data=st.data())
def test_round_trip_of_any_shape_matches_the_oracle(pool: RankPool, data: st.DataObject) -> None:
    check_drawn_round_trip(pool, data)


def test_two_calls_may_be_outstanding(pool: RankPool) -> None:
    pool.run(check_two_outstanding, MoeCase(tokens_of(pool.num_ranks, 6, 0, 16), 1024, 4, 8))


def _receives_in_other_orders(rank: Rank, case: MoeCase) -> None:
    """Hooks of two dispatches run in one order on even ranks, in the other on odd ones: nobody waits for another's."""
    buffer, idx = ll_buffer(rank), case.topk_idx(rank.rank)
    for _ in range(3):
        sent = [
            buffer.low_latency_dispatch(
                case.x(rank.rank) * scale,
                idx,
                MOST_TOKENS,
                case.num_experts,
                use_fp8=False,
                return_recv_hook=True,
            )
            for scale in (1, 2)
        ]
        for at in (0, 1) if rank.rank % 2 else (1, 0):
            hook = sent[at][4]
            assert hook is not None
            hook()
        for scale, (recv, counts, _, _, _) in zip((1, 2), sent, strict=True):
            wanted = oracle.ll_dispatch(case.routes(), case.num_experts, rank.rank)
            for expert, of_sources in enumerate(wanted):
                rows = torch.cat([x[tokens] for x, tokens in zip(case.all_x(), of_sources, strict=True)])
                assert int(counts[expert]) == len(rows)
                assert torch.equal(recv[expert, : len(rows)], rows * scale)


def _bytes_of_calls(rank: Rank, case: MoeCase, ranks_per_node: int, once_per_node: bool) -> tuple[int, int]:
    """A token, and what comes back, crosses once for each other node that has an expert of it, or for each rank there.
    Return the bytes of a dispatch and of a combine."""
    hint = weft.Buffer.get_low_latency_rdma_size_hint(128, case.hidden, rank.size, case.num_experts)
    buffer = weft.Buffer(rank.group, 0, hint, low_latency_mode=True)
    x, idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    goes = oracle.layout(idx, case.num_experts, rank.size)[2].clone()
    own = rank.rank // ranks_per_node
    goes[:, own * ranks_per_node : (own + 1) * ranks_per_node] = False
    if once_per_node:
        goes = torch.stack([part.any(dim=1) for part in goes.split(ranks_per_node, dim=1)], dim=1)
    for _ in range(2):
        barrier(rank)
        before = network_bytes()
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 128, case.num_experts, use_fp8=False)
        barrier(rank)
        middle = network_bytes()
        buffer.low_latency_combine(outputs_of(recv), idx, weights, handle)
        barrier(rank)
        after = network_bytes()
    needed = sum_over(rank, int(goes.sum())) * case.hidden * 2
    assert needed > 4 << 20
    both = sum_over(rank, middle - before), sum_over(rank, after - middle)
    for crossed in both:
        assert needed <= crossed <= 1.03 * needed, (needed, crossed, crossed / needed)
    return both


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_a_token_crosses_the_network_once_for_each_node_out_and_back(place: tuple[int, int, str]) -> None:
    num_ranks, ranks_per_node, provider = place
    case = MoeCase(tokens_of(num_ranks, 100, 128, 70), 7168, 8, 40, empty_share=0.1)
    crossed = {}
    for way in ("node", "direct"):
        with (
            nodes(ranks_per_node, provider, WEFT_LOW_LATENCY_FANOUT=way),
            RankPool(num_ranks, with_gpus=False) as ranks,
        ):
            crossed[way] = ranks.run(_bytes_of_calls, case, ranks_per_node, way == "node")[0]
    for node, direct in zip(crossed["node"], crossed["direct"], strict=True):
        assert node < 0.75 * direct


def test_a_plan_says_what_the_network_carries(capsys: pytest.CaptureFixture[str]) -> None:
    case = MoeCase((128,) * 4, 7168, 8, 40, empty_share=0.0)
    asked = "plan --json --mode ll --tokens 128 --hidden 7168 --top-k 8 --experts 40 --ranks-per-node 2"
    assert cli.main(asked.split()) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    for way, name in (("node", "per_node"), ("direct", "per_rank")):
        with (
            nodes(2, "fabric:shm", WEFT_LOW_LATENCY_FANOUT=way),
            RankPool(4, with_gpus=False) as ranks,
        ):
            counted = ranks.run(_bytes_of_calls, case, 2, way == "node")[0]
        for crossed, call in zip(counted, ("dispatch", "combine"), strict=True):
            assert crossed / 4 == pytest.approx(plan[call][name]["network_bytes"], rel=0.03)


def _says(rank: Rank, shrinks: bool) -> tuple[bool, bool, bool]:
    hint = weft.Buffer.get_low_latency_rdma_size_hint(64, 4096, rank.size, 16)
    buffer = weft.Buffer(rank.group, 0, hint, low_latency_mode=True, enable_shrink=shrinks)
    engine = buffer.runtime
    assert engine is not None
    mode = engine.low_latency
    return (
        mode.sends_once_per_domain(64, 8, 16, 8192, 0),
        mode.replies_once_per_domain(64, 8, 16, 8192),
        mode.replies_once_per_domain(4096, 8, 16, 8192),  # no room to gather so many
    )


@pytest.mark.parametrize(
    ("way", "ranks_per_node", "shrinks", "expected"),
    [
        ("auto", 2, False, True),
        ("auto", 1, False, False),
        ("node", 1, False, False),  # nobody to share with
        ("node", 2, True, False),  # a lost rail peer would take the tokens of ranks that live
        ("direct", 2, False, False),
    ],
)
def test_what_is_chosen(way: str, ranks_per_node: int, shrinks: bool, expected: bool) -> None:
    with nodes(ranks_per_node, "fabric:tcp", WEFT_LOW_LATENCY_FANOUT=way):
        assert run_ranks(4, _says, shrinks, with_gpus=False) == [(expected, expected, False)] * 4


def test_masks_go_with_once_per_rank() -> None:
    with nodes(2, "fabric:shm", WEFT_LOW_LATENCY_FANOUT="node"), RankPool(3, with_gpus=False) as ranks:
        ranks.run(check_masks, MoeCase((6, 9, 4), 128, 3, 6))


def _one_shrinks(rank: Rank) -> None:
    hint = weft.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, 128, rank.size, 8)
    buffer = weft.Buffer(
        rank.group, 0, hint, low_latency_mode=True, enable_shrink=rank.rank == 1, timeout_s=20.0
    )
    case = MoeCase((4, 4, 4, 4), 128, 2, 8)
    with pytest.raises(Error, match="enable_shrink"):
        buffer.low_latency_dispatch(case.x(rank.rank), case.topk_idx(rank.rank), MOST_TOKENS, 8)


def test_ranks_that_disagree_are_told() -> None:
    with nodes(2, "fabric:shm", WEFT_LOW_LATENCY_FANOUT="node"):
        run_ranks(4, _one_shrinks, with_gpus=False)


def test_receives_may_run_in_different_orders(pool: RankPool) -> None:
    case = MoeCase(tokens_of(pool.num_ranks, 5, 12, 0), 256, 3, 8)
    pool.run(_receives_in_other_orders, case)


def _leaves_at_once(rank: Rank) -> None:
    """A rank that has what it waited for may be gone before others of its node have read in its window."""
    case = MoeCase((16, 9, 16, 3), 512, 4, 8, seed=rank.size)
    for _ in range(3):
        with weft.Buffer(
            rank.group,
            0,
            weft.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, 512, rank.size, 8),
            low_latency_mode=True,
            explicitly_destroy=True,
        ) as buffer:
            rank.kept["buffer"] = buffer
            check_ll_round_trip(rank, case, BF16)
        del rank.kept["buffer"]


def test_buffers_may_go_at_once() -> None:
    with nodes(2, "fabric:tcp", WEFT_LOW_LATENCY_FANOUT="node"):
        run_ranks(4, _leaves_at_once, with_gpus=False)
