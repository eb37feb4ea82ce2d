# SPDX-License-Identifier: Apache-2.0
"""High-throughput calls, after their arguments are checked: their memory and the calls of the core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from weft import _core
from weft.errors import Error
from weft.moe.device_context import DeviceContext, Order
from weft.moe.handle import DispatchHandle, DispatchState, dispatch_form
from weft.runtime import spans
from weft.runtime.allocation import tensor_form

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
    known_format: Any = None  # the format of these, where an earlier call has asked for it

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


class Layout(NamedTuple):
    """Who gets what."""

    tokens_per_rank: Tensor  # i32[ranks]; the next one lies behind it
    slots_per_expert: Tensor  # i32[experts]
    is_token_in_rank: Tensor  # bool[T, ranks]


class LayoutPlan:
    """What layouts of one signature share: sizes, and the maker of what they fill.

    counted = plan.run(ids, stream)
    """

    def __init__(self, context: DeviceContext, topk_idx: Tensor, num_experts: int) -> None:
        num_ranks = int(context.communicator.size)
        self.context, self.num_experts = context, num_experts
        num_tokens, top_k = topk_idx.shape
        new_outputs = context.allocator(  # in the order of Layout
            tensor_form((num_ranks,), torch.int32),
            tensor_form((num_experts,), torch.int32),
            tensor_form((num_tokens, num_ranks), torch.bool),
            together=(0, 1),
            part_bytes=4,
        )
        self._form = context.core.layout_form(
            id_bytes=topk_idx.element_size(),
            tokens=num_tokens,
            top_k=top_k,
            experts=num_experts,
            new_outputs=new_outputs,
        )

    def run(
        self, topk_idx: Tensor, stream: int, sum_place: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what Layout names, in new tensors of the stream that is current.

        sum_place: i32[T, ranks] to fill, by right-most slot.
        """
        run = self._form.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("layout", run)
        made: tuple[Tensor, Tensor, Tensor] = run(topk_idx, sum_place, stream)
        return made


class DispatchPlan:
    """What dispatches along new routes share: so many tokens and experts, in one format.

    received, state, slots = plan.run(rows, is_token_in_rank, num_tokens_per_expert, num_sms, order)
    received.rows(), received.scales(), received.ids(), received.weights()      # src/bind/receiving.h
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
        num_tokens, row_format = rows.x.size(0), rows.format
        route_words = int(context.core.route_words(num_tokens, is_ordered))
        self.context, self.num_experts = context, num_experts
        self._worst_rows, self._alignment = worst_rows, alignment
        # For the stream that is current: send_row, slot_base, prefix and routes of DispatchState.
        self._new_places = context.allocator(
            tensor_form((num_tokens, num_ranks), i32),
            tensor_form((num_tokens,), i32),
            tensor_form((num_ranks, num_ranks), i32),
            tensor_form((route_words,), i32) if route_words else None,
        )
        self._form = dispatch_form(
            context, row_format, num_tokens, num_experts, rows.keep_weights, rows.has_global_scale
        )

    def run(
        self,
        rows: Rows,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        num_sms: int,
        order: Order,
        sum_place: Tensor | None = None,
        most_tokens: int = 0,
    ) -> tuple[Any, DispatchState, list[int]]:
        """Exchange counts, then rows. Returns what came, the routes, and the slots of each local expert.

        With worst_rows the last list is empty. most_tokens: no rank has more, the same on all ranks; 0: not known.
        sum_place: of a layout, where combine is to sum in its order.
        """
        sent = (
            rows.x,
            rows.scales,
            rows.topk_idx,
            rows.topk_weights,
            is_token_in_rank,
            num_tokens_per_expert,
        )
        how = (self._worst_rows, most_tokens, num_sms, order)
        came: tuple[Any, DispatchState, list[int]] = self._in_place(self._form.run, (*sent, sum_place), how)
        return came

    def run_whole(
        self, sent: tuple[Tensor | None, ...], num_sms: int, order: Order
    ) -> tuple[Payload, Tensor | None, Tensor | None, list[int], DispatchHandle]:
        """Do as run(), and return payload, ids, weights, slots of each local expert, and the handle.

        sent: x, scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, num_tokens_per_rank.
        """
        how = (self._worst_rows, self._alignment, num_sms, order)
        results: tuple[Payload, Tensor | None, Tensor | None, list[int], DispatchHandle]
        results = self._in_place(self._form.run_whole, sent, how)
        return results

    def _in_place(
        self, run: Callable[..., Any], sent: tuple[Tensor | None, ...], how: tuple[Any, ...]
    ) -> Any:
        """Return what a call of the form returns, with new places for its routes."""
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("dispatch", run)
        places = self._new_places()
        try:
            return run(*sent, places, *how, self.context.reclaim_waiting)
        except Error:  # counts are known, or awaited in vain, while the kernel still writes places
            self.context.finish(True, (*sent, *places))
            raise


def repeat(context: DeviceContext, rows: Rows, state: DispatchState, num_sms: int, order: Order) -> Any:
    """Send rows along the routes of an earlier dispatch. Returns what came, as DispatchPlan.run() does."""
    call = context.receiving.repeat
    if profiler._is_profiler_enabled or spans.NVTX:
        call = spans.around("dispatch", call)
    sent = (rows.x, rows.scales, rows.topk_idx, rows.topk_weights, rows.keep_weights, rows.has_global_scale)
    row_format = rows.known_format or rows.format
    return call(row_format, *sent, state.core, num_sms, order, context.reclaim_waiting)


class CombinePlan:
    """What combines of rows of one form share.

    combined, combined_weights = plan.run(x, topk_weights, biases, state, num_sms, order)
    """

    def __init__(self, context: DeviceContext, x: Tensor) -> None:
        self.context = context
        self.num_rows, columns = x.shape
        dtype = x.dtype

        @functools.lru_cache(maxsize=64)  # of numbers of tokens
        def new_sums(num_tokens: int) -> Callable[[], list[Any]]:
            return context.allocator(tensor_form((num_tokens, columns), dtype))

        self._form = context.core.combine_form(
            row_bytes=columns * x.element_size(),
            element=_SUMMED_ELEMENTS[dtype],
            new_sums=new_sums,
            reclaim=context.reclaim_waiting,
        )

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        biases: tuple[Tensor, ...],
        state: DispatchState,
        num_sms: int,
        order: Order,
    ) -> tuple[Tensor, Tensor | None]:
        """Send x [N, columns] back. Returns its sums [T, columns] and, with weights, f32[T, top_k].

        Both are new tensors of the stream that is current.
        """
        run = self._form.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("combine", run)
        top_k, weights, bias0, bias1 = 0, None, None, None
        if topk_weights is not None:
            top_k = topk_weights.size(1)
            weights = self.context.empty(state.num_tokens, top_k, dtype=torch.float32)
        if biases:
            bias0, bias1 = (*biases, None)[:2]
        sums = run(x, topk_weights, top_k, state.slot, bias0, bias1, weights, state.core, num_sms, order)
        return sums, weights


_SUMMED_ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}  # kElementBf16, kElementFp32
