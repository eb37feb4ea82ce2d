# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch and combine on GPUs against the oracle: shapes, formats, hooks, graphs, masks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu_ranks import num_ranks_here, rank_counts, replay, run_on_gpus
from low_latency_blocks import BLOCK_CASES, BLOCK_TOKENS, check_blocks

import weft
from weft import _core
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank

FORMATS = {
    "bf16": {"use_fp8": False},
    "fp8": {"use_fp8": True},
    "rounded": {"use_fp8": True, "round_scale": True},
    "ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}
SHAPES = [  # tokens, hidden, top_k, experts per rank
    (128, 7168, 8, 32),
    (1, 512, 1, 1),
    (0, 512, 2, 3),
    (77, 1536, 11, 7),
    (1500, 512, 3, 4),
]


def _case(num_ranks: int, tokens: int, hidden: int, top_k: int, per_rank: int, seed: int = 0) -> MoeCase:
    return MoeCase(
        tokens=tuple(max(0, tokens - rank) for rank in range(num_ranks)),
        hidden=hidden,
        top_k=min(top_k, per_rank * num_ranks),
        num_experts=per_rank * num_ranks,
        seed=seed,
    )


def _buffer(rank: Rank, case: MoeCase, most_tokens: int, **options: Any) -> weft.Buffer:
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
        most_tokens, case.hidden, rank.size, case.num_experts
    )
    return weft.Buffer(rank.group, 64 << 20, num_bytes, low_latency_mode=True, **options)


def _sent(x: torch.Tensor, form: str) -> torch.Tensor:
    """Return float32 of what arrives of x."""
    if form == "bf16":
        return x.float()
    return oracle.dequantize_fp8(*oracle.quantize_fp8(x, form != "fp8"))


def _received(recv: Any, expert: int, count: int) -> torch.Tensor:
    if isinstance(recv, tuple):
        return oracle.dequantize_fp8(recv[0][expert, :count].cpu(), recv[1][expert, :count].cpu())
    return recv[expert, :count].float().cpu()


def _check_dispatched(
    case: MoeCase, rank: int, form: str, recv: Any, counts: torch.Tensor, handle: Any
) -> torch.Tensor:
    """Compare with the oracle; return bf16 results of the experts, a quarter of each row."""
    expected = oracle.ll_dispatch(case.routes(), case.num_experts, rank)
    assert counts.tolist() == [sum(len(tokens) for tokens in sources) for sources in expected]
    src_info, ranges = handle[0].cpu(), handle[1].cpu()
    delivered = [_sent(x, form) for x in case.all_x()]
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    results = torch.full(recv_x.shape, float("nan"), dtype=torch.bfloat16, device=recv_x.device)
    for expert, sources in enumerate(expected):
        total = sum(len(tokens) for tokens in sources)
        rows = _received(recv, expert, total)
        for source, tokens in enumerate(sources):
            begin, count = divmod(int(ranges[expert, source]), 1 << 32)
            found = src_info[expert, begin : begin + count].long()
            assert found.sort().values.tolist() == tokens.tolist()
            # Rows are copied, and quantised to the same bits on every target.
            assert torch.equal(rows[begin : begin + count], delivered[source][found])
        results[expert, :total] = (rows * 0.25).bfloat16()
    return results


def _expected(case: MoeCase, rank: int, form: str) -> torch.Tensor:
    row = (_sent(case.x(rank), form) * 0.25).bfloat16()
    slot_rows = row.unsqueeze(1).expand(-1, case.top_k, -1)
    return oracle.ll_combine(slot_rows, case.topk_idx(rank), case.topk_weights(rank))


def _round_trip(
    buffer: weft.Buffer, case: MoeCase, rank: int, most_tokens: int, form: str, hooks: bool, **combine: Any
) -> None:
    x, idx, weights = case.x(rank).cuda(), case.topk_idx(rank).cuda(), case.topk_weights(rank).cuda()
    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, most_tokens, case.num_experts, return_recv_hook=hooks, **FORMATS[form]
    )
    if hooks:
        hook()
    results = _check_dispatched(case, rank, form, recv, counts, handle)
    if combine.get("zero_copy"):
        buffer.get_next_low_latency_combine_buffer(handle).copy_(results)
    combined, _, hook = buffer.low_latency_combine(
        results, idx, weights, handle, return_recv_hook=hooks, **combine
    )
    if hooks:
        assert hook is not None
        hook()
    tolerance = 9e-4 if combine.get("use_logfmt") else 1e-5
    assert calc_diff(combined.cpu(), _expected(case, rank, form)) < tolerance


def _check_shape(rank: Rank, shape: tuple[int, int, int, int]) -> None:
    case, most_tokens = _case(rank.size, *shape), max(shape[0], 1)
    buffer = _buffer(rank, case, most_tokens)
    for form in FORMATS:
        for hooks in (False, True):
            _round_trip(buffer, case, rank.rank, most_tokens, form, hooks)
    for options in ({"zero_copy": True}, {"use_logfmt": True}, {"exact": True}):
        _round_trip(buffer, case, rank.rank, most_tokens, "bf16", False, **options)


@pytest.mark.one_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_go_out_and_come_back(shape: tuple[int, int, int, int]) -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_shape, shape)


def _check_blocks(rank: Rank) -> None:
    for form, hidden, exponents in BLOCK_CASES:
        case = MoeCase(tuple((29 * r + 8) % 71 for r in range(rank.size)), hidden, 3, 5)
        buffer = _buffer(rank, case, BLOCK_TOKENS)
        for with_output in (False, True):
            check_blocks(buffer, rank, case, form, exponents, with_output, "cuda")


@pytest.mark.one_gpu
def test_block_formats_match_the_oracle_byte_for_byte() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_blocks)


def _bits(rank: Rank, case: MoeCase, form: str, line_tokens: int) -> list[torch.Tensor]:
    """Return the bytes of what a dispatch delivers, expert by expert, and of what its combine returns."""
    os.environ["WEFT_LOW_LATENCY_LINE_TOKENS"] = str(line_tokens)
    _core.config_reload()
    me, most_tokens = rank.rank, case.tokens[0]
    buffer = _buffer(rank, case, most_tokens)
    idx, weights = case.topk_idx(me).cuda(), case.topk_weights(me).cuda()
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(
        case.x(me).cuda(), idx, most_tokens, case.num_experts, **FORMATS[form]
    )
    results = _check_dispatched(case, me, form, recv, counts, handle)
    combined, _, _ = buffer.low_latency_combine(results, idx, weights, handle)
    exact, _, _ = buffer.low_latency_combine(results, idx, weights, handle, exact=True)
    parts = recv if isinstance(recv, tuple) else (recv,)
    rows = [part[e, :count] for part in parts for e, count in enumerate(counts.tolist())]
    whole = (t.clone(memory_format=torch.contiguous_format) for t in (*rows, combined, exact))
    return [t.view(torch.uint8).cpu() for t in whole]


def _check_lines_and_words(rank: Rank) -> None:
    for tokens, hidden in ((128, 7168), (33, 512), (2, 512)):
        case = _case(rank.size, tokens, hidden, 8, 8)
        for form in FORMATS:
            # 20: ranks with few tokens send lines to ranks with more, who send words.
            words, *others = (_bits(rank, case, form, line_tokens) for line_tokens in (0, 20, 128, -1))
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(words, other, strict=True))


def test_lines_and_words_bring_the_same_bits() -> None:
    """Over NVLink; elsewhere all are words."""
    run_on_gpus(num_ranks_here(), _check_lines_and_words)


def _check_graph(rank: Rank) -> None:
    """A captured dispatch and combine, replayed with other tokens and routes."""
    cases = [_case(rank.size, 64, 1024, 4, 8, seed) for seed in range(4)]
    me, first = rank.rank, cases[0]
    buffer = _buffer(rank, first, 64)
    x, idx, weights = first.x(me).cuda(), first.topk_idx(me).cuda(), first.topk_weights(me).cuda()

    def step() -> tuple[Any, ...]:
        recv, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, 64, first.num_experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        combined, _, hook = buffer.low_latency_combine(
            recv * 0.25, idx, weights, handle, return_recv_hook=True
        )
        assert hook is not None
        hook()
        return recv, counts, handle, combined

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recv, counts, handle, combined = step()
    for case in cases:
        replay(graph, case, me, x, idx, weights)
        _check_dispatched(case, me, "bf16", recv, counts, handle)
        assert calc_diff(combined.cpu(), _expected(case, me, "bf16")) < 1e-5


@pytest.mark.one_gpu
def test_a_captured_graph_replays_with_new_routes() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_graph)


def _check_mixed_forms(rank: Rank) -> None:
    """Words and lines take turns, with rows that change from call to call, so that older ones are noticed."""
    most_tokens, me = 300, rank.rank
    case = _case(rank.size, most_tokens, 1536, 11, 7)
    buffer = _buffer(rank, case, most_tokens)
    all_x, all_idx = case.x(me).cuda(), case.topk_idx(me).cuda()
    all_weights = case.topk_weights(me).cuda()
    steps = ((77, {}), (300, {}), (77, {"use_logfmt": True}), (77, {"exact": True}), (300, {"exact": True}))
    for turn in range(40):
        for tokens, options in steps:
            tokens -= me
            x = all_x.roll(turn, dims=1)[:tokens]
            idx, weights = all_idx[:tokens].contiguous(), all_weights[:tokens].contiguous()
            recv, _, handle, _, _ = buffer.low_latency_dispatch(
                x.contiguous(), idx, most_tokens, case.num_experts, use_fp8=False
            )
            combined, _, _ = buffer.low_latency_combine(recv * 0.25, idx, weights, handle, **options)
            expected = x.float() * 0.25 * weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
            off = calc_diff(combined, expected)
            assert off < (9e-4 if "use_logfmt" in options else 1e-4), (turn, tokens, options, off)


@pytest.mark.one_gpu
def test_lines_are_whole_where_other_forms_take_turns_with_them() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_mixed_forms)


def _check_both_modes(rank: Rank) -> None:
    """Low-latency and high-throughput calls on one buffer, events and side streams in between."""
    case = _case(rank.size, 96, 1024, 4, 8)
    buffer, me = _buffer(rank, case, 96), rank.rank
    x, idx, weights = case.x(me).cuda(), case.topk_idx(me).cuda(), case.topk_weights(me).cuda()
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    side = torch.cuda.Stream()
    for _ in range(5):
        _round_trip(buffer, case, me, 96, "fp8", hooks=True)
        event = buffer.capture()
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, case.num_experts, previous_event=event, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, _, _, counts, handle, event = buffer.dispatch(
            x,
            None,
            per_rank,
            None,
            in_rank,
            per_expert,
            idx,
            weights,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        with torch.cuda.stream(side):
            event.current_stream_wait()
            doubled = recv_x * 2
            combined, _, event = buffer.combine(doubled, handle, async_finish=True)
        event.current_stream_wait()
        assert counts == rows.per_expert
        copies = oracle.layout(case.topk_idx(me), case.num_experts, rank.size)[2].sum(1, keepdim=True)
        torch.cuda.synchronize()
        assert torch.equal(combined.cpu(), (case.x(me).float() * 2 * copies).bfloat16())
    assert isinstance(buffer.get_comm_stream(), torch.cuda.Stream)


@pytest.mark.one_gpu
def test_one_buffer_serves_both_modes() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_both_modes)


def _check_default_stream_first(rank: Rank) -> None:
    """The first call on another stream waits for those that the default stream still has, here behind a sleep."""
    case = _case(rank.size, 64, 1024, 4, 8)
    me, side = rank.rank, torch.cuda.Stream()
    idx, weights = case.topk_idx(me).cuda(), case.topk_weights(me).cuda()
    x = [case.x(me).cuda() * factor for factor in (1, 2)]
    _round_trip(_buffer(rank, case, 64), case, me, 64, "bf16", hooks=False)  # what compiles has compiled
    buffer = _buffer(rank, case, 64)
    torch.cuda.synchronize()

    def there_and_back(sent: torch.Tensor) -> torch.Tensor:
        recv, _, handle, _, _ = buffer.low_latency_dispatch(sent, idx, 64, case.num_experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(recv, idx, weights, handle)
        return combined

    if me == 0:
        torch.cuda._sleep(200_000_000)
    combined = [there_and_back(x[0])]
    with torch.cuda.stream(side):
        combined.append(there_and_back(x[1]))
    torch.cuda.synchronize()
    sums = weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
    for sent, got in zip(x, combined, strict=True):
        assert calc_diff(got, sent.float() * sums) < 1e-4


def test_the_first_call_on_another_stream_waits_for_the_default_stream() -> None:
    run_on_gpus(2, _check_default_stream_first)


def _check_masks(rank: Rank) -> None:
    """The last rank is masked by all others: it sends nothing, gets nothing and is skipped."""
    case = _case(rank.size, 32, 512, 4, 4)
    buffer, me, lost = _buffer(rank, case, 32, enable_shrink=True, timeout_s=20), rank.rank, rank.size - 1
    if me == lost:
        return
    buffer.low_latency_update_mask_buffer(lost, mask=True)
    status = torch.zeros(rank.size, dtype=torch.int32, device="cuda")
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(r == lost) for r in range(rank.size)]
    idx, weights = case.topk_idx(me), case.topk_weights(me)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x(me).cuda(), idx.cuda(), 32, case.num_experts, use_fp8=False
    )
    combined, _, _ = buffer.low_latency_combine(recv, idx.cuda(), weights.cuda(), handle)
    kept = idx.masked_fill(idx >= oracle.local_experts(case.num_experts, rank.size, lost).start, -1)
    expected = oracle.ll_combine(case.x(me).unsqueeze(1).expand(-1, case.top_k, -1), kept, weights)
    assert calc_diff(combined.cpu(), expected) < 1e-5
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * rank.size


def test_a_masked_rank_is_left_out() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_masks)


def _come_back(rank: Rank) -> str:
    """The last rank stays silent until kernels of the others have masked it, and is told so at its next call."""
    case = _case(rank.size, 32, 512, 4, 4)
    buffer = _buffer(rank, case, 32, enable_shrink=True, timeout_s=2)
    me, lost, said = rank.rank, rank.size - 1, ""
    status = torch.zeros(rank.size, dtype=torch.int32, device="cuda")

    def dispatch() -> None:
        x, idx = case.x(me).cuda(), case.topk_idx(me).cuda()
        buffer.low_latency_dispatch(x, idx, 32, case.num_experts, use_fp8=False)
        torch.cuda.synchronize()

    dispatch()
    torch.distributed.barrier(group=rank.group)
    if me != lost:
        dispatch()
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(r == lost) for r in range(rank.size)]
    torch.distributed.barrier(group=rank.group)
    if me == lost:
        with pytest.raises(weft.PeerLost) as raised:
            dispatch()
        said = str(raised.value)
    torch.distributed.barrier(group=rank.group)
    if me != lost:
        buffer.low_latency_clean_mask_buffer()
    torch.distributed.barrier(group=rank.group)
    if me == lost:
        dispatch()  # nobody refuses it any more
    torch.distributed.barrier(group=rank.group)
    return said


def test_a_masked_rank_that_comes_back_is_told_so() -> None:
    for num_ranks in rank_counts():
        said = run_on_gpus(num_ranks, _come_back)[-1]
        assert f"rank {num_ranks - 1} (this rank) was given up by rank 0 (pid " in said


def _check_statistics(rank: Rank) -> None:
    case = _case(rank.size, 32, 512, 4, 4)
    buffer, me = _buffer(rank, case, 32), rank.rank
    received = torch.full((4,), 7, dtype=torch.int32, device="cuda")
    cycles = torch.zeros(rank.size, dtype=torch.int64, device="cuda")
    for _ in range(2):
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(
            case.x(me).cuda(), case.topk_idx(me).cuda(), 32, case.num_experts, received, cycles, use_fp8=False
        )
        buffer.low_latency_combine(
            recv,
            case.topk_idx(me).cuda(),
            case.topk_weights(me).cuda(),
            handle,
            combine_wait_recv_cost_stats=cycles,
        )
    assert received.tolist() == [7 + 2 * n for n in counts.tolist()]
    assert int(cycles.min()) >= 0
    assert int(cycles.sum()) > 0


def test_statistics_are_added_to() -> None:
    run_on_gpus(2, _check_statistics)
