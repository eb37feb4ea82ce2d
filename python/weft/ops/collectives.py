# SPDX-License-Identifier: Apache-2.0
"""Collectives of a ``weft.Communicator`` as operators: they return new tensors, and gradients flow through sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.ops.bound import Bound, target_of
from weft.runtime.tensors import contiguous


class CollectiveOps(Bound):
    """The operators of one ``weft.Communicator``. Make it outside the compiled function, and keep it.

    Every tensor is contiguous or is copied, on the communicator's device, and alike on all ranks.
    """

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator)
        self.num_ranks = int(communicator.size)
        # Made at the first use otherwise, which is collective and no business of a compiled function.
        _ = communicator.collectives

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return the reduction over all ranks. Differentiable for sum and average.

        Args:
            op: sum, product, min, max or average.
        """
        out: Tensor = torch.ops.weft.all_reduce(x, op, self.key)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors as [ranks, *shape], in rank order. Differentiable."""
        out: Tensor = torch.ops.weft.all_gather(x, self.num_ranks, self.key)
        return out

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return part ``rank`` of the reduction; the first dimension divides by the ranks. Differentiable for sum and
        average."""
        out: Tensor = torch.ops.weft.reduce_scatter(x, op, self.num_ranks, self.key)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send part q of the first dimension to rank q; return the parts that came, in rank order. Differentiable."""
        out: Tensor = torch.ops.weft.all_to_all(x, self.key)
        return out


def _linear(op: str) -> str:
    """Return the operation, if gradients flow through it."""
    if op not in ("sum", "average"):
        raise invalid("op", op, "sum or average, where a gradient is asked for")
    return op


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, op: str, key: int) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    target_of(key).all_reduce(out, op)
    return out


@_all_reduce.register_fake
def _(x: Tensor, op: str, key: int) -> Tensor:
    return x.new_empty(x.shape)


def _keep_op(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.op, ctx.key = inputs[1], inputs[-1]


def _all_reduce_backward(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.weft.all_reduce(grad, _linear(ctx.op), ctx.key), None, None


_all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_op)


@torch.library.custom_op("weft::all_gather", mutates_args=())
def _all_gather(x: Tensor, num_ranks: int, key: int) -> Tensor:
    out: Tensor = target_of(key).all_gather(contiguous("x", x))
    return out


@_all_gather.register_fake
def _(x: Tensor, num_ranks: int, key: int) -> Tensor:
    return x.new_empty(num_ranks, *x.shape)


def _keep_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_ranks, ctx.key = inputs[1], inputs[2]


def _all_gather_backward(ctx: Any, grad: Tensor) -> Any:
    # One part a rank, whatever the tensor's own first dimension is.
    return torch.ops.weft.reduce_scatter(grad, "sum", ctx.num_ranks, ctx.key).squeeze(0), None, None


_all_gather.register_autograd(_all_gather_backward, setup_context=_keep_ranks)


@torch.library.custom_op("weft::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, op: str, num_ranks: int, key: int) -> Tensor:
    out: Tensor = target_of(key).reduce_scatter(contiguous("x", x), op)
    return out


@_reduce_scatter.register_fake
def _(x: Tensor, op: str, num_ranks: int, key: int) -> Tensor:
    return x.new_empty(x.size(0) // num_ranks, *x.shape[1:])


def _keep_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.op, ctx.num_ranks, ctx.key = inputs[1], inputs[2], inputs[3]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> Any:
    gathered = torch.ops.weft.all_gather(grad, ctx.num_ranks, ctx.key).flatten(0, 1)
    if _linear(ctx.op) == "average":
        gathered = gathered / ctx.num_ranks
    return gathered, None, None, None


_reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_keep_reduction)


@torch.library.custom_op("weft::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, key: int) -> Tensor:
    out: Tensor = target_of(key).all_to_all(contiguous("x", x))
    return out


@_all_to_all.register_fake
def _(x: Tensor, key: int) -> Tensor:
    return x.new_empty(x.shape)


def _keep_key(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key = inputs[1]


def _all_to_all_backward(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.weft.all_to_all(grad, ctx.key), None


_all_to_all.register_autograd(_all_to_all_backward, setup_context=_keep_key)
