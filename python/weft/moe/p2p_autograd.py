# SPDX-License-Identifier: Apache-2.0
"""The four phases of a ``weft.P2PAllToAll`` that gradients flow through; ``weft.moe.autograd`` has them, too.

    sending = p2p_dispatch_send(a2a, x, topk_idx, topk_weights)
    shared = shared_expert(x)                                    # while tokens travel
    rows = p2p_dispatch_recv(sending)
    returning = p2p_combine_send(my_experts(rows.x, rows.weights, rows.num_tokens), rows)
    out = shared + p2p_combine_recv(returning)

Backward runs the phases in reverse: the gradient of a receive is a send and that of a send is a receive, so what lies
between two phases in forward overlaps with the network in backward, too. Sums are unweighted: the caller applies
``rows.weights``, which carry gradients, as float32 [rows].

Every rank must run the same calls in the same order, backward too: keep the graph connected where no row came.
torch.utils.checkpoint stops a recomputation once it has all tensors that the backward pass needs, which may be before
the last phase: wrap such layers in torch.utils.checkpoint.set_checkpoint_early_stop(False).
Numerics: as the object's combine. in_dtype and out_dtype are the same, bfloat16, float16 or float32.
Errors: ``weft.Error`` from the object's phases, also inside ``backward()``. Threads: as the object's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import invalid, quoted
from weft.moe.p2p import P2PAllToAll, P2PHandle
from weft.runtime.tensors import contiguous

_WORD_ELEMENTS = 4  # float32 in 16 bytes, what a row is a multiple of


class _Exchange:
    """What the phases of one exchange share, and those of its gradients."""

    def __init__(self, a2a: P2PAllToAll, topk_idx: Tensor) -> None:
        self.a2a, self.topk_idx = a2a, topk_idx
        self.handle: P2PHandle
        self.back: P2PHandle  # along the same routes, with gradients of results
        self.slots: Tensor | None = None  # i64 by row: which of its token's slots brought it
        self.grad_weights: Tensor | None = None  # by row

    def ones(self) -> Tensor:
        """Return the weights of an unweighted sum."""
        return torch.ones(self.topk_idx.shape, dtype=torch.float32, device=self.topk_idx.device)

    def send_with_slots(self, rows: Tensor) -> P2PHandle:
        """Send rows along the routes; each brings the number of its slot as its weight."""
        numbers = torch.arange(self.topk_idx.size(1), device=rows.device, dtype=torch.float32)
        return self.a2a.dispatch_send(rows, self.topk_idx, numbers.expand(self.topk_idx.shape).contiguous())

    def receive_with_slots(self, handle: P2PHandle) -> Tensor:
        """Return the rows, zeros where there is none; they stand where those of the exchange do."""
        x = torch.zeros(self.handle.rows_shape, dtype=self.a2a.sizes.in_dtype, device=self.a2a.device)
        rows = self.a2a.dispatch_recv(handle, x)
        self.slots = rows.weights.reshape(-1).nan_to_num(0).clamp(0, self.topk_idx.size(1) - 1).long()
        return x

    def return_weights(self) -> Tensor:
        """Return float32 [T, K]: the gradients of weights, brought back to their slots."""
        assert self.grad_weights is not None
        if self.slots is None:  # results had no gradient: nobody has sent along the routes yet
            shape = (self.topk_idx.size(0), self.a2a.sizes.hidden_dim)
            empty = torch.zeros(shape, dtype=self.a2a.sizes.in_dtype, device=self.a2a.device)
            self.receive_with_slots(self.send_with_slots(empty))
        assert self.slots is not None
        top_k = self.topk_idx.size(1)
        width = -(-top_k // _WORD_ELEMENTS) * _WORD_ELEMENTS
        grads = self.grad_weights.reshape(-1, 1)
        wide = torch.zeros((grads.size(0), width), dtype=torch.float32, device=grads.device)
        wide.scatter_(1, self.slots.unsqueeze(1), grads)
        dtype = self.a2a.sizes.out_dtype
        of_rows = (*self.handle.rows_shape[:-1], -1)
        parts = [wide] if dtype == torch.float32 else _in_halves(wide, dtype)
        total = torch.zeros((self.topk_idx.size(0), top_k), dtype=torch.float32, device=grads.device)
        for part in parts:
            self.a2a.combine_send(part.reshape(of_rows).contiguous(), self.handle, self.ones())
            total += self.a2a.combine_recv(self.handle)[:, :top_k].float()
        return total


def _in_halves(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return float32 as the sum of parts of 16 bits, each with the rounding error of those before it."""
    padded = torch.nn.functional.pad(values, (0, -values.size(1) % (2 * _WORD_ELEMENTS)))
    parts, rest = [], padded
    for _ in range(2):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts


@dataclass(frozen=True)
class P2PTravelling:
    """Tokens or results on their way. token: what ties the phases in the graph; empty."""

    token: Tensor
    exchange: Any


@dataclass(frozen=True)
class P2PArrived:
    """Rows of this rank's experts.

    x: in_dtype, in the places of P2PRows.x, zeros between and behind; differentiable. weights: float32, one for each
        row, 0 where there is none; differentiable. num_tokens: int32 [Le].
    """

    x: Tensor
    weights: Tensor
    num_tokens: Tensor
    exchange: Any


def p2p_dispatch_send(a2a: P2PAllToAll, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> P2PTravelling:
    """Send each token to its experts' ranks: a2a.dispatch_send(). Collective."""
    if not isinstance(a2a, P2PAllToAll):
        raise invalid("a2a", quoted(a2a), "a weft.P2PAllToAll")
    sizes = a2a.sizes
    if sizes.in_dtype != sizes.out_dtype or sizes.hidden_dim_scale is not None:
        given = f"in_dtype {sizes.in_dtype}, out_dtype {sizes.out_dtype}, scales {sizes.hidden_dim_scale}"
        raise invalid("a2a", given, "one type for both ways, and no scales, for gradients")
    exchange = _Exchange(a2a, topk_idx)
    return P2PTravelling(_DispatchSend.apply(x, topk_weights, exchange), exchange)


def p2p_dispatch_recv(sending: P2PTravelling) -> P2PArrived:
    """Receive the rows of this rank's experts: a2a.dispatch_recv()."""
    x, weights, num_tokens = _DispatchRecv.apply(sending.token, sending.exchange)
    return P2PArrived(x, weights, num_tokens, sending.exchange)


def p2p_combine_send(y: Tensor, rows: P2PArrived) -> P2PTravelling:
    """Send the experts' results back, unweighted: a2a.combine_send(). y: out_dtype, in the shape of rows.x."""
    return P2PTravelling(_CombineSend.apply(y, rows.exchange), rows.exchange)


def p2p_combine_recv(returning: P2PTravelling) -> Tensor:
    """Return the sum of each token's results: a2a.combine_recv()."""
    out: Tensor = _CombineRecv.apply(returning.token, returning.exchange)
    return out


def _token(of: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=of.device)


class _DispatchSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.handle = exchange.a2a.dispatch_send(x, exchange.topk_idx, topk_weights)
        exchange.topk_idx = exchange.topk_idx.clone()  # for backward; the caller may write its own again
        return _token(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> Any:
        exchange = ctx.exchange
        grad_x = exchange.a2a.combine_recv(exchange.handle)
        return grad_x, exchange.return_weights() if ctx.needs_input_grad[1] else None, None


class _DispatchRecv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        a2a, handle = exchange.a2a, exchange.handle
        shape = a2a.rows_shape
        x = torch.zeros(shape, dtype=a2a.sizes.in_dtype, device=a2a.device)
        rows = a2a.dispatch_recv(handle, x)
        is_row = a2a.is_row(rows.num_tokens).view(rows.weights.shape)
        weights = torch.where(is_row, rows.weights, 0.0)
        ctx.mark_non_differentiable(rows.num_tokens)
        return x, weights, rows.num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, _: Any) -> Any:
        exchange = ctx.exchange
        exchange.grad_weights = contiguous("grad_weights", grad_weights)
        exchange.a2a.combine_send(contiguous("grad_x", grad_x), exchange.handle, exchange.ones())
        return _token(grad_x), None


class _CombineSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.a2a.combine_send(contiguous("y", y), exchange.handle, exchange.ones())
        return _token(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> Any:
        return ctx.exchange.receive_with_slots(ctx.exchange.back), None


class _CombineRecv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.a2a.combine_recv(exchange.handle)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.exchange.back = ctx.exchange.send_with_slots(contiguous("grad", grad))
        return _token(grad), None
