# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch and combine among ranks that cannot all map each other: one host, cut into nodes."""

from __future__ import annotations

import os
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
from low_latency_blocks import BLOCK_CASES
from moe_checks import barrier
from port_nodes import bench_moe, check_network_rows, nodes, tokens_of
from test_moe_ll import (
    MOST_TOKENS,
    WIDTHS,
    check_asynchronous,
    check_blocks_on_cpu,
    check_drawn_round_trip,
    check_ll_round_trip,
    check_logfmt,
    check_many_tokens,
    check_masks,
    check_other_width,
    check_outputs,
    check_repeats,
    check_statistics,
    check_two_outstanding,
    check_zero_copy,
    ll_buffer,
)

import weft
from weft.errors import Error
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank, RankPool, run_ranks
from weft.testing.round_trips import BF16, FORMATS, Format, expected_combined, outputs_of

# Ranks, of which so many make a node, and the network between nodes: pairs, loners, uneven nodes.
PLACES = ((4, 2, "fabric:tcp"), (5, 3, "fabric:shm"), (3, 1, "fabric:tcp"), (4, 1, "fabric:shm"))
LOST = 3
CASE = MoeCase((6, 9, 4, 12), 128, 3, 6, empty_share=0)


@pytest.fixture(scope="module", params=PLACES, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, ranks_per_node, provider = request.param
    with nodes(ranks_per_node, provider), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("hooks", [False, True])
def test_round_trip_in_every_format(pool: RankPool, form: Format, hooks: bool) -> None:
    case = MoeCase(tokens_of(pool.num_ranks, 9, 14, 1), hidden=512, top_k=3, num_experts=8)
    pool.run(check_ll_round_trip, case, form, MOST_TOKENS, hooks)


@pytest.mark.parametrize(("hidden", "options"), WIDTHS, ids=str)
def test_rows_may_come_back_in_another_width(pool: RankPool, hidden: int, options: dict[str, Any]) -> None:
    case = MoeCase(tokens_of(pool.num_ranks, 9, 14, 1), hidden=512, top_k=3, num_experts=8)
    pool.run(check_other_width, case, hidden, options)


@drawn(max_examples=8)
@given(data=st.data())
def test_round_trip_of_any_shape_matches_the_oracle(pool: RankPool, data: st.DataObject) -> None:
    check_drawn_round_trip(pool, data)


def check_exact(rank: Rank, case: MoeCase) -> None:
    """Every expert's row travels, and slots are summed in order."""
    buffer, topk_idx, weights = ll_buffer(rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    for _ in range(2):
        combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle, exact=True)
        assert torch.equal(combined, expected_combined(case, rank.rank, BF16).bfloat16())


@pytest.mark.parametrize(
    "check",
    [
        check_asynchronous,
        check_exact,
        check_logfmt,
        check_outputs,
        check_repeats,
        check_statistics,
        check_two_outstanding,
        check_zero_copy,
    ],
    ids=lambda check: check.__name__,
)
def test_whatever_a_call_can_do(pool: RankPool, check: Callable[..., None]) -> None:
    pool.run(check, MoeCase(tokens_of(pool.num_ranks, 6, 0, 16), hidden=1024, top_k=4, num_experts=8))


@pytest.mark.parametrize(("form", "hidden", "exponents"), BLOCK_CASES[1::2])
def test_rows_in_mxfp8_and_nvfp4(pool: RankPool, form: str, hidden: int, exponents: bool) -> None:
    case = MoeCase(tokens_of(pool.num_ranks, 9, 18, 0), hidden, 4, pool.num_ranks + 2)
    pool.run(check_blocks_on_cpu, case, form, exponents, False)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (0,)},
        {"tokens": (0, 16)},
        {"routing": "one expert", "empty_share": 0.0, "top_k": 1},
        {"routing": "none"},
        {"hidden": 7168, "top_k": 8, "num_experts": 16},
        {"num_experts": 3, "top_k": 2},  # ranks without an expert; pairs of counts that are half used
    ],
    ids=str,
)
def test_round_trip_at_the_edges(pool: RankPool, change: dict[str, Any]) -> None:
    tokens = tokens_of(pool.num_ranks, *change.pop("tokens", (5, 8, 3)))
    pool.run(
        check_ll_round_trip, MoeCase(tokens, **({"hidden": 64, "top_k": 4, "num_experts": 8} | change)), BF16
    )


def test_many_tokens_in_large_batches() -> None:
    case = MoeCase((1500, 1300, 700), 16, 2, 5)
    with nodes(2, "fabric:shm"), RankPool(3, with_gpus=False) as pool:
        pool.run(check_many_tokens, case, 1600)


def _in_too_small_a_buffer(rank: Rank, case: MoeCase) -> None:
    buffer = weft.Buffer(rank.group, 0, 1 << 20, low_latency_mode=True)
    with pytest.raises(Error, match="num_rdma_bytes"):
        buffer.low_latency_dispatch(
            case.x(rank.rank), case.topk_idx(rank.rank), 4096, case.num_experts, use_fp8=False
        )
    rank.kept["buffer"] = buffer
    check_ll_round_trip(rank, case, BF16)


def test_a_buffer_that_is_too_small_says_so() -> None:
    with nodes(1, "fabric:tcp"), RankPool(3, with_gpus=False) as pool:
        pool.run(_in_too_small_a_buffer, MoeCase((3, 2, 4), 64, 4, 6))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_masked_rank_is_left_out(ranks_per_node: int) -> None:
    with nodes(ranks_per_node, "fabric:tcp"), RankPool(3, with_gpus=False) as pool:
        pool.run(check_masks, MoeCase((6, 9, 4), 128, 3, 6))


def _buffer(rank: Rank, **options: Any) -> weft.Buffer:
    hint = weft.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, CASE.hidden, rank.size, CASE.num_experts)
    return weft.Buffer(rank.group, 0, hint, low_latency_mode=True, **options)


def _round_trip(buffer: weft.Buffer, rank: int) -> torch.Tensor:
    topk_idx, weights = CASE.topk_idx(rank), CASE.topk_weights(rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        CASE.x(rank), topk_idx, MOST_TOKENS, CASE.num_experts, use_fp8=False
    )
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle)
    return combined


def _until_one_dies(rank: Rank) -> tuple[str, float]:
    buffer = _buffer(rank, timeout_s=100.0)
    _round_trip(buffer, rank.rank)
    barrier(rank)
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        for _ in range(3):
            _round_trip(buffer, rank.rank)
    return str(raised.value), time.monotonic() - began


def test_a_killed_rank_is_named_before_the_deadline() -> None:
    with nodes(2, "fabric:tcp", WEFT_PEER_DEAD_S="3", WEFT_HEARTBEAT_S="0.5"):
        results = run_ranks(4, _until_one_dies, lost={LOST}, with_gpus=False)
    for message, waited_s in results[:LOST]:
        assert f"rank {LOST}" in message, message
        assert waited_s < 60, message


def _without_the_dead(rank: Rank) -> None:
    """One rank dies; the others mask it at the deadline and go on among themselves."""
    buffer = _buffer(rank, timeout_s=3.0, enable_shrink=True)
    _round_trip(buffer, rank.rank)
    barrier(rank)
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    masked = torch.zeros(rank.size, dtype=torch.int32)
    for _ in range(4):
        combined = _round_trip(buffer, rank.rank)
    buffer.low_latency_query_mask_buffer(masked)
    assert masked.tolist() == [0, 0, 0, 1]
    lost = oracle.local_experts(CASE.num_experts, rank.size, LOST)
    topk_idx = CASE.topk_idx(rank.rank)
    kept = topk_idx.masked_fill((topk_idx >= lost.start) & (topk_idx < lost.stop), -1)
    rows = (CASE.x(rank.rank).float() * 0.25).bfloat16().unsqueeze(1).expand(-1, CASE.top_k, -1)
    assert calc_diff(combined, oracle.ll_combine(rows, kept, CASE.topk_weights(rank.rank))) < 1e-5


def test_a_killed_rank_is_masked_where_that_is_allowed() -> None:
    with nodes(2, "fabric:tcp", WEFT_PEER_DEAD_S="3", WEFT_HEARTBEAT_S="0.5"):
        run_ranks(4, _without_the_dead, lost={LOST}, with_gpus=False)


def _fails_alike(rank: Rank) -> None:
    """A rank that means another call is told of on every rank, and the next call is a good one."""
    buffer = _buffer(rank, timeout_s=20.0)
    most = MOST_TOKENS - 1 if rank.rank == 1 else MOST_TOKENS
    with pytest.raises(Error, match="num_max_dispatch_tokens_per_rank"):
        buffer.low_latency_dispatch(CASE.x(rank.rank), CASE.topk_idx(rank.rank), most, CASE.num_experts)
    combined = _round_trip(buffer, rank.rank)
    assert calc_diff(combined, expected_combined(CASE, rank.rank, BF16)) < 1e-5


def test_ranks_that_disagree_are_told_and_go_on() -> None:
    with nodes(2, "fabric:shm"):
        run_ranks(4, _fails_alike, with_gpus=False)


def test_bench_moe_has_floors_of_memory_and_network(tmp_path: Path) -> None:
    ran, rows = bench_moe("ll", 6, 64, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [row["call"] for row in rows] == ["ll_dispatch", "ll_combine"]
    check_network_rows(rows)
    wrong, _ = bench_moe("ll", 6, 64, tmp_path, ranks_per_node=3)
    assert "ranks-per-node: got 3, allowed: 1 to 2" in wrong.stderr
