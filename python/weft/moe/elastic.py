# SPDX-License-Identifier: Apache-2.0
"""``weft.ElasticBuffer``: expert-parallel dispatch and combine with the interface of DeepEP 2.

    buffer = weft.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    recv_x, _, recv_weights, handle, _ = buffer.dispatch(
        x, topk_idx, topk_weights, num_experts=256, expert_alignment=128, do_expand=True)
    combined, _, _ = buffer.combine(my_experts(recv_x, handle.psum_num_recv_tokens_per_expert), handle)

T tokens here, N rows received here, X expanded rows, R ranks, E experts, Le of them here, K slots per token,
M = num_max_tokens_per_rank. It stands on the same context and kernels as ``weft.Buffer``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments, elastic_engram, elastic_ring, elastic_rows, elastic_sessions, high_throughput
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import (
    MAX_BYTES,
    MAX_SMS,
    align,
    check_flags,
    check_integer,
    check_number,
)
from weft.moe.device_context import DeviceContext, Order
from weft.moe.elastic_engram import EngramReads, Fetched
from weft.moe.elastic_handle import EPHandle
from weft.moe.elastic_plans import ElasticPlans
from weft.moe.elastic_ring import RingMessages
from weft.moe.elastic_rows import CachedPlan, RoutesPlan
from weft.moe.elastic_sessions import GatherSessions, Shapes
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES, MAX_HIDDEN, elastic_heap_bytes, elastic_size_hint
from weft.moe.events import EventHandle, EventOverlap, PreviousEvent, finished_event, handle_of
from weft.moe.high_throughput import Payload, rows_and_scales
from weft.runtime.modes import outside_modes

_LEAST_TIMEOUT_S = 1e-3
_NVLINK_GBS = 400.0  # of one GPU, where the caller does not say


class ElasticBuffer:
    """Dispatch, combine and what goes with them among ranks of one node or several; CPU and CUDA tensors.

    Args:
        group: as for weft.Buffer.
        num_bytes: room at first, a multiple of 2 MiB; or the four MoE sizes, from which it follows. Calls grow it.
        num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: the largest shape, for num_bytes; the first
            also is M of a dispatch that gives none.
        deterministic: taken; rows always come in the same order.
        allow_multiple_reduction: False: combine of the expanded layout sums the slots of a token only at its
            own rank, in slot order, rounding once. It moves K rows per (token, rank) where True moves one.
        prefer_overlap_with_compute: lets get_theoretical_num_sms() name few SMs.
        num_cpu_timeout_secs, num_gpu_timeout_secs: the larger bounds every wait for a peer.
        explicitly_destroy, device: as for weft.Buffer.
        allow_hybrid_mode: over several nodes a row crosses the network once for each node that has an expert of it, and
            a sum of the node's rows comes back. False: once for each rank, and each rank's row comes back, so that
            combine rounds as it does on one node.
        num_cpu_bytes, sl_idx, num_allocated_qps: taken for compatibility.
    Raises: weft.Error naming a wrong argument; weft.PeerLost naming ranks that stayed away.

    Collective calls, streams, events, threads and errors: as for weft.Buffer.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self.num_max_tokens_per_rank = check_integer(
            "num_max_tokens_per_rank", num_max_tokens_per_rank, 0, arguments.MAX_ROWS
        )
        check_integer("hidden", hidden, 0, MAX_HIDDEN)
        check_integer("num_topk", num_topk, 0, arguments.MAX_TOP_K)
        if num_bytes is None and not (num_max_tokens_per_rank and hidden):
            raise invalid("num_bytes", "None", "bytes, or num_max_tokens_per_rank and hidden above 0")
        if (
            num_bytes is not None
            and check_integer("num_bytes", num_bytes, 0, MAX_BYTES) % BUFFER_ALIGNMENT_BYTES
        ):
            raise invalid("num_bytes", num_bytes, f"a multiple of {BUFFER_ALIGNMENT_BYTES}")
        check_integer("num_cpu_bytes", num_cpu_bytes, 0)
        self.num_allocated_qps = check_integer("num_allocated_qps", num_allocated_qps, 0)
        timeout_s = max(
            check_number("num_cpu_timeout_secs", num_cpu_timeout_secs, _LEAST_TIMEOUT_S),
            check_number("num_gpu_timeout_secs", num_gpu_timeout_secs, _LEAST_TIMEOUT_S),
        )
        check_flags(
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            explicitly_destroy=explicitly_destroy,
        )
        shape = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)
        self._contexts = BufferContexts(
            "ElasticBuffer",
            group,
            None,
            device=device,
            heap_bytes=lambda of_nodes: num_bytes or elastic_heap_bytes(of_nodes, *shape),
            timeout_s=timeout_s,
            single_rank_domains=not allow_hybrid_mode,
            explicitly_destroy=bool(explicitly_destroy),
        )
        self._plans = ElasticPlans(
            self._contexts, self.num_max_tokens_per_rank, bool(allow_multiple_reduction)
        )
        self._sessions = GatherSessions(self._contexts)
        self._ring = RingMessages(self._contexts)
        self._table = EngramReads(self._contexts)
        self.group = group
        self.rank_idx, self.num_ranks = self._contexts.rank, self._contexts.size
        self.num_bytes = num_bytes or elastic_size_hint(self.num_ranks, *shape)
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        self.deterministic = bool(deterministic)
        self.explicitly_destroy = bool(explicitly_destroy)
        context = self._contexts.alive()
        per_node = Counter(facts["node"] for facts in context.communicator.facts)
        self.num_rdma_ranks, self.num_nvlink_ranks = len(per_node), max(per_node.values())
        logical = context.logical
        self.num_scaleout_ranks, self.num_scaleup_ranks = logical.groups, logical.local
        self.scaleout_rank_idx = logical.group_of[self._contexts.rank]
        self.scaleup_rank_idx = logical.place_of[self._contexts.rank]
        self.nccl_comm_handle: Any = None

    # -- life and facts --------------------------------------------------------------------------------------

    @property
    def runtime(self) -> DeviceContext | None:
        """What calls run on; None after destroy()."""
        return self._contexts.main

    def destroy(self) -> None:
        """Wait for all ranks, then give the memory back. Raises: weft.Error unless explicitly_destroy."""
        self._contexts.destroy()
        self._ring.drop()
        self._table.drop()

    def __enter__(self) -> ElasticBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy the buffer, made with ``explicitly_destroy`` or not; after an error without waiting for others."""
        self._contexts.close(is_clean=error is None)
        self._ring.drop()
        self._table.drop()

    def __repr__(self) -> str:
        return self._contexts.describe("ElasticBuffer", num_bytes=self.num_bytes)

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of everything that the current stream has queued."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """Return the stream that calls run on; see weft.Buffer."""
        return self._contexts.comm_stream()

    # -- how ranks are spread, and good sizes; none of it is collective ----------------------------------------

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (nodes, most ranks of one node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (scale-out ranks, scale-up ranks): in hybrid mode groups of ranks that map each other, and their size.

        (1, ranks) where all map each other, without hybrid mode, and where groups differ in size.
        """
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return num_bytes for this shape, a multiple of 2 MiB. Not collective."""
        return elastic_size_hint(
            arguments.group_size(group),
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return how many SMs it takes to fill the links: even, at least 4, 64 unless overlap is preferred.

        The link of the node is the faster one, and counts alone. One SM writes ``sm_write_gbs``; ``nvlink_gbs`` 0
        counts as 400.
        """
        check_integer("num_experts", num_experts, 1)
        check_integer("num_topk", num_topk, 1)
        links = check_number("nvlink_gbs", nvlink_gbs, 0) or _NVLINK_GBS
        needed = align(math.ceil(links / check_number("sm_write_gbs", sm_write_gbs, 1)), 2)
        number = max(needed, 4 if self.prefer_overlap_with_compute else 64)
        return min(number, self._contexts.alive().num_sms)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 0 to num_allocated_qps; Weft's proxies use none of them."""
        return min(self.num_allocated_qps, check_integer("num_sms", num_sms, 0, MAX_SMS))

    # -- dispatch --------------------------------------------------------------------------------------------

    @outside_modes
    def dispatch(
        self,
        x: Payload,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: PreviousEvent = None,
        previous_event_before_epilogue: PreviousEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each row once to every rank that owns one of its experts.

        Args:
            x: [T, hidden], contiguous, rows of whole 16-byte words, any type; or (rows, scales), scales float32
                or int32 [T, n] in any strides.
            topk_idx: int64 or int32 [T, K], -1 for an empty slot; not with a handle. topk_weights: float32
                [T, K] or None; with a handle too. All ranks give weights, or none does.
            cumulative_local_expert_recv_stats: i32[Le], added to; not with a handle.
            num_experts: on all ranks the same. num_max_tokens_per_rank: M, on all ranks the same, at least T; None:
                the buffer's. expert_alignment: None: 1. With a handle these three are its own, or None.
            handle: repeat the routes and the layout of an earlier dispatch of this buffer.
            do_handle_copy: the handle keeps a clone of topk_idx, else topk_idx itself.
            do_cpu_sync: None: wait on the host for the counts, unless there is a handle. False: the worst case
                of rows returns, undefined past the real ones (ids are -1), and a CUDA graph can be captured.
            do_expand: one row per (token, local expert), grouped by expert; a token's experts must differ.
            do_zero_padding: with do_expand: rows that belong to no token are 0, also their scales and weights.
            use_tma_aligned_col_major_sf: received scales are column-major, the token dimension padded to 4.
            previous_event_before_epilogue: rows may arrive before it, but outputs are written after it.
            num_sms: 0 takes the default. num_qps: taken.
        Returns: (recv_x [N, hidden] or (rows, scales [N, n]); local expert ids [N, K], -1 elsewhere, None with
            do_expand; weights float32 [N, K], those of experts elsewhere too, or [X] with do_expand, or None;
            handle; event). Rows come in order of source rank, then token; expanded rows inside an expert too.
        Raises: weft.Error also, on all ranks, when they disagree about row size, scales, K or E; on the CPU also on a
            rank that gets rows with weights and gave none, or the other way round.
        """
        flags = (
            *(async_with_compute_stream, allocate_on_comm_stream, do_handle_copy, do_cpu_sync, do_expand),
            *(do_zero_padding, use_tma_aligned_col_major_sf),
        )
        sizes = (num_experts, num_max_tokens_per_rank, expert_alignment)
        options = (*sizes, num_sms, num_qps, flags)
        ids: Any = topk_idx
        weights, stats = topk_weights, cumulative_local_expert_recv_stats
        data, scales = rows_and_scales(x)
        plan: RoutesPlan | CachedPlan
        if handle is None:
            plan = self._plans.of_routes(x, (data, scales, ids, weights, stats), options)
        else:
            plan = self._plans.of_handle(x, (data, scales, ids, weights, stats), options)
            self._plans.check_repeat(handle, plan, data, weights, sizes)
        context = plan.context
        if context.is_cuda:
            arguments.check_deterministic_fill(context.device)
        previous = None if previous_event is None else handle_of(previous_event, "previous_event")
        before_epilogue: EventHandle | None = None
        if previous_event_before_epilogue is not None:
            before_epilogue = handle_of(previous_event_before_epilogue, "previous_event_before_epilogue")
        given, layout = (data, scales, ids, weights, stats), (do_zero_padding, use_tma_aligned_col_major_sf)
        if not async_with_compute_stream and previous is None and before_epilogue is None:
            outputs, used = self._send(plan, given, handle, context.order(None, False), None, layout)
            return (*outputs, used, finished_event())
        with context.call_after(previous):
            outputs, used = self._send(plan, given, handle, context.as_ordered, before_epilogue, layout)
        event = context.finish(bool(async_with_compute_stream), (data, scales, ids, weights, used.topk_idx))
        data_out = outputs[0] if isinstance(outputs[0], tuple) else (outputs[0],)
        made = vars(used).values() if isinstance(plan, RoutesPlan) else ()
        context.hand_over([*data_out, *outputs[1:], *(entry for entry in made if isinstance(entry, Tensor))])
        return (*outputs, used, event)

    def _send(
        self,
        plan: RoutesPlan | CachedPlan,
        tensors: tuple[Any, ...],
        handle: EPHandle | None,
        order: Order,
        before_epilogue: EventHandle | None,
        layout: tuple[bool, bool],
    ) -> tuple[tuple[Payload, Tensor | None, Tensor | None], EPHandle]:
        """Run a checked dispatch on the current stream. Returns rows, ids and weights as laid out, and the handle."""
        data, scales, ids, weights, stats = tensors
        has_weights = weights is not None
        if isinstance(plan, RoutesPlan):
            received, used = plan.run(data, scales, ids, weights, order)
            elastic_rows.check_weights_alike(received, used, has_weights, self.rank_idx)
            if stats is not None:
                stats += used.num_unaligned_recv_tokens_per_expert
        else:
            assert handle is not None
            received, used = plan.run(data, scales, weights, handle, order), handle
        if before_epilogue is not None:
            plan.context.order_after(before_epilogue)
        return elastic_rows.outputs(received, used, has_weights, *layout), used

    # -- combine ---------------------------------------------------------------------------------------------

    @outside_modes
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: PreviousEvent = None,
        previous_event_before_epilogue: PreviousEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them, unweighted.

        Args:
            x: bf16, the rows of the matching dispatch: [N, hidden], or [X, hidden] expanded.
            topk_weights: float32 [N, K]; expanded [X], and None without allow_multiple_reduction.
            bias: None, a bf16 [T, hidden] tensor, or two.
        Returns: (combined bf16 [T, hidden]; the weights of each slot as its expert's rank sent them back,
            float32 [T, K], 0 for -1, or None; event).
            Rounding: expanded, each rank's slots are summed in ascending order in float32 and rounded to bf16.
            Over several nodes, in hybrid mode, the ranks of each are summed in order of their right-most slots and
            rounded. Then, in float32 from the bias on, ranks, or nodes, are added in that order; one rounding.
            Without allow_multiple_reduction nothing is summed before: all expanded slots, or all ranks in the order of
            their right-most slots, are added in ascending order, one rounding.
        Raises: weft.Error also, on all ranks, when they combine different dispatches or sizes.
        """
        flags = (async_with_compute_stream, allocate_on_comm_stream)
        context, x, biases, num_sms = self._plans.check_combine(
            x, handle, topk_weights, bias, num_sms, num_qps, flags
        )
        state = handle.state
        previous = None if previous_event is None else handle_of(previous_event, "previous_event")
        before_epilogue: EventHandle | None = None
        if previous_event_before_epilogue is not None:
            before_epilogue = handle_of(previous_event_before_epilogue, "previous_event_before_epilogue")
        if context.is_cuda:
            arguments.check_deterministic_fill(context.device)
        if context.lacks_room_for(state):
            top_k = handle.topk_idx.size(1)
            slots = top_k if handle.sums_at_owner else 1
            row_format = high_throughput.combined_format(x, 0 if topk_weights is None else top_k, slots)
            context.make_room_for(state, row_format, 0)
        given = (
            self._plans.of_combine,
            x,
            topk_weights,
            biases,
            handle,
            before_epilogue,
            num_sms or handle.num_sms,
        )
        if not async_with_compute_stream and previous is None and before_epilogue is None:
            combined, weights = elastic_rows.combine(*given, context.order(None, False))
            return combined, weights, finished_event()
        with context.call_after(previous):
            combined, weights = elastic_rows.combine(*given, context.as_ordered)
        event = context.finish(bool(async_with_compute_stream), (x, topk_weights, *biases))
        context.hand_over([combined, weights])
        return combined, weights, event

    # -- all-gather sessions --------------------------------------------------------------------------------

    @outside_modes
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait until all ranks have come here: the stream, and with ``with_cpu_sync`` the host too.

        use_comm_stream, sequential: taken; the current stream waits for the communication stream in any case.
        On the CPU the host waits.
        """
        context = self._contexts.alive()
        is_plain = use_comm_stream is True and with_cpu_sync is False and sequential is True
        if not is_plain:  # nothing to check in most programs' calls
            check_flags(use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync, sequential=sequential)
        if context.is_cuda:
            context.core.barrier(context.order_of_all())
        if with_cpu_sync or not context.is_cuda:
            context.synchronize()
            context.communicator.barrier()

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Shapes, dtype: torch.dtype) -> int:
        """Return the bytes that all-gathers of tensors of these shapes take together, from all ranks."""
        return elastic_sessions.session_bytes(group, shapes, dtype)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Return num_bytes of a buffer for sessions of so many bytes."""
        return align(check_integer("num_max_session_bytes", num_max_session_bytes, 0), BUFFER_ALIGNMENT_BYTES)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Set what one session may take: received bytes, and all-gathers, at most 32. Same on all ranks."""
        self._sessions.set_config(num_max_session_bytes, num_max_all_gathers_per_session)

    def create_agrs_session(self) -> None:
        """Open a session. Raises: weft.Error while one is open, or before agrs_set_config()."""
        self._sessions.open()

    def destroy_agrs_session(self) -> None:
        """Close the session; tensors gathered in it stay valid. Raises: weft.Error when none is open."""
        self._sessions.close()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Open a session for the block, if enabled."""
        if enabled:
            self.create_agrs_session()
        try:
            yield
        finally:
            if enabled:
                self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Shapes, dtype: torch.dtype) -> Any:
        """Return a tensor, or a tuple of them for several shapes, to fill and give to all_gather()."""
        return self._sessions.new_tensors(shapes, dtype)

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Return (gathered [R, ...] for each tensor of ``t``, then wait()). All ranks give the same shapes and types.

        The gathered tensors may be read on the current stream after wait(), a function without arguments.
        Raises: weft.Error outside a session, or past what agrs_set_config() allows (code capacity); on the CPU also on
            all ranks that gave different sizes or types.
        """
        return self._sessions.all_gather(t)

    # -- messages around the circle of ranks, for pipeline parallelism ----------------------------------------
    #
    # Ranks r and r + 1, and the last and the first, are neighbours. Messages from one rank to another arrive in the
    # order in which they were sent; the two directions, and both neighbours, are independent.

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Return num_bytes of a buffer for such messages, a multiple of 2 MiB, by DeepEP's formula.

        Weft's slots have memory of their own, which pp_set_config() takes.
        """
        return elastic_ring.ring_bytes(num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Set the largest message, and how many to one neighbour may be sent before it has received any.

        Collective, with the same values on all ranks. Messages that were sent and not received are dropped.
        Raises: weft.Error on all ranks that were given different values; weft.PeerLost naming a rank that stays
        away.
        """
        self._ring.set_config(num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a tensor to a neighbour, in order on the current stream. On the CPU it is sent on return.

        Args:
            t: contiguous, of any type and size up to pp_set_config()'s, on the buffer's device. It may be
                changed when the stream has passed the call.
            dst_rank_idx: this rank's next or previous one.
            num_sms: 0: chosen by size.
        Waits, on a GPU in the stream, while the neighbour has yet to receive num_max_inflight_tensors earlier
        ones. Raises: weft.Error naming a wrong argument; weft.PeerLost naming a neighbour that stayed silent,
        on CUDA at a later call.
        """
        self._ring.send(t, dst_rank_idx, num_sms)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Fill a tensor with the next message of a neighbour, in order on the current stream.

        Args:
            t: as for pp_send(), with as many bytes as were sent; the type is not looked at.
            src_rank_idx: this rank's next or previous one.
        Raises: as pp_send(); weft.Error too when the message has another size: it is dropped, and the next one
        can be received.
        """
        self._ring.receive(t, src_rank_idx, num_sms)

    # -- reads of a table of R times n entries, of which rank r holds entries r * n to r * n + n - 1 -----------
    #
    # A fetch needs nothing of other ranks: it reads their windows.

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Return bytes for fetched entries and for a rank's stored ones, multiples of 2 MiB, by DeepEP's formula.

        The table has memory of its own, on the device, which engram_write() takes.
        """
        return elastic_engram.table_bytes(num_entries, hidden, num_max_tokens_per_rank, dtype)

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Store this rank's entries. Collective; earlier fetches are done before, and every rank's entries are
        there after it. The host waits.

        Args:
            storage: [n, hidden], contiguous, on the buffer's device, any type; n, hidden and type as on all ranks.
            sf: float32 or int32 [R * n, words], scales of all ranks' entries; with float8_e4m3fn entries, and only
                with them. It is kept, not copied.
        Raises: weft.Error, on all ranks where they disagree about n, hidden or the type; weft.PeerLost naming a rank
        that stays away.
        """
        self._table.write(storage, sf)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Fetched]:
        """Start to read entries; the function that is returned gives them. Not collective.

        A rank on another node serves reads while its buffer lives: meet, in barrier() or destroy(), before one goes.

        Args:
            indices: int32 or int64 [T, k], contiguous: which entries each of T tokens reads.
            num_qps: taken. use_tma_aligned_col_major_sf: scales are column-major, their token dimension padded
                to 4.
        Returns: a function without arguments. It makes the current stream wait and returns (data of the stored
        type [T, k * hidden], each token's entries one after the other; scales [T, k * words], or None).
        Raises: weft.Error for an index outside [0, R * n), on CUDA at a later call; before engram_write().
            weft.PeerLost naming a rank on another node that is gone, or silent.
        """
        return self._table.fetch(indices, num_qps, use_tma_aligned_col_major_sf)
