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
from weft.moe.handle import DispatchState
from weft.runtime import spans
from weft.runtime.allocation import not_a_view, tensor_form

Payload = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


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

    def tensors(self) -> tuple[Any, ...]:
        """Return what the core takes of these, in its order."""
        scales = self.scales
        strides = (0, 0) if scales is None else scales.stride()
        return self.x, scales, *strides, self.topk_idx, self.topk_weights


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

    def run(self, topk_idx: Tensor, stream: int, sum_place: Tensor | None = None) -> list[Tensor]:
        """Return what Layout names, in new tensors of the stream that is current.

        sum_place: i32[T, ranks] to fill, by right-most slot.
        """
        run = self._form.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("layout", run)
        made: list[Tensor] = run(topk_idx, sum_place, stream)
        return made


class DispatchPlan:
    """What dispatches along new routes of so many tokens share: the maker of what their handles keep.

    received, state, slots = plan.run(rows, is_token_in_rank, num_tokens_per_expert, 0, num_sms, order)
    """

    def __init__(self, context: DeviceContext, num_tokens: int, is_ordered: bool = False) -> None:
        i32, num_ranks = torch.int32, int(context.communicator.size)
        route_words = int(context.core.route_words(num_tokens, is_ordered))
        self.context, self.num_tokens = context, num_tokens
        # For the stream that is current: send_row, slot_base, prefix and routes of DispatchState.
        self._new_places = context.allocator(
            tensor_form((num_tokens, num_ranks), i32),
            tensor_form((num_tokens,), i32),
            tensor_form((num_ranks, num_ranks), i32),
            tensor_form((route_words,), i32) if route_words else None,
        )

    def run(
        self,
        rows: Rows,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        num_worst_tokens: int,
        num_sms: int,
        order: Order,
        sum_place: Tensor | None = None,
        most_tokens: int = 0,
    ) -> tuple[Received, DispatchState, list[int]]:
        """Exchange counts, then rows. Returns what came, the routes, and the slots of each local expert.

        With num_worst_tokens the counts stay on the device, and the last list is empty. most_tokens: no rank has more,
        the same on all ranks; 0: not known. sum_place: of a layout, where combine is to sum in its order.
        """
        context, row_format = self.context, rows.known_format or rows.format
        send_row, slot_base, prefix, routes = self._new_places()
        records: list[Tensor] = []

        def new_records(words: int) -> Tensor:
            records.append(context.empty(words, dtype=torch.int32))
            return records[0]

        memory = _core.HandleMemory(send_row, slot_base, prefix, sum_place, routes)
        num_experts = num_tokens_per_expert.size(0)
        call = context.core.dispatch_new
        if profiler._is_profiler_enabled or spans.NVTX:
            call = spans.around("dispatch", call)
        try:
            came = call(
                *(
                    row_format,
                    *rows.tensors(),
                    is_token_in_rank,
                    num_tokens_per_expert,
                    self.num_tokens,
                    num_experts,
                ),
                *(memory, num_worst_tokens, most_tokens, rows.keep_weights, num_sms, order),
                *(context.reclaim_waiting, new_records),
            )
        except Error:  # counts are known, or awaited in vain, while the kernel still writes places
            used = (is_token_in_rank, num_tokens_per_expert, send_row, slot_base, prefix, routes, *records)
            context.finish(True, used)
            raise
        handle = came.handle
        received = Received(context, came.received, rows, handle.rows)
        state = DispatchState(
            group_key=context.group_key,
            rank=int(context.communicator.rank),
            handle_id=handle.id,
            num_experts=num_experts,
            top_k=row_format.top_k,
            num_tokens=self.num_tokens,
            num_rows=handle.rows,
            staging_rows=handle.staging_rows,
            counts_unknown=num_worst_tokens > 0,
            is_token_in_rank=is_token_in_rank,
            send_row=send_row,
            slot_base=slot_base,
            prefix=prefix,
            slot=received.slot(),
            token=received.token(),
            sum_place=sum_place,
            routes=routes,
            records=records[0] if records else None,
            islands=context.islands,
        )
        state.__dict__["core"] = handle  # so that nobody makes it again
        return received, state, came.tokens_per_local_expert


def repeat(context: DeviceContext, rows: Rows, state: DispatchState, num_sms: int, order: Order) -> Received:
    """Send rows along the routes of an earlier dispatch."""
    call = context.core.dispatch
    if profiler._is_profiler_enabled or spans.NVTX:
        call = spans.around("dispatch", call)
    received = call(
        *(rows.known_format or rows.format, *rows.tensors(), state.core, rows.keep_weights, True, num_sms),
        *(order, context.reclaim_waiting),
    )
    return Received(context, received, rows, state.num_rows)


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


class Received:
    """The results of a dispatch in the pieces that it filled: rows and scales; ids, weights and origins."""

    def __init__(self, context: DeviceContext, received: Any, sent: Rows, num_rows: int) -> None:
        self.num_rows = num_rows
        self._context = context
        self._layout = received.layout
        self._rows_at, self._meta_at = received.rows_at, received.meta_at
        is_captured = received.is_captured
        self._rows = context.lend(received.rows_at, is_captured)
        self._meta_lease = (
            self._rows if received.is_one_piece else context.lend(received.meta_at, is_captured)
        )
        self._sent = sent

    def payload(self) -> Payload:
        """Return rows [N, hidden]; (rows, scales [N, n]); or (rows, scales, global scales f32[N, 1])."""
        rows, scales = self.parts()
        if scales is None:
            return rows
        if not self._sent.has_global_scale:
            return rows, scales
        # Of one row or none, contiguous() would give the parts themselves, which share their memory.
        parts = scales.split((scales.size(1) - 1, 1), dim=1)
        blocks, whole = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return rows, blocks, not_a_view(whole.view(torch.float32))

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Return rows [N, hidden], and scales [N, n] or None, as they came."""
        rows = self._rows_of(self._rows_at, self._sent.x)
        if self._sent.scales is None:
            return rows, None
        return rows, self._rows_of(self._rows_at + self._layout.scales, self._sent.scales)

    def ids(self) -> Tensor | None:
        """Return local expert ids [N, top_k], -1 elsewhere."""
        return None if self._sent.topk_idx is None else self._matrix(0, self._sent.topk_idx)

    def weights(self) -> Tensor | None:
        """Return float32 [N, top_k], 0 elsewhere."""
        if self._sent.topk_weights is None:
            return None
        return self._matrix(self._layout.weights, self._sent.topk_weights)

    def token(self) -> Tensor:
        """Return i32[N], each row's token at its source."""
        return self._column(self._layout.token)

    def slot(self) -> Tensor:
        """Return i32[N], each row's place in its owner's staging."""
        return self._column(self._layout.slot)

    @functools.cached_property
    def _meta(self) -> Tensor:
        return self._context.words_at(self._meta_lease, self._meta_at, self._layout.meta_bytes)

    def _rows_of(self, begin: int, like: Tensor) -> Tensor:
        return self._context.rows_at(self._rows, begin, (self.num_rows, like.size(1)), like.dtype)

    def _matrix(self, offset: int, like: Tensor) -> Tensor:
        return self._output(offset, (self.num_rows, like.size(1)), like.dtype)

    def _column(self, offset: int) -> Tensor:
        return self._output(offset, (self.num_rows,), torch.int32)

    def _output(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._context.is_cuda:
            return self._context.copied(self._meta_at + offset, shape, dtype)
        return self._context.output(self._meta, offset, shape, dtype)
