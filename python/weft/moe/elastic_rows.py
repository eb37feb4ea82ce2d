# SPDX-License-Identifier: Apache-2.0
"""What elastic dispatch and combine do once their arguments are checked: rows to their layout, and back.

Work goes to the context's communication stream; nothing here waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import elastic_layout, high_throughput
from weft.moe.config import align, ceil_div, local_experts
from weft.moe.device_context import DeviceContext
from weft.moe.elastic_handle import (
    EPHandle,
    destination_slots,
    expert_psum,
    right_most_slots,
    scaleup_psum,
    source_metadata,
)
from weft.moe.elastic_layout import Expansion, ExpertCounts
from weft.moe.events import EventHandle
from weft.moe.high_throughput import Layout, Payload, Rows

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


def first_dispatch(context: DeviceContext, rows: Rows, wanted: Wanted) -> tuple[Any, EPHandle]:
    """Send rows along new routes. Returns what came, one row per (token, rank), and the handle."""
    assert rows.topk_idx is not None
    ids, ranks, rank = rows.topk_idx, int(context.communicator.size), int(context.communicator.rank)
    num_tokens, top_k = ids.shape
    with context.on_comm_stream():
        layout = high_throughput.LayoutPlan(context, ids, wanted.num_experts)
        sum_place = context.empty(num_tokens, ranks, dtype=torch.int32)
        counted = Layout._make(layout.run(ids, context.stream, sum_place))
        worst = max(ranks * wanted.num_max_tokens, 1) if wanted.counts_unknown else 0
        plan = high_throughput.DispatchPlan(
            context, rows, wanted.num_experts, is_ordered=True, worst_rows=worst
        )
        received, state, slots = plan.run(
            rows,
            counted.is_token_in_rank,
            counted.slots_per_expert,
            wanted.num_sms,
            context.as_ordered,
            sum_place,
            wanted.num_max_tokens,
        )
        recv_idx = received.ids()
        assert recv_idx is not None
        num_local = local_experts(wanted.num_experts, ranks, rank)
        experts: ExpertCounts = elastic_layout.count_experts(recv_idx, num_local, wanted.alignment)
        aligned = [align(count, wanted.alignment) for count in slots]
        expansion: Expansion | None = None
        if wanted.do_expand:
            most = elastic_layout.most_expanded_rows(worst, top_k, num_local, wanted.alignment)
            expansion = elastic_layout.expand(
                recv_idx, experts, most if wanted.counts_unknown else sum(aligned)
            )
        handle = EPHandle(
            do_expand=wanted.do_expand,
            num_experts=wanted.num_experts,
            expert_alignment=wanted.alignment,
            num_max_tokens_per_rank=wanted.num_max_tokens,
            num_sms=wanted.num_sms,
            topk_idx=ids.clone() if wanted.do_handle_copy else ids,
            num_recv_tokens=state.num_rows,
            num_expanded_tokens=expansion.slot_of_row.size(0) if expansion else 0,
            num_recv_tokens_per_expert_list=[] if wanted.counts_unknown else aligned,
            psum_num_recv_tokens_per_scaleup_rank=scaleup_psum(
                state.prefix[:, rank], context.scaleup_places, context.logical.local
            ),
            psum_num_recv_tokens_per_expert=expert_psum(experts, wanted.do_expand),
            num_unaligned_recv_tokens_per_expert=experts.slots,
            recv_src_metadata=source_metadata(state, rank, recv_idx, expansion, wanted.num_max_tokens),
            dst_buffer_slot_idx=destination_slots(ids, state.send_row, ceil_div(wanted.num_experts, ranks)),
            state=state,
            expansion=expansion,
            recv_topk_idx=recv_idx,
            sums_at_owner=wanted.sums_at_owner,
        )
    context.hand_over([value for value in vars(handle).values() if isinstance(value, Tensor)])
    return received, handle


def no_weights(topk_idx: Tensor) -> Tensor:
    """Return what travels in place of weights, float32 [T, K]: nobody takes it for some."""
    return torch.full_like(topk_idx, _NO_WEIGHT_BITS, dtype=torch.int32).view(torch.float32)


def check_weights_alike(received: Any, handle: EPHandle, has_weights: bool, rank: int) -> None:
    """Refuse rows of a rank that gave weights where this one gave none, or the other way round.

    Not looked at on CUDA, where it would stall the stream: NaN arrives in place of weights.
    """
    weights, ends = received.weights(), handle.state.prefix[:, rank]
    if weights is None or weights.is_cuda:
        return
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
        row_of = torch.where(slot_of_row < 0, -1, slot_of_row.div(top_k, rounding_mode="floor"))
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
    context: DeviceContext,
    x: Tensor,
    topk_weights: Tensor | None,
    biases: tuple[Tensor, ...],
    handle: EPHandle,
    before_epilogue: EventHandle | None,
    num_sms: int,
) -> tuple[Tensor, Tensor | None]:
    """Return bf16 [T, hidden], and f32 [T, K] where weights come back too."""
    state, expansion, top_k, hidden = handle.state, handle.expansion, handle.topk_idx.size(1), x.size(1)
    with context.on_comm_stream():
        rows, weights, sent_biases = x, topk_weights, biases
        if expansion is not None:
            row_of = expansion.row_of_slot.view(-1)
            if handle.sums_at_owner:
                rows = elastic_layout.take_rows(x, row_of, True).view(state.num_rows, top_k * hidden)
            else:
                rows = elastic_layout.reduce_slots(x, expansion.row_of_slot)
            if weights is not None:
                weights = elastic_layout.take_rows(weights, row_of, True).view(-1, top_k)
        else:
            if handle.sums_at_owner:
                rows = elastic_layout.at_slots(x, right_most_slots(handle.recv_topk_idx), top_k)
            if weights is not None:
                weights = weights.masked_fill(handle.recv_topk_idx < 0, 0.0)
        if handle.sums_at_owner:
            sent_biases = ()
        context.order_after(before_epilogue)
        combined, combined_weights = high_throughput.CombinePlan(context, rows).run(
            rows, weights, sent_biases, state, num_sms, context.as_ordered
        )
        if handle.sums_at_owner:
            combined = _sum_slots(combined.view(-1, top_k, hidden), biases)
    return combined, combined_weights


def _sum_slots(slots: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
    """Return bf16 [T, hidden]: biases plus slots [T, K, hidden] in ascending order, in float32."""
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for term in (*biases, *slots.unbind(1)):
        total += term.float()
    return total.to(slots.dtype)
