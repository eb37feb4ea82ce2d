# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/deep_ep_compatibility.md for what clients call since they know DeepEP 2: their calls, written out."""

from __future__ import annotations

from typing import Any

import torch
from moe_checks import FakeMpi
from torch import Tensor

import deep_ep
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank

CASE = MoeCase(tokens=(6, 9), hidden=512, top_k=3, num_experts=8)
MOST = 16
LOCAL = 4


def routes(rank: Rank) -> dict[str, Any]:
    return {
        "topk_idx": CASE.topk_idx(rank.rank),
        "topk_weights": CASE.topk_weights(rank.rank),
        "num_experts": CASE.num_experts,
    }


def check_weighted(rank: Rank, combined: Tensor, weights: Tensor | None = None) -> None:
    """Experts gave their rows back as they came, times the weights, or times 1 for each rank of a token."""
    idx, x = CASE.topk_idx(rank.rank), CASE.x(rank.rank).float()
    if weights is None:
        per_rank = torch.stack([(idx // LOCAL == other).logical_and(idx >= 0).any(1) for other in range(2)])
        total = per_rank.sum(0).float().unsqueeze(1)
    else:
        total = weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), x * total, rtol=2e-2, atol=2e-2)


def torchtitan_elastic(rank: Rank) -> None:
    """A dispatch, its cached repeat in the backward pass, for which no host waits; an expanded one for inference."""
    size = deep_ep.ElasticBuffer.get_buffer_size_hint(
        rank.group, MOST, CASE.hidden, num_topk=CASE.top_k, use_fp8_dispatch=False
    )
    buffer = deep_ep.ElasticBuffer(
        rank.group,
        num_bytes=size,
        num_max_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_topk=CASE.top_k,
        use_fp8_dispatch=False,
        deterministic=False,
        explicitly_destroy=True,
    )
    assert buffer.num_bytes >= size and buffer.num_max_tokens_per_rank == MOST
    num_sms, most = buffer.get_theoretical_num_sms(CASE.num_experts, CASE.top_k), max(CASE.tokens)
    x, common = CASE.x(rank.rank), {**routes(rank), "num_max_tokens_per_rank": most, "num_sms": num_sms}
    rows, _, weights, handle, _ = buffer.dispatch(x, do_expand=False, do_cpu_sync=True, **common)
    assert len(handle.num_recv_tokens_per_expert_list) == LOCAL
    combined, _, event = buffer.combine(
        rows, handle=handle, topk_weights=None, async_with_compute_stream=True
    )
    event.current_stream_wait()
    check_weighted(rank, combined)
    again, *_ = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    assert torch.equal(again, rows)
    back = buffer.combine(again, handle=handle, topk_weights=weights.float())[1]
    assert torch.equal(back, common["topk_weights"].masked_fill(common["topk_idx"] < 0, 0))
    rows, idx, weights, handle, _ = buffer.dispatch(x, do_expand=True, do_cpu_sync=False, **common)
    assert idx is None and weights.shape == (len(rows),)
    ends = handle.psum_num_recv_tokens_per_expert
    assert torch.equal(
        torch.diff(ends, prepend=ends.new_zeros(1)), handle.num_unaligned_recv_tokens_per_expert
    )
    combined, _, _ = buffer.combine(rows * weights.nan_to_num(0).unsqueeze(1).bfloat16(), handle=handle)
    check_weighted(rank, combined, common["topk_weights"])
    buffer.destroy()
    assert buffer.runtime is None


def vllm_elastic_prefill(rank: Rank) -> None:
    """Packed MXFP8 scales; expanded rows as many as the list says; an idle rank; SMs by keyword."""
    buffer = deep_ep.ElasticBuffer(
        group=rank.group,
        num_max_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_topk=CASE.top_k,
        use_fp8_dispatch=True,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=True,
        num_cpu_timeout_secs=1800,
        num_gpu_timeout_secs=1800,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_sms(num_experts=CASE.num_experts, num_topk=CASE.top_k) > 0
    x = CASE.x(rank.rank)
    scales = torch.arange(len(x) * 4, dtype=torch.int32).view(-1, 4) + 1
    (rows, came), idx, weights, handle, _ = buffer.dispatch(
        x=(x.to(torch.float8_e4m3fn), scales),
        **routes(rank),
        num_max_tokens_per_rank=None,
        do_expand=True,
        do_cpu_sync=True,
        async_with_compute_stream=False,
    )
    counts = handle.num_recv_tokens_per_expert_list
    assert sum(counts) == len(rows) == len(came) == len(weights)
    assert came.dtype == torch.int32 and idx is None
    assert counts == handle.num_unaligned_recv_tokens_per_expert.tolist()
    combined, _, event = buffer.combine(
        x=rows.bfloat16(),
        handle=handle,
        topk_weights=None,
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    if event.event is not None:
        event.current_stream_wait()
    assert combined.shape == x.shape
    own = {
        name: value[:0] if rank.rank == 0 else value
        for name, value in (("x", x), *list(routes(rank).items())[:2])
    }
    rows, _, _, handle, _ = buffer.dispatch(
        **own, num_experts=CASE.num_experts, num_max_tokens_per_rank=None, do_expand=True, do_cpu_sync=True
    )
    assert buffer.combine(x=rows, handle=handle)[0].shape == own["x"].shape
    buffer.destroy()


def sglang_elastic_decode(rank: Rank) -> None:
    """Expanded rows of the worst case, aligned to 128, that no host waits for; both layouts of scales."""
    buffer = deep_ep.ElasticBuffer(
        rank.group,
        num_max_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_topk=CASE.top_k,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    num_sms = buffer.get_theoretical_num_sms(CASE.num_experts, CASE.top_k)
    sizes = {"num_sms": num_sms, "num_qps": buffer.get_theoretical_num_qps(num_sms)}
    x = CASE.x(rank.rank)
    packed = torch.ones((1, len(x)), dtype=torch.int32).T
    for scales, column_major in ((CASE.scales(rank.rank, 4), False), (packed, True)):
        (rows, came), idx, weights, handle, _ = buffer.dispatch(
            (x.to(torch.float8_e4m3fn), scales),
            **routes(rank),
            num_max_tokens_per_rank=MOST,
            expert_alignment=128,
            use_tma_aligned_col_major_sf=column_major,
            do_cpu_sync=False,
            do_expand=True,
            **sizes,
        )
        assert idx is None and weights.shape == (len(rows),) and len(rows) % 128 == 0
        assert (came.stride(0) == 1) == column_major
        assert buffer.combine(rows.bfloat16(), handle=handle, topk_weights=None, **sizes)[0].shape == x.shape


def low_latency(rank: Rank, hidden: int, **options: Any) -> Any:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST, hidden=hidden, num_ranks=2, num_experts=CASE.num_experts
    )
    return deep_ep.Buffer(
        num_nvl_bytes=1 << 20, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=LOCAL, **options
    )


def vllm_low_latency_formats(rank: Rank) -> None:
    """Exponents as scales, and NVFP4 relative to a scale of the layer; all flags given, whatever the format."""
    buffer = low_latency(rank, 2048, group=rank.group, explicitly_destroy=True)
    seed = torch.Generator().manual_seed(rank.rank)
    x = torch.randn(5, 2048, generator=seed).bfloat16()
    idx = torch.rand(5, CASE.num_experts, generator=seed).topk(CASE.top_k).indices
    common = {"async_finish": False, "return_recv_hook": True}
    (rows, scales), _, _, _, hook = buffer.low_latency_dispatch(
        x, idx, MOST, CASE.num_experts, use_fp8=True, round_scale=True, use_ue8m0=True, **common
    )
    hook()
    assert (scales.dtype, scales.shape) == (torch.int32, (LOCAL, 2 * MOST, 4))
    flags = {"use_fp8": False, "round_scale": False, "use_ue8m0": False, "use_nvfp4": True}
    (rows, _), _, _, _, hook = buffer.low_latency_dispatch(
        x, idx, MOST, CASE.num_experts, x_global_scale=torch.ones(1), **flags, **common
    )
    hook()
    assert rows.permute(2, 0, 1).shape == (LOCAL, 2 * MOST, 1024)
    buffer.destroy()


def tensorrt_llm_low_latency(rank: Rank) -> None:
    """FP8 rows go out as half as many bfloat16, and rows of the whole width come back."""
    buffer = low_latency(
        rank, CASE.hidden, group=None, comm=FakeMpi.of(rank), allow_nvlink_for_low_latency_mode=True
    )
    sent = CASE.x(rank.rank).to(torch.float8_e4m3fn)
    idx, weights = CASE.topk_idx(rank.rank), CASE.topk_weights(rank.rank)
    rows, _, handle, event, hook = buffer.low_latency_dispatch(
        sent.view(torch.bfloat16), idx, MOST, CASE.num_experts, use_fp8=False
    )
    assert event.event is None and hook is None and rows.shape == (LOCAL, 2 * MOST, CASE.hidden // 2)
    whole = rows.view(torch.float8_e4m3fn).bfloat16()
    combined, event, hook = buffer.low_latency_combine(whole, idx, weights, handle)
    total = weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), sent.float() * total, rtol=2e-2, atol=2e-2)


CHECKS = [
    torchtitan_elastic,
    vllm_elastic_prefill,
    sglang_elastic_decode,
    vllm_low_latency_formats,
    tensorrt_llm_low_latency,
]
