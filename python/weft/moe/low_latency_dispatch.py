# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch sends and what it fills: tensors, checked or made, and described for the core.

Le experts of this rank, M tokens per rank at most, R ranks, K slots per token, T tokens here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import local_experts
from weft.moe.device_context import DeviceContext
from weft.moe.low_latency_formats import Format, check_output


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


class Sent(NamedTuple):
    """The caller's tensors, checked, as the core takes them."""

    rows: Tensor
    global_scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    expert_stats: Tensor | None  # i32[Le], added to, as is wait_cycles, i64[R]
    wait_cycles: Tensor | None

    def named(self) -> dict[str, Tensor | None]:
        """Return all of them by the names that the caller knows."""
        names = ("x", "x_global_scale", "topk_idx", "topk_weights")
        stats = ("cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats")
        return dict(zip((*names, *stats), self, strict=True))


def check_outputs(
    context: DeviceContext,
    sizes: Sizes,
    payload: Format,
    sent: Sent,
    wanted: tuple[object, object, object, object],
) -> tuple[Tensor | None, ...]:
    """Return the caller's rows, src_info, layout_range and counts to be filled; None: new ones.

    Raises: weft.Error naming one that does not fit, or shares memory with another or with what is sent.
    """
    rows, i32 = (sizes.local_experts, sizes.rows), torch.int32
    names = ("out_packed_recv_x", "out_src_info", "out_layout_range", "out_count")
    shapes = ((*rows, payload.columns), rows, (rows[0], sizes.num_ranks), (rows[0],))
    types = (payload.row_type, i32, torch.int64, i32)
    given = {
        name: check_output(context, name, value, shape, dtype)
        for name, value, shape, dtype in zip(names, wanted, shapes, types, strict=True)
    }
    arguments.check_apart(
        {name: tensor for name, tensor in given.items() if tensor is not None}, sent.named()
    )
    return tuple(given.values())


def check_global_scale(value: Tensor | None, context: DeviceContext) -> Tensor:
    """Return the float32 that NVFP4 scales are relative to, on the device."""
    if value is None:
        return torch.ones(1, dtype=torch.float32, device=context.device)
    shape = tuple(value.shape) if isinstance(value, Tensor) else (1,)
    scale = arguments.check_tensor("x_global_scale", value, shape, (torch.float32,), context.device)
    if scale.numel() != 1:
        raise invalid("x_global_scale", arguments.describe(value), "float32 of one element")
    return scale
