# SPDX-License-Identifier: Apache-2.0
"""High-throughput dispatch and combine against the oracle, over shapes, options and bad arguments."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from moe_checks import (
    WINDOW_BYTES,
    FakeMpi,
    barrier,
    cached_buffer,
    check_cached,
    check_case,
    check_combined,
    check_float32_rows,
    check_layout,
    check_no_top_k,
    check_received,
    check_repeats,
    check_round_trip,
    check_scales,
    check_worst_tokens,
    dispatch,
    expert_output,
)
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool, run_ranks

RANK_COUNTS = (1, 2, 3, 5, 6, 7, 17)
SMALL = MoeCase(tokens=(6, 9), hidden=64, top_k=3, num_experts=8)


@pytest.fixture(scope="module", params=RANK_COUNTS)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, with_gpus=False) as ranks:
        yield ranks


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> MoeCase:
    most_tokens = 40 if num_ranks <= 7 else 8
    return MoeCase(
        tokens=tuple(draw(st.lists(st.integers(0, most_tokens), min_size=num_ranks, max_size=num_ranks))),
        hidden=8 * draw(st.integers(1, 40)),
        top_k=draw(st.integers(1, 32)),
        num_experts=draw(st.integers(1, 80)),
        routing=draw(st.sampled_from(("distinct", "any", "one expert", "none"))),
        empty_share=draw(st.sampled_from((0.0, 0.3, 0.9))),
        seed=draw(st.integers(0, 1000)),
    )


@drawn(max_examples=12)
@given(data=st.data())
def test_round_trip_of_any_shape_matches_the_oracle(pool: RankPool, data: st.DataObject) -> None:
    check_case(pool, data.draw(cases(pool.num_ranks)))


@pytest.mark.parametrize(
    "case",
    [
        MoeCase((0, 0), 64, 2, 4),
        MoeCase((5, 0), 64, 2, 4),
        MoeCase((1, 1), 8, 1, 1),
        MoeCase((4, 7), 64, 32, 40),
        MoeCase((3, 3), 64, 4, 2, routing="any"),
        MoeCase((40, 50), 64, 4, 8, routing="one expert", empty_share=0),
        MoeCase((4, 4), 64, 4, 8, routing="none"),
        MoeCase((100, 130), 7168, 8, 256),
        MoeCase((3, 4), 16384, 2, 6),
    ],
    ids=str,
)
def test_round_trip_at_the_edges(pair: RankPool, case: MoeCase) -> None:
    pair.run(check_round_trip, case)


@pytest.mark.parametrize("words", [1, 3, 56])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("column_major", [False, True])
def test_scales_travel_with_rows_in_any_stride(
    pair: RankPool, words: int, dtype: torch.dtype, column_major: bool
) -> None:
    pair.run(check_scales, SMALL, words, dtype, column_major)


def check_nvfp4(rank: Rank, case: MoeCase, per_row: bool, column_major: bool) -> None:
    """x is (eight 4-bit channels an int32, four scales an int32, the float32 that scales are relative to)."""
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    packed = [x.view(torch.int32)[:, : case.hidden // 8].contiguous() for x in case.all_x()]
    scales = [case.scales(r, case.hidden // 64).view(torch.int32) for r in range(rank.size)]
    factors = [case.scales(r, 1) if per_row else torch.tensor([2.5 + r]) for r in range(rank.size)]
    mine = scales[rank.rank].T.contiguous().T if column_major else scales[rank.rank]
    x = (packed[rank.rank], mine, factors[rank.rank])
    buffer = cached_buffer(rank)
    (recv_x, recv_scales, recv_factors), idx, _, _, handle, _ = dispatch(buffer, case, rank.rank, x)
    assert torch.equal(recv_x, rows.take(packed))
    assert torch.equal(recv_scales, rows.take(scales))
    assert torch.equal(idx, rows.topk_idx)
    tokens = [len(x) for x in packed]
    of_rows = [factor.view(-1, 1).expand(n, 1) for factor, n in zip(factors, tokens, strict=True)]
    assert recv_factors.dtype == torch.float32
    assert torch.equal(recv_factors, rows.take(of_rows))
    again = buffer.dispatch(x, handle=handle)[0]
    assert all(torch.equal(a, b) for a, b in zip(again, (recv_x, recv_scales, recv_factors), strict=True))
    y = expert_output(rows.take(case.all_x()), rank.rank)
    check_combined(case, rank.rank, buffer.combine(y, handle)[0])
    for wrong, argument in (
        ((packed[rank.rank].float(), mine, factors[rank.rank]), "x"),
        ((packed[rank.rank][:, :-4].contiguous(), mine, factors[rank.rank]), "x"),
        ((packed[rank.rank], mine[:, :-1], factors[rank.rank]), r"x \(scales\)"),
        ((packed[rank.rank], mine, torch.ones(3)), r"x \(global scale\)"),
        ((packed[rank.rank], mine, 1.0), r"x \(global scale\)"),
    ):
        with pytest.raises(weft.Error, match=f"^{argument}: got"):
            buffer.dispatch(wrong, handle=handle)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_nvfp4_rows_bring_both_kinds_of_scales(pair: RankPool, per_row: bool, column_major: bool) -> None:
    pair.run(check_nvfp4, MoeCase(tokens=(6, 9), hidden=192, top_k=3, num_experts=8), per_row, column_major)


def check_int32_routes(rank: Rank, case: MoeCase) -> None:
    buffer, topk_idx = cached_buffer(rank), case.topk_idx(rank.rank).int()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    recv_x, recv_idx, recv_weights, counts, _, _ = buffer.dispatch(
        case.x(rank.rank),
        None,
        per_rank,
        None,
        in_rank,
        per_expert,
        topk_idx,
        case.topk_weights(rank.rank),
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    check_received(case, rank.rank, rows, recv_x, recv_idx, recv_weights)
    assert recv_idx.dtype == torch.int32
    assert counts == rows.per_expert


def test_routes_of_int32_come_back_as_int32(pair: RankPool) -> None:
    pair.run(check_int32_routes, SMALL)


def check_alignment(rank: Rank, case: MoeCase, alignment: int) -> None:
    counts = dispatch(cached_buffer(rank), case, rank.rank, expert_alignment=alignment)[3]
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert counts == [-(-n // alignment) * alignment for n in rows.per_expert]
    assert all(type(count) is int for count in counts)


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_expert_alignment_rounds_the_counts(pair: RankPool, alignment: int) -> None:
    pair.run(check_alignment, SMALL, alignment)


@pytest.mark.parametrize("num_worst_tokens", [15, 16, 1000])
def test_worst_tokens_gives_a_fixed_number_of_rows(pair: RankPool, num_worst_tokens: int) -> None:
    pair.run(check_worst_tokens, SMALL, num_worst_tokens)


def check_worst_tokens_grow(rank: Rank, case: MoeCase) -> None:
    buffer = weft.Buffer(rank.group, num_nvl_bytes=0, explicitly_destroy=True)
    kept = []
    for _ in range(3):
        recv_x, recv_idx, _, _, handle, _ = dispatch(buffer, case, rank.rank, num_worst_tokens=20000)
        kept.append((recv_x, recv_idx))
        check_combined(case, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])
    assert all(torch.equal(ids, kept[0][1]) for _, ids in kept)
    buffer.destroy()


def test_worst_tokens_grow_the_buffer_without_counts(pair: RankPool) -> None:
    pair.run(check_worst_tokens_grow, SMALL)


def check_worst_tokens_differ(rank: Rank, case: MoeCase) -> None:
    buffer = weft.Buffer(rank.group, num_nvl_bytes=0, explicitly_destroy=True)
    with pytest.raises(weft.Error, match=r"num_worst_tokens.*same on all ranks"):
        dispatch(buffer, case, rank.rank, num_worst_tokens=100_000 * (1 + rank.rank))
    barrier(rank)
    check_round_trip(rank, case)
    buffer.destroy()


def test_worst_tokens_that_differ_are_reported_on_all_ranks(pair: RankPool) -> None:
    pair.run(check_worst_tokens_differ, SMALL)


def test_cached_dispatch_repeats_the_routes(pair: RankPool) -> None:
    pair.run(check_cached, SMALL)


def check_handle_entries(rank: Rank, case: MoeCase) -> None:
    handle = dispatch(cached_buffer(rank), case, rank.rank)[4]
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    per_rank, _, in_rank = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)
    assert isinstance(handle, tuple)
    assert all(isinstance(entry, Tensor) for entry in handle)
    prefix, sent, received, tokens, is_in_rank, send_head, *_ = handle
    assert prefix.shape == (rank.size, rank.size)
    assert sent.flatten().tolist() == per_rank.tolist()
    assert received.flatten().tolist() == rows.per_source.cumsum(0).tolist()
    assert tokens.tolist() == rows.src_token.tolist()
    assert torch.equal(is_in_rank, in_rank)
    assert torch.equal(send_head >= 0, in_rank)


def test_handle_entries_are_those_of_deepep(pair: RankPool) -> None:
    pair.run(check_handle_entries, SMALL)


def test_dispatch_without_top_k(pair: RankPool) -> None:
    pair.run(check_no_top_k, SMALL)


def check_biases(rank: Rank, case: MoeCase, num_biases: int) -> None:
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    biases = tuple(case.bias(rank.rank, i) for i in range(num_biases))
    given_bias = biases if num_biases == 2 else biases[0] if biases else None
    combined, _, _ = buffer.combine(expert_output(recv_x, rank.rank), handle, bias=given_bias)
    check_combined(case, rank.rank, combined, biases)


@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_sums_start_from_the_biases(pair: RankPool, num_biases: int) -> None:
    pair.run(check_biases, SMALL, num_biases)


def check_asynchronous(rank: Rank, case: MoeCase, as_handle: bool, on_comm_stream: bool) -> None:
    buffer = cached_buffer(rank)
    previous: Any = weft.EventHandle() if as_handle else buffer.capture()
    options = {
        "previous_event": previous,
        "async_finish": True,
        "allocate_on_comm_stream": on_comm_stream,
    }
    recv_x, _, _, _, handle, event = dispatch(buffer, case, rank.rank, **options)
    event.current_stream_wait()
    combined, _, event = buffer.combine(expert_output(recv_x, rank.rank), handle, **options)
    with event:
        pass
    check_combined(case, rank.rank, combined)


@pytest.mark.parametrize("as_handle", [False, True])
@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_asynchronous_calls_take_and_give_events(
    pair: RankPool, as_handle: bool, on_comm_stream: bool
) -> None:
    pair.run(check_asynchronous, SMALL, as_handle, on_comm_stream)


def check_aliases(rank: Rank, case: MoeCase) -> None:
    buffer = cached_buffer(rank)
    topk_idx = case.topk_idx(rank.rank)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    config = buffer.get_dispatch_config(rank.size)
    recv_x, _, _, _, handle, _ = buffer.internode_dispatch(
        case.x(rank.rank),
        None,
        per_rank,
        per_node,
        in_rank,
        per_expert,
        topk_idx,
        case.topk_weights(rank.rank),
        1,
        0,
        config,
    )
    config = buffer.get_combine_config(rank.size)
    combined, _, _ = buffer.internode_combine(expert_output(recv_x, rank.rank), handle, config=config)
    check_combined(case, rank.rank, combined)


def test_internode_names_are_the_same_calls(pair: RankPool) -> None:
    pair.run(check_aliases, SMALL)


def check_outstanding(rank: Rank, first: MoeCase, second: MoeCase) -> None:
    buffer = cached_buffer(rank)
    one, _, _, _, first_handle, _ = dispatch(buffer, first, rank.rank)
    kept = one.clone()
    two, _, _, _, second_handle, _ = dispatch(buffer, second, rank.rank)
    assert torch.equal(one, kept), "a later dispatch overwrote rows that the caller still holds"
    combined, _, _ = buffer.combine(expert_output(one, rank.rank), first_handle)
    check_combined(first, rank.rank, combined)
    combined, _, _ = buffer.combine(expert_output(two, rank.rank), second_handle)
    check_combined(second, rank.rank, combined)


def test_two_dispatches_may_be_outstanding(pair: RankPool) -> None:
    pair.run(check_outstanding, SMALL, MoeCase((20, 3), 128, 2, 6, seed=5))


def test_a_buffer_serves_many_rounds(pair: RankPool) -> None:
    pair.run(check_repeats, MoeCase((60, 50), 1024, 4, 16))


def check_several_buffers(rank: Rank, case: MoeCase) -> None:
    buffers = [weft.Buffer(rank.group, WINDOW_BYTES) for _ in range(3)]
    results = [dispatch(buffer, case, rank.rank) for buffer in buffers]
    for buffer, result in reversed(list(zip(buffers, results, strict=True))):
        combined, _, _ = buffer.combine(expert_output(result[0], rank.rank), result[4])
        check_combined(case, rank.rank, combined)


def test_several_buffers_live_at_once(pair: RankPool) -> None:
    pair.run(check_several_buffers, SMALL)


def test_rows_of_float32_are_summed_without_rounding_to_bf16(pair: RankPool) -> None:
    pair.run(check_float32_rows, SMALL)


def check_mpi(rank: Rank, case: MoeCase) -> None:
    buffer = weft.Buffer(None, WINDOW_BYTES, comm=FakeMpi(rank))
    assert (buffer.rank, buffer.group_size) == (rank.rank, rank.size)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    check_combined(case, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])


def test_an_mpi_communicator_is_enough(pair: RankPool) -> None:
    pair.run(check_mpi, SMALL)


# Attributes, statics, views, destruction


def check_attributes(rank: Rank) -> None:
    buffer = weft.Buffer(
        rank.group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=12,
        allow_nvlink_for_low_latency_mode=True,
        allow_nvlink_for_normal_mode=True,
        allow_mnnvl=True,
        use_fabric=True,
        explicitly_destroy=True,
    )
    assert (buffer.rank, buffer.group_size) == (rank.rank, rank.size)
    assert buffer.group is rank.group
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
    assert not buffer.low_latency_mode
    assert not buffer.enable_shrink
    assert buffer.explicitly_destroy
    assert buffer.runtime is not None
    buffer.destroy()
    assert buffer.runtime is None
    with pytest.raises(weft.Error, match="destroy"):
        buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=torch.int64), 2)
    with pytest.raises(weft.Error, match="destroy"):
        buffer.destroy()


def test_attributes_and_destruction(pair: RankPool) -> None:
    pair.run(check_attributes)


def check_destroy_needs_consent(rank: Rank) -> None:
    with pytest.raises(weft.Error, match="explicitly_destroy"):
        cached_buffer(rank).destroy()
    check_round_trip(rank, SMALL)


def test_destroy_needs_explicitly_destroy(pair: RankPool) -> None:
    pair.run(check_destroy_needs_consent)


def check_local_view(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    whole = buffer.get_local_buffer_tensor(torch.uint8)
    assert whole.dim() == 1
    assert whole.numel() >= buffer.num_nvl_bytes
    view = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size((4, 8)), offset=64)
    assert view.shape == (4, 8)
    assert view.dtype == torch.bfloat16
    view.fill_(3.0)
    assert bool((whole[64 : 64 + 64].view(torch.bfloat16) == 3.0).all()), "offset is in bytes"
    with pytest.raises(weft.Error, match="size"):
        buffer.get_local_buffer_tensor(torch.uint8, torch.Size((1 << 40,)))
    barrier(rank)
    check_round_trip(rank, SMALL)


def test_local_buffer_tensor_is_a_view(pair: RankPool) -> None:
    pair.run(check_local_view)


def test_statics() -> None:
    assert isinstance(weft.Buffer.is_sm90_compiled(), bool)
    assert weft.Buffer.capture().event is not None
    assert weft.Buffer.get_dispatch_config(8).num_sms == weft.Buffer.num_sms
    assert weft.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 0
    before = weft.Buffer.num_sms
    try:
        weft.Buffer.set_num_sms(24)
        assert weft.Buffer.get_combine_config(3).num_sms == 24
        with pytest.raises(weft.Error, match="num_sms"):
            weft.Buffer.set_num_sms(7)
        assert weft.Buffer.num_sms == 24
    finally:
        weft.Buffer.set_num_sms(before)


def test_a_buffer_needs_a_group() -> None:
    with pytest.raises(ValueError, match="group"):
        weft.Buffer(None, 1 << 20)


def check_bad_construction(rank: Rank) -> None:
    for argument, value in (("num_nvl_bytes", -1), ("num_rdma_bytes", 1.5), ("num_nvl_bytes", "many")):
        with pytest.raises(weft.Error, match=argument):
            weft.Buffer(rank.group, **{argument: value})
    with pytest.raises(weft.Error, match="timeout_s"):
        weft.Buffer(rank.group, 1 << 20, timeout_s=-1)
    with pytest.raises(weft.Error, match="device"):
        weft.Buffer(rank.group, 1 << 20, device="meta")


def test_bad_sizes_are_refused_at_construction(pair: RankPool) -> None:
    pair.run(check_bad_construction)


# Bad input: refused by name, nothing written, the buffer stays usable


Arguments = dict[str, Any]


def good_dispatch(buffer: weft.Buffer, case: MoeCase, rank: int) -> Arguments:
    topk_idx = case.topk_idx(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    return {
        "x": case.x(rank),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": case.topk_weights(rank),
    }


BAD_DISPATCH: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "1-D x": ("x", lambda a: a["x"].flatten()),
    "x not contiguous": ("x", lambda a: a["x"].repeat(1, 2)[:, ::2]),
    "row bytes not a multiple of 16": ("x", lambda a: a["x"][:, :7].contiguous()),
    "x of no columns": ("x", lambda a: a["x"][:, :0]),
    "x is a list": ("x", lambda a: a["x"].tolist()),
    "x on meta": ("x", lambda a: a["x"].to("meta")),
    "x None": ("x", lambda a: None),
    "scales of float64": (
        "x",
        lambda a: (a["x"].to(torch.float8_e4m3fn), torch.ones(len(a["x"]), 1).double()),
    ),
    "scales of other length": (
        "x",
        lambda a: (a["x"].to(torch.float8_e4m3fn), torch.ones(len(a["x"]) + 1, 1)),
    ),
    "scales 1-D": ("x", lambda a: (a["x"].to(torch.float8_e4m3fn), torch.ones(len(a["x"])))),
    "topk_idx of other length": ("topk_idx", lambda a: a["topk_idx"][1:]),
    "topk_idx 1-D": ("topk_idx", lambda a: a["topk_idx"][:, 0]),
    "topk_idx of float": ("topk_idx", lambda a: a["topk_idx"].float()),
    "topk_idx not contiguous": ("topk_idx", lambda a: a["topk_idx"].T.contiguous().T),
    "topk_idx without weights": ("topk_weights", lambda a: None),
    "weights of float64": ("topk_weights", lambda a: a["topk_weights"].double()),
    "weights of other shape": ("topk_weights", lambda a: a["topk_weights"][:, :1]),
    "no is_token_in_rank": ("is_token_in_rank", lambda a: None),
    "is_token_in_rank of uint8": ("is_token_in_rank", lambda a: a["is_token_in_rank"].byte()),
    "is_token_in_rank of other shape": ("is_token_in_rank", lambda a: a["is_token_in_rank"][:, :1]),
    "no num_tokens_per_rank": ("num_tokens_per_rank", lambda a: None),
    "num_tokens_per_rank of int64": ("num_tokens_per_rank", lambda a: a["num_tokens_per_rank"].long()),
    "num_tokens_per_rank of other length": ("num_tokens_per_rank", lambda a: a["num_tokens_per_rank"][:1]),
    "no num_tokens_per_expert": ("num_tokens_per_expert", lambda a: None),
    "num_tokens_per_expert of int64": ("num_tokens_per_expert", lambda a: a["num_tokens_per_expert"].long()),
    "num_tokens_per_expert of 2-D": ("num_tokens_per_expert", lambda a: a["num_tokens_per_expert"][None]),
    "num_tokens_per_expert negative": ("num_tokens_per_expert", lambda a: -a["num_tokens_per_expert"] - 1),
    "num_tokens_per_expert above all slots": (
        "num_tokens_per_expert",
        lambda a: a["num_tokens_per_expert"] + a["topk_idx"].numel() + 1,
    ),
    "expert_alignment 0": ("expert_alignment", lambda a: 0),
    "expert_alignment of float": ("expert_alignment", lambda a: 1.5),
    "num_worst_tokens negative": ("num_worst_tokens", lambda a: -1),
    "num_worst_tokens beyond all memory": ("num_worst_tokens", lambda a: (1 << 31) - 1),
    "config of another type": ("config", lambda a: 24),
    "previous_event of another type": ("previous_event", lambda a: 3),
    "handle of another type": ("handle", lambda a: (1, 2, 3)),
}


def check_bad_dispatch(rank: Rank, case: MoeCase, name: str) -> None:
    argument, change = BAD_DISPATCH[name]
    buffer = cached_buffer(rank)
    arguments = good_dispatch(buffer, case, rank.rank)
    arguments[argument] = change(arguments)
    if argument == "handle":
        arguments = {"x": arguments["x"], "handle": arguments["handle"]}
    with pytest.raises(weft.Error, match=argument) as raised:
        buffer.dispatch(**arguments)
    assert "allowed" in str(raised.value)
    check_round_trip(rank, case)


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_bad_dispatch_arguments_are_named(pair: RankPool, name: str) -> None:
    pair.run(check_bad_dispatch, SMALL, name)


def check_contradictions(rank: Rank, case: MoeCase) -> None:
    buffer = cached_buffer(rank)
    arguments = good_dispatch(buffer, case, rank.rank)
    *_, handle, _ = buffer.dispatch(**arguments)
    with pytest.raises(weft.Error, match="topk_idx"):
        buffer.dispatch(
            arguments["x"], handle, topk_idx=arguments["topk_idx"], topk_weights=arguments["topk_weights"]
        )
    with pytest.raises(weft.Error, match="topk_idx"):
        worst = {**arguments, "topk_idx": None, "topk_weights": None, "num_worst_tokens": 100}
        buffer.dispatch(**worst)
    with pytest.raises(weft.Error, match="allocate_on_comm_stream"):
        buffer.dispatch(**arguments, allocate_on_comm_stream=True)
    with pytest.raises(weft.Error, match="x"):
        buffer.dispatch(arguments["x"][1:], handle)
    with pytest.raises(weft.Error, match="config"):
        buffer.internode_dispatch(**arguments)
    check_round_trip(rank, case)


def test_arguments_that_exclude_each_other(pair: RankPool) -> None:
    pair.run(check_contradictions, SMALL)


def check_layout_arguments(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    good = torch.zeros((3, 2), dtype=torch.int64)
    for bad in (good[0], good.float(), good.T, None, good.to("meta")):
        with pytest.raises(weft.Error, match="topk_idx"):
            buffer.get_dispatch_layout(bad, 4)  # type: ignore[arg-type]
    for bad_count in (0, -3, 2.5):
        with pytest.raises(weft.Error, match="num_experts"):
            buffer.get_dispatch_layout(good, bad_count)  # type: ignore[arg-type]
    for bad_id in (4, 1 << 40, -2):
        with pytest.raises(weft.Error, match="topk_idx"):
            buffer.get_dispatch_layout(torch.full((3, 2), bad_id), 4)
    check_layout(rank, SMALL)


def test_bad_layout_arguments_are_named(pair: RankPool) -> None:
    pair.run(check_layout_arguments)


BAD_COMBINE: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "x of other length": ("x", lambda x, w: torch.cat((x, x))),
    "x of float8": ("x", lambda x, w: x.to(torch.float8_e4m3fn)),
    "x of int16": ("x", lambda x, w: x.view(torch.int16)),
    "row bytes not a multiple of 16": ("x", lambda x, w: x[:, :7].contiguous()),
    "x not contiguous": ("x", lambda x, w: x.repeat(1, 2)[:, ::2]),
    "x on meta": ("x", lambda x, w: x.to("meta")),
    "weights of other length": ("topk_weights", lambda x, w: torch.cat((w, w))),
    "weights of float64": ("topk_weights", lambda x, w: w.double()),
    "bias of other shape": ("bias", lambda x, w: torch.zeros(1, 64).bfloat16()),
    "bias of float32": ("bias", lambda x, w: torch.zeros(6, 64)),
    "three biases": ("bias", lambda x, w: (torch.zeros(6, 64).bfloat16(),) * 3),
    "handle None": ("handle", lambda x, w: None),
    "handle of another type": ("handle", lambda x, w: (x,) * 6),
    "config of another type": ("config", lambda x, w: "fast"),
    "previous_event of another type": ("previous_event", lambda x, w: True),
}


def check_bad_combine(rank: Rank, case: MoeCase, name: str) -> None:
    buffer = cached_buffer(rank)
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, case, rank.rank)
    argument, change = BAD_COMBINE[name]
    arguments = {"x": recv_x, "handle": handle, "topk_weights": recv_weights}
    arguments[argument] = change(recv_x, recv_weights)
    with pytest.raises(weft.Error, match=argument) as raised:
        buffer.combine(**arguments)
    assert "allowed" in str(raised.value)
    combined, _, _ = buffer.combine(expert_output(recv_x, rank.rank), handle)
    check_combined(case, rank.rank, combined)


@pytest.mark.parametrize("name", BAD_COMBINE)
def test_bad_combine_arguments_are_named(pair: RankPool, name: str) -> None:
    pair.run(check_bad_combine, MoeCase((6, 6), 64, 3, 8), name)


class SavesHandle(torch.autograd.Function):
    """A dispatch that keeps its handle as autograd keeps tensors, and nothing else; returns it too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: list[weft.Buffer], case: MoeCase, rank: int) -> Any:
        recv_x, _, _, _, handle, event = dispatch(buffers[0], case, rank, x, async_finish=True)
        _prefix, *_ = handle  # before the event was waited for
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffers = buffers
        return recv_x, handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        handle = ctx.saved_tensors
        assert type(handle) is tuple
        back = ctx.buffers[0].combine(grad.contiguous(), handle)[0]
        again = ctx.buffers[0].dispatch(back, handle=handle)[0]
        assert again.shape == grad.shape
        return back, None, None, None


def check_saved_handle(rank: Rank, case: MoeCase, copies: bool) -> None:
    """The backward pass has the handle's tensors alone, and a buffer that is made after the dispatch."""
    buffers = [weft.Buffer(rank.group, 4 << 20)]
    x = case.x(rank.rank).requires_grad_()
    context = torch.autograd.graph.save_on_cpu() if copies else contextlib.nullcontext()
    with context:
        recv_x, _ = SavesHandle.apply(x, buffers, case, rank.rank)
    y = recv_x.detach()
    buffers[0] = weft.Buffer(rank.group, 16 << 20)  # and the old one is gone
    recv_x.backward(torch.ones_like(recv_x))
    assert x.grad is not None
    in_rank = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2]
    assert torch.equal(x.grad, in_rank.sum(dim=1, dtype=x.dtype).view(-1, 1).expand_as(x))
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert torch.equal(y, rows.take(case.all_x()))


@pytest.mark.parametrize("copies", [False, True])
def test_a_handle_is_the_tensors_that_autograd_saves(pair: RankPool, copies: bool) -> None:
    pair.run(check_saved_handle, SMALL, copies)


def test_autograd_keeps_handles_of_any_number_of_ranks() -> None:
    for num_ranks in (1, 3):
        case = MoeCase(tokens=(5, 0, 7)[:num_ranks], hidden=64, top_k=2, num_experts=6)
        run_ranks(num_ranks, check_saved_handle, case, False, with_gpus=False)


def check_another_buffer(rank: Rank, case: MoeCase) -> None:
    """Wider rows, weights, biases and cached dispatches along the routes of a buffer that is smaller, then gone."""
    small = weft.Buffer(rank.group, 0, explicitly_destroy=True)
    recv_x, _, recv_weights, _, handle, _ = dispatch(small, case, rank.rank)
    tiny = weft.Buffer(rank.group, 0)  # has to grow for what it did not dispatch
    combined, weights, _ = tiny.combine(expert_output(recv_x, rank.rank), handle, topk_weights=recv_weights)
    check_combined(case, rank.rank, combined)
    assert torch.equal(weights > 0, case.topk_idx(rank.rank) >= 0)
    small.destroy()
    large = weft.Buffer(rank.group, WINDOW_BYTES)
    wide = torch.cat([expert_output(recv_x, rank.rank)] * 40, dim=1)
    for buffer in (large, tiny):
        combined, _, _ = buffer.combine(wide, tuple(handle))
        check_combined(case, rank.rank, combined[:, : case.hidden].contiguous())
        again, *_ = buffer.dispatch(case.x(rank.rank).repeat(1, 40), list(handle))
        assert torch.equal(again[:, : case.hidden], recv_x)


def test_a_handle_serves_every_buffer_of_its_ranks(pair: RankPool) -> None:
    pair.run(check_another_buffer, SMALL)


def check_worst_of_another_buffer(rank: Rank, case: MoeCase) -> None:
    """A handle without counts serves a buffer that has counted nothing, and one whose last counts were refused."""
    first, second = (weft.Buffer(rank.group, WINDOW_BYTES) for _ in range(2))
    recv_x, _, _, _, handle, _ = dispatch(first, case, rank.rank, num_worst_tokens=sum(case.tokens) + 2)
    again, *_ = second.dispatch(case.x(rank.rank) * 2, handle)
    received = int(handle[0][-1, rank.rank])
    assert torch.equal(again[:received], recv_x[:received] * 2)
    wide = case.x(rank.rank).repeat(1, 1 + rank.rank)
    with pytest.raises(weft.Error, match="bytes per row"):
        dispatch(first, case, rank.rank, wide, num_worst_tokens=sum(case.tokens) + 2)
    again, *_ = first.dispatch(case.x(rank.rank) * 3, handle)
    assert torch.equal(again[:received], recv_x[:received] * 3)


def test_a_handle_without_counts_serves_every_buffer_of_its_ranks(pair: RankPool) -> None:
    pair.run(check_worst_of_another_buffer, SMALL)


def check_copied_handle(rank: Rank, case: MoeCase) -> None:
    """Copies of a handle, as deepcopy and pickle make them, are handles of the same dispatch."""
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert type(copied) is type(handle)
        again, *_ = buffer.dispatch(case.x(rank.rank), copied)
        assert torch.equal(again, recv_x)
        check_combined(case, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), copied)[0])


def test_handles_can_be_copied_and_pickled(pair: RankPool) -> None:
    pair.run(check_copied_handle, SMALL)


def check_foreign_handle(rank: Rank, case: MoeCase) -> None:
    """What does not fit is refused by every rank before anything moves."""
    alone = weft.Buffer(
        torch.distributed.new_group([rank.rank], use_local_synchronization=True), WINDOW_BYTES
    )
    own_case = MoeCase(tokens=(6,), hidden=64, top_k=3, num_experts=4)
    recv_x, _, _, _, handle, _ = dispatch(alone, own_case, 0)
    buffer = cached_buffer(rank)
    good = dispatch(buffer, case, rank.rank)
    facts = good[4][-1].clone()
    facts[0] += 1
    moved = tuple(entry.to("meta") for entry in good[4])
    for wrong in (
        handle,
        tuple(handle),
        moved,
        (*good[4][:-1], facts),
        good[4][:-1],
        (*good[4], facts),
        good[4][0],
    ):
        with pytest.raises(
            weft.Error,
            match=r"^handle: got .*, allowed: the DispatchHandle that dispatch\(\) returned to the same",
        ):
            buffer.combine(recv_x, wrong)
        with pytest.raises(weft.Error, match=r"^handle: got "):
            buffer.dispatch(case.x(rank.rank), handle=wrong)
    check_combined(case, rank.rank, buffer.combine(expert_output(good[0], rank.rank), good[4])[0])


def test_a_handle_of_other_ranks_is_refused(pair: RankPool) -> None:
    pair.run(check_foreign_handle, SMALL)


def check_different_handles(rank: Rank, case: MoeCase) -> None:
    """Each rank combines another dispatch; every rank hears of it, and nothing is lost."""
    buffer = cached_buffer(rank)
    results = [dispatch(buffer, case, rank.rank) for _ in range(2)]
    recv_x, handle = results[rank.rank % 2][0], results[rank.rank % 2][4]
    with pytest.raises(weft.Error, match="handle"):
        buffer.combine(recv_x, handle)
    barrier(rank)
    combined, _, _ = buffer.combine(expert_output(results[0][0], rank.rank), results[0][4])
    check_combined(case, rank.rank, combined)


def test_combining_different_dispatches_is_refused_on_all_ranks(pair: RankPool) -> None:
    pair.run(check_different_handles, SMALL)


def check_disagreements(rank: Rank, case: MoeCase) -> None:
    """The ranks give a combine or a cached dispatch different things: all hear of it, and can go on."""
    buffer, is_first = cached_buffer(rank), rank.rank == 0
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, case, rank.rank)
    x, words = case.x(rank.rank), case.scales(rank.rank, 4)
    for argument, call in (
        (
            "topk_weights .how many travel with a row.: got [03]",
            lambda: buffer.combine(recv_x, handle, topk_weights=recv_weights if is_first else None),
        ),
        ("x", lambda: buffer.combine(recv_x if is_first else recv_x[:, :32].contiguous(), handle)),
        ("x", lambda: buffer.dispatch(x if is_first else x[:, :32].contiguous(), handle)),
        ("x .scale words per row.: got [04]", lambda: buffer.dispatch((x, words) if is_first else x, handle)),
    ):
        with pytest.raises(weft.Error, match=f"^{argument}.*, allowed: the same on all ranks"):
            call()
        barrier(rank)
        combined, _, _ = buffer.combine(expert_output(recv_x, rank.rank), handle)
        check_combined(case, rank.rank, combined)


def test_ranks_that_disagree_all_hear_of_it(pair: RankPool) -> None:
    pair.run(check_disagreements, SMALL)


def check_other_width(rank: Rank, case: MoeCase) -> None:
    """Experts may return rows of another width than they got."""
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    combined, _, _ = buffer.combine(torch.cat((recv_x, recv_x, recv_x), dim=1), handle)
    copies = oracle.layout(case.topk_idx(rank.rank), case.num_experts, rank.size)[2].sum(dim=1, keepdim=True)
    expected = (case.x(rank.rank).float() * copies).bfloat16()
    assert torch.equal(combined, torch.cat((expected,) * 3, dim=1))


def test_combined_rows_may_be_wider_than_dispatched_ones(pair: RankPool) -> None:
    pair.run(check_other_width, SMALL)


MISMATCHES: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": 128},
    "top_k": {"top_k": 2},
    "experts": {"num_experts": 10},
}


def check_mismatch(rank: Rank, case: MoeCase, name: str) -> None:
    """The last rank differs in one argument: all ranks raise, naming it and the two ranks' values."""
    changed = MISMATCHES[name] if rank.rank == rank.size - 1 else {}
    fields = {field: getattr(case, field) for field in ("tokens", "hidden", "top_k", "num_experts")}
    with pytest.raises(weft.Error, match=r"rank"):
        dispatch(cached_buffer(rank), MoeCase(**{**fields, **changed}), rank.rank)
    barrier(rank)
    check_round_trip(rank, case)


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_arguments_that_differ_between_ranks_raise_on_all(num_ranks: int, name: str) -> None:
    case = MoeCase((6,) * num_ranks, 64, 3, 8)
    run_ranks(num_ranks, check_mismatch, case, name, with_gpus=False)


def check_element_mismatch(rank: Rank, case: MoeCase) -> None:
    x = case.x(rank.rank)
    x = x.float() if rank.rank == 0 else torch.cat((x, x), dim=1)  # the same bytes a row
    with pytest.raises(weft.Error, match="rank"):
        dispatch(cached_buffer(rank), case, rank.rank, x)
    barrier(rank)
    check_round_trip(rank, case)


def test_types_that_differ_between_ranks_raise_on_all(pair: RankPool) -> None:
    pair.run(check_element_mismatch, SMALL)


def check_id_mismatch(rank: Rank, case: MoeCase) -> None:
    """One rank's ids are int32, the others' int64."""
    arguments = good_dispatch(cached_buffer(rank), case, rank.rank)
    if rank.rank == 0:
        arguments["topk_idx"] = arguments["topk_idx"].int()
    with pytest.raises(weft.Error, match=r"topk_idx \(bytes per id\): got [48] on rank . and [48] on rank"):
        cached_buffer(rank).dispatch(**arguments)
    barrier(rank)
    check_round_trip(rank, case)


def test_id_types_that_differ_between_ranks_raise_on_all(pair: RankPool) -> None:
    pair.run(check_id_mismatch, SMALL)


def check_too_few_worst_tokens(rank: Rank, case: MoeCase) -> None:
    buffer = cached_buffer(rank)
    with pytest.raises(weft.Error, match="num_worst_tokens"):
        dispatch(buffer, case, rank.rank, num_worst_tokens=3)
    barrier(rank)
    check_round_trip(rank, case)


def test_more_rows_than_worst_tokens_is_reported(pair: RankPool) -> None:
    pair.run(check_too_few_worst_tokens, MoeCase((9, 9), 64, 3, 8, empty_share=0))


def _names_each_place_once(rank: Rank) -> None:
    buffer = weft.Buffer(rank.group, 1 << 20, device="cpu")
    with pytest.raises(weft.Error, match=r"^topk_idx: got int64\[4, 2\] on meta, allowed: a tensor on cpu$"):
        buffer.get_dispatch_layout(torch.zeros(4, 2, dtype=torch.int64, device="meta"), 4)


def test_a_tensor_elsewhere_is_refused_by_where_it_may_be() -> None:
    run_ranks(1, _names_each_place_once, with_gpus=False)
