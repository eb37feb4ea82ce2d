# SPDX-License-Identifier: Apache-2.0
"""High-throughput dispatch and combine among ranks that cannot all map each other: one host, cut into nodes."""

from __future__ import annotations

import itertools
import json
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
from moe_checks import (
    WINDOW_BYTES,
    barrier,
    cached_buffer,
    check_cached,
    check_case,
    check_combined,
    check_float32_rows,
    check_no_top_k,
    check_repeats,
    check_round_trip,
    check_scales,
    check_worst_tokens,
    dispatch,
    expert_output,
)
from port_nodes import bench_moe, check_network_rows, network_bytes, nodes
from test_moe_ht import (
    cases,
    check_aliases,
    check_alignment,
    check_another_buffer,
    check_asynchronous,
    check_biases,
    check_copied_handle,
    check_different_handles,
    check_disagreements,
    check_id_mismatch,
    check_int32_routes,
    check_nvfp4,
    check_outstanding,
    check_saved_handle,
    check_several_buffers,
    check_too_few_worst_tokens,
    check_worst_of_another_buffer,
    check_worst_tokens_differ,
    check_worst_tokens_grow,
)
from test_ports_experts import PLACES

import deep_ep
import weft
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from weft import cli
from weft.errors import Error
from weft.moe.autograd import combine as combine_with_gradient
from weft.moe.autograd import dispatch as dispatch_with_gradient
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool, run_ranks

LOST = 3
LOST_CASE = MoeCase((6, 9, 4, 12), 128, 3, 6, empty_share=0)


@pytest.fixture(scope="module", params=PLACES, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, ranks_per_node, provider = request.param
    with nodes(ranks_per_node, provider), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


def _case(pool: RankPool, *tokens: int, hidden: int = 64, top_k: int = 3, **more: Any) -> MoeCase:
    of_ranks = tuple(tokens[rank % len(tokens)] for rank in range(pool.num_ranks))
    return MoeCase(of_ranks, hidden, top_k, **({"num_experts": 8} | more))


@drawn(max_examples=10)
@given(data=st.data())
def test_round_trip_of_any_shape_matches_the_oracle(pool: RankPool, data: st.DataObject) -> None:
    check_case(pool, data.draw(cases(pool.num_ranks)))


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        ((0,), {}),
        ((0, 0, 7), {}),
        ((9, 0), {"routing": "one expert", "empty_share": 0.0, "top_k": 1}),
        ((5, 8, 3), {"routing": "none"}),
        ((3, 4), {"routing": "any", "top_k": 12}),
        ((100, 230, 60), {"hidden": 7168, "top_k": 8, "num_experts": 256}),
        ((4, 3), {"hidden": 16384, "top_k": 2, "num_experts": 3}),  # ranks, and a node, without an expert
        (
            (700, 40),
            {"hidden": 2048, "top_k": 2, "routing": "one expert"},
        ),  # many laps of one rail peer's rings
    ],
    ids=str,
)
def test_round_trip_at_the_edges(pool: RankPool, tokens: tuple[int, ...], more: dict[str, Any]) -> None:
    pool.run(check_round_trip, _case(pool, *tokens, **more))


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (check_aliases, ()),
        (check_alignment, (4,)),
        (check_another_buffer, ()),
        (check_worst_of_another_buffer, ()),
        (check_copied_handle, ()),
        (check_asynchronous, (True, False)),
        (check_asynchronous, (False, True)),
        (check_biases, (0,)),
        (check_biases, (1,)),
        (check_cached, ()),
        (check_different_handles, ()),
        (check_disagreements, ()),
        (check_float32_rows, ()),
        (check_id_mismatch, ()),
        (check_int32_routes, ()),
        (check_no_top_k, ()),
        (check_nvfp4, (True, False)),
        (check_repeats, ()),
        (check_saved_handle, (False,)),
        (check_saved_handle, (True,)),
        (check_scales, (3, torch.int32, True)),
        (check_scales, (56, torch.float32, False)),
        (check_several_buffers, ()),
        (check_worst_tokens, (1000,)),
        (check_worst_tokens_differ, ()),
        (check_worst_tokens_grow, ()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_whatever_a_call_can_do(
    pool: RankPool, check: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    pool.run(check, _case(pool, 6, 9, 4), *arguments)


def test_two_dispatches_may_be_outstanding(pool: RankPool) -> None:
    pool.run(check_outstanding, _case(pool, 6, 9), _case(pool, 20, 3, hidden=128, top_k=2, seed=5))


def test_more_rows_than_worst_tokens_is_reported(pool: RankPool) -> None:
    pool.run(check_too_few_worst_tokens, _case(pool, 9, num_experts=2 * pool.num_ranks, empty_share=0.0))


def _check_groups_and_handle(rank: Rank, case: MoeCase, ranks_per_node: int) -> None:
    buffer = cached_buffer(rank)
    assert buffer.runtime is not None
    node_of = [r // ranks_per_node for r in range(rank.size)]
    num_nodes = node_of[-1] + 1
    assert buffer.runtime.get_num_rdma_ranks() == num_nodes
    assert buffer.runtime.get_rdma_rank() == node_of[rank.rank]
    assert buffer.runtime.is_internode_available()
    in_rank = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2]
    in_node = torch.stack(
        [in_rank[:, n * ranks_per_node : (n + 1) * ranks_per_node].any(dim=1) for n in range(num_nodes)], 1
    )
    per_node = buffer.get_dispatch_layout(case.topk_idx(rank.rank), case.num_experts)[1]
    assert per_node is not None
    assert per_node.dtype == torch.int32
    assert per_node.tolist() == in_node.sum(dim=0).tolist()
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert handle[-4].tolist() == rows.per_source.cumsum(0).tolist()
    of_deep_ep = handle[-10:]
    assert [tuple(entry.shape) for entry in of_deep_ep[:7]] == [
        tuple(in_rank.shape),
        (num_nodes, 1),
        (rank.size, 1),
        (num_nodes, 1),
        (num_nodes,),
        (rank.size, 1),
        (rank.size,),
    ]
    assert torch.equal(of_deep_ep[0], in_rank)
    assert of_deep_ep[1].flatten().tolist() == per_node.tolist()
    assert of_deep_ep[7].view(torch.int32).flatten().tolist() == rows.src_token.tolist()
    assert torch.equal(of_deep_ep[8] >= 0, in_node)
    assert len(recv_x) == handle[-4][-1]


def test_groups_and_handles_are_those_of_deepep_across_nodes() -> None:
    for num_ranks, ranks_per_node, provider in PLACES[:2]:
        with nodes(ranks_per_node, provider), RankPool(num_ranks, with_gpus=False) as pool:
            pool.run(_check_groups_and_handle, _case(pool, 7, 11, 2), ranks_per_node)


def _check_gradients(rank: Rank, case: MoeCase) -> None:
    buffer = cached_buffer(rank)
    x = case.x(rank.rank).requires_grad_()
    weights = case.topk_weights(rank.rank).requires_grad_()
    arrived = dispatch_with_gradient(buffer, x, case.topk_idx(rank.rank), weights, case.num_experts)
    combined = combine_with_gradient(buffer, arrived.x * 2, arrived.handle)
    (combined.float().sum() + arrived.topk_weights[arrived.topk_idx >= 0].sum()).backward()
    copies = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2].sum(1, keepdim=True)
    assert x.grad is not None
    assert torch.equal(x.grad, (2.0 * copies).bfloat16().expand_as(x))
    assert weights.grad is not None
    assert torch.equal(weights.grad, (case.topk_idx(rank.rank) >= 0).float())


def test_gradients_flow_back_along_the_routes(pool: RankPool) -> None:
    pool.run(_check_gradients, _case(pool, 6, 9, 4))


def _check_network_bytes(rank: Rank, case: MoeCase, ranks_per_node: int) -> list[int]:
    """Each way, a row crosses the network once per (token, other node). Return the bytes of all ranks each way."""
    buffer = cached_buffer(rank)
    check_round_trip(rank, case)  # growth and first rendezvous
    in_rank = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2]
    nodes_of = in_rank.unflatten(1, (-1, ranks_per_node)).any(dim=2)
    nodes_of[:, rank.rank // ranks_per_node] = False
    sent_rows = int(nodes_of.sum())
    rows_of_ranks: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(rows_of_ranks, sent_rows, group=rank.group)
    barrier(rank)
    before = network_bytes()
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, case, rank.rank)
    middle = network_bytes()
    buffer.combine(expert_output(recv_x, rank.rank), handle, topk_weights=recv_weights)
    buffer.runtime.communicator.barrier()
    counted: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(
        counted, (middle - before, network_bytes() - middle), group=rank.group
    )
    needed = sum(rows_of_ranks) * case.hidden * 2
    assert needed > 8 << 20
    both = [sum(of_rank[way] for of_rank in counted) for way in (0, 1)]
    for way, crossed in enumerate(both):
        assert needed <= crossed <= 1.03 * needed, (way, needed, crossed, crossed / needed)
    return both


def test_a_row_crosses_the_network_once_for_each_node() -> None:
    for provider in ("fabric:tcp", "fabric:shm"):
        with nodes(2, provider), RankPool(4, with_gpus=False) as pool:
            pool.run(_check_network_bytes, MoeCase((400, 300, 500, 350), 7168, 8, 32), 2)


def test_a_plan_says_what_the_network_carries(capsys: pytest.CaptureFixture[str]) -> None:
    case = MoeCase(
        (400, 300, 500, 350), 7168, 1, 32, empty_share=0.0
    )  # half of the tokens stay on their node
    with nodes(2, "fabric:shm"), RankPool(4, with_gpus=False) as pool:
        counted = pool.run(_check_network_bytes, case, 2)[0]
    tokens = sum(case.tokens)  # as if one rank had them all
    asked = f"plan --json --mode ht --ranks-per-node 2 --top-k 1 --experts 32 --tokens {tokens}"
    assert cli.main(asked.split()) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    for crossed, call in zip(counted, ("dispatch", "combine"), strict=True):
        assert crossed == pytest.approx(plan[call]["network_bytes"], rel=0.06)


def _like_deep_eps_own_test(rank: Rank) -> None:
    """What DeepEP's test across nodes asks of a buffer, through the drop-in: every form, cached too, and biases."""
    hidden, top_k, num_tokens, num_experts = 512, 4, 60, 16
    case = MoeCase((num_tokens,) * rank.size, hidden, top_k, num_experts, empty_share=0)
    topk_idx, me = case.topk_idx(rank.rank).to(deep_ep.topk_idx_t), rank.rank
    random_x = case.x(me)
    of_rank = torch.full_like(random_x, me)
    per_token_scales = per_token_cast_to_fp8(of_rank)
    quantized = (per_token_scales[0], per_token_scales[1].T.contiguous().T)
    buffer = deep_ep.Buffer(rank.group, int(2e7), int(1e7), low_latency_mode=False, num_qps_per_rank=24)
    config = deep_ep.Config(24, 8, 512, 16, 128)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    assert per_node is not None
    assert per_node.numel() == rank.size // 2
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    weights = case.topk_weights(me)
    rows = oracle.ht_dispatch(case.routes(), num_experts, me)
    for previous, is_async, x, with_top_k in itertools.product(
        (False, True), (False, True), (random_x, of_rank, quantized), (False, True)
    ):
        options: dict[str, Any] = {"config": config, "async_finish": is_async}
        if previous:
            options["previous_event"] = buffer.capture()
        routed = {"topk_idx": topk_idx, "topk_weights": weights} if with_top_k else {}
        recv, recv_idx, recv_weights, counts, handle, event = buffer.internode_dispatch(
            x=x, **layout, **routed, **options
        )
        if is_async:
            event.current_stream_wait()
        recv_x = per_token_cast_back(*recv) if isinstance(recv, tuple) else recv
        ends = handle[-4].tolist()
        assert ends == rows.per_source.cumsum(0).tolist()
        assert counts == rows.per_expert
        if x is not random_x:
            for source, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
                assert bool((recv_x[begin:end].int() == source).all())
        if with_top_k:
            assert torch.equal(recv_idx, rows.topk_idx)
        else:
            again, *none, event = buffer.internode_dispatch(x=x, handle=handle, **options)
            if is_async:
                event.current_stream_wait()
            assert none == [None] * 4
            pairs = zip(again, recv, strict=True) if isinstance(recv, tuple) else [(again, recv)]
            assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
        biases = (torch.ones_like(random_x), case.bias(me, 1))
        combined, combined_weights, event = buffer.internode_combine(
            x=recv_x, bias=biases, handle=handle, topk_weights=recv_weights, **options
        )
        if is_async:
            event.current_stream_wait()
        sums = combined.float() - biases[0].float() - biases[1].float()
        expected = random_x if x is random_x else of_rank
        assert calc_diff(sums / in_rank.sum(dim=1, keepdim=True), expected) < 5e-4
        if with_top_k:
            assert calc_diff(combined_weights, weights) < 1e-9


def test_what_deep_eps_own_test_across_nodes_asks() -> None:
    with nodes(2, "fabric:tcp"):
        run_ranks(4, _like_deep_eps_own_test, with_gpus=False)


def test_bench_moe_has_floors_of_memory_and_network(tmp_path: Path) -> None:
    ran, rows = bench_moe("ht", 60, 256, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [row["call"] for row in rows] == ["ht_layout", "ht_dispatch", "ht_combine"]
    check_network_rows(rows[1:])


def _too_wide(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    wide = MoeCase((2,) * rank.size, 1 << 18, 1, 4)
    with pytest.raises(
        Error, match=r"x: got rows of 524288 bytes, allowed: up to \d+ among ranks that do not all map"
    ):
        dispatch(buffer, wide, rank.rank)
    check_round_trip(rank, MoeCase((5,) * rank.size, 64, 3, 8))


def test_rows_that_fit_no_slot_are_refused() -> None:
    with nodes(1, "fabric:tcp"), RankPool(2, with_gpus=False) as pool:
        pool.run(_too_wide)


# ---- losses

_KILLED = {"WEFT_PEER_DEAD_S": "3", "WEFT_HEARTBEAT_S": "0.5"}


def _until_one_dies(rank: Rank, dies_in_combine: bool, lost: frozenset[int]) -> tuple[str, float]:
    buffer = weft.Buffer(rank.group, WINDOW_BYTES, timeout_s=100.0)
    rank.kept["buffer"] = buffer
    check_round_trip(rank, LOST_CASE)
    if dies_in_combine:
        recv_x, _, _, _, handle, _ = dispatch(buffer, LOST_CASE, rank.rank)
    barrier(rank)
    if rank.rank in lost:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        if dies_in_combine:
            buffer.combine(expert_output(recv_x, rank.rank), handle)
        for _ in range(3):
            dispatch(buffer, LOST_CASE, rank.rank)
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("dies_in_combine", [False, True])
@pytest.mark.parametrize("lost", [frozenset({LOST}), frozenset({2, 3})], ids=["rank", "node"])
def test_who_dies_is_named_before_the_deadline(lost: frozenset[int], dies_in_combine: bool) -> None:
    with nodes(2, "fabric:tcp", **_KILLED):
        results = run_ranks(4, _until_one_dies, dies_in_combine, lost, lost=set(lost), with_gpus=False)
    for rank in set(range(4)) - lost:
        message, waited_s = results[rank]
        assert any(f"rank {gone}" in message for gone in lost), message
        assert waited_s < 60, message


def _one_is_late(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    for turn in range(4):
        if rank.rank == turn:
            time.sleep(1.5)
        recv_x, _, _, _, handle, _ = dispatch(buffer, LOST_CASE, rank.rank)
        if rank.rank == 3 - turn:
            time.sleep(1.5)
        check_combined(LOST_CASE, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])


def test_a_rank_that_is_late_is_waited_for() -> None:
    with nodes(2, "fabric:tcp"):
        run_ranks(4, _one_is_late, with_gpus=False)


def _one_stays_away(rank: Rank) -> str:
    buffer = weft.Buffer(rank.group, WINDOW_BYTES, timeout_s=6.0)
    rank.kept["buffer"] = buffer
    check_round_trip(rank, LOST_CASE)
    barrier(rank)
    story = f"rank {LOST}"
    if rank.rank != LOST:
        with pytest.raises(weft.PeerLost) as raised:
            dispatch(buffer, LOST_CASE, rank.rank)
        with pytest.raises(weft.PeerLost):
            dispatch(buffer, LOST_CASE, rank.rank)
        story = str(raised.value)
    rank.meet()  # nobody leaves while another still waits
    return story


def test_a_silent_rank_is_named_at_the_deadline() -> None:
    with nodes(2, "fabric:shm"):
        results = run_ranks(4, _one_stays_away, with_gpus=False)
    assert all(f"rank {LOST}" in message for message in results), results


def _other_nodes(rank: Rank) -> str:
    os.environ["WEFT_RANKS_PER_NODE"] = "1" if rank.rank == 1 else "2"
    weft._core.config_reload()
    with pytest.raises(Error) as raised:
        weft.Buffer(rank.group, WINDOW_BYTES, timeout_s=10.0)
    return str(raised.value)


def test_ranks_per_node_that_differ_are_named() -> None:
    with nodes(2, "fabric:tcp"):
        for message in run_ranks(4, _other_nodes, with_gpus=False):
            assert "WEFT_RANKS_PER_NODE" in message, message
