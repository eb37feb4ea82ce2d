# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of ``weft.Buffer``.

    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, 128, num_experts, return_recv_hook=True)
    other_work()        # nothing of the dispatch runs meanwhile
    hook()              # now recv and counts are there
    combined, _, _ = buffer.low_latency_combine(my_experts(recv, counts), topk_idx, topk_weights, handle)

T tokens here, M tokens per rank at most, R ranks, E experts, Le experts of this rank, K slots per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_LOW_LATENCY_TOKENS, check_flags, check_integer
from weft.moe.device_context import DeviceContext, address
from weft.moe.events import EventOverlap
from weft.moe.low_latency_dispatch import Sent, Sizes, check_global_scale, check_outputs
from weft.moe.low_latency_formats import SCALE_GROUP, check_output, find_format
from weft.moe.low_latency_handle import (
    LowLatencyAgreement,
    LowLatencyHandle,
    combine_rows_of,
    keep_combine_rows,
    routes_lengths,
)
from weft.moe.low_latency_plan import REPLIES, Hook, LowLatencyCombinePlan, LowLatencyDispatchPlan, spanned
from weft.moe.low_latency_signals import NO_SIGNALS, Signals, check_signals, waits_for_loading
from weft.runtime import spans
from weft.runtime.modes import are_modes_on, outside_modes
from weft.runtime.plain import find_plan, known_low_latency_combine, known_low_latency_dispatch

Combined = tuple[Tensor, EventOverlap, Hook | None]


class LowLatencyCalls:
    """The part of ``weft.Buffer`` that is low latency; see there for construction, streams, threads, errors.

    Le is ceil(E / R); the last ranks own fewer experts where E is not a multiple of R, and their tensors are
    accordingly smaller.
    """

    _contexts: BufferContexts
    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool

    # -- dispatch --------------------------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        use_mxfp8: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: Tensor | None = None,
        use_ue8m0_for_sf: bool = False,
        out_packed_recv_x: Tensor | None = None,
        out_src_info: Tensor | None = None,
        out_layout_range: Tensor | None = None,
        out_count: Tensor | None = None,
    ) -> Any:
        """Send each token once to every rank that owns one of its experts; rows come sorted by expert.

        Args:
            x: bf16 [T, hidden], contiguous, T <= M, rows of whole 16-byte words; with FP8 hidden is a
                multiple of 128, with UE8M0 scales of 512.
            topk_idx: int64 or int32 [T, K], -1 for an empty slot. A token that names an expert twice sends it
                two rows.
            num_max_dispatch_tokens_per_rank: M; the same on all ranks, as are num_experts, K and the format.
            num_experts: at most 16384 over all ranks.
            cumulative_local_expert_recv_stats: int32 [Le], which the counts are added to.
            dispatch_wait_recv_cost_stats: int64 [R], which clock cycles spent waiting for each source are
                added to.
            use_fp8: quantise per 128 channels: scale = max(1e-4, largest magnitude) / 448.
            round_scale: scales become powers of two, rounded up. use_ue8m0: and travel as exponents only. Without
                FP8 neither counts.
            async_finish: the caller waits for the event, which keeps all tensors alive.
            return_recv_hook: send now, on the current stream; the results are there after hook(), which
                receives on the same stream. In between no SM is in use. Not with async_finish. A hook has to run
                before the second call after its own, which is refused until then.
            topk_weights: float32 [T, K], to travel along; two more results then.
            use_mxfp8: quantise per 32 channels to FP8 with power-of-two scales; hidden a multiple of 128.
            use_nvfp4: quantise per 16 channels to 4 bits, with E4M3 scales (use_ue8m0_for_sf: powers of two)
                relative to x_global_scale, float32 of one element, the same on all ranks (None: 1): a channel is
                code * scale / x_global_scale. hidden a multiple of 64. These two go before use_fp8. Without NVFP4
                x_global_scale is not looked at.
            out_packed_recv_x, out_src_info, out_layout_range, out_count: where to put results, as rows lie in memory.
        Returns: (recv_x [Le, R * M, hidden], or with FP8 (recv_x float8_e4m3fn, scales); counts int32 [Le];
            with topk_weights then weights float32 [Le, R * M] and source ranks int32 [Le, R * M]; handle;
            event; hook or None). Rows [0, counts[e]) of expert e are valid, those of one source together; the
            order is otherwise free. Scales are float32 [Le, R * M, hidden / 128], or with UE8M0 int32
            [Le, R * M, hidden / 512] whose byte j of word p is the exponent of group 4 p + j; column-major. MXFP8
            has those of 32 channels, [Le, R * M, hidden / 128]. NVFP4 comes as matrix units take it: rows uint8
            [R * M, hidden / 2, Le], the even channel in the low bits, each expert's in one piece, and scales
            float8_e4m3fn (int8 exponents) [32, 4, ceil(R * M / 128), 4, hidden / 64, Le]: row 128 a + 32 b + c,
            block 4 d + e at [c, b, a, e, d].
        Raises: weft.Error also, on all ranks, when they disagree about sizes or format; capacity when the
            buffer's num_rdma_bytes are too few, or an expert got more than R * M rows.
        """
        stats, costs = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        tensors = (x, topk_idx, topk_weights, stats, costs)
        most, experts = num_max_dispatch_tokens_per_rank, num_experts
        flags = (use_fp8, round_scale, use_ue8m0, use_mxfp8, use_nvfp4, use_ue8m0_for_sf)
        options = (b"ll_dispatch", most, experts, flags, async_finish, return_recv_hook)
        is_new = out_packed_recv_x is out_src_info is out_layout_range is out_count is None
        is_usual = is_new and use_nvfp4 is False
        is_watched = profiler._is_profiler_enabled or spans.NVTX or are_modes_on()
        if is_usual and not is_watched:
            results = known_low_latency_dispatch(self._contexts.plans, tensors, options)
            if results is not None:
                return results
        wanted = (out_packed_recv_x, out_src_info, out_layout_range, out_count)
        return self._dispatch_checked(tensors, options, x_global_scale, wanted)

    @outside_modes
    def _dispatch_checked(
        self,
        tensors: tuple[Any, ...],
        options: tuple[Any, ...],
        x_global_scale: Tensor | None,
        wanted: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    ) -> Any:
        """Dispatch what is not known yet, or is to be looked at in every call."""
        x, topk_idx, topk_weights, stats, costs = tensors
        _, most, experts, flags, async_finish, returns_hook = options
        plans = self._contexts.plans
        plan: LowLatencyDispatchPlan | None = find_plan(plans, tensors, *options)
        if plan is None:
            arguments.check_not_both("return_recv_hook", returns_hook, "async_finish", async_finish)
            plan = self._plan_dispatch(x, topk_idx, topk_weights, most, experts, flags)
            self._check_stats(plan, stats, costs)
            plans.keep(plan, tensors, *options)
        use_nvfp4 = flags[4]
        scale = check_global_scale(x_global_scale, plan.context) if use_nvfp4 else None
        filled: list[Any] | None = None  # new tensors
        if any(tensor is not None for tensor in wanted):
            sent = Sent(x, scale, topk_idx, topk_weights, stats, costs)
            filled = plan.outputs(check_outputs(plan.context, plan.sizes, plan.payload, sent, wanted))
        return spanned("low_latency_dispatch", plan, returns_hook)(tensors, options, scale, filled)

    def _check_stats(self, plan: LowLatencyDispatchPlan, stats: object, costs: object) -> None:
        local, device = (plan.sizes.local_experts,), plan.context.device
        arguments.check_optional("cumulative_local_expert_recv_stats", stats, local, torch.int32, device)
        ranks = (self.group_size,)
        arguments.check_optional("dispatch_wait_recv_cost_stats", costs, ranks, torch.int64, device)

    def _plan_dispatch(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        max_tokens: object,
        num_experts: object,
        flags: Any,
    ) -> LowLatencyDispatchPlan:
        """Check what the calls of one signature share, and plan them."""
        context = self._low_latency_context("x", x)
        names = ("use_fp8", "round_scale", "use_ue8m0", "use_mxfp8", "use_nvfp4", "use_ue8m0_for_sf")
        asked = dict(zip(names, flags, strict=True))
        check_flags(**asked)
        sizes = Sizes(
            check_integer("num_max_dispatch_tokens_per_rank", max_tokens, 1, MAX_LOW_LATENCY_TOKENS),
            arguments.check_num_experts(num_experts, self.group_size),
            self.rank,
            self.group_size,
        )
        rows = arguments.check_rows("x", x, "tokens", (torch.bfloat16,), context.device)
        ids = arguments.check_topk_idx(topk_idx, rows.size(0), context.device)
        payload = find_format(rows.size(1), **{name: bool(flag) for name, flag in asked.items()})
        weights = arguments.check_optional(
            "topk_weights", topk_weights, ids.shape, torch.float32, context.device
        )
        return LowLatencyDispatchPlan(context, sizes, payload, ids, weights is not None)

    # -- combine ---------------------------------------------------------------------------------------------

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        exact: bool = False,
        overlap: bool = False,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int | None = None,
    ) -> Combined:
        """Return each token the weighted sum of its experts' rows.

        Args:
            x: bf16 [Le, R * M, hidden], contiguous, in the places of recv_x; hidden need not be dispatch's, but is the
                same on all ranks, and a multiple of 8.
            topk_idx: as given to the dispatch. Slots may be masked, by any id below 0, and a token's ids may be in
                other slots: a slot means the row of its expert. topk_weights: float32 [T, K], of these slots; None
                when the dispatch had them: then those, of its slots.
            handle: what the dispatch returned; its hook, if it returned one, has run.
            use_logfmt: rows travel as LogFMT-10, where a block of channels allows; hidden a multiple of 128.
            zero_copy: take the rows from get_next_low_latency_combine_buffer(handle) instead of x.
            async_finish, return_recv_hook: as in low_latency_dispatch().
            out: bf16 [T, hidden], contiguous: where to put the sums.
            combine_wait_recv_cost_stats: int64 [R], which clock cycles spent waiting for each rank are added
            to.
            exact: every expert's row travels, and slots are summed in order in float32 with one rounding; so
                too with use_logfmt. Otherwise a rank first sums its rows of a token, in float32, and rounds
                that to bf16 as well: fewer bytes, one more rounding per rank. Where one sum of another node's
                rows crosses the network, it is rounded, too (docs/several-machines.md).
            overlap: rows of x may still be under way in other kernels of this rank, which raise signals; rows
                travel as theirs are seen. Give src_signals or comp_signal. For it to help, call on a stream that
                does not wait for those kernels, with return_recv_hook. Where CUDA loads kernels at their first launch
                (CUDA_MODULE_LOADING=EAGER says otherwise) a hook is needed, and that of a plan's first call sends,
                too, outside of graphs. The other arguments count only with it.
            src_signals: int32 or uint32 [Le]: expert e's rows are there once src_signals[e] has reached
                src_signal_expect_value.
            comp_signal: int32 or uint32, Le * ceil(R * M / block_m) elements, expert-major: so many rows of an
                expert are there once its block's has reached threshold. packed_recv_count: taken, int32 [Le].
            num_sms: SMs that the send may take, so that the other kernels find some; None: 3 with comp_signal,
                32 with src_signals; 0: all. On the CPU not looked at.
        Returns: (combined_x bf16 [T, hidden], event, hook or None). Slots of -1, and of masked ranks, add
        nothing.
        Raises: weft.Error also, on all ranks, when they answer different dispatches; on this rank when a slot names an
        expert that the dispatch did not send its token to. The call then went on for the others, without that slot; on
        CUDA a later call raises it. weft.PeerLost also on a rank whose own signals stay away, naming the expert.
        """
        tensors = (x, topk_idx, topk_weights, combine_wait_recv_cost_stats)
        options = (b"ll_combine", use_logfmt, exact, async_finish, return_recv_hook)
        is_usual = zero_copy is False and overlap is False and out is None
        known = handle.state if type(handle) is LowLatencyHandle else None
        is_watched = profiler._is_profiler_enabled or spans.NVTX or are_modes_on()
        if is_usual and known is not None and not is_watched:
            results: Combined | None = known_low_latency_combine(
                self._contexts.plans, tensors, options, known
            )
            if results is not None:
                return results
        asked = (src_signals, src_signal_expect_value, comp_signal, block_m, threshold, num_sms)
        overlapped = (overlap, asked, packed_recv_count)
        return self._combine_checked(tensors, options, handle, zero_copy, out, overlapped)

    @outside_modes
    def _combine_checked(
        self,
        tensors: tuple[Any, ...],
        options: tuple[Any, ...],
        handle: Any,
        zero_copy: bool,
        out: Tensor | None,
        overlapped: tuple[bool, tuple[Any, ...], Tensor | None],
    ) -> Combined:
        """Combine what is not known yet, or is to be looked at in every call."""
        x, topk_idx, topk_weights, costs = tensors
        _, use_logfmt, exact, async_finish, returns_hook = options
        overlap, asked, packed_recv_count = overlapped
        known = handle.state if type(handle) is LowLatencyHandle else None
        state = known if known is not None and known.is_ready else self._check_ready(handle, x)
        rows, signals, sends_late = x, NO_SIGNALS, False
        if zero_copy is not False or overlap is not False:
            context = self._low_latency_context("x", x)
            arguments.check_not_both("zero_copy", zero_copy, "use_logfmt", use_logfmt)
            check_flags(overlap=overlap)
            if zero_copy:
                rows = self._check_combine_rows(context, state, x, zero_copy)
            if overlap:
                sends_late = self._sends_late(context, returns_hook)
                signals = check_signals(context.device, state.agreement.rows_shape, *asked)
                local = state.agreement.rows_shape[:1]
                arguments.check_optional(
                    "packed_recv_count", packed_recv_count, local, torch.int32, context.device
                )
        plans = self._contexts.plans
        key = ((rows, *tensors[1:]), *options, state.agreement.key, *signals.key)
        plan: LowLatencyCombinePlan | None = find_plan(plans, *key)
        if plan is None:
            context = self._low_latency_context("x", x)
            state = self._check_low_latency_handle(handle, context)
            arguments.check_not_both("return_recv_hook", returns_hook, "async_finish", async_finish)
            check_flags(exact=exact, use_logfmt=use_logfmt)
            rows = self._check_combine_rows(context, state, rows, False)
            ranks = (self.group_size,)
            arguments.check_optional(
                "combine_wait_recv_cost_stats", costs, ranks, torch.int64, context.device
            )
            reply = REPLIES[bool(exact), bool(use_logfmt)]
            hidden = rows.size(2)
            plan = self._plan_combine(
                context, state.agreement, hidden, topk_idx, topk_weights, reply, signals
            )
            plans.keep(plan, *key)
        if out is not None:
            sums = (state.agreement.num_tokens, rows.size(2))
            out = check_output(plan.context, "out", out, sums, torch.bfloat16)
            others = {
                "x": rows,
                "topk_idx": topk_idx,
                "topk_weights": topk_weights,
                "signals": signals.tensor,
            }
            arguments.check_apart({"out": out}, {**others, "combine_wait_recv_cost_stats": costs})
        call = spanned("low_latency_combine", plan, returns_hook)
        results: Combined = call((rows, *tensors[1:]), options, state, out, signals.tensor, sends_late)
        return results

    @staticmethod
    def _sends_late(context: DeviceContext, returns_hook: bool) -> bool:
        """Return whether the hook of a plan's first call with overlap sends, too.

        CUDA may load a kernel when it is first launched, and that launch waits for what runs: for a combine that waits
        for that kernel. When the hook runs those kernels have been launched, and are loaded.
        """
        if not waits_for_loading(context) or context.is_capturing:
            return False
        if not returns_hook:
            loads = "in a process that loads CUDA kernels at their first launch"
            remedy = "return_recv_hook=True, or CUDA_MODULE_LOADING=EAGER in the environment"
            raise invalid("overlap", f"True without return_recv_hook, {loads}", remedy)
        return True

    def _check_ready(self, handle: object, x: object) -> _core.LowLatencyHandleState:
        """Return the state of a handle: of the tensors of one, too. Raises: weft.Error where its hook has not run."""
        state = self._check_low_latency_handle(handle, self._low_latency_context("x", x))
        if not state.is_received:
            raise invalid("handle", "that of a dispatch whose hook has not run", "combining after hook()")
        return state

    def _check_combine_rows(
        self, context: DeviceContext, state: _core.LowLatencyHandleState, x: object, zero_copy: bool
    ) -> Tensor:
        bf16 = (torch.bfloat16,)
        local, num_rows, hidden = state.agreement.rows_shape
        if not zero_copy:
            shape = (local, num_rows, "hidden")
            return arguments.check_row_bytes("x", arguments.check_tensor("x", x, shape, bf16, context.device))
        arguments.check_tensor("x", x, (local, num_rows, hidden), bf16, context.device, contiguous=False)
        rows = combine_rows_of(state)
        if rows is None:
            raise invalid("zero_copy", True, "after get_next_low_latency_combine_buffer() of this handle")
        return rows

    def _plan_combine(
        self,
        context: DeviceContext,
        agreement: LowLatencyAgreement,
        hidden: int,
        topk_idx: object,
        topk_weights: object,
        reply: int,
        signals: Signals,
    ) -> LowLatencyCombinePlan:
        """Check what the calls of one signature share, and plan them."""
        shape = (agreement.num_tokens, agreement.top_k)
        ids = arguments.check_tensor("topk_idx", topk_idx, shape, arguments.IDS, context.device)
        weights = arguments.check_optional("topk_weights", topk_weights, shape, torch.float32, context.device)
        if weights is None and not agreement.had_weights:
            raise invalid("topk_weights", "None", "float32 weights; None only if the dispatch had them")
        if reply == _core.REPLY_EXACT_LOG and hidden % SCALE_GROUP:
            raise invalid("use_logfmt", f"True for hidden {hidden}", f"multiples of {SCALE_GROUP}")
        facts = {
            "max_tokens": agreement.max_tokens,
            "tokens": agreement.num_tokens,
            "top_k": agreement.top_k,
            "experts": agreement.num_experts,
            "id_bytes": ids.element_size(),
            "reply": reply,
            "row_bytes": hidden * 2,
            "has_weights": True,
            "saved_weights": weights is None,
            "dispatch_had_weights": agreement.had_weights,
            "signal_value": signals.value,
            "signals_per_expert": signals.per_expert,
            "signal_rows": signals.rows,
            "num_sms": signals.num_sms,
        }
        return LowLatencyCombinePlan(context, facts, (agreement.num_tokens, hidden))

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bf16 [Le, R * M, hidden] to be filled and then combined with ``zero_copy=True``."""
        context = self._low_latency_context(
            "handle", handle[0] if isinstance(handle, (tuple, list)) and handle else handle
        )
        state = self._check_low_latency_handle(handle, context)
        rows = combine_rows_of(state)
        if rows is None:
            rows = context.empty(*state.agreement.rows_shape, dtype=torch.bfloat16)
            keep_combine_rows(state, rows)
        return rows

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Check the sizes. There is nothing to clean: signals only grow, whatever is called in between.

        With enable_shrink all ranks that are not masked meet here, as in DeepEP: one that stays away is masked.
        """
        context = self._low_latency_context("buffer", None)
        check_integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        check_integer("hidden", hidden, 1)
        experts = arguments.check_num_experts(num_experts, self.group_size)
        if self.enable_shrink:  # a dispatch of no tokens
            least = arguments.ROW_ALIGNMENT_BYTES // torch.bfloat16.itemsize
            x = context.empty(0, least, dtype=torch.bfloat16)
            ids = context.empty(0, 1, dtype=torch.int64)
            self.low_latency_dispatch(x, ids, 1, experts, use_fp8=False)

    # -- masks -----------------------------------------------------------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank in this rank's later low-latency calls, or take it back in. Not collective.

        A masked rank sends no tokens, receives none, and is skipped in combine. In order on the current
        stream. A rank that has missed a call of the others cannot be taken back in: they and it count calls, and the
        next one fails. That takes a new buffer of all ranks.
        Raises: weft.Error unless the buffer was made with enable_shrink.
        """
        context = self._shrinking_context()
        rank = check_integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        check_flags(mask=mask)
        context.low_latency.set_mask(rank, bool(mask), context.current_stream)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Fill mask_status, int32 [R] on the buffer's device, with 1 for a masked rank, in stream order."""
        context = self._shrinking_context()
        status = arguments.check_tensor(
            "mask_status", mask_status, (self.group_size,), (torch.int32,), context.device
        )
        context.low_latency.query_masks(address(status), context.current_stream)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks. In order on the current stream."""
        context = self._shrinking_context()
        context.low_latency.clear_masks(context.current_stream)

    # -- checks ----------------------------------------------------------------------------------------------

    def _low_latency_context(self, argument: str, value: object) -> DeviceContext:
        """Return the context for a tensor's device, or of the buffer's own for None."""
        context = self._contexts.alive()
        if not self.low_latency_mode:
            raise invalid("low_latency_mode", False, "True, when the buffer is made, for low-latency calls")
        return context if argument == "buffer" else self._contexts.of(argument, value)

    def _shrinking_context(self) -> DeviceContext:
        context = self._low_latency_context("buffer", None)
        if not self.enable_shrink:
            raise invalid("enable_shrink", False, "True, when the buffer is made, for masks")
        return context

    def _check_low_latency_handle(
        self, handle: object, context: DeviceContext
    ) -> _core.LowLatencyHandleState:
        call = "low_latency_dispatch"
        state: _core.LowLatencyHandleState = context.check_handle(handle, LowLatencyHandle, call)
        agreement = state.agreement
        local, rows, _ = agreement.rows_shape
        sizes = (agreement.max_tokens, agreement.top_k, agreement.num_experts, agreement.had_weights)
        lengths = routes_lengths(context.low_latency, *sizes, local * rows)
        if state.routes.numel() not in lengths:
            raise invalid("handle", f"routes of {state.routes.numel()} words", f"{lengths[0]}, as at first")
        state.is_checked = True
        return state
