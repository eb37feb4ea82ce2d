# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/deep_ep_compatibility.md for clients of DeepEP 2 and its hybrid-ep branch: their calls, written out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import deep_ep
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank

CASE = MoeCase(tokens=(6, 9), hidden=512, top_k=3, num_experts=8)
MOST = 16
LOCAL = 4


def hybrid_buffer(rank: Rank, **options: Any) -> Any:
    return deep_ep.HybridEPBuffer(
        group=rank.group,
        hidden_dim=CASE.hidden,
        max_num_of_tokens_per_rank=MOST,
        num_local_experts=LOCAL,
        use_fp8=False,
        **options,
    )


def maps(rank: Rank) -> tuple[Tensor, Tensor]:
    from deep_ep.hybrid_ep_buffer import indices_to_map

    me = rank.rank
    weights = CASE.topk_weights(me).float()
    routing_map, probs = indices_to_map(CASE.topk_idx(me), weights, CASE.tokens[me], CASE.num_experts)
    assert probs is not None
    return routing_map, probs


def check_sums(rank: Rank, combined: Tensor, routing_map: Tensor) -> None:
    """Rows that came back as they went: each token times the number of its experts."""
    expected = CASE.x(rank.rank).float() * routing_map.sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=2e-2, atol=1e-2)


def megatron_hybrid_ep(rank: Rank) -> None:
    """Fused permutation, found by the signature; a backward pass with the number of rows as a tensor."""
    assert (
        "fuse_permute_dispatch" in inspect.signature(deep_ep.HybridEPBuffer.dispatch_with_permute).parameters
    )
    options = {"num_sms_dispatch_api": 16, "num_sms_combine_api": 16, "num_sms_preprocessing_api": 108}
    buffer = hybrid_buffer(rank, num_blocks_permute=16, num_blocks_unpermute=16, **options)
    routing_map, probs = maps(rank)
    rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank),
        routing_map=routing_map,
        probs=probs,
        scaling_factor=None,
        num_of_experts_per_rank=LOCAL,
        pad_multiple=None,
        num_permuted_tokens=None,
        non_blocking=False,
        fuse_permute_dispatch=True,
    )
    assert scales is None and len(rows) == int(counts.sum())
    combined, none = buffer.combine_with_unpermute(
        hidden=rows, handle=handle, pad_multiple=None, fuse_unpermute_combine=True
    )
    check_sums(rank, combined, routing_map)
    assert none is None
    grad, *_ = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank),
        scaling_factor=None,
        handle=handle,
        pad_multiple=None,
        num_permuted_tokens=counts.sum(),
        fuse_permute_dispatch=True,
    )
    assert torch.equal(grad, rows)
    _, grad_probs = buffer.combine_with_unpermute(
        hidden=rows, probs=row_probs, handle=handle, pad_multiple=None
    )
    assert torch.equal(grad_probs, probs)


def torchtitan_hybrid_ep(rank: Rank) -> None:
    """A buffer that is kept while its sizes suffice; the flag for rows over the budget at the end of the handle."""
    buffer = hybrid_buffer(
        rank, load_cached_kernels=True, use_shared_buffer=True, enable_custom_allgather=True
    )
    sizes = buffer.configurer.buffer_config
    assert (sizes.hidden_dim, sizes.max_num_of_tokens_per_rank) == (CASE.hidden, MOST)
    assert (sizes.num_of_experts_per_rank, buffer.group) == (LOCAL, rank.group)
    routing_map, probs = maps(rank)
    budget = MOST * rank.size * min(LOCAL, CASE.top_k)
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank),
        routing_map=routing_map,
        probs=probs,
        scaling_factor=None,
        num_of_experts_per_rank=LOCAL,
        pad_multiple=8,
        num_permuted_tokens=budget,
        non_blocking=True,
    )
    over_budget = torch.zeros(1, dtype=torch.bool, device=handle[-1].device).logical_or_(handle[-1])
    assert (len(rows), len(row_probs), bool(over_budget)) == (budget, budget, False)
    assert not (counts % 8).any() and counts.dtype == torch.int64
    combined, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    check_sums(rank, combined, routing_map)

    first = int(counts[0])  # room for a rank's first expert alone, and the rest is dropped
    few, few_probs, _, few_counts, handle = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank),
        routing_map=routing_map,
        probs=probs,
        num_of_experts_per_rank=LOCAL,
        pad_multiple=8,
        num_permuted_tokens=first,
        non_blocking=True,
    )
    assert handle[-1].tolist() == [int(first < counts.sum())] == [1]
    assert torch.equal(few, rows[:first]) and few_counts.tolist() == [first] + [0] * (LOCAL - 1)
    kept = torch.zeros_like(routing_map)
    kept[:, ::LOCAL] = routing_map[:, ::LOCAL]
    combined, back = buffer.combine_with_unpermute(hidden=few, probs=few_probs, handle=handle)
    check_sums(rank, combined, kept)
    assert torch.equal(back, probs * kept)
    grad, *_ = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank), handle=handle, num_permuted_tokens=first, pad_multiple=8
    )
    assert torch.equal(grad, few)


def vllm_hybrid_ep(rank: Rank) -> None:
    """A bound of rows that no routes exceed, the same in each call; ids per row from counts on the device."""
    buffer, (routing_map, probs) = hybrid_buffer(rank), maps(rank)
    bound = MOST * rank.size * CASE.top_k
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=CASE.x(rank.rank),
        routing_map=routing_map,
        probs=probs,
        scaling_factor=None,
        num_of_experts_per_rank=LOCAL,
        pad_multiple=1,
        num_permuted_tokens=bound,
        non_blocking=True,
    )
    counts = counts.to(device=rows.device, non_blocking=True)
    rest = torch.full((1,), rows.shape[0]) - counts.sum(dim=0, keepdim=True)
    ids = torch.repeat_interleave(
        torch.arange(LOCAL + 1), torch.cat([counts, rest]), output_size=rows.shape[0]
    )
    assert len(ids) == len(row_probs) == bound
    assert bool((row_probs[ids < LOCAL] > 0).all()) and not rows[ids == LOCAL].any()
    combined, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    check_sums(rank, combined, routing_map)


def sglang_elastic(rank: Rank) -> None:
    """SMs and queue pairs from the buffer; as many rows as the handle says are read; FP8 with column-major scales."""
    buffer = deep_ep.ElasticBuffer(
        rank.group,
        num_max_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_topk=CASE.top_k,
        use_fp8_dispatch=True,
        allow_hybrid_mode=True,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    num_sms = buffer.get_theoretical_num_sms(CASE.num_experts, CASE.top_k)
    num_qps = buffer.get_theoretical_num_qps(num_sms)
    assert buffer.num_bytes > 0
    x = CASE.x(rank.rank)
    rows, idx, weights, handle, event = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), CASE.scales(rank.rank, CASE.hidden // 128)),
        topk_idx=CASE.topk_idx(rank.rank),
        topk_weights=CASE.topk_weights(rank.rank),
        num_experts=CASE.num_experts,
        num_max_tokens_per_rank=MOST,
        expert_alignment=128,
        num_sms=num_sms,
        num_qps=num_qps,
        use_tma_aligned_col_major_sf=True,
        do_cpu_sync=True,
        do_expand=False,
    )
    assert event.event is None
    came = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
    data, scales = rows
    assert scales[:came].stride(0) == 1
    counts = list(handle.num_recv_tokens_per_expert_list)
    assert len(counts) == LOCAL and not any(count % 128 for count in counts)
    assert handle.psum_num_recv_tokens_per_expert is not None and idx[:came].max() < LOCAL
    combined, _, _ = buffer.combine(
        data[:came].bfloat16(), handle=handle, topk_weights=weights[:came], num_sms=num_sms, num_qps=num_qps
    )
    assert combined.shape == x.shape


def automodel_elastic(rank: Rank) -> None:
    """Names by the first module that has them; a handle whose tensors autograd kept; a cached dispatch as it was."""
    from deep_ep.buffers.elastic import ElasticBuffer
    from deep_ep.buffers.legacy import Buffer
    from deep_ep.utils.event import EventHandle, EventOverlap

    assert (Buffer, ElasticBuffer) == (deep_ep.Buffer, deep_ep.ElasticBuffer)
    assert (EventHandle, EventOverlap) == (deep_ep.EventHandle, deep_ep.EventOverlap)
    assert isinstance(Buffer.is_sm90_compiled(), bool)
    buffer = ElasticBuffer(
        rank.group,
        num_max_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_topk=CASE.top_k,
        num_gpu_timeout_secs=300,
        explicitly_destroy=True,
        num_allocated_qps=4,
    )
    options = {"num_qps": 0, "async_with_compute_stream": True, "allocate_on_comm_stream": True}
    rows, _, weights, handle, event = buffer.dispatch(
        CASE.x(rank.rank),
        topk_idx=CASE.topk_idx(rank.rank),
        topk_weights=CASE.topk_weights(rank.rank),
        num_experts=CASE.num_experts,
        num_max_tokens_per_rank=MOST,
        num_sms=0,
        **options,
    )
    event.current_stream_wait()
    names = (
        "topk_idx",
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "recv_src_metadata",
        "dst_buffer_slot_idx",
        "token_metadata_at_forward",
        "channel_linked_list",
        "num_unaligned_recv_tokens_per_expert",
    )
    kept = {name: getattr(handle, name).clone() for name in names if getattr(handle, name, None) is not None}
    assert "topk_idx" in kept and "num_unaligned_recv_tokens_per_expert" in kept
    for name, tensor in kept.items():
        setattr(handle, name, tensor)
    again, *_, event = buffer.dispatch(CASE.x(rank.rank), handle=handle, num_sms=handle.num_sms, **options)
    event.current_stream_wait()
    assert torch.equal(again, rows)
    _, back, event = buffer.combine(rows, handle, topk_weights=weights.float(), num_sms=0, **options)
    event.current_stream_wait()
    assert torch.equal(back, CASE.topk_weights(rank.rank).masked_fill(CASE.topk_idx(rank.rank) < 0, 0))
    buffer.destroy()


CHECKS = [
    megatron_hybrid_ep,
    torchtitan_hybrid_ep,
    vllm_hybrid_ep,
    sglang_elastic,
    automodel_elastic,
]
