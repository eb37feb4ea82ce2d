# SPDX-License-Identifier: Apache-2.0
"""The high-throughput calls of ``weft.Buffer``: layout, dispatch and combine, with all checks of their arguments.

What runs after the checks stands in weft.moe.high_throughput. T tokens here, N rows received here, R ranks, E experts,
K slots per token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from weft import _core
from weft.errors import invalid
from weft.moe import arguments, high_throughput
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_ALIGNMENT, Config, check_integer
from weft.moe.device_context import DeviceContext
from weft.moe.events import EventHandle, EventOverlap, PreviousEvent, finished_event, handle_of
from weft.moe.handle import DispatchHandle
from weft.moe.high_throughput import (
    CombinePlan,
    DispatchPlan,
    LayoutPlan,
    Payload,
    RepeatPlan,
    rows_and_scales,
)
from weft.runtime import spans
from weft.runtime.modes import are_modes_on, outside_modes
from weft.runtime.plain import find_plan

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _with_config(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return ``call`` with its config required.

    By position, the config may also stand where num_worst_tokens does: versions of DeepEP differ in it.
    """
    signature = inspect.signature(call)
    names = list(signature.parameters)
    worst_at = names.index("num_worst_tokens") if "num_worst_tokens" in names else len(names)

    @functools.wraps(call)
    def with_config(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > worst_at and (args[worst_at] is None or isinstance(args[worst_at], Config)):
            args = (*args[:worst_at], 0, *args[worst_at:])  # type: ignore[assignment]
        config = signature.bind(*args, **kwargs).arguments.get("config")
        if config is None:
            raise invalid("config", arguments.describe(config), "a Config")
        return call(*args, **kwargs)

    with_config.__name__ = f"internode_{call.__name__}"
    with_config.__qualname__ = f"Buffer.{with_config.__name__}"
    with_config.__doc__ = f"The same as {call.__name__}(), with config required."
    return with_config


class HighThroughputCalls:
    """The part of ``weft.Buffer`` that is high throughput; see there for construction, streams, threads, errors."""

    _contexts: BufferContexts
    _asked_sms: ClassVar[int]
    group_size: int

    # -- layout ----------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count tokens per rank and slots per expert, and say which token goes to which rank. Not collective.

        Args:
            topk_idx: int64 or int32 [T, K], contiguous; -1 is an empty slot. An expert may stand twice in a
            row.
            num_experts: over all ranks, the same on all of them.
            previous_event, async_finish, allocate_on_comm_stream: see the class; the last one makes the
                outputs belong to the communication stream and needs the first two.
        Returns: (tokens per rank i32[R], tokens per node i32[nodes], slots per expert i32[E], is token in rank
            bool[T, R], event). A node is what ranks make that map each other; where all do, eight ranks, and None for
            up to eight.
        """
        if are_modes_on():
            order = (previous_event, async_finish, allocate_on_comm_stream)
            return outside_modes(self.get_dispatch_layout)(topk_idx, num_experts, *order)
        plans, key = self._contexts.plans, ((topk_idx,), b"layout", num_experts)
        plan: LayoutPlan | None = find_plan(plans, *key)
        if plan is None:
            plan = plans.keep(self._plan_layout(topk_idx, num_experts), *key)
        context, run = plan.context, plan.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("layout", run)
        if not context.is_cuda:
            arguments.check_expert_ids(topk_idx, plan.num_experts)
        previous = self._check_order(previous_event, async_finish, allocate_on_comm_stream)
        if previous is None and not async_finish:  # its memory is the caller's: it can run as torch's kernels
            context.layout_stream = stream = context.current_stream
            per_rank, per_expert, in_rank = run(topk_idx, None, stream)
            per_node = None if context.rdma_places is None else self._count_per_node(context, in_rank)
            return per_rank, per_node, per_expert, in_rank, finished_event()
        context.begin(previous)
        with context.allocating(allocate_on_comm_stream):
            per_rank, per_expert, in_rank = run(topk_idx, None, context.stream)
        with context.on_comm_stream():
            per_node = self._count_per_node(context, in_rank)
        event = context.finish(async_finish, (topk_idx, per_rank, per_expert, in_rank, per_node))
        return per_rank, per_node, per_expert, in_rank, event

    def _plan_layout(self, topk_idx: object, num_experts: object) -> LayoutPlan:
        context = self._contexts.of("topk_idx", topk_idx)
        ids = arguments.check_topk_idx(topk_idx, "tokens", context.device)
        return LayoutPlan(context, ids, arguments.check_num_experts(num_experts, self.group_size))

    def _check_order(
        self, previous_event: PreviousEvent, async_finish: bool, allocate_on_comm_stream: bool
    ) -> EventHandle | None:
        """Return the event to wait for, or None."""
        if previous_event is None and async_finish is False and allocate_on_comm_stream is False:
            return None
        previous = handle_of(previous_event, "previous_event")
        arguments.check_allocation(allocate_on_comm_stream, previous_event, async_finish)
        return previous

    def _count_per_node(self, context: DeviceContext, in_rank: Tensor) -> Tensor | None:
        """Return how many tokens go to each group of ranks; None for up to eight that all map each other."""
        places = context.rdma_places
        if places is None:
            return None
        shape = (in_rank.size(0), context.get_num_rdma_ranks())
        goes = torch.zeros(shape, dtype=torch.int32, device=in_rank.device)
        goes.scatter_reduce_(1, places.expand(in_rank.size(0), -1), in_rank.int(), "amax")
        per_node: Tensor = goes.sum(dim=0, dtype=torch.int32)
        return per_node

    # -- dispatch --------------------------------------------------------------------------------------------

    @outside_modes
    def dispatch(
        self,
        x: Payload,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Payload, Tensor | None, Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Send each row of ``x`` once to every rank that owns one of its experts.

        Args:
            x: [T, hidden], contiguous, rows of whole 16-byte words, any element type; or (rows, scales),
                scales float32 or int32 [T, n] in any strides; or NVFP4: (int32 [T, hidden / 8], E4M3 scales of 16
                channels as int32 [T, hidden / 64] in any strides, the global scale float32 [1], [T] or [T, 1]).
            handle: of an earlier dispatch: repeat its routes, without ids and counts.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: what
                get_dispatch_layout() returned for this topk_idx; not with a handle. On CUDA nobody looks whether they
                belong together: rows go where is_token_in_rank says.
            topk_idx, topk_weights: int64 or int32, and float32, [T, K]; both or neither; not with a handle.
            expert_alignment: the returned counts are rounded up to multiples of it; rows are not padded.
            num_worst_tokens: above 0: return exactly so many rows and no counts, so that nothing waits for
                the GPU and a CUDA graph can be captured; the ids of rows beyond the real ones are -1, the
                rest of such rows undefined. Needs topk_idx. weft.Error, code capacity, when more rows came.
            config: only its num_sms matters.
            previous_event, async_finish, allocate_on_comm_stream: see the class.
        Returns: (recv_x [N, hidden], (rows, scales [N, n]) or (rows, scales, global scales
            [N, 1]); recv_topk_idx [N, K]: local expert ids, -1
            elsewhere, or None; recv_topk_weights float32 [N, K]: 0 elsewhere, or None; slots for each local
            expert, or [] with num_worst_tokens; handle; event). Rows come in order of source rank, then of
            source token. With a handle: (recv_x, None, None, None, None, event).
            On CUDA received tensors live in the buffer's memory, which stays theirs as long as they do, and until
            streams that record_stream() named are done with it.
        Raises: weft.Error also, on all ranks, when they disagree about row size, scales, K or E, and, code capacity,
            when one of them has no room for a dispatch with a handle, which cannot grow the window.
        """
        previous = self._check_order(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            return self._dispatch_again(x, handle, topk_idx, topk_weights, config, previous, async_finish)
        given = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
        options = (isinstance(x, Tensor), expert_alignment, num_worst_tokens)
        rows, scales = parts = rows_and_scales(x)
        plans, tensors = self._contexts.plans, (*parts, *given, topk_idx, topk_weights)
        plan: DispatchPlan | None = find_plan(plans, tensors, b"dispatch", *options)
        if plan is None:
            plan, rows, scales = self._plan_new_routes(x, given, topk_idx, topk_weights, *options[1:])
            plans.keep(plan, tensors, b"dispatch", *options)
        context = plan.context
        if not context.is_cuda:
            if topk_idx is not None:
                arguments.check_expert_ids(topk_idx, plan.num_experts)
        elif arguments.is_deterministic():
            arguments.check_deterministic_fill(context.device)
        num_sms = self._num_sms(config, context.planned_sms)
        run = plan.run_new
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("dispatch", run)
        counted = (is_token_in_rank, num_tokens_per_expert, num_tokens_per_rank)
        sent = (rows, scales, topk_idx, topk_weights, *counted)
        results = run(*sent, num_sms, context.order(previous, async_finish))
        if not async_finish:
            return (*results, finished_event())
        state = results[4].state
        assert state is not None
        places = (state.send_row, state.slot_base, state.prefix)
        return (*results, context.finish(True, (*sent, *places)))

    def _plan_new_routes(
        self,
        x: Payload,
        given: tuple[Tensor | None, ...],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        expert_alignment: object,
        num_worst_tokens: object,
    ) -> tuple[DispatchPlan, Tensor, Tensor | None]:
        """Check what the dispatches of one signature share, and plan them. Returns the rows and scales of x, too."""
        context, rows = self._check_rows(x)
        _, per_expert = self._check_layout(rows.x, *given)
        ids, weights = self._check_top_k(rows.x, topk_idx, topk_weights)
        alignment = check_integer("expert_alignment", expert_alignment, 1, MAX_ALIGNMENT)
        worst = check_integer("num_worst_tokens", num_worst_tokens, 0, arguments.MAX_ROWS)
        if worst > 0 and ids is None:
            raise invalid(
                "topk_idx", "None with num_worst_tokens", "expert ids, to tell rows from their tail"
            )
        rows = high_throughput.Rows(rows.x, rows.scales, ids, weights, has_global_scale=rows.has_global_scale)
        plan = DispatchPlan(context, rows, per_expert.size(0), worst_rows=worst, alignment=alignment)
        return plan, rows.x, rows.scales

    def _dispatch_again(
        self,
        x: Payload,
        handle: DispatchHandle,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        config: Config | None,
        previous: EventHandle | None,
        async_finish: bool,
    ) -> tuple[Payload, None, None, None, None, EventOverlap]:
        """Send rows along the routes of an earlier dispatch."""
        rows, scales = rows_and_scales(x)
        plans, key = self._contexts.plans, ((rows, scales), b"repeat", isinstance(x, Tensor))
        plan: RepeatPlan | None = find_plan(plans, *key)
        if plan is None:
            context, checked = self._check_rows(x)
            rows, scales = checked.x, checked.scales
            plan = plans.keep(RepeatPlan(context, checked), *key)
        context = plan.context
        if context.is_cuda and arguments.is_deterministic():
            arguments.check_deterministic_fill(context.device)
        num_sms = self._num_sms(config, context.planned_sms)
        state = self._check_repeat(handle, rows, topk_idx, topk_weights, context)
        if context.lacks_room_for(state):
            context.make_room_for(state, plan.format, state.num_rows)
        run = plan.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("dispatch", run)
        order = context.order(previous, async_finish)
        payload: Payload = run(rows, scales, None, None, state, num_sms, order).payload()
        event = context.finish(True, (rows, scales)) if async_finish else finished_event()
        return payload, None, None, None, None, event

    def _check_layout(
        self,
        x: Tensor,
        num_tokens_per_rank: object,
        num_tokens_per_rdma_rank: object,
        is_token_in_rank: object,
        num_tokens_per_expert: object,
    ) -> tuple[Tensor, Tensor]:
        """Check what get_dispatch_layout() returned; return (is_token_in_rank, num_tokens_per_expert)."""
        num_ranks, device, i32 = self.group_size, x.device, (torch.int32,)
        arguments.check_tensor("num_tokens_per_rank", num_tokens_per_rank, (num_ranks,), i32, device)
        if num_tokens_per_rdma_rank is not None:
            shape = (self._contexts.alive().get_num_rdma_ranks(),)
            arguments.check_tensor("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, shape, i32, device)
        in_rank = arguments.check_tensor(
            "is_token_in_rank", is_token_in_rank, (x.size(0), num_ranks), (torch.bool,), device
        )
        per_expert = arguments.check_tensor(
            "num_tokens_per_expert", num_tokens_per_expert, ("experts",), i32, device
        )
        arguments.check_num_experts(per_expert.size(0), num_ranks)
        return in_rank, per_expert

    def _check_top_k(
        self, x: Tensor, topk_idx: object, topk_weights: object
    ) -> tuple[Tensor | None, Tensor | None]:
        """Check ids and weights, which come together or not at all."""
        if topk_idx is None and topk_weights is None:
            return None, None
        ids = arguments.check_topk_idx(topk_idx, x.size(0), x.device)
        shape, f32 = tuple(ids.shape), (torch.float32,)
        return ids, arguments.check_tensor("topk_weights", topk_weights, shape, f32, x.device)

    def _check_repeat(
        self,
        handle: object,
        x: Tensor,
        topk_idx: object,
        topk_weights: object,
        context: DeviceContext,
    ) -> _core.DispatchState:
        """Check the arguments of a dispatch along the routes of an earlier one."""
        for argument, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if value is not None:
                raise invalid(
                    argument, arguments.describe(value), "None with a handle, whose routes are repeated"
                )
        state = self._check_handle(handle, context)
        if x.size(0) != state.num_tokens:
            raise invalid("x", arguments.describe(x), f"the {state.num_tokens} rows of the handle's dispatch")
        return state

    def _check_handle(self, handle: object, context: DeviceContext) -> _core.DispatchState:
        if type(handle) is DispatchHandle:
            known = handle.state
            if known is not None and known.group_key == context.group_key and known.is_in_place:
                return known
        state: _core.DispatchState = context.check_handle(handle, DispatchHandle, "dispatch")
        return state

    def _num_sms(self, config: object, planned_sms: int) -> int:
        if config is None:
            return self._asked_sms or planned_sms
        given = arguments.check_config(config)
        assert given is not None
        return given.num_sms

    # -- combine ---------------------------------------------------------------------------------------------

    @outside_modes
    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them, unweighted.

        Args:
            x: bf16 or float32 [N, hidden], contiguous, in the order of recv_x; hidden need not be dispatch's.
            handle: what the dispatch returned that brought the rows; any number of combines may use it.
            topk_weights: float32 [N, K], to be carried back too.
            bias: one or two tensors [T, hidden] of x's type, which sums start from.
            config, previous_event, async_finish, allocate_on_comm_stream: as in dispatch().
        Returns: (combined_x [T, hidden]: float32 sums, biases first, then ranks ascending, rounded once to
            x's type, 0 for a token that was sent nowhere; over several nodes the ranks of each are summed and rounded
            first, and then nodes ascending; per slot the sum of the weights that came back,
            float32 [T, K], or None; event).
        Raises: weft.Error also, on all ranks, when they combine different dispatches or sizes, or one of them has no
            room for what comes back.
        """
        plans, key = self._contexts.plans, ((x,), b"combine")
        plan: CombinePlan | None = find_plan(plans, *key)
        if plan is None or bias is not None:
            context = self._contexts.of("x", x)
            state = self._check_handle(handle, context)
            x = arguments.check_rows("x", x, state.num_rows, arguments.SUMMABLE, context.device)
            biases = arguments.check_bias(bias, (state.num_tokens, x.size(1)), x.dtype, context.device)
            if plan is None:
                plan = plans.keep(CombinePlan(context, x), *key)
        else:
            context, biases = plan.context, ()
            state = self._check_handle(handle, context)
            if plan.num_rows != state.num_rows:
                arguments.check_rows("x", x, state.num_rows, arguments.SUMMABLE, context.device)
        if topk_weights is not None:
            columns = state.top_k or "top_k"
            topk_weights = arguments.check_tensor(
                "topk_weights", topk_weights, (state.num_rows, columns), (torch.float32,), context.device
            )
        previous = self._check_order(previous_event, async_finish, allocate_on_comm_stream)
        if context.is_cuda and arguments.is_deterministic():
            arguments.check_deterministic_fill(context.device)
        num_sms = self._num_sms(config, context.planned_combine_sms)
        if context.lacks_room_for(state):
            context.make_room_for(
                state,
                high_throughput.combined_format(x, 0 if topk_weights is None else topk_weights.size(1)),
                0,
            )
        run = plan.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around("combine", run)
        order = context.order(previous, async_finish)
        bias0, bias1 = (*biases, None, None)[:2]
        if not allocate_on_comm_stream:
            combined, combined_weights = run(x, topk_weights, bias0, bias1, state, num_sms, order)
        else:
            with context.on_comm_stream():
                combined, combined_weights = run(x, topk_weights, bias0, bias1, state, num_sms, order)
        if not async_finish:
            return combined, combined_weights, finished_event()
        used = (x, topk_weights, *biases, state.send_row, state.slot_base, state.prefix)
        return combined, combined_weights, context.finish(True, (*used, combined, combined_weights))

    # -- across nodes, by their older names ------------------------------------------------------------------

    internode_dispatch = _with_config(dispatch)
    internode_combine = _with_config(combine)

    def _check_rows(self, x: Payload) -> tuple[DeviceContext, high_throughput.Rows]:
        """Return the rows of x and the context that they are for: a tensor, a pair with scales, or an NVFP4 triple."""
        context = self._contexts.of("x", x)
        if isinstance(x, (tuple, list)) and len(x) == 3:
            packed, words = arguments.check_nvfp4_rows(x, "tokens", context.device)
            return context, high_throughput.Rows(packed, words, has_global_scale=True)
        return context, high_throughput.Rows(*arguments.check_rows_with_scales(x, "tokens", context.device))
