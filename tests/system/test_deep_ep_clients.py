# SPDX-License-Identifier: Apache-2.0
"""What clients of DeepEP touch, a test for each row of docs/deep_ep_compatibility.md: their calls, written out here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import newer_clients
import newest_clients
import pytest
import torch
from moe_checks import FakeMpi, check_combined, expert_output
from torch import Tensor

import deep_ep
import weft
from deep_ep.utils import EventHandle, EventOverlap
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool

CASE = MoeCase(tokens=(6, 9), hidden=512, top_k=3, num_experts=8)
MOST = 16
PAGE = Path(__file__).parents[2] / "docs" / "deep_ep_compatibility.md"
CHECKS: dict[str, Callable[[Rank], None]] = {}


def row(check: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Make a check the test of the row that has its name."""
    CHECKS[check.__name__] = check
    return check


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2, with_gpus=False) as ranks:
        yield ranks


def hinted_sizes(size: int, hidden_bytes: int) -> tuple[int, int]:
    """Return (num_nvl_bytes, num_rdma_bytes) as training frameworks work them out."""
    configs = (deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size))
    return (
        max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs),
        max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs),
    )


def dispatch(buffer: Any, me: int, x: Any = None, **options: Any) -> Any:
    """Lay out and dispatch the case by keywords."""
    idx = CASE.topk_idx(me)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, CASE.num_experts)
    return buffer.dispatch(
        CASE.x(me) if x is None else x,
        topk_idx=idx,
        topk_weights=CASE.topk_weights(me),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **{"previous_event": event, **options},
    )


@row
def megatron_buffer(rank: Rank) -> None:
    nvl_bytes, rdma_bytes = hinted_sizes(rank.size, CASE.hidden * 2)
    buffer = deep_ep.Buffer(rank.group, nvl_bytes, rdma_bytes)
    assert buffer.group == rank.group
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl_bytes, rdma_bytes)
    assert hinted_sizes(rank.size, CASE.hidden * 4)[0] > nvl_bytes
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24


@row
def megatron_layer(rank: Rank) -> None:
    """A forward and a backward pass, the buffer replaced by a larger one in between."""
    me, before = rank.rank, EventOverlap(EventHandle())
    options = {"async_finish": True, "allocate_on_comm_stream": True}
    buffer = deep_ep.Buffer(rank.group, *hinted_sizes(rank.size, CASE.hidden * 2))
    *layout, event = buffer.get_dispatch_layout(
        CASE.topk_idx(me), CASE.num_experts, previous_event=before, **options
    )
    recv_x, recv_idx, recv_weights, counts, handle, after = buffer.dispatch(
        CASE.x(me),
        topk_idx=CASE.topk_idx(me),
        topk_weights=CASE.topk_weights(me),
        num_tokens_per_rank=layout[0],
        num_tokens_per_rdma_rank=layout[1],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
        previous_event=event,
        **options,
    )
    after.current_stream_wait()
    assert torch.tensor(counts).sum() == (recv_idx >= 0).sum()
    wider = deep_ep.Buffer(rank.group, *hinted_sizes(rank.size, CASE.hidden * 8))
    del buffer
    for sent_weights in (recv_weights.float(), None):
        combined, weights, after = wider.combine(
            expert_output(recv_x, me),
            handle,
            topk_weights=sent_weights,
            previous_event=EventOverlap(EventHandle()),
            **options,
        )
        after.current_stream_wait()
        check_combined(CASE, me, combined)
        assert (weights is None) == (sent_weights is None)
    grad, *nothing, after = wider.dispatch(
        CASE.x(me), handle=handle, previous_event=EventOverlap(EventHandle()), **options
    )
    after.current_stream_wait()
    assert torch.equal(grad, recv_x)
    assert nothing == [None] * 4


@row
def megatron_frees_outputs(rank: Rank) -> None:
    buffer = deep_ep.Buffer(rank.group, 1 << 20)
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, rank.rank)
    y = expert_output(recv_x, rank.rank)
    for output in (recv_x, recv_weights):
        output.untyped_storage().resize_(0)
    check_combined(CASE, rank.rank, buffer.combine(y, handle)[0])


class SavesItsHandle(torch.autograd.Function):
    """Keeps the handle among the tensors that autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Any, me: int) -> Any:
        recv_x, _, _, _, handle, event = dispatch(
            buffer,
            me,
            x,
            previous_event=deep_ep.Buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        assert isinstance(handle, tuple)
        ctx.save_for_backward(*handle)
        ctx.buffer, ctx.me = buffer, me
        return recv_x, handle, event

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        finished = EventOverlap(None)
        x, _, event = ctx.buffer.combine(
            grad,
            ctx.saved_tensors,
            previous_event=deep_ep.Buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        finished.event = event.event
        finished.current_stream_wait()
        return x, None, None


@row
def xtuner_saved_handle(rank: Rank) -> None:
    buffer = deep_ep.Buffer(rank.group, 1 << 20)
    x = CASE.x(rank.rank).requires_grad_()
    recv_x, handle, event = SavesItsHandle.apply(x, buffer, rank.rank)
    event.current_stream_wait()
    recv_x.mul_(1)
    recv_x.backward(torch.ones_like(recv_x))
    in_rank = oracle.layout(CASE.topk_idx(rank.rank), CASE.num_experts, rank.size)[2]
    assert x.grad is not None
    assert torch.equal(x.grad[:, 0].float(), in_rank.sum(dim=1).float())
    assert torch.equal(handle[0][:, rank.rank][-1], torch.tensor(len(recv_x), dtype=torch.int32))


@row
def vllm_high_throughput(rank: Rank) -> None:
    buffer = deep_ep.Buffer(
        group=rank.group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    scales = CASE.scales(rank.rank, 1)
    event = deep_ep.Buffer.capture()
    (rows, recv_scales), recv_idx, recv_weights, counts, handle, event = dispatch(
        buffer,
        rank.rank,
        (CASE.x(rank.rank), scales),
        expert_alignment=1,
        config=None,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    assert recv_scales.shape == (len(rows), 1)
    assert len(counts) == CASE.num_experts // rank.size
    assert recv_idx.dtype == deep_ep.topk_idx_t
    assert recv_weights.dtype == torch.float32
    combined, _, event = buffer.combine(
        x=expert_output(rows, rank.rank),
        handle=handle,
        topk_weights=None,
        config=None,
        previous_event=deep_ep.Buffer.capture(),
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    event.current_stream_wait()
    check_combined(CASE, rank.rank, combined)
    buffer.destroy()
    assert buffer.runtime is None


def low_latency_buffer(rank: Rank, **options: Any) -> Any:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST,
        hidden=CASE.hidden,
        num_ranks=rank.size,
        num_experts=CASE.num_experts,
    )
    return deep_ep.Buffer(
        group=rank.group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=CASE.num_experts // rank.size,
        **options,
    )


def serve_low_latency(rank: Rank, buffer: Any, **options: Any) -> None:
    """Dispatch and combine with hooks into a given tensor."""
    x, idx, weights = CASE.x(rank.rank), CASE.topk_idx(rank.rank), CASE.topk_weights(rank.rank)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, idx, MOST, CASE.num_experts, use_fp8=False, async_finish=False, return_recv_hook=True
    )
    assert event.event is None
    hook()
    assert rows.shape == (CASE.num_experts // rank.size, rank.size * MOST, CASE.hidden)
    assert counts.dtype == torch.int32
    out = torch.empty_like(x)
    combined, _, hook = buffer.low_latency_combine(
        rows, idx, weights, handle, async_finish=False, return_recv_hook=True, out=out, **options
    )
    hook()
    assert combined.data_ptr() == out.data_ptr()
    total = weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(out.float(), x.float() * total, rtol=2.0**-6, atol=2.0**-6)


@row
def vllm_low_latency(rank: Rank) -> None:
    options = {"allow_nvlink_for_low_latency_mode": True, "allow_mnnvl": False, "explicitly_destroy": True}
    buffer = low_latency_buffer(rank, enable_shrink=True, **options)
    serve_low_latency(rank, buffer)
    mask = torch.ones(rank.size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [0] * rank.size
    torch.distributed.barrier(rank.group)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    torch.distributed.barrier(rank.group)
    serve_low_latency(rank, buffer)
    buffer.destroy()


@row
def vllm_elastic(rank: Rank) -> None:
    size = deep_ep.ElasticBuffer.get_buffer_size_hint(
        rank.group, num_max_tokens_per_rank=MOST, hidden=CASE.hidden, num_topk=CASE.top_k
    )
    buffer = deep_ep.ElasticBuffer(
        group=rank.group,
        num_bytes=size,
        num_cpu_timeout_secs=60,
        num_gpu_timeout_secs=60,
        explicitly_destroy=True,
    )
    rows, idx, weights, handle, event = buffer.dispatch(
        CASE.x(rank.rank),
        topk_idx=CASE.topk_idx(rank.rank),
        topk_weights=CASE.topk_weights(rank.rank),
        num_experts=CASE.num_experts,
        num_max_tokens_per_rank=MOST,
        expert_alignment=1,
        do_expand=False,
        do_cpu_sync=False,
        async_with_compute_stream=False,
    )
    assert event.event is None
    assert (event.extra_tensors, event.hook_after_wait) == (None, None)
    assert len(rows) == rank.size * MOST
    assert handle.num_recv_tokens_per_expert_list == []
    assert int(handle.num_unaligned_recv_tokens_per_expert.sum()) == int((idx >= 0).sum())
    idx.fill_(-1)
    _, back, _ = buffer.combine(rows, handle, topk_weights=weights)
    assert torch.equal(back, CASE.topk_weights(rank.rank).masked_fill(CASE.topk_idx(rank.rank) < 0, 0))
    buffer.destroy()


@row
def sglang_both_modes(rank: Rank) -> None:
    buffer = low_latency_buffer(rank, allow_mnnvl=True)
    assert buffer.low_latency_mode
    assert buffer.group_size == rank.size
    config = deep_ep.Config(**{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8})
    recv_x, _, _, counts, handle, _ = dispatch(
        buffer,
        rank.rank,
        async_finish=False,
        allocate_on_comm_stream=False,
        expert_alignment=128,
        config=config,
    )
    assert all(count % 128 == 0 for count in counts)
    check_combined(
        CASE, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle, config=config)[0]
    )
    buffer.clean_low_latency_buffer(MOST, CASE.hidden, CASE.num_experts)
    serve_low_latency(rank, buffer)


@row
def sglang_overlap(rank: Rank) -> None:
    signals = torch.ones(CASE.num_experts // rank.size * MOST * rank.size, dtype=torch.int32)
    serve_low_latency(
        rank,
        low_latency_buffer(rank),
        overlap=True,
        packed_recv_count=torch.zeros(CASE.num_experts // rank.size, dtype=torch.int32),
        comp_signal=signals,
        block_m=1,
        threshold=1,
        num_sms=3,
    )


@row
def tensorrt_llm_comm(rank: Rank) -> None:
    comm = FakeMpi.of(rank)
    buffer = deep_ep.Buffer(None, *hinted_sizes(rank.size, CASE.hidden * 2), comm=comm)
    assert buffer.group is comm
    recv_x, _, _, _, handle, event = dispatch(buffer, rank.rank)
    assert event.event is None
    check_combined(CASE, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])


@row
def lmdeploy_common_buffer(rank: Rank) -> None:
    deep_ep.Buffer.set_num_sms(20)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, CASE.hidden, rank.size, CASE.num_experts)
    nvl_bytes, rdma_bytes = hinted_sizes(rank.size, CASE.hidden * 2)
    buffer = deep_ep.Buffer(
        rank.group,
        nvl_bytes,
        max(rdma_bytes, size),
        low_latency_mode=True,
        num_qps_per_rank=max(CASE.num_experts // rank.size, deep_ep.Buffer.num_sms // 2),
    )
    recv_x, _, _, _, handle, _ = dispatch(buffer, rank.rank, async_finish=True, allocate_on_comm_stream=True)
    check_combined(CASE, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])
    serve_low_latency(rank, buffer)


@row
def torchtitan_handle_cache(rank: Rank) -> None:
    """Handles wait in a dictionary; the buffer is another one when it comes to the backward pass."""
    kept, buffer = {}, deep_ep.Buffer(rank.group, 1 << 20)
    for number in range(3):
        recv_x, _, _, _, kept[number], _ = dispatch(buffer, rank.rank)
    buffer = deep_ep.Buffer(rank.group, 4 << 20)
    for number in reversed(range(3)):
        y = expert_output(recv_x, rank.rank)
        check_combined(CASE, rank.rank, buffer.combine(y, kept.pop(number))[0])


@row
def automodel_handle_fields(rank: Rank) -> None:
    buffer = deep_ep.ElasticBuffer(rank.group, num_bytes=0)
    rows, _, _, handle, _ = buffer.dispatch(
        CASE.x(rank.rank),
        CASE.topk_idx(rank.rank),
        CASE.topk_weights(rank.rank),
        num_experts=CASE.num_experts,
        num_max_tokens_per_rank=MOST,
    )
    for name in vars(handle):
        setattr(handle, name, getattr(handle, name))
    handle.anything = 3
    assert buffer.combine(rows, handle)[0].shape == CASE.x(rank.rank).shape


@row
def deep_ep_internode_positions(rank: Rank) -> None:
    """The config stands behind num_worst_tokens, or where that is in versions without it."""
    me, buffer, config = rank.rank, deep_ep.Buffer(rank.group, 1 << 20), deep_ep.Config()
    idx, weights = CASE.topk_idx(me), CASE.topk_weights(me)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, CASE.num_experts)
    routes = (None, per_rank, per_node, in_rank, per_expert, idx, weights, 1)
    for middle, rows in (((config,), None), ((0, config), None), ((40, config), 40)):
        recv_x, _, _, _, handle, _ = buffer.internode_dispatch(
            CASE.x(me), *routes, *middle, event, False, False
        )
        assert rows is None or len(recv_x) == rows
        combined, _, _ = buffer.internode_combine(recv_x, handle, None, None, config, event, False, False)
        assert combined.shape == CASE.x(me).shape
    with pytest.raises(weft.Error, match="config"):
        buffer.internode_dispatch(CASE.x(me), *routes, None)
    with pytest.raises(weft.Error, match="config"):
        buffer.internode_dispatch(CASE.x(me), *routes, 0)


@row
def deep_ep_runtime(rank: Rank) -> None:
    runtime = deep_ep.Buffer(rank.group, 1 << 20).runtime
    assert runtime is not None
    assert runtime.is_available()
    assert not runtime.is_internode_available()
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (1, 0)
    assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (rank.rank, 0)
    assert runtime.get_local_device_id() == 0


@row
def deep_ep_sizes(rank: Rank) -> None:
    from deep_ep import _C
    from deep_ep.utils import comm

    assert _C.get_elastic_buffer_alignment() == 2 << 20
    comm._num_ranks[77] = rank.size  # as get_nccl_comm_handle() notes for a group that has used NCCL
    shape = (MOST, CASE.hidden, CASE.top_k, False, True, True)
    size = _C.calculate_elastic_buffer_size(77, *shape)
    assert size == deep_ep.ElasticBuffer.get_buffer_size_hint(rank.group, *shape)
    assert size % _C.get_elastic_buffer_alignment() == 0
    with pytest.raises(weft.Error, match="nccl_comm: got 78"):
        _C.calculate_elastic_buffer_size(78, *shape)


@row
def deep_ep_gather_keyword(rank: Rank) -> None:
    buffer = deep_ep.ElasticBuffer(rank.group, num_bytes=0)
    mine = torch.full((5,), float(rank.rank))
    size = buffer.get_agrs_num_max_session_bytes(rank.group, mine.shape, mine.dtype)
    buffer.agrs_set_config(size, 1)
    with buffer.agrs_new_session():
        gathered, wait = buffer.all_gather(t=mine)
        wait()
    assert gathered[:, 0].tolist() == [float(other) for other in range(rank.size)]


@row
def deep_ep_hook_after_wait(rank: Rank) -> None:
    calls: list[str] = []
    event = EventOverlap(EventHandle())
    assert event.hook_after_wait is None

    def fails_once() -> None:
        calls.append("ran")
        if len(calls) == 1:
            raise ValueError("not yet")

    event.register_hook_after_wait(fails_once)
    with pytest.raises(ValueError, match="not yet"):
        event.current_stream_wait(release_handle=True)
    assert event.hook_after_wait is fails_once
    assert event.event is not None
    event.current_stream_wait(release_handle=True)
    assert (calls, event.hook_after_wait, event.event) == (["ran", "ran"], None, None)
    event.hook_after_wait = fails_once
    assert event.hook_after_wait is fails_once


for _check in (*newer_clients.CHECKS, *newest_clients.CHECKS):
    row(_check)


@pytest.mark.parametrize("name", CHECKS)
def test_what_clients_call(pair: RankPool, name: str) -> None:
    pair.run(CHECKS[name])


def test_the_page_has_a_row_for_each_test() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(CHECKS)
