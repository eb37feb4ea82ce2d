# SPDX-License-Identifier: Apache-2.0
"""Dispatch, combine and the low-latency calls of a ``weft.Buffer`` as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import invalid
from weft.ops.bound import Bound, target_of
from weft.runtime.tensors import contiguous

_HANDLE = 9  # tensors of a dispatch's handle
_LOW_LATENCY_HANDLE = 8
# Where a handle holds what shapes and tails need.
_PREFIX, _IN_RANK, _SLOT, _FACTS = 0, 4, 7, 8


class Rows(NamedTuple):
    """What a dispatch brought.

    Attributes:
        x: [N, hidden], by source rank, then token; differentiable. Past the real rows: 0.
        topk_idx: int64 [N, K]: experts of this rank counted from 0; -1 elsewhere and past the real rows.
        topk_weights: float32 [N, K], 0 where topk_idx is -1; differentiable.
        slots_per_expert: int64 [Le]: how many slots of topk_idx name each expert of this rank.
        handle: tensors, for any number of combines.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    slots_per_expert: Tensor
    handle: tuple[Tensor, ...]


class LowLatencyRows(NamedTuple):
    """The result of a low-latency dispatch.

    Attributes:
        x: [Le, R * M, hidden], bf16 or float8_e4m3fn. Rows [0, counts[e]) of expert e are valid.
        scales: float32 [Le, R * M, hidden / 128] with FP8; of no elements without.
        counts: int32 [Le].
        handle: tensors, for the combine.
    """

    x: Tensor
    scales: Tensor
    counts: Tensor
    handle: tuple[Tensor, ...]


class ExpertOps(Bound):
    """The operators of one ``weft.Buffer``. Make it outside the compiled function, and keep it.

    Args:
        buffer: a weft.Buffer; low-latency operators need ``low_latency_mode=True``.
    """

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer)
        self.num_ranks = int(buffer.group_size)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, num_worst_tokens: int = 0
    ) -> Rows:
        """Send each row once to every rank that owns one of its experts.

        Args:
            x: [T, hidden], contiguous, rows of whole 16-byte words.
            topk_idx: int64 [T, K], -1 for an empty slot.
            topk_weights: float32 [T, K].
            num_experts: over all ranks.
            num_worst_tokens: above 0: N, known beforehand, so that ``fullgraph=True`` works as it is, and graphs can be
                captured. 0: N is what came; then set ``torch._dynamo.config.capture_dynamic_output_shape_ops``.
        Raises: weft.Error, as weft.Buffer.dispatch().
        """
        x_in, idx, weights, slots, *handle = torch.ops.weft.dispatch(
            x, topk_idx, topk_weights, num_experts, num_worst_tokens, self.num_ranks, self.key
        )
        return Rows(x_in, idx, weights, slots, tuple(handle))

    def combine(self, x: Tensor, handle: Sequence[Tensor]) -> Tensor:
        """Send rows back to their tokens and sum them, unweighted: [T, hidden] of x's type.

        Args:
            x: bf16 or float32 [N, hidden], in the order of the dispatch's rows. Rows past the real ones are ignored.
            handle: of the dispatch that brought the rows.
        """
        combined: Tensor = torch.ops.weft.combine(x, list(handle), self.key)
        return combined

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, use_fp8: bool = True
    ) -> LowLatencyRows:
        """Send each token once to every rank that owns one of its experts; rows come sorted by expert. No gradient.

        Args:
            x: bf16 [T, hidden], T <= max_tokens; with FP8 hidden is a multiple of 128.
            topk_idx: int64 [T, K], -1 for an empty slot.
            max_tokens: M, the same on all ranks, as is num_experts.
        """
        rows, scales, counts, *handle = torch.ops.weft.low_latency_dispatch(
            x, topk_idx, max_tokens, num_experts, use_fp8, self.num_ranks, self.key
        )
        return LowLatencyRows(rows, scales, counts, tuple(handle))

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Sequence[Tensor]
    ) -> Tensor:
        """Return bf16 [T, hidden]: the weighted sum of each token's rows. No gradient.

        Args:
            x: bf16 [Le, R * M, hidden]. topk_idx, topk_weights: those of the dispatch; weights are float32.
        """
        combined: Tensor = torch.ops.weft.low_latency_combine(
            x, topk_idx, topk_weights, list(handle), self.key
        )
        return combined


_Flat = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]


@torch.library.custom_op("weft::dispatch", mutates_args=())
def _dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_worst_tokens: int,
    num_ranks: int,
    key: int,
) -> _Flat:
    buffer = target_of(key)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    rows, idx, weights, _, handle, _ = buffer.dispatch(
        contiguous("x", x),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        num_worst_tokens=num_worst_tokens,
    )
    local = -(-num_experts // num_ranks)
    slots = torch.zeros(local + 1, dtype=torch.int64, device=idx.device)
    slots.scatter_add_(0, idx.flatten().long() + 1, torch.ones_like(idx.flatten(), dtype=torch.int64))
    kept = [entry.clone() for entry in handle]  # operators return tensors that share no memory
    rows, weights = _without_tail(rows, kept), _without_tail(weights, kept)
    return (rows, idx.long().clone(), weights.clone(), slots[1:].clone(), *kept)


def _without_tail(rows: Tensor, handle: Sequence[Tensor]) -> Tensor:
    """Return rows with 0 past the real ones, where their number was not known on the host."""
    counts_unknown = int(handle[_FACTS][7])
    if not counts_unknown or rows.size(0) == 0:
        return rows
    rank = int(handle[_FACTS][2])
    is_tail = torch.arange(rows.size(0), device=rows.device) >= handle[_PREFIX][-1, rank]
    return rows.masked_fill(is_tail.unsqueeze(1), 0)


@_dispatch.register_fake
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_worst_tokens: int,
    num_ranks: int,
    key: int,
) -> _Flat:
    num_rows: Any = num_worst_tokens
    if num_rows == 0:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    tokens, top_k = topk_idx.size(0), topk_idx.size(1)
    shapes: tuple[tuple[Any, ...], ...] = (
        (num_ranks, num_ranks),
        (num_ranks, 1),
        (num_ranks, 1),
        (num_rows,),
        (tokens, num_ranks),
        (tokens, num_ranks),
        (tokens,),
        (num_rows,),
    )
    handle = [
        x.new_empty(shape, dtype=torch.bool if place == _IN_RANK else torch.int32)
        for place, shape in enumerate(shapes)
    ]
    return (  # type: ignore[return-value]
        x.new_empty(num_rows, x.size(1)),
        topk_idx.new_empty(num_rows, top_k, dtype=torch.int64),
        topk_weights.new_empty(num_rows, top_k),
        topk_idx.new_empty(-(-num_experts // num_ranks), dtype=torch.int64),
        *handle,
        torch.empty(8, dtype=torch.int64, device="cpu"),
    )


def _keep_routes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.key = inputs[6]
    ctx.mark_non_differentiable(output[1], *output[3:])
    ctx.save_for_backward(output[1] < 0, *output[4:])  # a copy: the caller may overwrite the ids


def _dispatch_backward(ctx: Any, grad_x: Tensor, _idx: Any, grad_weights: Tensor, *_: Any) -> Any:
    is_elsewhere, *handle = ctx.saved_tensors
    # The 0 of a slot whose expert is elsewhere is no weight: the sum must not count its gradient.
    grad_weights = grad_weights.masked_fill(is_elsewhere, 0)
    x, weights = torch.ops.weft.combine_with_weights(grad_x, grad_weights, handle, ctx.key)
    return x, None, weights, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_routes)


@torch.library.custom_op("weft::combine", mutates_args=())
def _combine(x: Tensor, handle: list[Tensor], key: int) -> Tensor:
    combined: Tensor = target_of(key).combine(contiguous("x", x), _checked(handle))[0]
    return combined


@_combine.register_fake
def _(x: Tensor, handle: list[Tensor], key: int) -> Tensor:
    return x.new_empty(handle[_IN_RANK].size(0), x.size(1))


def _keep_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key = inputs[2]
    ctx.save_for_backward(*inputs[1])


def _combine_backward(ctx: Any, grad: Tensor) -> Any:
    handle = list(ctx.saved_tensors)
    return torch.ops.weft.dispatch_again(grad, handle, ctx.key), [None] * len(handle), None


_combine.register_autograd(_combine_backward, setup_context=_keep_handle)


@torch.library.custom_op("weft::combine_with_weights", mutates_args=())
def _combine_with_weights(
    x: Tensor, topk_weights: Tensor, handle: list[Tensor], key: int
) -> tuple[Tensor, Tensor]:
    given = contiguous("topk_weights", topk_weights).float()
    combined, weights, _ = target_of(key).combine(contiguous("x", x), _checked(handle), topk_weights=given)
    return combined, weights


@_combine_with_weights.register_fake
def _(x: Tensor, topk_weights: Tensor, handle: list[Tensor], key: int) -> tuple[Tensor, Tensor]:
    tokens = handle[_IN_RANK].size(0)
    weights = topk_weights.new_empty(tokens, topk_weights.size(1), dtype=torch.float32)
    return x.new_empty(tokens, x.size(1)), weights


@torch.library.custom_op("weft::dispatch_again", mutates_args=())
def _dispatch_again(x: Tensor, handle: list[Tensor], key: int) -> Tensor:
    rows = target_of(key).dispatch(contiguous("x", x), handle=_checked(handle))[0]
    kept = _without_tail(rows, handle)
    return kept.clone() if kept is x else kept


@_dispatch_again.register_fake
def _(x: Tensor, handle: list[Tensor], key: int) -> Tensor:
    return x.new_empty(handle[_SLOT].size(0), x.size(1))


def _checked(handle: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(handle) != _HANDLE:
        raise invalid("handle", f"{len(handle)} tensors", f"the {_HANDLE} of a dispatch")
    return tuple(handle)


_LowLatencyFlat = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]


@torch.library.custom_op("weft::low_latency_dispatch", mutates_args=())
def _low_latency_dispatch(
    x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, use_fp8: bool, num_ranks: int, key: int
) -> _LowLatencyFlat:
    got, counts, handle, _, _ = target_of(key).low_latency_dispatch(
        contiguous("x", x), topk_idx, max_tokens, num_experts, use_fp8=use_fp8
    )
    rows, scales = got if use_fp8 else (got, x.new_empty(0, dtype=torch.float32))
    return (rows, scales, counts, *(entry.clone() for entry in handle))


@_low_latency_dispatch.register_fake
def _(
    x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int, use_fp8: bool, num_ranks: int, key: int
) -> _LowLatencyFlat:
    from weft.moe.config import local_experts  # operators do not need weft.moe until a buffer is there
    from weft.moe.low_latency_handle import routes_lengths

    buffer = target_of(key)
    local = local_experts(num_experts, num_ranks, buffer.rank)
    most, hidden = num_ranks * max_tokens, x.size(1)
    rows = x.new_empty(local, most, hidden, dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
    # Scales are column-major, as matrix units take them.
    scales = x.new_empty(local, hidden // 128, most, dtype=torch.float32).transpose(1, 2)
    mode = buffer.runtime.low_latency
    words, _ = routes_lengths(mode, max_tokens, topk_idx.size(1), num_experts, False, local * most)
    i32, i64 = torch.int32, torch.int64
    on_cpu = [torch.empty(shape, dtype=i64, device="cpu") for shape in ((), (), (), (8,), (2,))]
    handle = (
        x.new_empty(local, most, dtype=i32),
        x.new_empty(local, num_ranks, dtype=i64),
        *on_cpu[:3],
        x.new_empty(words, dtype=i32),
        *on_cpu[3:],
    )
    return (  # type: ignore[return-value]
        rows,
        scales if use_fp8 else x.new_empty(0, dtype=torch.float32),
        x.new_empty(local, dtype=i32),
        *handle,
    )


@torch.library.custom_op("weft::low_latency_combine", mutates_args=())
def _low_latency_combine(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: list[Tensor], key: int
) -> Tensor:
    if len(handle) != _LOW_LATENCY_HANDLE:
        raise invalid(
            "handle", f"{len(handle)} tensors", f"the {_LOW_LATENCY_HANDLE} of a low-latency dispatch"
        )
    buffer = target_of(key)
    combined: Tensor = buffer.low_latency_combine(contiguous("x", x), topk_idx, topk_weights, tuple(handle))[
        0
    ]
    return combined


@_low_latency_combine.register_fake
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: list[Tensor], key: int) -> Tensor:
    return x.new_empty(topk_idx.size(0), x.size(2))
