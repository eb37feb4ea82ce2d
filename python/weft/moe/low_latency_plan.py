# SPDX-License-Identifier: Apache-2.0
"""The plan of low-latency calls of one signature: the first call checks and plans, later calls reuse the plan.

    tensors = (x, topk_idx, topk_weights, stats, costs)
    options = (b"ll_dispatch", num_experts, ..., async_finish, return_recv_hook)
    results = known_low_latency_dispatch(contexts.plans, tensors, options)    # one trip into the core, or None
    plan = plans.keep(LowLatencyDispatchPlan(context, sizes, payload, ids, has_weights), tensors, *options)
    recv_x, counts, handle, event, hook = plan(tensors, options, None, None)

A signature holds everything that checks depend on, except addresses. So a call whose signature is known can only be
refused because of its tensors' addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from weft import _core
from weft.moe.device_context import DeviceContext
from weft.moe.events import EventOverlap
from weft.moe.low_latency_dispatch import Sizes
from weft.moe.low_latency_formats import Format
from weft.moe.low_latency_handle import (
    LowLatencyHandle,
    low_latency_agreement,
    make_statuses,
    unused_statuses,
)
from weft.runtime import spans
from weft.runtime.allocation import tensor_spec
from weft.runtime.streams import current_stream

Hook = Callable[[], None]

_OF_HANDLE = (5, 2)  # routes, and src_info behind them: no caller gets these but in a handle


class LowLatencyDispatchPlan(_core.LowLatencyDispatchPlan):  # type: ignore[misc]
    """A dispatch's payload: sizes, format, and what it fills. The core calls it, and makes the results.

    plan(tensors, options, global scale or None, what to fill or None)

    tensors: x, topk_idx, topk_weights, stats, costs. options: the last two are async_finish and return_recv_hook.
    Raises: weft.Error where sizes do not fit the buffer.
    """

    def __init__(
        self, context: DeviceContext, sizes: Sizes, payload: Format, topk_idx: Tensor, has_weights: bool
    ) -> None:
        self.context, self.sizes, self.payload = context, sizes, payload
        self.num_tokens, self.top_k = topk_idx.shape
        rows = (sizes.local_experts, sizes.rows)
        scale_strides = payload.scale_strides(rows)
        calls: Any = context.low_latency.plan_dispatch(
            max_tokens=sizes.max_tokens,
            tokens=self.num_tokens,
            top_k=self.top_k,
            experts=sizes.num_experts,
            id_bytes=topk_idx.element_size(),
            payload=payload.payload,
            row_bytes=payload.row_bytes,
            scale_bytes=payload.scale_bytes,
            has_weights=has_weights,
            scale_expert_stride=scale_strides[0],
            scale_row_stride=scale_strides[1],
            scale_word_stride=scale_strides[2],
            tiled_scales=payload.is_tiled,
        )
        words = int(
            context.low_latency.routes_words(sizes.max_tokens, self.top_k, sizes.num_experts, has_weights)
        )
        i32, meta = torch.int32, (rows[0], sizes.num_ranks)
        self.handle_agreement = low_latency_agreement(
            context.group_key,
            *(self.num_tokens, self.top_k, has_weights, sizes.max_tokens, payload.hidden, sizes.num_experts),
            (*rows, payload.hidden),
        )
        self._specs = (
            tensor_spec((*rows, payload.columns), payload.row_type),
            payload.scale_memory(rows),
            tensor_spec(rows, i32),
            tensor_spec(meta, torch.int64),
            tensor_spec(rows[:1], i32),
            tensor_spec((words,), i32),
            tensor_spec(rows, torch.float32) if has_weights else None,
            tensor_spec(rows, i32) if has_weights else None,
        )
        # All that a dispatch fills, in the order of the core, for the stream that is current.
        make = context.maker(*self._specs, together=_OF_HANDLE, first_is_all=True)
        seen = payload.seen if payload.is_tiled else None
        super().__init__(calls, _setting(context), make, self.handle_agreement, seen)

    def outputs(self, given: tuple[Tensor | None, ...]) -> list[Any]:
        """Return the caller's rows, src_info, layout_range and counts, checked, or new ones instead of None."""
        rows, src_info, layout_range, counts = given
        mine = (rows, None, src_info, layout_range, counts, None, None, None)
        specs = (None if tensor is not None else spec for tensor, spec in zip(mine, self._specs, strict=True))
        made = self.context.maker(*specs)()
        return [new if old is None else old for old, new in zip(mine, made, strict=True)]


class LowLatencyCombinePlan(_core.LowLatencyCombinePlan):  # type: ignore[misc]
    """Combines of one signature. The core calls it, and makes the results.

    plan(tensors, options, state of the handle, out or None, signals)

    tensors: x, topk_idx, topk_weights, costs. options: as for a dispatch.
    Raises: weft.Error where sizes do not fit the buffer.
    """

    def __init__(self, context: DeviceContext, facts: dict[str, int], out_shape: tuple[int, int]) -> None:
        self.context = context
        make = context.maker(tensor_spec(out_shape, torch.bfloat16))  # the sums alone
        calls: Any = context.low_latency.plan_combine(**facts)
        super().__init__(calls, _setting(context), make)


def spanned(name: str, call: Callable[..., Any], has_hook: bool) -> Callable[..., Any]:
    """Return a call of the core: where somebody watches, in a span, and its hook, its last result, in another one."""
    if not profiler._is_profiler_enabled and not spans.NVTX:
        return call
    if not has_hook:
        return spans.around(name, call)
    send = spans.around(f"{name}.send", call)

    def run(*args: Any) -> Any:
        *results, hook = send(*args)
        return (*results, spans.around(f"{name}.receive", hook))

    return run


def _setting(context: DeviceContext) -> Any:
    of_cuda = (current_stream, context.device.index) if context.is_cuda else (None, 0)
    finish = functools.partial(_finish, context)
    statuses = (unused_statuses, make_statuses)
    return _core.LowLatencySetting(
        context.stream, *of_cuda, finish, LowLatencyHandle, EventOverlap, *statuses
    )


def _finish(context: DeviceContext, used: tuple[Any, ...]) -> EventOverlap:
    """Return the event of a call with async_finish, which keeps its tensors alive: what was given, and the results."""
    tensors, *results = used
    flat = tuple(entry for entry in (*tensors, *results) if isinstance(entry, Tensor))
    event = context.finish(True, flat)
    event.extra_tensors = flat
    return event


REPLIES = {
    # (exact, use_logfmt)
    (False, False): int(_core.REPLY_REDUCED),
    (True, False): int(_core.REPLY_EXACT),
    (False, True): int(_core.REPLY_EXACT_LOG),
    (True, True): int(_core.REPLY_EXACT_LOG),
}
