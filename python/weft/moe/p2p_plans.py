# SPDX-License-Identifier: Apache-2.0
"""The forms of a P2PAllToAll's phases, planned once each, and the tensors that a dispatch fills.

    forms = DispatchForms(context, sizes)
    layout = forms.layout(None, None, local_experts, max_recv_tokens)     # or those of the caller's tensors
    made = forms.new_outputs(layout, local_experts, num_ranks)
    calls = forms.receiver(tokens, id_bytes, layout)

What is sent and what is received may differ in where rows go, so each phase has a form of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.device_context import DeviceContext
from weft.moe.low_latency_formats import check_output
from weft.moe.p2p_sizes import SUMMED, P2PSizes
from weft.runtime.allocation import tensor_form


@dataclass(frozen=True)
class Layout:
    """Where received rows stand: shape of x without hidden, and strides of the scales, in words."""

    rows: tuple[int, ...]  # (all,) packed, or (experts, rows of each)
    scale_strides: tuple[int, int, int]  # between experts, rows, words

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return self.rows[0] if len(self.rows) == 1 else self.rows[0] * self.rows[1]


class Made(NamedTuple):
    """New tensors for what a dispatch fills; x and x_scale None where the caller's are taken."""

    x: Tensor | None
    x_scale: Tensor | None
    num_tokens: Tensor
    weights: Tensor
    src_rank: Tensor
    src_token: Tensor
    ranges: Tensor  # i64[Le, R], begin << 32 | count
    routes: Tensor


def _routes_of(sizes: P2PSizes, tokens: int, id_bytes: int) -> dict[str, int]:
    """Return what the core is told of the routes of ``tokens`` tokens, alike for both directions."""
    return {
        "max_tokens": sizes.max_num_tokens,
        "tokens": tokens,
        "top_k": sizes.num_experts_per_token,
        "experts": sizes.num_experts,
        "id_bytes": id_bytes,
    }


class DispatchForms:
    """Dispatches of one context."""

    def __init__(self, context: DeviceContext, sizes: P2PSizes) -> None:
        self._context, self._sizes = context, sizes
        words = context.low_latency.routes_words(
            sizes.max_num_tokens, sizes.num_experts_per_token, sizes.num_experts, True
        )
        self._routes_words = int(words)
        self._makers: dict[Any, Any] = {}
        self.sender = functools.lru_cache(maxsize=4096)(self._plan)
        self.receiver = functools.lru_cache(maxsize=4096)(self._plan)

    def layout(self, out_x: object, out_scale: object, local_experts: int, max_rows: int) -> Layout:
        """Return the layout of the caller's tensors, checked, or of new ones. Raises: weft.Error naming one."""
        sizes, context = self._sizes, self._context
        rows: tuple[int, ...] = (max_rows,)
        if sizes.max_tokens_per_expert is not None:
            rows = (local_experts, sizes.max_tokens_per_expert)
        if isinstance(out_x, Tensor) and out_x.dim() in (2, 3):
            rows = tuple(out_x.shape[:-1])
            if len(rows) == 2 and rows[0] != local_experts:
                raise invalid("out_x", arguments.describe(out_x), f"[{local_experts} experts, rows, hidden]")
        if out_x is not None:
            check_output(context, "out_x", out_x, (*rows, sizes.hidden_dim), sizes.in_dtype)
        words, dtype = sizes.hidden_dim_scale, sizes.scale_dtype
        if words is None or dtype is None:
            if out_scale is not None:
                raise invalid("out_x_scale", arguments.describe(out_scale), "None without hidden_dim_scale")
            return Layout(rows, (0, 0, 0))
        if out_scale is None:
            return Layout(rows, (rows[-1] * words if len(rows) == 2 else 0, words, 1))
        shape = (*rows, words)
        scale = arguments.check_tensor(
            "out_x_scale", out_scale, shape, (dtype,), context.device, contiguous=False
        )
        strides = scale.stride()
        return Layout(rows, (strides[0] if len(rows) == 2 else 0, strides[-2], strides[-1]))

    def new_outputs(self, layout: Layout, local_experts: int, num_ranks: int) -> Made:
        """Return new tensors for the stream that is current."""
        make = self._makers.get(layout)
        if make is None:
            sizes, i32 = self._sizes, torch.int32
            scale = None
            if sizes.hidden_dim_scale is not None and sizes.scale_dtype is not None:
                scale = tensor_form((*layout.rows, sizes.hidden_dim_scale), sizes.scale_dtype)
            make = self._makers[layout] = self._context.maker(
                tensor_form((*layout.rows, sizes.hidden_dim), sizes.in_dtype),
                scale,
                tensor_form((local_experts,), i32),
                tensor_form(layout.rows, torch.float32),
                tensor_form(layout.rows, i32),
                tensor_form(layout.rows, i32),
                tensor_form((local_experts, num_ranks), torch.int64),
                tensor_form((self._routes_words,), i32),
            )
        return Made(*make())

    def _plan(self, tokens: int, id_bytes: int, layout: Layout | None = None) -> Any:
        sizes = self._sizes
        per_expert = sizes.max_tokens_per_expert
        rows = layout.rows if layout is not None else (1,) if per_expert is None else (1, per_expert)
        is_packed = len(rows) == 1
        strides = (0, 0, 0) if layout is None else layout.scale_strides
        return self._context.low_latency.plan_dispatch(
            **_routes_of(sizes, tokens, id_bytes),
            payload=_core.PAYLOAD_COPY,
            row_bytes=sizes.row_bytes,
            scale_bytes=sizes.scale_bytes,
            has_weights=True,
            scale_expert_stride=strides[0],
            scale_row_stride=strides[1],
            scale_word_stride=strides[2],
            tiled_scales=False,
            expert_rows=0 if is_packed else rows[1],
            padding=sizes.expert_padding if is_packed else 0,
            max_rows=rows[0] if is_packed else 0,
            grid_sms=sizes.num_sms,
        )


class CombineForms:
    """Combines of one context."""

    def __init__(self, context: DeviceContext, sizes: P2PSizes) -> None:
        self._context, self._sizes = context, sizes
        self.calls = functools.lru_cache(maxsize=4096)(self._plan)

    def _plan(
        self,
        tokens: int,
        id_bytes: int,
        hidden: int,
        dtype: torch.dtype,
        exact: bool,
        has_weights: bool,
        sent_id_bytes: int,
        accumulate: bool = False,
    ) -> Any:
        sizes = self._sizes
        return self._context.low_latency.plan_combine(
            **_routes_of(sizes, tokens, id_bytes),
            reply=_core.REPLY_EXACT if exact else _core.REPLY_REDUCED,
            row_bytes=hidden * dtype.itemsize,
            has_weights=exact or has_weights,
            dispatch_had_weights=True,
            sent_id_bytes=sent_id_bytes,
            element=SUMMED[dtype],
            out_element=SUMMED[sizes.out_dtype],
            accumulate=accumulate,
            grid_sms=sizes.num_sms,
        )
