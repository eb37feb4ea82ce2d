# SPDX-License-Identifier: Apache-2.0
"""What a ``weft.P2PAllToAll`` is made for, checked, and what follows: its plans of phases, planned once each.

    sizes = P2PSizes(max_num_tokens=128, num_experts=256, hidden_dim=7168, num_experts_per_token=8, ...)
    sizes.rows_of(num_dp_groups=8, dp_rank=0)      # rows of packed outputs that are always enough
    plans = DispatchPlans(context, sizes)
    layout = plans.layout(None, None, local_experts, max_recv_tokens)     # or those of the caller's tensors
    made = plans.new_outputs(layout, local_experts, num_ranks)
    calls = plans.receiver(tokens, id_bytes, layout)

What is sent and what is received may differ in where rows go, so each phase has a plan of its own. Any thread.
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
from weft.moe.arguments import MAX_ROWS, MAX_TOP_K, ROW_ALIGNMENT_BYTES
from weft.moe.config import (
    MAX_ALIGNMENT,
    MAX_LOW_LATENCY_TOKENS,
    MAX_SMS,
    align,
    ceil_div,
    check_integer,
    local_experts,
)
from weft.moe.device_context import DeviceContext
from weft.moe.low_latency_formats import check_output
from weft.runtime.allocation import tensor_spec
from weft.runtime.bootstrap import Bootstrap

SUMMED = {
    torch.bfloat16: int(_core.ELEMENT_BF16),
    torch.float32: int(_core.ELEMENT_FP32),
    torch.float16: int(_core.ELEMENT_FP16),
}
SCALES = (torch.float32, torch.int32)
_MAX_IN_FLIGHT = 32


@dataclass(frozen=True)
class P2PSizes:
    """The sizes and types of a P2PAllToAll; the same on all ranks. See there. Raises: weft.Error naming one."""

    max_num_tokens: int
    num_experts: int
    hidden_dim: int
    num_experts_per_token: int
    in_dtype: torch.dtype
    out_dtype: torch.dtype
    hidden_dim_scale: int | None
    scale_dtype: torch.dtype | None
    expert_padding: int
    max_recv_tokens: int | None
    max_tokens_per_expert: int | None
    max_private_tokens: int | None
    max_in_flight: int
    dp_size: int
    num_sms: int = 0

    def __post_init__(self) -> None:
        check_integer("max_num_tokens", self.max_num_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        check_integer("num_experts", self.num_experts, 1)
        check_integer("num_experts_per_token", self.num_experts_per_token, 1, MAX_TOP_K)
        check_integer("expert_padding", self.expert_padding, 1, MAX_ALIGNMENT)
        check_integer("max_in_flight", self.max_in_flight, 1, _MAX_IN_FLIGHT)
        check_integer("dp_size", self.dp_size, 1)
        check_integer("num_sms", self.num_sms, 0, MAX_SMS)
        for name in ("max_recv_tokens", "max_tokens_per_expert"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, MAX_ROWS)
        if self.max_private_tokens is not None:
            check_integer("max_private_tokens", self.max_private_tokens, self.max_num_tokens)
        if self.max_recv_tokens is not None and self.max_tokens_per_expert is not None:
            raise invalid("max_recv_tokens", "both it and max_tokens_per_expert", "one of the two")
        self._check_types()

    def _check_types(self) -> None:
        if not isinstance(self.in_dtype, torch.dtype) or self.in_dtype.is_complex:
            raise invalid("in_dtype", self.in_dtype, "a torch.dtype of real numbers")
        if self.out_dtype not in SUMMED:
            raise invalid("out_dtype", self.out_dtype, "torch.bfloat16, torch.float16 or torch.float32")
        check_integer("hidden_dim", self.hidden_dim, 1, 1 << 26)
        for name, dtype in (("in_dtype", self.in_dtype), ("out_dtype", self.out_dtype)):
            if self.hidden_dim * dtype.itemsize % ROW_ALIGNMENT_BYTES:
                raise invalid("hidden_dim", self.hidden_dim, f"rows of {name} of a multiple of 16 bytes")
        if (self.hidden_dim_scale is None) != (self.scale_dtype is None):
            given = f"{self.hidden_dim_scale} with scale_dtype {self.scale_dtype}"
            raise invalid("hidden_dim_scale", given, "both or neither")
        if self.hidden_dim_scale is not None:
            check_integer("hidden_dim_scale", self.hidden_dim_scale, 1, 1 << 20)
            if self.scale_dtype not in SCALES:
                raise invalid("scale_dtype", self.scale_dtype, "torch.float32 or torch.int32")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.hidden_dim * self.in_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of its scales."""
        return (self.hidden_dim_scale or 0) * 4

    def local_experts(self, num_dp_groups: int, dp_rank: int) -> int:
        """Return how many experts a data-parallel group has: the last ones fewer where it does not come out even."""
        return local_experts(self.num_experts, num_dp_groups, dp_rank)

    def rows_of(self, num_dp_groups: int, dp_rank: int) -> int:
        """Return rows of packed outputs: max_recv_tokens, or as many as can ever come, with padding.

        Tokens that name an expert more than once count as often.
        """
        if self.max_recv_tokens is not None:
            return self.max_recv_tokens
        experts = self.local_experts(num_dp_groups, dp_rank)
        rows = self.max_num_tokens * num_dp_groups * min(self.num_experts_per_token, max(experts, 1))
        return align(max(rows + experts * (self.expert_padding - 1), 1), self.expert_padding)

    def window_bytes(self, num_dp_groups: int) -> int:
        """Return low-latency bytes of the window of one exchange: a dispatch and its combine."""
        replies = self.hidden_dim * self.out_dtype.itemsize
        widest = max(self.row_bytes + self.scale_bytes, replies)
        hidden = align(ceil_div(widest, 2), 16)  # bf16 channels of as many bytes
        top_k, experts = self.num_experts_per_token, self.num_experts
        return int(_core.low_latency_hint_bytes(num_dp_groups, self.max_num_tokens, top_k, experts, hidden))


class DpColumn:
    """The ranks at the same place of each data-parallel group, as a bootstrap: one rank of every group.

    All ranks of a group hold the same tokens and the same experts, so the exchange within a column is complete.
    """

    def __init__(self, everyone: Bootstrap, dp_size: int) -> None:
        if everyone.size % dp_size:
            raise invalid("dp_size", dp_size, f"a divisor of the {everyone.size} ranks")
        self._everyone, self._dp_size = everyone, dp_size
        self.rank = everyone.rank // dp_size
        self.size = everyone.size // dp_size

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give ``data`` to the ranks of this column; every rank of all columns calls it."""
        gathered = self._everyone.all_gather(data, timeout_s)
        return gathered[self._everyone.rank % self._dp_size :: self._dp_size]


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


class DispatchPlans:
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
                scale = tensor_spec((*layout.rows, sizes.hidden_dim_scale), sizes.scale_dtype)
            make = self._makers[layout] = self._context.maker(
                tensor_spec((*layout.rows, sizes.hidden_dim), sizes.in_dtype),
                scale,
                tensor_spec((local_experts,), i32),
                tensor_spec(layout.rows, torch.float32),
                tensor_spec(layout.rows, i32),
                tensor_spec(layout.rows, i32),
                tensor_spec((local_experts, num_ranks), torch.int64),
                tensor_spec((self._routes_words,), i32),
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


class CombinePlans:
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
