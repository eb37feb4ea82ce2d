# SPDX-License-Identifier: Apache-2.0
"""The plans of an ElasticBuffer's calls: the first of each signature is checked, and its plan cached for the others.

    plans = ElasticPlans(contexts, num_max_tokens_per_rank=4096, allow_multiple_reduction=True)
    plan = plans.of_routes(x, (data, scales, topk_idx, topk_weights, stats), options)
    received, handle = plan.run(data, scales, topk_idx, topk_weights, order)         # weft.moe.elastic_rows

Threads: one caller at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments, elastic_rows
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_ALIGNMENT, MAX_SMS, check_flags, check_integer, local_experts
from weft.moe.device_context import DeviceContext
from weft.moe.elastic_handle import EPHandle, check_fields
from weft.moe.elastic_rows import CachedPlan, RoutesPlan
from weft.moe.high_throughput import CombinePlan, Payload
from weft.runtime.plain import find_plan

_FLAGS = (
    "async_with_compute_stream",
    "allocate_on_comm_stream",
    "do_handle_copy",
    "do_cpu_sync",
    "do_expand",
    "do_zero_padding",
    "use_tma_aligned_col_major_sf",
)


class KnownCombine(NamedTuple):
    """Combines with arguments of one signature, which were checked."""

    context: DeviceContext
    num_rows: int
    weights_shape: tuple[int, ...] | None


class ElasticPlans:
    """The plans of one buffer. Arguments as of ElasticBuffer."""

    def __init__(
        self, contexts: BufferContexts, num_max_tokens_per_rank: int, allow_multiple_reduction: bool
    ) -> None:
        self._contexts = contexts
        self._max_tokens = num_max_tokens_per_rank
        self._allow_multiple_reduction = allow_multiple_reduction

    def of_routes(self, x: Payload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> RoutesPlan:
        """Return the plan of dispatches along new routes with such arguments. The first of them are checked."""
        data, scales, topk_idx, topk_weights, stats = tensors
        plans, key = self._contexts.plans, (tensors, b"elastic", isinstance(x, Tensor), *options)
        plan: RoutesPlan | None = find_plan(plans, *key)
        if plan is None:
            context, sms, flags = self._check_alike(x, options)
            num_experts, max_tokens, expert_alignment, *_ = options
            most = arguments.MAX_EXPERTS_PER_RANK * self._contexts.size
            experts = check_integer("num_experts", num_experts, 1, most)
            ids = arguments.check_topk_idx(topk_idx, data.size(0), data.device)
            weights = self._check_weights(topk_weights, ids)
            self._check_stats(stats, experts, context)
            at_owner = not self._allow_multiple_reduction and (
                flags["do_expand"] or context.has_sums_of_nodes
            )
            alignment = 1 if expert_alignment is None else expert_alignment
            wanted = elastic_rows.Wanted(
                num_experts=experts,
                num_max_tokens=self._check_max_tokens(max_tokens, data.size(0)),
                alignment=check_integer("expert_alignment", alignment, 1, MAX_ALIGNMENT),
                num_sms=sms,
                do_expand=bool(flags["do_expand"]),
                sums_at_owner=bool(at_owner),
                do_handle_copy=bool(flags["do_handle_copy"]),
                counts_unknown=flags["do_cpu_sync"] is not None and not flags["do_cpu_sync"],
            )
            plan = plans.keep(RoutesPlan(context, data, scales, ids, weights, wanted), *key)
        if not plan.context.is_cuda:
            arguments.check_expert_ids(topk_idx, plan.wanted.num_experts)
            if plan.wanted.do_expand:
                arguments.check_distinct_experts(topk_idx)
        return plan

    def of_handle(self, x: Payload, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> CachedPlan:
        """Return the plan of dispatches along routes of a handle, for such arguments. The first of them are checked."""
        plans, key = self._contexts.plans, (tensors, b"elastic, handle", isinstance(x, Tensor), *options)
        plan: CachedPlan | None = find_plan(plans, *key)
        if plan is None:
            context, sms, flags = self._check_alike(x, options)
            _, _, topk_idx, _, stats = tensors
            for argument, value in (("topk_idx", topk_idx), ("cumulative_local_expert_recv_stats", stats)):
                if value is not None:
                    raise invalid(argument, arguments.describe(value), "None with a handle")
            plan = plans.keep(CachedPlan(context, sms, bool(flags["do_expand"])), *key)
        return plan

    def _check_alike(self, x: Payload, options: tuple[Any, ...]) -> tuple[DeviceContext, int, dict[str, Any]]:
        """Check what dispatches of both kinds are given. Returns the context, SMs and flags."""
        context = self._contexts.of("x", x)
        arguments.check_rows_with_scales(x, "tokens", context.device)
        *_, num_sms, num_qps, given = options
        flags = dict(zip(_FLAGS, given, strict=True))
        check_flags(**flags)
        check_integer("num_qps", num_qps, 0)
        return context, check_integer("num_sms", num_sms, 0, MAX_SMS) or context.planned_sms, flags

    def check_combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Tensor | tuple[Tensor, Tensor] | None,
        num_sms: int,
        num_qps: int,
        flags: tuple[bool, bool],
    ) -> tuple[DeviceContext, Tensor, tuple[Tensor, ...], int]:
        """Check a combine's arguments, or find that such were checked. Returns the context, x, biases and SMs.

        flags: async_with_compute_stream, allocate_on_comm_stream.
        """
        plans, key = self._contexts.plans, ((x, topk_weights), b"elastic combine", num_sms, num_qps, flags)
        known: KnownCombine | None = find_plan(plans, *key)
        context = self._contexts.of("x", x) if known is None else known.context
        state = context.check_handle(handle, EPHandle, "dispatch")
        check_fields(handle, context.device)
        num_rows = handle.num_expanded_tokens if handle.do_expand else state.num_rows
        if known is None or known.num_rows != num_rows:
            x = arguments.check_rows("x", x, num_rows, (torch.bfloat16,), context.device)
        biases: tuple[Tensor, ...] = ()
        if bias is not None:
            biases = arguments.check_bias(bias, (state.num_tokens, x.size(1)), x.dtype, context.device)
        if topk_weights is not None:
            if handle.sums_at_owner and handle.do_expand:
                raise invalid("topk_weights", "weights", "None, as allow_multiple_reduction is False")
            shape = (num_rows,) if handle.do_expand else (num_rows, handle.topk_idx.size(1))
            if known is None or known.weights_shape != shape:
                arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), context.device)
        if known is None:
            names = ("async_with_compute_stream", "allocate_on_comm_stream")
            check_flags(**dict(zip(names, flags, strict=True)))
            num_sms = check_integer("num_sms", num_sms, 0, MAX_SMS)
            check_integer("num_qps", num_qps, 0)
            weights_shape = None if topk_weights is None else tuple(topk_weights.shape)
            plans.keep(KnownCombine(context, num_rows, weights_shape), *key)
        return context, x, biases, num_sms

    def of_combine(self, rows: Tensor) -> CombinePlan:
        """Return the plan of combines of such rows, bf16 and checked, or made here."""
        plans, key = self._contexts.plans, ((rows,), b"combine rows")
        plan: CombinePlan | None = find_plan(plans, *key)
        return plan or plans.keep(CombinePlan(self._contexts.of("x", rows), rows), *key)

    def check_repeat(
        self,
        handle: EPHandle,
        plan: CachedPlan,
        data: Tensor,
        topk_weights: object,
        sizes: tuple[Any, Any, Any],
    ) -> None:
        context = plan.context
        context.check_handle(handle, EPHandle, "dispatch")
        check_fields(handle, context.device)
        if plan.do_expand != handle.do_expand:
            raise invalid("do_expand", plan.do_expand, f"{handle.do_expand}, as in the handle's dispatch")
        if data.size(0) != handle.state.num_tokens:
            raise invalid(
                "x", arguments.describe(data), f"the {handle.state.num_tokens} rows of the dispatch"
            )
        names = ("num_experts", "num_max_tokens_per_rank", "expert_alignment")
        for argument, value in zip(names, sizes, strict=True):
            if value is not None and check_integer(argument, value, 0) != getattr(handle, argument):
                held = getattr(handle, argument)
                raise invalid(argument, value, f"{held}, as in the handle's dispatch")
        self._check_weights(topk_weights, handle.topk_idx)

    def _check_weights(self, topk_weights: object, ids: Tensor) -> Tensor | None:
        if topk_weights is None:
            return None
        shape = tuple(ids.shape)
        return arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), ids.device)

    def _check_max_tokens(self, given: object, num_tokens: int) -> int:
        most = (
            self._max_tokens
            if given is None
            else check_integer("num_max_tokens_per_rank", given, 0, arguments.MAX_ROWS)
        )
        if most < num_tokens:
            raise invalid("num_max_tokens_per_rank", most, f"at least the {num_tokens} tokens of x")
        return most

    def _check_stats(self, stats: object, num_experts: int, context: DeviceContext) -> None:
        local = local_experts(num_experts, self._contexts.size, self._contexts.rank)
        name = "cumulative_local_expert_recv_stats"
        arguments.check_optional(name, stats, (local,), torch.int32, context.device)
