# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch and combine against the oracle, over shapes, formats, options and bad arguments."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from low_latency_blocks import BLOCK_CASES, check_blocks
from moe_checks import barrier, check_round_trip
from torch import Tensor

import weft
from weft import _core
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank, RankPool, run_ranks
from weft.testing.round_trips import (
    BF16,
    FORMATS,
    FP8,
    UE8M0,
    Format,
    check_dispatched,
    expected_combined,
    outputs_of,
)

RANK_COUNTS = (1, 2, 3, 5, 6, 7, 17)
WIRES = ("lines", "words")
SMALL = MoeCase(tokens=(6, 9), hidden=512, top_k=3, num_experts=8)
MOST_TOKENS = 16
LARGEST = (512, 1024, 96)  # tokens, hidden, experts that the kept buffer is sized for
BYTES = {torch.bfloat16: 2, torch.float8_e4m3fn: 1}


@contextmanager
def wire(name: str) -> Iterator[None]:
    """Have few tokens travel as "lines", or followed by "words", among the ranks that are started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_LOW_LATENCY_LINE_TOKENS", {"lines": "-1", "words": "0"}.get(name, name))
        _core.config_reload()
        yield
    _core.config_reload()


@pytest.fixture(scope="module", params=zip(RANK_COUNTS, itertools.cycle(WIRES)), ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    num_ranks, name = request.param
    with wire(name), RankPool(num_ranks, with_gpus=False) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=WIRES)
def pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks, over each wire in turn."""
    with wire(request.param), RankPool(2, with_gpus=False) as ranks:
        yield ranks


def ll_buffer(rank: Rank, **options: Any) -> weft.Buffer:
    """Return this rank's buffer of the pool, which serves both modes."""
    if "buffer" not in rank.kept:
        tokens, hidden, experts = LARGEST
        num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, rank.size, experts)
        rank.kept["buffer"] = weft.Buffer(rank.group, 16 << 20, num_bytes, low_latency_mode=True, **options)
    return rank.kept["buffer"]


def check_scales_layout(case: MoeCase, most_tokens: int, form: Format, scales: Tensor) -> None:
    """Scales are logically [local experts, rows, groups] and column-major in memory."""
    groups = case.hidden // (512 if form.use_ue8m0 else 128)
    num_rows = case.num_ranks * most_tokens
    assert scales.dtype == (torch.int32 if form.use_ue8m0 else torch.float32)
    assert scales.shape[1:] == (num_rows, groups)
    if scales.numel() > 0 and groups > 1 and num_rows > 1:
        assert scales.stride() == (groups * num_rows, 1, num_rows)


def check_ll_round_trip(
    rank: Rank, case: MoeCase, form: Format, most_tokens: int = MOST_TOKENS, hooks: bool = False
) -> None:
    """Dispatch and combine: counts, ranges and rows exact, sums within 1e-5."""
    buffer = ll_buffer(rank)
    x, topk_idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, most_tokens, case.num_experts, return_recv_hook=hooks, **form.options()
    )
    assert (hook is not None) == hooks
    if hooks:
        hook()
    check_dispatched(case, rank.rank, most_tokens, form, recv, counts, handle)
    if form.use_fp8:
        check_scales_layout(case, most_tokens, form, recv[1])
    combined, _, hook = buffer.low_latency_combine(
        outputs_of(recv), topk_idx, weights, handle, return_recv_hook=hooks
    )
    if hooks:
        hook()
    assert combined.shape == x.shape
    assert combined.dtype == torch.bfloat16
    assert not bool(combined.isnan().any())
    if combined.numel():
        assert calc_diff(combined, expected_combined(case, rank.rank, form)) < 1e-5


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> tuple[MoeCase, Format]:
    form = draw(st.sampled_from(FORMATS))
    step = 512 if form.use_ue8m0 else 128 if form.use_fp8 else 8
    tokens = st.integers(0, MOST_TOKENS if num_ranks <= 7 else 4)
    case = MoeCase(
        tokens=tuple(draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks))),
        hidden=step * draw(st.integers(1, 1024 // step)),
        top_k=draw(st.integers(1, 32)),
        num_experts=draw(st.integers(1, 60)),
        routing=draw(st.sampled_from(("distinct", "any", "one expert", "none"))),
        empty_share=draw(st.sampled_from((0.0, 0.3, 0.9))),
        seed=draw(st.integers(0, 1000)),
    )
    return case, form


def check_drawn_round_trip(pool: RankPool, data: st.DataObject) -> None:
    """A round trip of any shape, in any format, with room for its tokens alone or for more, with hooks or without."""
    case, form = data.draw(cases(pool.num_ranks))
    most_tokens = max(*case.tokens, 1) if data.draw(st.booleans()) else MOST_TOKENS
    if case.routing != "distinct" or case.top_k > case.num_experts:  # rows may name an expert twice
        most_tokens *= case.top_k
    pool.run(check_ll_round_trip, case, form, most_tokens, data.draw(st.booleans()))


@drawn(max_examples=12)
@given(data=st.data())
def test_round_trip_of_any_shape_matches_the_oracle(pool: RankPool, data: st.DataObject) -> None:
    check_drawn_round_trip(pool, data)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("hooks", [False, True])
def test_round_trip_in_every_format(pair: RankPool, form: Format, hooks: bool) -> None:
    pair.run(check_ll_round_trip, SMALL, form, MOST_TOKENS, hooks)


@pytest.mark.parametrize(
    "case",
    [
        MoeCase((0, 0), 64, 2, 4),
        MoeCase((5, 0), 64, 2, 4),
        MoeCase((1, 1), 8, 1, 1),
        MoeCase((4, 7), 64, 32, 40),
        MoeCase((16, 16), 64, 1, 8, routing="one expert", empty_share=0),
        MoeCase((4, 4), 64, 4, 8, routing="none"),
        MoeCase((3, 2), 7168, 8, 16),
    ],
    ids=str,
)
def test_round_trip_at_the_edges(pair: RankPool, case: MoeCase) -> None:
    pair.run(check_ll_round_trip, case, BF16)


def check_many_tokens(rank: Rank, case: MoeCase, most_tokens: int) -> None:
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        most_tokens, case.hidden, rank.size, case.num_experts
    )
    rank.kept["buffer"] = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True)
    check_ll_round_trip(rank, case, BF16, most_tokens)


@pytest.mark.parametrize("name", WIRES)
def test_more_than_1024_tokens_to_one_expert(name: str) -> None:
    case = MoeCase((1500, 1300), 16, 1, 4, routing="one expert", empty_share=0)
    with wire(name), RankPool(2, with_gpus=False) as pool:
        pool.run(check_many_tokens, case, 1600)


def check_statistics(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    experts = oracle.local_experts(case.num_experts, rank.size, rank.rank)
    received = torch.full((len(experts),), 7, dtype=torch.int32)
    dispatch_wait = torch.zeros(rank.size, dtype=torch.int64)
    combine_wait = torch.zeros(rank.size, dtype=torch.int64)
    for _ in range(2):
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(
            case.x(rank.rank),
            case.topk_idx(rank.rank),
            MOST_TOKENS,
            case.num_experts,
            cumulative_local_expert_recv_stats=received,
            dispatch_wait_recv_cost_stats=dispatch_wait,
            use_fp8=False,
        )
        buffer.low_latency_combine(
            outputs_of(recv),
            case.topk_idx(rank.rank),
            case.topk_weights(rank.rank),
            handle,
            combine_wait_recv_cost_stats=combine_wait,
        )
    assert received.tolist() == [7 + 2 * n for n in counts.tolist()]
    assert bool((dispatch_wait >= 0).all())
    assert bool((combine_wait >= 0).all())
    assert int(dispatch_wait.sum()) + int(combine_wait.sum()) > 0


def test_statistics_are_added_to(pair: RankPool) -> None:
    pair.run(check_statistics, SMALL)


def check_outputs(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    x, topk_idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    num_local = len(oracle.local_experts(case.num_experts, rank.size, rank.rank))
    num_rows = rank.size * MOST_TOKENS
    given_outputs = {
        "out_packed_recv_x": torch.zeros((num_local, num_rows, case.hidden), dtype=torch.bfloat16),
        "out_src_info": torch.zeros((num_local, num_rows), dtype=torch.int32),
        "out_layout_range": torch.zeros((num_local, rank.size), dtype=torch.int64),
        "out_count": torch.zeros(num_local, dtype=torch.int32),
    }
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(
        x, topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False, **given_outputs
    )
    assert recv.data_ptr() == given_outputs["out_packed_recv_x"].data_ptr()
    assert counts.data_ptr() == given_outputs["out_count"].data_ptr()
    assert handle[0].data_ptr() == given_outputs["out_src_info"].data_ptr()
    assert handle[1].data_ptr() == given_outputs["out_layout_range"].data_ptr()
    check_dispatched(case, rank.rank, MOST_TOKENS, BF16, recv, counts, handle)
    out = torch.zeros_like(x)
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle, out=out)
    assert combined.data_ptr() == out.data_ptr()
    assert calc_diff(out, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_results_land_in_the_given_tensors(pair: RankPool) -> None:
    pair.run(check_outputs, SMALL)


def check_zero_copy(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    results = outputs_of(recv)
    view = buffer.get_next_low_latency_combine_buffer(handle)
    assert view.shape == results.shape
    assert view.dtype == torch.bfloat16
    view.copy_(results)
    combined, _, _ = buffer.low_latency_combine(view, topk_idx, weights, handle, zero_copy=True)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_zero_copy_combines_what_is_in_the_buffer(pair: RankPool) -> None:
    pair.run(check_zero_copy, SMALL)


def check_logfmt(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle, use_logfmt=True)
    row = oracle.logfmt10((case.x(rank.rank).float() * 0.25).bfloat16())
    expected = oracle.ll_combine(row.unsqueeze(1).expand(-1, case.top_k, -1), topk_idx, weights).bfloat16()
    assert calc_diff(combined, expected) < 1e-5
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 9e-4


@pytest.mark.parametrize("hidden", [512, 1024, 1536])
def test_logfmt_costs_little_precision(pair: RankPool, hidden: int) -> None:
    pair.run(check_logfmt, MoeCase((6, 9), hidden, 3, 8))


def check_asynchronous(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, event, hook = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False, async_finish=True
    )
    assert hook is None
    event.current_stream_wait()
    combined, event, _ = buffer.low_latency_combine(
        outputs_of(recv), topk_idx, weights, handle, async_finish=True
    )
    event.current_stream_wait()
    assert event.extra_tensors
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_asynchronous_calls_keep_their_tensors_alive(pair: RankPool) -> None:
    pair.run(check_asynchronous, SMALL)


def check_both_modes(rank: Rank, ht_case: MoeCase, ll_case: MoeCase) -> None:
    ll_buffer(rank)
    for _ in range(3):
        check_round_trip(rank, ht_case)
        check_ll_round_trip(rank, ll_case, FP8)
    ll_buffer(rank).clean_low_latency_buffer(MOST_TOKENS, ll_case.hidden, ll_case.num_experts)
    check_ll_round_trip(rank, ll_case, BF16)


def test_one_buffer_serves_both_modes_cleaned_or_not(pair: RankPool) -> None:
    pair.run(check_both_modes, MoeCase((6, 9), 64, 3, 8), SMALL)


def check_two_outstanding(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    other = MoeCase(case.tokens, case.hidden, case.top_k, case.num_experts, seed=case.seed + 1)
    calls = []
    for one in (case, other):
        calls.append(
            buffer.low_latency_dispatch(
                one.x(rank.rank), one.topk_idx(rank.rank), MOST_TOKENS, one.num_experts, use_fp8=False
            )
        )
    for one, (recv, counts, handle, _, _) in zip((case, other), calls, strict=True):
        check_dispatched(one, rank.rank, MOST_TOKENS, BF16, recv, counts, handle)
        combined, _, _ = buffer.low_latency_combine(
            outputs_of(recv), one.topk_idx(rank.rank), one.topk_weights(rank.rank), handle
        )
        assert calc_diff(combined, expected_combined(one, rank.rank, BF16)) < 1e-5


def test_two_dispatches_may_be_outstanding(pair: RankPool) -> None:
    pair.run(check_two_outstanding, SMALL)


def check_repeats(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    first = None
    for _ in range(50):
        recv, _, handle, _, _ = buffer.low_latency_dispatch(
            case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts
        )
        combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle)
        first = combined if first is None else first
        assert torch.equal(combined, first)


def test_repeats_give_the_same_bits(pair: RankPool) -> None:
    pair.run(check_repeats, SMALL)


# Masks


def check_masks(rank: Rank, case: MoeCase) -> None:
    """Rank 1 is masked: it gives no tokens, gets none, and is skipped in combine."""
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        MOST_TOKENS, case.hidden, rank.size, case.num_experts
    )
    buffer = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True, enable_shrink=True)
    status = torch.full((rank.size,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * rank.size
    if rank.rank == 1:
        barrier(rank)
        return
    buffer.low_latency_update_mask_buffer(1, mask=True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 1, 0]
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    lost = oracle.local_experts(case.num_experts, rank.size, 1)
    assert bool((handle[1][:, 1] & 0xFFFFFFFF == 0).all())
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle)
    kept_idx = topk_idx.masked_fill((topk_idx >= lost.start) & (topk_idx < lost.stop), -1)
    row = (case.x(rank.rank).float() * 0.25).bfloat16()
    expected = oracle.ll_combine(row.unsqueeze(1).expand(-1, case.top_k, -1), kept_idx, weights)
    assert calc_diff(combined, expected) < 1e-5
    barrier(rank)
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * rank.size


@pytest.mark.parametrize("name", WIRES)
def test_a_masked_rank_is_left_out(name: str) -> None:
    with wire(name), RankPool(3, with_gpus=False) as pool:
        pool.run(check_masks, MoeCase((6, 9, 4), 128, 3, 6))


def check_clean_up(rank: Rank) -> None:
    """The last rank stays away from a clean-up, which masks it; the others go on, and clean up again."""
    case = MoeCase((6, 9, 4), 128, 3, 6)
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        MOST_TOKENS, case.hidden, rank.size, case.num_experts
    )
    buffer = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True, enable_shrink=True, timeout_s=3)
    sizes, lost = (MOST_TOKENS, case.hidden, case.num_experts), rank.size - 1
    buffer.clean_low_latency_buffer(*sizes)
    status = torch.zeros(rank.size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * rank.size
    if rank.rank != lost:
        for _ in range(2):
            buffer.clean_low_latency_buffer(*sizes)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(other == lost) for other in range(rank.size)]
        buffer.low_latency_dispatch(
            case.x(rank.rank), case.topk_idx(rank.rank), MOST_TOKENS, case.num_experts, use_fp8=False
        )
    barrier(rank)


def test_a_rank_that_stays_away_from_a_clean_up_is_masked() -> None:
    with RankPool(3, with_gpus=False) as pool:
        pool.run(check_clean_up)


def make_over_another_wire(rank: Rank, names: tuple[str, ...]) -> None:
    with wire(names[rank.rank]), pytest.raises(weft.Error, match="WEFT_LOW_LATENCY_LINE_TOKENS"):
        weft.Buffer(rank.group, 0, 1 << 20, low_latency_mode=True)


@pytest.mark.parametrize("names", [("lines", "words"), ("words", "129")], ids=str)
def test_ranks_must_agree_on_lines(names: tuple[str, ...]) -> None:
    run_ranks(2, make_over_another_wire, names, with_gpus=False)


def check_masks_need_shrink(rank: Rank) -> None:
    buffer = ll_buffer(rank)
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(1, True),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(rank.size, dtype=torch.int32)),
        lambda: buffer.low_latency_clean_mask_buffer(),
    ):
        with pytest.raises(weft.Error, match="enable_shrink"):
            call()


def test_masks_need_enable_shrink(pair: RankPool) -> None:
    pair.run(check_masks_need_shrink)


# Bad input: refused by name, nothing written, the buffer stays usable

Arguments = dict[str, Any]


def good_dispatch(case: MoeCase, rank: int) -> Arguments:
    return {
        "x": case.x(rank),
        "topk_idx": case.topk_idx(rank),
        "num_max_dispatch_tokens_per_rank": MOST_TOKENS,
        "num_experts": case.num_experts,
        "use_fp8": False,
    }


BAD_DISPATCH: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "1-D x": ("x", lambda a: a["x"].flatten()),
    "x of float32": ("x", lambda a: a["x"].float()),
    "x not contiguous": ("x", lambda a: a["x"].repeat(1, 2)[:, ::2]),
    "row bytes not a multiple of 16": ("x", lambda a: a["x"][:, :7].contiguous()),
    "more tokens than the maximum": ("x", lambda a: a["x"].repeat(MOST_TOKENS, 1)),
    "x on meta": ("x", lambda a: a["x"].to("meta")),
    "topk_idx of other length": ("topk_idx", lambda a: a["topk_idx"][1:]),
    "topk_idx 1-D": ("topk_idx", lambda a: a["topk_idx"][:, 0]),
    "topk_idx of float": ("topk_idx", lambda a: a["topk_idx"].float()),
    "topk_idx out of range": ("topk_idx", lambda a: a["topk_idx"] + 100),
    "no room for tokens": ("num_max_dispatch_tokens_per_rank", lambda a: 0),
    "tokens of float": ("num_max_dispatch_tokens_per_rank", lambda a: 8.0),
    "more bytes than the buffer has": ("num_max_dispatch_tokens_per_rank", lambda a: 1 << 20),
    "no experts": ("num_experts", lambda a: 0),
    "more experts than there is room for counts": ("num_experts", lambda a: 16386),
    "stats of int64": ("cumulative_local_expert_recv_stats", lambda a: torch.zeros(4, dtype=torch.int64)),
    "stats of other length": (
        "cumulative_local_expert_recv_stats",
        lambda a: torch.zeros(5, dtype=torch.int32),
    ),
    "costs 2-D": ("dispatch_wait_recv_cost_stats", lambda a: torch.zeros((2, 2), dtype=torch.int64)),
    "costs of int32": ("dispatch_wait_recv_cost_stats", lambda a: torch.zeros(2, dtype=torch.int32)),
    "ue8m0 without round_scale": ("use_ue8m0", lambda a: True),
    "out of other shape": ("out_packed_recv_x", lambda a: torch.zeros(1, 2, 3).bfloat16()),
    "out_count of int64": ("out_count", lambda a: torch.zeros(4, dtype=torch.int64)),
}


def check_bad_dispatch(rank: Rank, case: MoeCase, name: str) -> None:
    argument, change = BAD_DISPATCH[name]
    arguments = good_dispatch(case, rank.rank)
    arguments[argument] = change(arguments)
    if argument == "use_ue8m0":
        arguments["use_fp8"] = True
    with pytest.raises(weft.Error, match=argument):
        ll_buffer(rank).low_latency_dispatch(**arguments)
    check_ll_round_trip(rank, case, BF16)


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_bad_dispatch_arguments_are_named(pair: RankPool, name: str) -> None:
    pair.run(check_bad_dispatch, SMALL, name)


def check_fp8_needs_whole_groups(rank: Rank, case: MoeCase, options: dict[str, bool]) -> None:
    with pytest.raises(weft.Error, match="x"):
        ll_buffer(rank).low_latency_dispatch(
            case.x(rank.rank), case.topk_idx(rank.rank), MOST_TOKENS, case.num_experts, **options
        )
    check_ll_round_trip(rank, case, BF16)


@pytest.mark.parametrize(("hidden", "form"), [(64, FP8), (256, UE8M0)])
def test_scales_need_whole_groups(pair: RankPool, hidden: int, form: Format) -> None:
    pair.run(check_fp8_needs_whole_groups, MoeCase((6, 6), hidden, 3, 8), form.options())


def check_hook_excludes_async(rank: Rank, case: MoeCase) -> None:
    arguments = good_dispatch(case, rank.rank)
    with pytest.raises(weft.Error, match="return_recv_hook"):
        ll_buffer(rank).low_latency_dispatch(**arguments, async_finish=True, return_recv_hook=True)
    check_ll_round_trip(rank, case, BF16)


def test_hook_excludes_async(pair: RankPool) -> None:
    pair.run(check_hook_excludes_async, SMALL)


BAD_COMBINE: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "x of float32": ("x", lambda a: a["x"].float()),
    "x of other shape": ("x", lambda a: a["x"][:, 1:]),
    "topk_idx of other length": ("topk_idx", lambda a: a["topk_idx"][1:]),
    "topk_idx of float": ("topk_idx", lambda a: a["topk_idx"].float()),
    "weights of float64": ("topk_weights", lambda a: a["topk_weights"].double()),
    "weights of other shape": ("topk_weights", lambda a: a["topk_weights"][:, 1:]),
    "out of other shape": ("out", lambda a: torch.zeros(3, 512).bfloat16()),
    "out of float32": ("out", lambda a: torch.zeros(6, 512)),
    "costs of int32": ("combine_wait_recv_cost_stats", lambda a: torch.zeros(2, dtype=torch.int32)),
    "handle None": ("handle", lambda a: None),
    "handle of another type": ("handle", lambda a: (1, 2, 3)),
}


def check_bad_combine(rank: Rank, case: MoeCase, name: str) -> None:
    buffer = ll_buffer(rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(**good_dispatch(case, rank.rank))
    good: Arguments = {
        "x": outputs_of(recv),
        "topk_idx": case.topk_idx(rank.rank),
        "topk_weights": case.topk_weights(rank.rank),
        "handle": handle,
    }
    argument, change = BAD_COMBINE[name]
    with pytest.raises(weft.Error, match=argument):
        buffer.low_latency_combine(**{**good, argument: change(good)})
    combined, _, _ = buffer.low_latency_combine(**good)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


@pytest.mark.parametrize("name", BAD_COMBINE)
def test_bad_combine_arguments_are_named(pair: RankPool, name: str) -> None:
    pair.run(check_bad_combine, MoeCase((6, 6), 512, 3, 8), name)


def check_shared_memory(rank: Rank, case: MoeCase) -> None:
    """Where results go is nowhere that the call reads, or puts something else."""
    buffer, arguments = ll_buffer(rank), good_dispatch(case, rank.rank)
    experts = len(oracle.local_experts(case.num_experts, rank.size, rank.rank))
    counts = torch.zeros(experts, dtype=torch.int32)
    rows = torch.empty(experts, rank.size * MOST_TOKENS, case.hidden, dtype=torch.bfloat16)
    inside = rows.flatten(0, 1)[: case.tokens[rank.rank]]
    inside.copy_(arguments["x"])
    for shared in (
        {"out_count": counts, "cumulative_local_expert_recv_stats": counts},
        {"out_packed_recv_x": rows, "x": inside},
        {"out_packed_recv_x": rows, "out_count": rows.flatten().view(torch.int32)[:experts]},
    ):
        with pytest.raises(weft.Error, match="uses too, allowed: memory of its own"):
            buffer.low_latency_dispatch(**{**arguments, **shared})
    assert torch.equal(inside, arguments["x"])
    assert not counts.any()
    recv, _, handle, _, _ = buffer.low_latency_dispatch(**arguments)
    routes = (case.topk_idx(rank.rank), case.topk_weights(rank.rank))
    with pytest.raises(weft.Error, match=r"^out: got memory that x uses too"):
        buffer.low_latency_combine(recv, *routes, handle, out=recv.flatten(0, 1)[: len(inside)])
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), *routes, handle)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_results_share_memory_with_nothing(pair: RankPool) -> None:
    pair.run(check_shared_memory, SMALL)


def check_handle_is_tensors(rank: Rank, case: MoeCase, hooks: bool) -> None:
    """Saved before its dispatch has received, as plain tensors, for a buffer that is made later; twice at once."""
    first = ll_buffer(rank)
    larger = weft.Buffer(rank.group, 0, 2 * first.num_rdma_bytes, low_latency_mode=True)
    routes, arguments = (
        (case.topk_idx(rank.rank), case.topk_weights(rank.rank)),
        good_dispatch(case, rank.rank),
    )
    expected = expected_combined(case, rank.rank, BF16)
    recv, _, handle, _, hook = first.low_latency_dispatch(**arguments, return_recv_hook=hooks)
    assert isinstance(handle, tuple)
    assert all(isinstance(entry, Tensor) for entry in handle)
    assert [int(size) for size in handle[2:5]] == [MOST_TOKENS, case.hidden, case.num_experts]
    leaf = torch.zeros(1, requires_grad=True)
    node = KeepsTensors.apply(leaf, *handle)
    if hook is not None:
        with pytest.raises(weft.Error, match=r"^handle: got that of a dispatch whose hook has not run"):
            first.low_latency_combine(arguments["x"].new_zeros(recv.shape), *routes, tuple(handle))
        hook()
    saved = node.grad_fn.saved_tensors
    assert type(saved) is tuple
    for buffer in (first, larger):
        for same in (handle, saved, list(saved), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
            combined, _, _ = buffer.low_latency_combine(outputs_of(recv), *routes, same)
            assert calc_diff(combined, expected) < 1e-5
        view = buffer.get_next_low_latency_combine_buffer(saved)
        view.copy_(outputs_of(recv))
        for same in (saved, handle):
            ignored = torch.zeros_like(view)
            combined, _, _ = buffer.low_latency_combine(ignored, *routes, same, zero_copy=True)
            assert calc_diff(combined, expected) < 1e-5
        del view
    facts = saved[6].clone()
    facts[1] += 1
    for wrong in (saved[:-1], (*saved[:6], facts, saved[7]), tuple(entry.to("meta") for entry in saved)):
        with pytest.raises(
            weft.Error, match=r"^handle: got .* allowed: the LowLatencyHandle that low_latency_dispatch"
        ):
            first.low_latency_combine(outputs_of(recv), *routes, wrong)


class KeepsTensors(torch.autograd.Function):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *([None] * len(ctx.saved_tensors))


@pytest.mark.parametrize("hooks", [False, True])
def test_a_handle_is_the_tensors_that_autograd_saves(pair: RankPool, hooks: bool) -> None:
    pair.run(check_handle_is_tensors, SMALL, hooks)


def check_exclusive_combine(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(**good_dispatch(case, rank.rank))
    arguments = (outputs_of(recv), case.topk_idx(rank.rank), case.topk_weights(rank.rank), handle)
    with pytest.raises(weft.Error, match="zero_copy"):
        buffer.low_latency_combine(*arguments, use_logfmt=True, zero_copy=True)
    with pytest.raises(weft.Error, match="return_recv_hook"):
        buffer.low_latency_combine(*arguments, async_finish=True, return_recv_hook=True)
    combined, _, _ = buffer.low_latency_combine(*arguments)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_combine_options_that_exclude_each_other(pair: RankPool) -> None:
    pair.run(check_exclusive_combine, SMALL)


def check_needs_low_latency_mode(rank: Rank, case: MoeCase) -> None:
    buffer = weft.Buffer(rank.group, 16 << 20)
    with pytest.raises(weft.Error, match="low_latency_mode"):
        buffer.low_latency_dispatch(**good_dispatch(case, rank.rank))
    recv = buffer.get_dispatch_layout(case.topk_idx(rank.rank), case.num_experts)
    assert recv[3].shape == (len(case.x(rank.rank)), rank.size)


def test_low_latency_calls_need_low_latency_mode(pair: RankPool) -> None:
    pair.run(check_needs_low_latency_mode, SMALL)


# Weights that travel with a dispatch; exact sums


def check_travelling_weights(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, counts, recv_weights, recv_sources, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False, topk_weights=weights
    )
    check_dispatched(case, rank.rank, MOST_TOKENS, BF16, recv, counts, handle)
    experts = oracle.local_experts(case.num_experts, rank.size, rank.rank)
    for expert, count in enumerate(counts.tolist()):
        for row in range(count):
            source, token = int(recv_sources[expert, row]), int(handle[0][expert, row])
            slots = case.topk_idx(source)[token] == experts.start + expert
            sent = case.topk_weights(source)[token][slots]
            assert float(recv_weights[expert, row]) in sent.tolist()
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, None, handle)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


@pytest.mark.parametrize("num_experts", [8, 7])
def test_weights_may_travel_with_the_dispatch(pair: RankPool, num_experts: int) -> None:
    pair.run(check_travelling_weights, MoeCase((6, 9), 512, 3, num_experts))


def check_exact(rank: Rank, case: MoeCase) -> None:
    buffer = ll_buffer(rank)
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    exact, _, _ = buffer.low_latency_combine(outputs_of(recv), topk_idx, weights, handle, exact=True)
    expected = expected_combined(case, rank.rank, BF16)
    assert calc_diff(exact, expected) < 1e-7
    assert int((exact != expected).sum()) <= exact.numel() // 50  # a fused multiply-add rounds otherwise


def test_exact_sums_round_once(pair: RankPool) -> None:
    pair.run(check_exact, MoeCase((6, 9), 512, 6, 8))


def check_other_width(rank: Rank, case: MoeCase, hidden: int, options: dict[str, Any]) -> None:
    """Experts return rows of another width than they got: each its number, and a little more in every fourth column."""
    buffer, idx, weights = ll_buffer(rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    first = oracle.local_experts(case.num_experts, rank.size, rank.rank).start
    numbers = torch.arange(first, first + recv.size(0)).view(-1, 1, 1)
    rows = (numbers + torch.arange(hidden) % 4).expand(-1, recv.size(1), -1).bfloat16().contiguous()
    wanted = (idx.unsqueeze(2) + torch.arange(hidden) % 4) * weights.masked_fill(idx < 0, 0).unsqueeze(2)
    for out in (None, torch.empty(len(idx), hidden, dtype=torch.bfloat16)):
        combined, _, _ = buffer.low_latency_combine(rows, idx, weights, handle, out=out, **options)
        assert combined.shape == (len(idx), hidden)
        assert calc_diff(combined, wanted.sum(dim=1)) < (1e-3 if "use_logfmt" in options else 1e-4)


WIDTHS = ((256, {}), (1024, {}), (136, {"exact": True}), (128, {"use_logfmt": True}))


@pytest.mark.parametrize(("hidden", "options"), WIDTHS, ids=str)
def test_rows_may_come_back_in_another_width(pool: RankPool, hidden: int, options: dict[str, Any]) -> None:
    case = MoeCase(tuple(3 + 2 * rank % 9 for rank in range(pool.num_ranks)), 512, 3, 24)
    pool.run(check_other_width, case, hidden, options)


# Handles and arguments that differ


def check_different_widths(rank: Rank, case: MoeCase) -> None:
    """All ranks raise where one returns rows of another width, and go on. A width that no kernel moves is refused."""
    buffer, routes = ll_buffer(rank), (case.topk_idx(rank.rank), case.topk_weights(rank.rank))
    recv, _, handle, _, _ = buffer.low_latency_dispatch(**good_dispatch(case, rank.rank))
    for wrong in (12, 0):
        with pytest.raises(weft.Error, match=r"x: got rows of .* bytes, allowed: a multiple of 16"):
            buffer.low_latency_combine(recv[:, :, :wrong].contiguous(), *routes, handle)
    with pytest.raises(weft.Error, match="allowed: the same on all ranks"):
        buffer.low_latency_combine(recv[:, :, : 256 + 8 * rank.rank].contiguous(), *routes, handle)
    barrier(rank)
    check_ll_round_trip(rank, case, BF16)


def test_combining_different_widths_is_refused_on_all_ranks(pair: RankPool) -> None:
    pair.run(check_different_widths, SMALL)


def check_foreign_handle(rank: Rank, case: MoeCase) -> None:
    """That of other ranks, though as many rows came."""
    group = torch.distributed.new_group([rank.rank], use_local_synchronization=True)
    alone = weft.Buffer(group, 0, ll_buffer(rank).num_rdma_bytes, low_latency_mode=True)
    x, idx, weights = case.x(rank.rank), case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = alone.low_latency_dispatch(
        x, idx, 2 * MOST_TOKENS, case.num_experts, use_fp8=False
    )
    with pytest.raises(weft.Error, match=r"^handle: got the handle of other ranks"):
        ll_buffer(rank).low_latency_combine(recv, idx, weights, handle)
    combined, _, _ = alone.low_latency_combine(recv, idx, weights, handle)
    assert combined.shape == x.shape


def test_the_handle_of_other_ranks_is_refused(pair: RankPool) -> None:
    pair.run(check_foreign_handle, SMALL)


def check_different_handles(rank: Rank, case: MoeCase) -> None:
    """Each rank combines another dispatch; every rank hears of it, and can go on."""
    buffer = ll_buffer(rank)
    calls = [buffer.low_latency_dispatch(**good_dispatch(case, rank.rank)) for _ in range(2)]
    routes = (case.topk_idx(rank.rank), case.topk_weights(rank.rank))
    with pytest.raises(weft.Error, match="rank"):
        recv, _, handle, _, _ = calls[rank.rank % 2]
        buffer.low_latency_combine(outputs_of(recv), *routes, handle)
    barrier(rank)
    check_ll_round_trip(rank, case, BF16)


def test_combining_different_dispatches_is_refused_on_all_ranks(pair: RankPool) -> None:
    pair.run(check_different_handles, SMALL)


MISMATCHES: dict[str, Arguments] = {
    "num_max_dispatch_tokens_per_rank": {"num_max_dispatch_tokens_per_rank": MOST_TOKENS + 1},
    "num_experts": {"num_experts": 12},
    "top-k": {"topk_idx": torch.zeros((9, 2), dtype=torch.int64)},
    "bytes per row": {"x": torch.zeros((9, 1024), dtype=torch.bfloat16)},
    "form": {"use_fp8": True},
}


def check_mismatch(rank: Rank, case: MoeCase, name: str) -> None:
    """The last rank differs in one argument: all ranks raise, naming it."""
    arguments = good_dispatch(case, rank.rank)
    if rank.rank == rank.size - 1:
        arguments.update(MISMATCHES[name])
    with pytest.raises(weft.Error, match="allowed: the same on all ranks"):
        ll_buffer(rank).low_latency_dispatch(**arguments)
    barrier(rank)
    check_ll_round_trip(rank, case, BF16)


@pytest.mark.parametrize("name", MISMATCHES)
def test_arguments_that_differ_between_ranks_raise_on_all(pair: RankPool, name: str) -> None:
    pair.run(check_mismatch, MoeCase((9, 9), 512, 3, 8), name)


def check_used_up_hook(rank: Rank, case: MoeCase) -> None:
    *_, hook = ll_buffer(rank).low_latency_dispatch(**good_dispatch(case, rank.rank), return_recv_hook=True)
    hook()
    with pytest.raises(weft.Error, match="hook"):
        hook()
    check_ll_round_trip(rank, case, BF16)


def test_a_hook_runs_once(pair: RankPool) -> None:
    pair.run(check_used_up_hook, SMALL)


def check_combine_before_hook(rank: Rank, case: MoeCase) -> None:
    """The handle's routes are there once the hook has run; until then every rank refuses to follow them."""
    buffer, routes = ll_buffer(rank), (case.topk_idx(rank.rank), case.topk_weights(rank.rank))
    recv, _, handle, _, hook = buffer.low_latency_dispatch(
        **good_dispatch(case, rank.rank), return_recv_hook=True
    )
    for hooks in (False, True):
        with pytest.raises(weft.Error, match="handle: got that of a dispatch whose hook has not run"):
            buffer.low_latency_combine(recv, *routes, handle, return_recv_hook=hooks)
    hook()
    combined, _, _ = buffer.low_latency_combine(outputs_of(recv), *routes, handle)
    assert calc_diff(combined, expected_combined(case, rank.rank, BF16)) < 1e-5


def test_combining_before_the_hook_is_refused(pair: RankPool) -> None:
    pair.run(check_combine_before_hook, SMALL)


def check_forgotten_hook(rank: Rank, case: MoeCase, shrink: bool) -> None:
    """Rank 1 runs its first hook too late: it is told so at its third call, and the others notice nothing."""
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        MOST_TOKENS, case.hidden, rank.size, case.num_experts
    )
    buffer = weft.Buffer(rank.group, 0, num_bytes, low_latency_mode=True, enable_shrink=shrink, timeout_s=60)
    arguments = good_dispatch(case, rank.rank)
    forgotten = buffer.low_latency_dispatch(**arguments, return_recv_hook=True)
    if rank.rank != 1:
        forgotten[-1]()
    buffer.low_latency_dispatch(**arguments)
    if rank.rank == 1:
        late = "^hook: that of the low_latency_dispatch.. before the last call has not run"
        for hooks in (False, True):
            with pytest.raises(weft.Error, match=late):
                buffer.low_latency_dispatch(**arguments, return_recv_hook=hooks)
        forgotten[-1]()
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(**arguments)
    for results in (forgotten[:3], (recv, counts, handle)):
        check_dispatched(case, rank.rank, MOST_TOKENS, BF16, *results)
    if shrink:
        status = torch.ones(rank.size, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * rank.size


@pytest.mark.parametrize("shrink", [False, True])
def test_a_forgotten_hook_is_told_of_and_can_still_run(pair: RankPool, shrink: bool) -> None:
    pair.run(check_forgotten_hook, SMALL, shrink)


def check_too_many_rows(rank: Rank, case: MoeCase) -> None:
    """A row that names an expert three times sends it three rows: more than there is room for."""
    with pytest.raises(weft.Error, match="num_max_dispatch_tokens_per_rank"):
        arguments = good_dispatch(case, rank.rank)
        arguments["num_max_dispatch_tokens_per_rank"] = 9
        ll_buffer(rank).low_latency_dispatch(**arguments)
        assert rank.rank == 1, "only the expert's rank has too many rows"
        raise weft.Error("num_max_dispatch_tokens_per_rank: not this rank's")
    barrier(rank)
    check_ll_round_trip(rank, SMALL, BF16)


def test_more_rows_than_an_expert_has_room_for_are_reported(pair: RankPool) -> None:
    pair.run(check_too_many_rows, MoeCase((9, 9), 512, 3, 8, routing="one expert", empty_share=0))


def check_local_view(rank: Rank, case: MoeCase) -> None:
    """Zeroing what the buffer shows of its memory between calls disturbs nothing."""
    buffer = ll_buffer(rank)
    check_ll_round_trip(rank, case, BF16)
    barrier(rank)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    barrier(rank)
    check_ll_round_trip(rank, case, BF16)


def test_its_memory_may_be_zeroed_between_calls(pair: RankPool) -> None:
    pair.run(check_local_view, SMALL)


def raise_signals(y: Tensor, rows: Tensor, signals: Tensor, rows_per_signal: int, value: int) -> None:
    """What the kernels of an overlapped layer do: fill a block of rows, then say so, last block first."""
    per_expert = signals.numel() // y.size(0)
    for at in reversed(range(signals.numel())):
        expert, first = at // per_expert, at % per_expert * rows_per_signal
        y[expert, first : first + rows_per_signal] = rows[expert, first : first + rows_per_signal]
        for step in range(1, value + 1):
            signals.view(-1)[at] = step
        time.sleep(0.002)


def check_overlap(rank: Rank, by_block: bool, options: dict[str, Any], hook: bool) -> None:
    buffer, case = ll_buffer(rank), SMALL
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    rows = torch.zeros_like(recv)
    for expert, count in enumerate(counts.tolist()):
        rows[expert, :count] = recv[expert, :count] * 0.5
    expected, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle, **options)
    block_m = 5
    blocks = -(-rows.size(1) // block_m)
    for _ in range(3):
        y = torch.full_like(rows, float("nan"))
        if by_block:
            signals = torch.zeros(rows.size(0) * blocks, dtype=torch.int32)
            how: dict[str, Any] = {
                "comp_signal": signals,
                "block_m": block_m,
                "threshold": 3,
                "packed_recv_count": counts,
                "num_sms": 3,
            }
        else:
            signals = torch.zeros(rows.size(0), dtype=torch.uint32)
            how = {"src_signals": signals, "src_signal_expect_value": 3}
        layer = Thread(
            target=raise_signals, args=(y, rows, signals, block_m if by_block else rows.size(1), 3)
        )
        layer.start()
        combined, _, receive = buffer.low_latency_combine(
            y, topk_idx, weights, handle, overlap=True, return_recv_hook=hook, **how, **options
        )
        if receive is not None:
            receive()
        layer.join()
        assert torch.equal(combined, expected)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"use_logfmt": True}], ids=str)
@pytest.mark.parametrize("by_block", [False, True])
def test_combine_sends_rows_as_their_signals_come(
    pair: RankPool, by_block: bool, options: dict[str, Any], hook: bool
) -> None:
    pair.run(check_overlap, by_block, options, hook)


def refuse_signals(rank: Rank) -> None:
    buffer, case = ll_buffer(rank), SMALL
    topk_idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(rank.rank), topk_idx, MOST_TOKENS, case.num_experts, use_fp8=False
    )
    local, rows = recv.shape[:2]
    good = torch.zeros(local, dtype=torch.int32)
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "overlap: got True with neither"),
        ({"src_signals": good, "comp_signal": good}, "overlap: got True with both"),
        ({"src_signals": good[1:]}, "src_signals"),
        ({"src_signals": good.float()}, "src_signals"),
        ({"src_signals": good, "src_signal_expect_value": -1}, "src_signal_expect_value"),
        ({"comp_signal": good}, rf"comp_signal: got .*, allowed: .*\[{local * -(-rows // 64)}\]")
        if rows > 64
        else ({"comp_signal": good[1:]}, "comp_signal"),
        ({"comp_signal": good, "block_m": 0}, "block_m"),
        ({"comp_signal": good, "block_m": rows, "threshold": 1.5}, "threshold"),
        ({"src_signals": good, "packed_recv_count": good[1:]}, "packed_recv_count"),
        ({"src_signals": good, "num_sms": -1}, "num_sms"),
    ]
    for options, message in bad:
        with pytest.raises(weft.Error, match=message):
            buffer.low_latency_combine(recv, topk_idx, weights, handle, overlap=True, **options)
    # Without overlap nobody looks at them.
    combined, _, _ = buffer.low_latency_combine(
        torch.zeros_like(recv), topk_idx, weights, handle, src_signals=good, src_signal_expect_value=9
    )
    assert not combined.any()


def test_bad_signals_are_refused(pair: RankPool) -> None:
    pair.run(refuse_signals)


def check_blocks_on_cpu(rank: Rank, *what: Any) -> None:
    check_blocks(ll_buffer(rank), rank, *what)


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize(("form", "hidden", "exponents"), BLOCK_CASES)
def test_block_formats_match_the_oracle_byte_for_byte(
    pair: RankPool, form: str, hidden: int, exponents: bool, with_output: bool
) -> None:
    case = MoeCase(tokens=(70, 33), hidden=hidden, top_k=3, num_experts=5)
    pair.run(check_blocks_on_cpu, case, form, exponents, with_output)


@pytest.mark.parametrize(("form", "hidden", "exponents"), BLOCK_CASES[1::2])
def test_block_formats_on_any_number_of_ranks(
    pool: RankPool, form: str, hidden: int, exponents: bool
) -> None:
    tokens = tuple((9 * r) % 23 for r in range(pool.num_ranks))
    pool.run(check_blocks_on_cpu, MoeCase(tokens, hidden, 4, pool.num_ranks + 2), form, exponents, False)


def refuse_blocks(rank: Rank) -> None:
    buffer, case = ll_buffer(rank), SMALL
    x, topk_idx = case.x(rank.rank), case.topk_idx(rank.rank)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"use_mxfp8": True, "use_nvfp4": True}, "use_mxfp8"),
        ({"use_ue8m0_for_sf": True}, "use_ue8m0_for_sf"),
        ({"use_nvfp4": True, "x_global_scale": torch.ones(2)}, "x_global_scale"),
        ({"use_nvfp4": True, "x_global_scale": 2.0}, "x_global_scale"),
    ]
    for options, argument in bad:
        with pytest.raises(weft.Error, match=f"^{argument}: got"):
            buffer.low_latency_dispatch(x, topk_idx, MOST_TOKENS, case.num_experts, **options)
    for form, width, multiple in (("use_mxfp8", 96, 128), ("use_nvfp4", 32, 64)):
        with pytest.raises(weft.Error, match=f"x: got hidden {width}, allowed: a multiple of {multiple}"):
            buffer.low_latency_dispatch(
                x[:, :width].contiguous(), topk_idx, MOST_TOKENS, case.num_experts, **{form: True}
            )


def test_bad_block_formats_are_refused(pair: RankPool) -> None:
    pair.run(refuse_blocks)
