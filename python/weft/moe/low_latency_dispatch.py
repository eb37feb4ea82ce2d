# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch sends and what it fills: tensors, checked or made, and described for the core.

Le experts of this rank, M tokens per rank at most, R ranks, K slots per token, T tokens here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import local_experts
from weft.moe.engine import Engine, address
from weft.moe.low_latency_formats import Format, take_output


@dataclass(frozen=True)
class Sizes:
    """What all ranks of a call agree on, and what follows for this one."""

    max_tokens: int
    num_experts: int
    rank: int
    num_ranks: int

    @property
    def local_experts(self) -> int:
        """Experts that this rank owns."""
        return local_experts(self.num_experts, self.num_ranks, self.rank)

    @property
    def rows(self) -> int:
        """Rows of one expert at most."""
        return self.max_tokens * self.num_ranks


@dataclass(frozen=True)
class Sent:
    """The caller's tensors, checked. expert_stats i32[Le] and wait_cycles i64[R] are added to, or None."""

    rows: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    global_scale: Tensor | None
    expert_stats: Tensor | None
    wait_cycles: Tensor | None

    def describe(self, call: Any, sizes: Sizes, form: Format) -> None:
        """Fill in the core's description."""
        call.max_tokens, call.experts = sizes.max_tokens, sizes.num_experts
        call.tokens, call.top_k = self.topk_idx.shape
        call.id_bytes, call.payload = self.topk_idx.element_size(), form.payload
        call.row_bytes, call.scale_bytes = form.row_bytes, form.scale_bytes
        call.topk_idx, call.x = address(self.topk_idx), address(self.rows)
        call.topk_weights = address(self.topk_weights)
        call.x_scales, call.tiled_scales = address(self.global_scale), form.is_tiled
        call.expert_stats, call.wait_cycles = address(self.expert_stats), address(self.wait_cycles)

    def named(self) -> dict[str, Tensor | None]:
        """Return all of them by the names that the caller knows."""
        return {
            "x": self.rows,
            "topk_idx": self.topk_idx,
            "topk_weights": self.topk_weights,
            "x_global_scale": self.global_scale,
            "cumulative_local_expert_recv_stats": self.expert_stats,
            "dispatch_wait_recv_cost_stats": self.wait_cycles,
        }

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all of them, to be kept alive."""
        return tuple(self.named().values())


@dataclass(frozen=True)
class Outputs:
    """Where the caller wants results, as rows lie in memory; None: in new tensors."""

    packed_recv_x: object
    src_info: object
    layout_range: object
    count: object


@dataclass(frozen=True)
class Filled:
    """What a dispatch fills. memory and scale_memory are what rows and scales, as the caller sees them, lie in."""

    memory: Tensor
    scale_memory: Tensor | None
    rows: Tensor
    scales: Tensor | None
    src_info: Tensor
    layout_range: Tensor
    counts: Tensor
    extras: tuple[Tensor, ...]  # weights and source ranks of rows, where weights travel
    routes: Tensor  # for combine

    @classmethod
    def take(cls, engine: Engine, sizes: Sizes, form: Format, sent: Sent, wanted: Outputs) -> Filled:
        """Return the caller's tensors, or new ones. Raises: weft.Error naming one that does not fit."""
        shape = (sizes.local_experts, sizes.rows)
        has_weights = sent.topk_weights is not None
        extra_types = (torch.float32, torch.int32) if has_weights else ()
        num_words = engine.low_latency.routes_words(
            sizes.max_tokens, sent.topk_idx.size(1), sizes.num_experts, has_weights
        )
        i32, ranges = torch.int32, (sizes.local_experts, sizes.num_ranks)
        return cls(
            *form.take(engine, wanted.packed_recv_x, shape),
            src_info=take_output(engine, "out_src_info", wanted.src_info, shape, i32),
            layout_range=take_output(engine, "out_layout_range", wanted.layout_range, ranges, torch.int64),
            counts=take_output(engine, "out_count", wanted.count, (sizes.local_experts,), i32),
            extras=tuple(engine.empty(*shape, dtype=dtype) for dtype in extra_types),
            routes=engine.empty(int(num_words), dtype=i32),
        )

    def check_apart(self, wanted: Outputs, sent: Sent) -> None:
        """Refuse tensors of the caller's that share memory with one another or with what is sent."""
        mine = (wanted.packed_recv_x, wanted.src_info, wanted.layout_range, wanted.count)
        filled = (self.memory, self.src_info, self.layout_range, self.counts)
        names = ("out_packed_recv_x", "out_src_info", "out_layout_range", "out_count")
        given = {n: t for n, t, w in zip(names, filled, mine, strict=True) if w is not None}
        if given:
            arguments.check_apart(given, sent.named())

    def describe(self, call: Any, form: Format) -> None:
        """Fill in the core's description."""
        call.out, call.src_info, call.counts = map(address, (self.memory, self.src_info, self.counts))
        call.layout_range, call.routes = address(self.layout_range), address(self.routes)
        if self.extras:
            call.out_weights, call.out_source = map(address, self.extras)
        if self.scale_memory is None:
            return
        call.out_scales = address(self.scale_memory)
        strides = self.scale_memory.stride()
        if form.is_tiled:
            call.scale_expert_stride = strides[0] // 4
        else:
            call.scale_expert_stride, call.scale_row_stride, call.scale_word_stride = strides

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all of them, to be kept alive."""
        meta = (self.src_info, self.layout_range, self.counts, *self.extras, self.routes)
        return (self.memory, self.scale_memory, *meta)


def check_global_scale(value: Tensor | None, is_nvfp4: bool, engine: Engine) -> Tensor | None:
    """Return the float32 that NVFP4 scales are relative to, on the device."""
    if not is_nvfp4:
        if value is not None:
            raise invalid("x_global_scale", arguments.describe(value), "None without use_nvfp4")
        return None
    if value is None:
        return torch.ones(1, dtype=torch.float32, device=engine.device)
    shape = tuple(value.shape) if isinstance(value, Tensor) else (1,)
    scale = arguments.check_tensor("x_global_scale", value, shape, (torch.float32,), engine.device)
    if scale.numel() != 1:
        raise invalid("x_global_scale", arguments.describe(value), "float32 of one element")
    return scale
