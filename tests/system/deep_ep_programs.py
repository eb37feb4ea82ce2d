# SPDX-License-Identifier: Apache-2.0
"""Programs written for DeepEP, in the manner of its best-known callers, for CPU tensors and for CUDA tensors."""

from __future__ import annotations

from typing import Any

import torch
from moe_checks import check_combined, expert_output
from torch import Tensor

import deep_ep
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank

# A training framework: an autograd function around dispatch and one around combine


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, idx: Tensor, probs: Tensor, experts: int, buffer: Any) -> Any:
        previous_event = deep_ep.utils.EventOverlap(deep_ep.utils.EventHandle())
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, experts, previous_event=previous_event, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, recv_idx, recv_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        after.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _idx: Any, grad_probs: Tensor, _counts: Any, _handle: Any) -> Any:
        grad_x, grad_weights, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=grad_probs.float()
        )
        return grad_x, None, grad_weights, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(x, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0]
        return grad_x, None, None


def megatron_buffer(group: Any, hidden_bytes: int) -> deep_ep.Buffer:
    configs = (
        deep_ep.Buffer.get_dispatch_config(group.size()),
        deep_ep.Buffer.get_combine_config(group.size()),
    )
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    buffer = deep_ep.Buffer(group, nvl, rdma)
    assert buffer.num_nvl_bytes >= nvl
    assert buffer.num_rdma_bytes >= rdma
    return buffer


def train_one_step(rank: Rank, case: MoeCase, device: str) -> None:
    """A layer whose expert e multiplies by 2^e: gradients must equal those of the same layer on one rank."""
    buffer = megatron_buffer(rank.group, case.hidden * 2)
    experts = oracle.local_experts(case.num_experts, rank.size, rank.rank)
    x = case.x(rank.rank).to(device).requires_grad_()
    probs = case.topk_weights(rank.rank).to(device).requires_grad_()
    idx = case.topk_idx(rank.rank).to(device)
    recv_x, recv_idx, recv_probs, counts, handle = FusedDispatch.apply(
        x, idx, probs, case.num_experts, buffer
    )
    assert counts.tolist() == [int((recv_idx == e).sum()) for e in range(len(experts))]
    factors = 2.0 ** torch.arange(experts.start, experts.start + len(experts) + 1, device=device)
    per_slot = factors[recv_idx.clamp(min=0)].masked_fill(recv_idx < 0, 0.0)
    factor = (recv_probs * per_slot).sum(dim=1, keepdim=True)
    combined = FusedCombine.apply((recv_x.float() * factor).bfloat16(), handle, buffer)
    combined.float().square().sum().backward()

    expected_x = case.x(rank.rank).to(device).requires_grad_()
    expected_probs = case.topk_weights(rank.rank).to(device).requires_grad_()
    chosen = (2.0 ** idx.clamp(min=0)).masked_fill(idx < 0, 0.0)
    alone = (expected_x.float() * (expected_probs * chosen).sum(dim=1, keepdim=True)).bfloat16()
    alone.float().square().sum().backward()
    assert calc_diff(combined.detach(), alone.detach()) < 1e-4
    assert x.grad is not None
    assert expected_x.grad is not None
    assert calc_diff(x.grad, expected_x.grad) < 1e-4
    assert probs.grad is not None
    assert expected_probs.grad is not None
    assert calc_diff(probs.grad, expected_probs.grad.masked_fill(idx < 0, 0.0)) < 1e-3


# Inference engines: prefill by high throughput, decode by low latency


def serve_like_vllm(rank: Rank, case: MoeCase, device: str) -> None:
    most_tokens, local = 64, case.num_experts // rank.size
    num_rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=most_tokens,
        hidden=case.hidden,
        num_ranks=rank.size,
        num_experts=case.num_experts,
    )
    buffer = deep_ep.Buffer(
        group=rank.group,
        num_nvl_bytes=64 << 20,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=local,
        explicitly_destroy=True,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
    )
    buffer.set_num_sms(20)
    prefill(buffer, rank, case, device)
    buffer.clean_low_latency_buffer(most_tokens, case.hidden, case.num_experts)
    decode(buffer, rank, case, device, most_tokens)
    buffer.destroy()


def prefill(buffer: deep_ep.Buffer, rank: Rank, case: MoeCase, device: str) -> None:
    topk_idx = case.topk_idx(rank.rank).to(device)
    previous_event = deep_ep.Buffer.capture()
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=topk_idx,
        num_experts=case.num_experts,
        previous_event=previous_event,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    recv_x, recv_idx, _, counts, handle, event = buffer.dispatch(
        x=case.x(rank.rank).to(device),
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=case.topk_weights(rank.rank).to(device),
        expert_alignment=1,
        config=buffer.get_dispatch_config(rank.size),
        previous_event=previous_event,
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert torch.equal(recv_x.cpu(), rows.take(case.all_x()))
    assert torch.equal(recv_idx.cpu(), rows.topk_idx)
    assert counts == rows.per_expert
    combined, _, event = buffer.combine(
        x=expert_output(recv_x, rank.rank),
        handle=handle,
        topk_weights=None,
        config=buffer.get_combine_config(rank.size),
        previous_event=deep_ep.Buffer.capture(),
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    check_combined(case, rank.rank, combined.cpu())


def decode(buffer: deep_ep.Buffer, rank: Rank, case: MoeCase, device: str, most_tokens: int) -> None:
    x, topk_idx = case.x(rank.rank).to(device), case.topk_idx(rank.rank).to(device)
    weights = case.topk_weights(rank.rank).to(device)
    (q, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        x,
        topk_idx,
        most_tokens,
        case.num_experts,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=True,
    )
    hook()
    assert q.dtype == torch.float8_e4m3fn
    results = torch.zeros(q.shape, dtype=torch.bfloat16, device=device)
    for expert, count in enumerate(counts.tolist()):
        results[expert, :count] = oracle.dequantize_fp8(q[expert, :count], scales[expert, :count]).bfloat16()
    output = torch.empty_like(x)
    _, _, hook = buffer.low_latency_combine(
        results,
        topk_idx,
        weights,
        handle,
        async_finish=False,
        zero_copy=False,
        return_recv_hook=True,
        out=output,
    )
    hook()
    total = weights.masked_fill(topk_idx < 0, 0).sum(dim=1, keepdim=True)
    assert calc_diff(output, x.float() * total) < 1e-3


def serve_like_sglang(rank: Rank, case: MoeCase, device: str) -> None:
    """Packed int32 scales, column-major; Config from a JSON file; events of the layout passed on."""
    buffer = deep_ep.Buffer(rank.group, 64 << 20, 0, allow_mnnvl=True)
    settings = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 256}
    config = deep_ep.Config(**settings)
    assert deep_ep.Buffer.num_sms % 2 == 0
    assert not buffer.low_latency_mode
    assert buffer.group_size == rank.size
    quantized = [oracle.quantize_fp8(x, round_scale=True) for x in case.all_x()]
    packed = [oracle.pack_ue8m0(scales) for _, scales in quantized]
    mine = packed[rank.rank].to(device).T.contiguous().T
    topk_idx = case.topk_idx(rank.rank).to(device)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    (recv_q, recv_scales), _, _, counts, handle, event = buffer.dispatch(
        (quantized[rank.rank][0].to(device), mine),
        topk_idx=topk_idx,
        topk_weights=case.topk_weights(rank.rank).to(device),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=False,
        allocate_on_comm_stream=False,
        expert_alignment=128,
        config=config,
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert torch.equal(recv_scales.cpu(), rows.take(packed))
    assert counts == [-(-n // 128) * 128 for n in rows.per_expert]
    back = oracle.dequantize_fp8(recv_q, recv_scales).bfloat16()
    assert calc_diff(back.cpu(), rows.take(case.all_x())) < 1e-3
    combined, _, _ = buffer.combine(back, handle, previous_event=event, config=config)
    assert combined.shape == case.x(rank.rank).shape


# It asks for the scales that this machine's matrix units take, whatever format the layer's rows have.
SCALES_OF_THE_MACHINE = {"round_scale": True, "use_ue8m0": True}


def decode_bf16_like_sglang(rank: Rank, case: MoeCase, device: str) -> None:
    """Decode with rows that are not quantised."""
    most, ranks, experts = 32, rank.size, case.num_experts
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, case.hidden, ranks, experts)
    buffer = deep_ep.Buffer(rank.group, 0, num_bytes, low_latency_mode=True)
    x, ids = case.x(rank.rank).to(device), case.topk_idx(rank.rank).to(device)
    weights = case.topk_weights(rank.rank).to(device)
    rows, _, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, most, experts, use_fp8=False, async_finish=True, **SCALES_OF_THE_MACHINE
    )
    event.current_stream_wait()
    assert hook is None
    assert rows.dtype == torch.bfloat16
    combined, event, _ = buffer.low_latency_combine(rows, ids, weights, handle, async_finish=True)
    event.current_stream_wait()
    total = weights.masked_fill(ids < 0, 0).sum(dim=1, keepdim=True)
    assert calc_diff(combined, x.float() * total) < 1e-5


def overlap_like_sglang(rank: Rank, case: MoeCase, device: str) -> None:
    """Decode with NVFP4 rows, and a combine that follows the signals of either kind of expert kernel."""
    most, ranks, experts = 32, rank.size, case.num_experts
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, case.hidden, ranks, experts)
    buffer = deep_ep.Buffer(
        rank.group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=experts // ranks, allow_mnnvl=True
    )
    x, ids = case.x(rank.rank).to(device), case.topk_idx(rank.rank).to(device)
    weights = case.topk_weights(rank.rank).to(device)
    scale = torch.tensor([448.0 * 6 / 8], device=device)
    (codes, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        x,
        ids,
        most,
        experts,
        use_fp8=False,
        use_nvfp4=True,
        x_global_scale=scale,
        use_ue8m0_for_sf=False,
        async_finish=False,
        return_recv_hook=True,
        **SCALES_OF_THE_MACHINE,
    )
    hook()
    local = experts // ranks
    assert codes.shape == (ranks * most, case.hidden // 2, local)
    linear = scales.permute(5, 2, 1, 0, 4, 3).reshape(local, -1, case.hidden // 16)[:, : ranks * most].float()
    halves = codes.permute(2, 0, 1).cpu()
    values = oracle.fp4_values(torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2))
    rows = (values * linear.cpu().repeat_interleave(16, dim=-1) / scale.item()).bfloat16()
    for expert, count in enumerate(counts.tolist()):
        rows[expert, count:] = 0
    rows = rows.to(device)
    by_expert = torch.ones(local, dtype=torch.uint32, device=device)
    by_block = torch.full((local * -(-ranks * most // 64),), 7, dtype=torch.int32, device=device)
    total = weights.masked_fill(ids < 0, 0).sum(dim=1, keepdim=True)
    for signals in (
        {"src_signals": by_expert, "src_signal_expect_value": 1},
        {"packed_recv_count": counts, "comp_signal": by_block, "block_m": 64, "threshold": 7, "num_sms": 3},
    ):
        combined, _, hook = buffer.low_latency_combine(
            x=rows,
            topk_idx=ids,
            topk_weights=weights,
            handle=handle,
            return_recv_hook=True,
            overlap=True,
            **signals,
        )
        hook()
        assert calc_diff(combined, x.float() * total) < 2e-2
