# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine that gradients flow through, for training.

    arrived = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    y = my_experts(arrived.x, arrived.topk_idx, arrived.topk_weights)   # this rank's experts, weighted,
    summed out = combine(buffer, y, arrived.handle)

The gradient of a dispatch is a combine, and the gradient of a combine is a dispatch along the same routes:
what was copied to several ranks comes back summed, and what was summed goes back as copies. Routes are
exchanged once. The phases of a ``weft.P2PAllToAll`` have functions of their own, ``p2p_...``.

Every rank must run the same calls in the same order, backward too. A rank that received no row therefore has
to keep the graph between ``arrived.x`` and ``y`` connected; indexing with an empty index does, skipping does
not.

Numerics: as the buffer's ``combine``: float32 sums over ranks in ascending order, one rounding to bf16. So a
gradient that comes back through dispatch carries one rounding per rank that the row went to, and one for the
sum.
Errors: ``weft.Error`` from the buffer's calls; also raised inside ``backward()``. A gradient of a gradient is torch's
RuntimeError: no call here gives one.
Threads: as ``weft.Buffer``: one thread at a time per buffer; autograd runs a graph on one thread per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from weft.errors import invalid, quoted
from weft.moe.p2p_autograd import (
    P2PArrived,
    P2PTravelling,
    p2p_combine_recv,
    p2p_combine_send,
    p2p_dispatch_recv,
    p2p_dispatch_send,
)
from weft.runtime.tensors import contiguous

__all__ = [
    "Arrived",
    "P2PArrived",
    "P2PTravelling",
    "combine",
    "dispatch",
    "p2p_combine_recv",
    "p2p_combine_send",
    "p2p_dispatch_recv",
    "p2p_dispatch_send",
]


class DispatchingBuffer(Protocol):
    """What is used of ``weft.Buffer``; DeepEP's ``Buffer`` fits as well."""

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> Any: ...

    def dispatch(self, x: torch.Tensor, **arguments: Any) -> Any: ...

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None) -> Any: ...


@dataclass(frozen=True)
class Arrived:
    """Rows that a dispatch brought to this rank.

    Attributes:
        x: bf16[received, hidden], source rank major, source token minor; differentiable.
        topk_idx: [received, top_k], experts of this rank counted from 0; -1 where the slot's expert is
            elsewhere.
        topk_weights: float32[received, top_k], 0 where the slot's expert is elsewhere; differentiable.
        num_tokens_per_expert: rows for each expert of this rank; a row counts for each expert it chose.
        handle: for ``combine``, any number of times.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: list[int]
    handle: Any


def dispatch(
    buffer: DispatchingBuffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
) -> Arrived:
    """Send each row to the ranks that own its chosen experts. Collective over the buffer's group.

    Args:
        x: bf16[tokens, hidden], contiguous.
        topk_idx: int64[tokens, top_k], -1 for none.
        topk_weights: float32[tokens, top_k].
        num_experts: over all ranks; every rank owns as many.
    """
    _check_buffer(buffer)
    return Arrived(*_Dispatch.apply(x, topk_weights, topk_idx, num_experts, buffer))


def combine(buffer: DispatchingBuffer, x: torch.Tensor, handle: Any) -> torch.Tensor:
    """Send expert rows back to their tokens and sum them there, unweighted. Collective over the buffer's
    group.

    Args:
        x: bf16[received, hidden], contiguous, rows in the order of the dispatch.
        handle: of the dispatch that brought the rows.
    Returns: bf16[tokens, hidden]; 0 for a token that was sent nowhere.
    """
    _check_buffer(buffer)
    out: torch.Tensor = _Combine.apply(x, handle, buffer)
    return out


def _check_buffer(buffer: object) -> None:
    if not (hasattr(buffer, "dispatch") and hasattr(buffer, "combine")):
        raise invalid("buffer", quoted(buffer), "a weft.Buffer")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_idx: torch.Tensor,
        num_experts: int,
        buffer: DispatchingBuffer,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], Any]:
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.is_elsewhere = recv_idx < 0  # of its own: who gets recv_idx may write to it
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor, *__: Any) -> Any:
        x, weights, _event = ctx.buffer.combine(
            contiguous("grad_x", grad_x),
            ctx.handle,
            # The 0 of a slot whose expert is elsewhere is no weight: the sum must not count its gradient.
            topk_weights=contiguous("grad_weights", grad_weights).float().masked_fill(ctx.is_elsewhere, 0),
        )
        return x, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any, buffer: DispatchingBuffer) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined: torch.Tensor = buffer.combine(x, handle)[0]
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.buffer.dispatch(contiguous("grad", grad), handle=ctx.handle)[0], None, None
