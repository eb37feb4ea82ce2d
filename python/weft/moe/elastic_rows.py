# SPDX-License-Identifier: Apache-2.0
"""What elastic dispatch and combine do once their arguments are checked: rows to their layout, and back.

Work goes to the current stream; nothing here waits for a GPU, but for counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from weft import _core
from weft.errors import invalid
from weft.moe import elastic_layout, high_throughput
from weft.moe.config import ceil_div, local_experts
from weft.moe.device_context import DeviceContext, Order
from weft.moe.elastic_handle import LATE_FIELDS, EPHandle, LateFields, right_most_slots
from weft.moe.elastic_layout import Expansion
from weft.moe.events import EventHandle
from weft.moe.high_throughput import CombinePlan, Payload, Rows
from weft.runtime import spans
from weft.runtime.allocation import tensor_spec

_NO_WEIGHT_BITS = -1  # of a NaN that no sum gives


@dataclass(frozen=True)
class Wanted:
    """How a dispatch with new routes is to be laid out; see ElasticBuffer.dispatch."""

    num_experts: int
    num_max_tokens: int
    alignment: int
    num_sms: int
    do_expand: bool
    sums_at_owner: bool
    do_handle_copy: bool
    counts_unknown: bool


class RoutesPlan:
    """What dispatches along new routes share that have arguments of one signature.

    received, handle = plan.run(data, scales, ids, weights, order)
    """

    def __init__(
        self,
        context: DeviceContext,
        data: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor | None,
        wanted: Wanted,
    ) -> None:
        """Plan for tensors like these."""
        ranks = int(context.communicator.size)
        sent = no_weights(ids) if weights is None else weights
        rows = Rows(data, scales, ids, sent, True, ids.size(1) if wanted.sums_at_owner else 1)
        self.context, self.wanted = context, wanted
        self._rank = int(context.communicator.rank)
        # Experts of a rank that has all of its, and of this one.
        self._experts = (
            ceil_div(wanted.num_experts, ranks),
            local_experts(wanted.num_experts, ranks, self._rank),
        )
        self._worst = max(ranks * wanted.num_max_tokens, 1) if wanted.counts_unknown else 0
        self._layout = high_throughput.LayoutPlan(context, ids, wanted.num_experts)
        self._new_sum_place = context.maker(tensor_spec((ids.size(0), ranks), torch.int32))
        self._dispatch = high_throughput.DispatchPlan(
            context,
            rows,
            wanted.num_experts,
            is_ordered=True,
            worst_rows=self._worst,
            alignment=wanted.alignment,
        )

    def run(
        self,
        data: Tensor,
        scales: Tensor | None,
        ids: Tensor,
        weights: Tensor | None,
        order: Order,
    ) -> tuple[Any, EPHandle]:
        """Send rows. Returns what came, one row per (token, rank), and the handle."""
        wanted, stream = self.wanted, order[1]
        lay_out, dispatch = self._layout.run, self._dispatch.run
        if profiler._is_profiler_enabled or spans.NVTX:
            lay_out, dispatch = spans.around("layout", lay_out), spans.around("dispatch", dispatch)
        (sum_place,) = self._new_sum_place()
        _, per_expert, in_rank = lay_out(ids, sum_place, stream)
        sent = (data, scales, ids, no_weights(ids) if weights is None else weights)
        received, state, slots = dispatch(
            *(*sent, in_rank, per_expert, sum_place, wanted.num_max_tokens, wanted.num_sms, order)
        )
        return received, self._handle(ids, received, state, slots, stream)

    def _handle(
        self, ids: Tensor, received: Any, state: _core.DispatchState, slots: list[int], stream: int
    ) -> EPHandle:
        context, wanted = self.context, self.wanted
        num_local, recv_idx = self._experts[1], received.ids()
        topk_idx = ids.clone() if wanted.do_handle_copy else ids
        late = LateFields(
            state=state,
            rank=self._rank,
            topk_idx=topk_idx,
            recv_topk_idx=recv_idx,
            expansion=None,
            num_experts=self._experts,
            alignment=wanted.alignment,
            max_tokens=wanted.num_max_tokens,
            scaleup_places=context.scaleup_places,
            num_places=context.logical.local,
            stream=stream,
        )
        expansion: Expansion | None = None
        if wanted.do_expand:
            most = elastic_layout.most_expanded_rows(self._worst, ids.size(1), num_local, wanted.alignment)
            num_rows = most if wanted.counts_unknown else sum(slots)
            expansion = elastic_layout.expand(recv_idx, late.counts, num_rows, not wanted.counts_unknown)
            late.expansion = expansion
        handle = EPHandle(
            do_expand=wanted.do_expand,
            num_experts=wanted.num_experts,
            expert_alignment=wanted.alignment,
            num_max_tokens_per_rank=wanted.num_max_tokens,
            num_sms=wanted.num_sms,
            topk_idx=topk_idx,
            num_recv_tokens=state.num_rows,
            num_expanded_tokens=expansion.slot_of_row.size(0) if expansion else 0,
            num_recv_tokens_per_expert_list=slots,
            state=state,
            expansion=expansion,
            recv_topk_idx=recv_idx,
            sums_at_owner=wanted.sums_at_owner,
            late=late,
        )
        if wanted.counts_unknown and context.is_capturing:  # each replay brings others
            for name in LATE_FIELDS:
                getattr(handle, name)
        return handle


class CachedPlan:
    """What dispatches along routes of a handle share that have arguments of one signature.

    received = plan.run(data, scales, weights, handle, order)
    """

    def __init__(self, context: DeviceContext, num_sms: int, do_expand: bool) -> None:
        self.context, self.do_expand = context, do_expand
        self._num_sms = num_sms
        self._by_id_bytes: dict[int, high_throughput.RepeatPlan] = {}  # 0: no ids travel

    def run(
        self, data: Tensor, scales: Tensor | None, weights: Tensor | None, handle: EPHandle, order: Order
    ) -> Any:
        """Send rows. Returns what came."""
        context, state = self.context, handle.state
        ids = None if weights is None else handle.topk_idx
        id_bytes = 0 if ids is None else ids.element_size()
        plan = self._by_id_bytes.get(id_bytes)
        if plan is None:
            rows = Rows(data, scales, ids, weights, True)
            plan = self._by_id_bytes[id_bytes] = high_throughput.RepeatPlan(context, rows)
        if context.lacks_room_for(state):
            context.make_room_for(state, plan.format, state.num_rows)
        run = plan.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("dispatch", run)
        return run(data, scales, ids, weights, state, self._num_sms, order)


def no_weights(topk_idx: Tensor) -> Tensor:
    """Return what travels in place of weights, float32 [T, K]: nobody takes it for some."""
    return torch.full_like(topk_idx, _NO_WEIGHT_BITS, dtype=torch.int32).view(torch.float32)


def check_weights_alike(received: Any, handle: EPHandle, has_weights: bool, rank: int) -> None:
    """Refuse rows of a rank that gave weights where this one gave none, or the other way round.

    Not looked at on CUDA, where it would stall the stream: NaN arrives in place of weights.
    """
    if handle.recv_topk_idx.is_cuda or (weights := received.weights()) is None:
        return
    ends = handle.state.prefix[:, rank]
    came_with = weights[: int(ends[-1]), :1].view(torch.int32) != _NO_WEIGHT_BITS
    others = (came_with != has_weights).flatten().nonzero()
    if others.numel() > 0:
        other = int(torch.searchsorted(ends.contiguous(), others[0].to(ends.dtype), right=True))
        given = f"{'weights' if has_weights else 'None'} on rank {rank}"
        given += f" and {'None' if has_weights else 'weights'} on rank {other}"
        raise invalid("topk_weights", given, "weights on all ranks, or on none")


def outputs(
    received: Any, handle: EPHandle, has_weights: bool, zero_padding: bool, col_major: bool
) -> tuple[Payload, Tensor | None, Tensor | None]:
    """Return rows, ids and weights in the handle's layout."""
    data, scales = received.rows(), received.scales()
    weights = received.weights() if has_weights else None
    expansion = handle.expansion
    if expansion is not None:
        slot_of_row, top_k = expansion.slot_of_row, handle.topk_idx.size(1)
        row_of = slot_of_row.div(top_k, rounding_mode="floor")  # of -1, -1
        data = elastic_layout.take_rows(data, row_of, zero_padding)
        if scales is not None:
            scales = elastic_layout.take_rows(scales, row_of, zero_padding)
        if weights is not None:
            weights = elastic_layout.take_rows(weights.view(-1), slot_of_row, zero_padding)
    if scales is not None and col_major:
        scales = elastic_layout.column_major(scales)
    idx = None if handle.do_expand else handle.recv_topk_idx.clone()  # the caller may write to it
    return (data if scales is None else (data, scales)), idx, weights


def combine(
    plan_of: Callable[[Tensor], CombinePlan],
    x: Tensor,
    topk_weights: Tensor | None,
    biases: tuple[Tensor, ...],
    handle: EPHandle,
    before_epilogue: EventHandle | None,
    num_sms: int,
    order: Order,
) -> tuple[Tensor, Tensor | None]:
    """Return bf16 [T, hidden], and f32 [T, K] where weights come back too. plan_of(rows): of such a combine."""
    state, expansion, top_k, hidden = handle.state, handle.expansion, handle.topk_idx.size(1), x.size(1)
    rows, weights, sent_biases = x, topk_weights, biases
    if expansion is not None:
        row_of = expansion.row_of_slot.view(-1)
        if handle.sums_at_owner:
            rows = elastic_layout.take_rows(x, row_of, True).view(state.num_rows, top_k * hidden)
        else:
            rows = elastic_layout.reduce_slots(x, expansion.rows_of_token)
        if weights is not None:
            weights = elastic_layout.take_rows(weights, row_of, True).view(-1, top_k)
    else:
        if handle.sums_at_owner:
            rows = elastic_layout.at_slots(x, right_most_slots(handle.recv_topk_idx), top_k)
        if weights is not None:
            weights = weights.masked_fill(handle.recv_topk_idx < 0, 0.0)
    if handle.sums_at_owner:
        sent_biases = ()
    plan = plan_of(rows)
    if before_epilogue is not None:
        plan.context.order_after(before_epilogue)
    run = plan.run
    if profiler._is_profiler_enabled or spans.NVTX:
        run = spans.around("combine", run)
    bias0, bias1 = (*sent_biases, None, None)[:2]
    combined, combined_weights = run(rows, weights, bias0, bias1, state, num_sms, order)
    if handle.sums_at_owner:
        combined = _sum_slots(combined.view(-1, top_k, hidden), biases)
    return combined, combined_weights


def _sum_slots(slots: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
    """Return bf16 [T, hidden]: biases plus slots [T, K, hidden] in ascending order, in float32."""
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for term in (*biases, *slots.unbind(1)):
        total += term.float()
    return total.to(slots.dtype)
