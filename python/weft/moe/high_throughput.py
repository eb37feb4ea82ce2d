# SPDX-License-Identifier: Apache-2.0
"""The plans of high-throughput calls: what those of one signature share, checked and planned by the first of them.

    plan = DispatchPlan(context, Rows(x, None, topk_idx, topk_weights), num_experts)
    payload, ids, weights, slots, handle = plan.run_new(x, None, topk_idx, ...)

A call of a plan is one trip into the core (src/bind/high_throughput.cc), which makes new tensors for the stream that is
current, and fills them. With an error, tensors of the call stay until the communication stream is done with them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.moe.device_context import DeviceContext
from weft.moe.handle import KIND, DispatchHandle, entries_across_nodes
from weft.runtime.allocation import tensor_spec

Payload = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def rows_and_scales(x: Any) -> tuple[Any, Any]:
    """Return rows and scales; anything else itself, which has no signature."""
    return tuple(x) if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)


@dataclass
class Rows:
    """What a dispatch sends: rows [T, hidden], maybe 4-byte scales [T, n] of any strides, ids and weights.

    has_global_scale: the last scale of a row is the float32 that all of its others are relative to, and x holds
        eight 4-bit channels in each int32.
    keep_weights: a slot whose expert is elsewhere keeps its weight; else 0 arrives.
    combine_rows: how many rows of this size combine will bring back for each.
    """

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    keep_weights: bool = False
    combine_rows: int = 1
    has_global_scale: bool = False

    @property
    def format(self) -> Any:
        """The core's description. Combine brings back bf16, or float32 for wider elements."""
        num_elements, element_bytes = self.x.size(1), self.x.element_size()
        summed_bytes = 16 if self.has_global_scale else 2 if element_bytes <= 2 else 4
        return _row_format(
            num_elements * element_bytes,
            self.scales.size(1) if self.scales is not None else 0,
            self.topk_idx.size(1) if self.topk_idx is not None else 0,
            self.topk_idx.element_size() if self.topk_idx is not None else 8,
            element_bytes,
            num_elements * summed_bytes * self.combine_rows,
        )


_row_format = functools.lru_cache(maxsize=1024)(
    _core.RowFormat
)  # calls ask for the same ones again and again


def combined_format(x: Tensor, top_k: int, slots: int = 1) -> Any:
    """Return the core's description of rows that a combine brings back, each with top_k weights.

    slots: how many rows of x make one of them.
    """
    row_bytes = x.size(1) * x.element_size() * slots
    return _row_format(row_bytes, 0, top_k, 8, x.element_size(), row_bytes)


class LayoutPlan(_core.LayoutPlan):  # type: ignore[misc]
    """Layouts of one signature. The core runs them:

    per_rank, per_expert, in_rank = plan.run(topk_idx, None, stream)   # i32[R], i32[E] behind it, bool[T, R]
    plan.run(topk_idx, sum_place, stream)              # sum_place: i32[T, R] to fill, by right-most slot
    """

    def __init__(self, context: DeviceContext, topk_idx: Tensor, num_experts: int) -> None:
        num_ranks = int(context.communicator.size)
        self.context, self.num_experts = context, num_experts
        num_tokens, top_k = topk_idx.shape
        make = context.maker(
            tensor_spec((num_ranks,), torch.int32),
            tensor_spec((num_experts,), torch.int32),
            tensor_spec((num_tokens, num_ranks), torch.bool),
            together=(0, 1),
            part_bytes=4,
        )
        super().__init__(
            device=context.high_throughput,
            id_bytes=topk_idx.element_size(),
            tokens=num_tokens,
            top_k=top_k,
            experts=num_experts,
            make=make,
        )


class DispatchPlan(_core.DispatchPlan):  # type: ignore[misc]
    """Dispatches along new routes: so many tokens and experts, in one format. The core runs them:

    payload, ids, weights, slots, handle = plan.run_new(
        x, scales, topk_idx, topk_weights, in_rank, per_expert, per_rank, num_sms, order)
    received, state, slots = plan.run(
        x, scales, topk_idx, topk_weights, in_rank, per_expert, sum_place, most_tokens, num_sms, order)
    received.rows(), received.scales(), received.ids(), received.weights()      # src/bind/receiving.h

    slots: of each local expert; with worst_rows none. sum_place: of a layout, where combine is to sum in its order.
    most_tokens: no rank has more, the same on all ranks; 0: not known.
    """

    def __init__(
        self,
        context: DeviceContext,
        rows: Rows,
        num_experts: int,
        *,
        is_ordered: bool = False,
        worst_rows: int = 0,
        alignment: int = 1,
    ) -> None:
        """Plan for rows like these.

        is_ordered: combine sums in the order of a layout's sum_place. worst_rows: above 0: so many rows come, and
        counts stay on the device. alignment: counts are rounded up to multiples of it.
        """
        i32, num_ranks = torch.int32, int(context.communicator.size)
        num_tokens = rows.x.size(0)
        route_words = int(context.core.route_words(num_tokens, is_ordered))
        self.context, self.num_experts = context, num_experts
        super().__init__(
            device=context.high_throughput,
            reclaim=context.reclaim_waiting,
            format=rows.format,
            keep_weights=rows.keep_weights,
            has_global_scale=rows.has_global_scale,
            tokens=num_tokens,
            experts=num_experts,
            worst_rows=worst_rows,
            alignment=alignment,
            make_places=context.maker(  # of the state
                tensor_spec((num_tokens, num_ranks), i32),
                tensor_spec((num_tokens,), i32),
                tensor_spec((num_ranks, num_ranks), i32),
                tensor_spec((route_words,), i32) if route_words else None,
            ),
            keep=functools.partial(context.finish, True),
            handle_type=DispatchHandle,
            handle_kind=KIND,
            across_nodes=entries_across_nodes,
        )


class RepeatPlan(_core.RepeatPlan):  # type: ignore[misc]
    """Dispatches along the routes of earlier ones, of rows in one format. The core runs them:

    received = plan.run(x, scales, topk_idx, topk_weights, state, num_sms, order)      # as DispatchPlan.run()
    """

    def __init__(self, context: DeviceContext, rows: Rows) -> None:
        self.context, self.format = context, rows.format
        super().__init__(
            device=context.high_throughput,
            reclaim=context.reclaim_waiting,
            format=self.format,
            keep_weights=rows.keep_weights,
            has_global_scale=rows.has_global_scale,
        )


class CombinePlan(_core.CombinePlan):  # type: ignore[misc]
    """Combines of rows [N, columns] of one type. The core runs them:

    sums, weights = plan.run(x, topk_weights, bias0, bias1, state, num_sms, order)     # [T, columns]; f32[T, K] or None
    """

    def __init__(self, context: DeviceContext, x: Tensor) -> None:
        self.context = context
        self.num_rows, columns = x.shape
        super().__init__(
            device=context.high_throughput,
            reclaim=context.reclaim_waiting,
            dtype=x.dtype,
            columns=columns,
            row_bytes=columns * x.element_size(),
            element=_SUMMED_ELEMENTS[x.dtype],
        )


_SUMMED_ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}  # kElementBf16, kElementFp32
