# SPDX-License-Identifier: Apache-2.0
"""``weft.ElasticBuffer``: expert-parallel dispatch and combine with the interface of DeepEP 2.

    buffer = weft.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    recv_x, _, recv_weights, handle, _ = buffer.dispatch(
        x, topk_idx, topk_weights, num_experts=256, expert_alignment=128, do_expand=True)
    combined, _, _ = buffer.combine(my_experts(recv_x, handle.psum_num_recv_tokens_per_expert), handle)

T tokens here, N rows received here, X expanded rows, R ranks, E experts, Le of them here, K slots per token,
M = num_max_tokens_per_rank. It stands on the same engine and kernels as ``weft.Buffer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments, elastic_layout, high_throughput
from weft.moe.buffer import Buffer, PreviousEvent
from weft.moe.config import align, ceil_div, check_whole
from weft.moe.elastic_handle import EPHandle, destination_slots, expert_psum, source_metadata
from weft.moe.elastic_layout import Expansion, ExpertCounts
from weft.moe.elastic_sessions import GatherSessions
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES, elastic_size_hint
from weft.moe.engine import Engine
from weft.moe.events import EventHandle, EventOverlap, handle_of
from weft.moe.high_throughput import Payload, Received, Rows

_DEFAULT_SMS = 20


class ElasticBuffer(GatherSessions):
    """Dispatch, combine, barriers and all-gathers among the ranks of one node; CPU and CUDA tensors.

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
        num_cpu_bytes, allow_hybrid_mode, sl_idx, num_allocated_qps: taken for compatibility.
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
        self.num_max_tokens_per_rank = check_whole("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        if num_bytes is None and not (num_max_tokens_per_rank and hidden):
            raise invalid("num_bytes", "None", "bytes, or num_max_tokens_per_rank and hidden above 0")
        if num_bytes is not None and check_whole("num_bytes", num_bytes, 0) % BUFFER_ALIGNMENT_BYTES:
            raise invalid("num_bytes", num_bytes, f"a multiple of {BUFFER_ALIGNMENT_BYTES}")
        check_whole("num_cpu_bytes", num_cpu_bytes, 0)
        self.num_allocated_qps = check_whole("num_allocated_qps", num_allocated_qps, 0)
        timeout_s = max(float(num_cpu_timeout_secs), float(num_gpu_timeout_secs))
        if not timeout_s > 0:
            raise invalid("num_gpu_timeout_secs", num_gpu_timeout_secs, "a number of seconds above 0")
        self._base = Buffer(
            group, num_bytes or 0, explicitly_destroy=explicitly_destroy, timeout_s=timeout_s, device=device
        )
        super().__init__()
        self.group = group
        self.rank_idx, self.num_ranks = self._base.rank, self._base.group_size
        self.num_bytes = num_bytes or elastic_size_hint(
            self.num_ranks,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        self.deterministic = bool(deterministic)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.num_scaleup_ranks = self.num_nvlink_ranks = self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.nccl_comm_handle: Any = None

    # -- life and facts --------------------------------------------------------------------------------------

    @property
    def runtime(self) -> Engine | None:
        """What calls run on; None after destroy()."""
        return self._base.runtime

    def destroy(self) -> None:
        """Wait for all ranks, then give the memory back. Raises: weft.Error unless explicitly_destroy."""
        self._base.destroy()

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of everything that the current stream has queued."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """Return the stream that calls run on; see weft.Buffer."""
        return self._base.get_comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (nodes, ranks of one node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (scale-out ranks, scale-up ranks)."""
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
            group.size(),
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

        One SM writes ``sm_write_gbs``; ``nvlink_gbs`` 0 counts as 400.
        """
        check_whole("num_experts", num_experts, 1)
        check_whole("num_topk", num_topk, 1)
        needed = align(ceil_div(int(nvlink_gbs or 400), max(int(sm_write_gbs), 1)), 2)
        number = max(needed, 4 if self.prefer_overlap_with_compute else 64)
        return min(number, self._base._alive().num_sms)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 0 to num_allocated_qps; among ranks of one node none is used."""
        return min(self.num_allocated_qps, check_whole("num_sms", num_sms, 0))

    # -- dispatch --------------------------------------------------------------------------------------------

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
            num_experts: on all ranks the same; None with a handle.
            num_max_tokens_per_rank: M, on all ranks the same, at least T; None: the buffer's.
            expert_alignment: None: 1, or the handle's.
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
        Raises: weft.Error also, on all ranks, when they disagree about row size, scales, K or E.
        """
        engine = self._base._engine("x", x)
        data, scales = arguments.check_rows_with_scales(x, "tokens", engine.device)
        previous = handle_of(previous_event, "previous_event")
        before_epilogue = handle_of(previous_event_before_epilogue, "previous_event_before_epilogue")
        arguments.check_deterministic_fill(engine.device)
        sms = check_whole("num_sms", num_sms, 0) or _DEFAULT_SMS
        check_whole("num_qps", num_qps, 0)
        if handle is not None:
            self._check_repeat(handle, engine, data, topk_idx, cumulative_local_expert_recv_stats, do_expand)
            weights = self._check_weights(topk_weights, handle.topk_idx)
            ids = handle.topk_idx if weights is not None else None
            rows = Rows(data, scales, ids, weights, True)
            engine.begin(previous)
            received = high_throughput.repeat(engine, rows, handle.state, sms)
        else:
            ids, experts = self._check_routes(topk_idx, data, num_experts, do_expand)
            weights = self._check_weights(topk_weights, ids)
            most = self._check_max_tokens(num_max_tokens_per_rank, data.size(0))
            alignment = check_whole(
                "expert_alignment", 1 if expert_alignment is None else expert_alignment, 1
            )
            stats = self._check_stats(cumulative_local_expert_recv_stats, experts, engine)
            sent = torch.zeros_like(ids, dtype=torch.float32) if weights is None else weights
            pieces = ids.size(1) if do_expand and not self.allow_multiple_reduction else 1
            rows = Rows(data, scales, ids, sent, True, pieces)
            engine.begin(previous)
            received, handle = self._first_dispatch(
                engine, rows, experts, most, alignment, sms, do_expand, do_handle_copy, do_cpu_sync is False
            )
            if stats is not None:
                with engine.on_comm_stream():
                    stats += handle.num_unaligned_recv_tokens_per_expert
        engine.order_after(before_epilogue)
        with engine.on_comm_stream():
            outputs = self._outputs(
                received, handle, weights is not None, do_zero_padding, use_tma_aligned_col_major_sf
            )
            del received
        event = engine.finish(bool(async_with_compute_stream), (data, scales, ids, weights, handle.topk_idx))
        engine.hand_over(_flat(outputs))
        return (*outputs, handle, event)

    def _first_dispatch(
        self,
        engine: Engine,
        rows: Rows,
        num_experts: int,
        num_max_tokens: int,
        alignment: int,
        num_sms: int,
        do_expand: bool,
        do_handle_copy: bool,
        counts_unknown: bool,
    ) -> tuple[Received, EPHandle]:
        assert rows.topk_idx is not None
        ids, ranks = rows.topk_idx, self.num_ranks
        num_tokens, top_k = ids.shape
        with engine.on_comm_stream():
            counted = (
                engine.empty(ranks, dtype=torch.int32),
                engine.empty(num_experts, dtype=torch.int32),
                engine.empty(num_tokens, ranks, dtype=torch.bool),
            )
            sum_place = engine.empty(num_tokens, ranks, dtype=torch.int32)
            high_throughput.layout(engine, ids, counted, sum_place)
            worst = max(ranks * num_max_tokens, 1) if counts_unknown else 0
            received, state, slots = high_throughput.dispatch(
                engine, self._base, rows, counted[2], counted[1], worst, num_sms, sum_place
            )
            recv_idx = received.ids()
            assert recv_idx is not None
            each = ceil_div(num_experts, ranks)
            num_local = max(min(each, num_experts - each * self.rank_idx), 0)
            experts: ExpertCounts = elastic_layout.count_experts(recv_idx, num_local, alignment)
            aligned = [align(count, alignment) for count in slots]
            expansion: Expansion | None = None
            if do_expand:
                most = elastic_layout.most_expanded_rows(worst, top_k, num_local, alignment)
                expansion = elastic_layout.expand(recv_idx, experts, most if counts_unknown else sum(aligned))
            handle = EPHandle(
                do_expand=do_expand,
                num_experts=num_experts,
                expert_alignment=alignment,
                num_max_tokens_per_rank=num_max_tokens,
                num_sms=num_sms,
                topk_idx=ids.clone() if do_handle_copy else ids,
                num_recv_tokens=state.num_rows,
                num_expanded_tokens=expansion.slot_of_row.size(0) if expansion else 0,
                num_recv_tokens_per_expert_list=[] if counts_unknown else aligned,
                psum_num_recv_tokens_per_scaleup_rank=state.prefix[:, self.rank_idx].contiguous(),
                psum_num_recv_tokens_per_expert=expert_psum(experts, do_expand),
                num_unaligned_recv_tokens_per_expert=experts.slots,
                recv_src_metadata=source_metadata(state, self.rank_idx, recv_idx, expansion, num_max_tokens),
                dst_buffer_slot_idx=destination_slots(ids, state.send_row, each),
                state=state,
                expansion=expansion,
                recv_topk_idx=recv_idx,
            )
        engine.hand_over([value for value in vars(handle).values() if isinstance(value, Tensor)])
        return received, handle

    def _outputs(
        self, received: Received, handle: EPHandle, has_weights: bool, zero_padding: bool, col_major: bool
    ) -> tuple[Payload, Tensor | None, Tensor | None]:
        """Return rows, ids and weights in the handle's layout."""
        payload = received.payload()
        data, scales = payload if isinstance(payload, tuple) else (payload, None)
        weights = received.weights() if has_weights else None
        expansion = handle.expansion
        if expansion is not None:
            slot_of_row, top_k = expansion.slot_of_row, handle.topk_idx.size(1)
            row_of = torch.where(slot_of_row < 0, -1, slot_of_row.div(top_k, rounding_mode="floor"))
            data = elastic_layout.take_rows(data, row_of, zero_padding)
            if scales is not None:
                scales = elastic_layout.take_rows(scales, row_of, zero_padding)
            if weights is not None:
                weights = elastic_layout.take_rows(weights.view(-1), slot_of_row, zero_padding)
        if scales is not None and col_major:
            scales = elastic_layout.column_major(scales)
        idx = None if handle.do_expand else handle.recv_topk_idx
        return (data if scales is None else (data, scales)), idx, weights

    # -- combine ---------------------------------------------------------------------------------------------

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
            Then, in float32 from the bias on, ranks are added in order of their right-most slots; one rounding.
            Without allow_multiple_reduction all expanded slots are added in ascending order, one rounding.
        Raises: weft.Error also, on all ranks, when they combine different dispatches or sizes.
        """
        engine = self._base._engine("x", x)
        self._check_handle(handle, engine)
        state, expansion, top_k = handle.state, handle.expansion, handle.topk_idx.size(1)
        num_rows = handle.num_expanded_tokens if expansion else state.num_rows
        x = arguments.check_rows("x", x, num_rows, (torch.bfloat16,), engine.device)
        hidden = x.size(1)
        biases = arguments.check_bias(bias, (state.num_tokens, hidden), x.dtype, engine.device)
        sums_at_owner = expansion is not None and not self.allow_multiple_reduction
        if topk_weights is not None:
            if sums_at_owner:
                raise invalid("topk_weights", "weights", "None, as allow_multiple_reduction is False")
            shape = (num_rows,) if expansion else (num_rows, top_k)
            arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), engine.device)
        previous = handle_of(previous_event, "previous_event")
        before_epilogue = handle_of(previous_event_before_epilogue, "previous_event_before_epilogue")
        sms = check_whole("num_sms", num_sms, 0) or handle.num_sms
        check_whole("num_qps", num_qps, 0)
        arguments.check_deterministic_fill(engine.device)
        engine.begin(previous)
        with engine.on_comm_stream():
            rows, weights = x, topk_weights
            if sums_at_owner:
                rows = elastic_layout.take_rows(x, expansion.row_of_slot.view(-1), True)  # type: ignore[union-attr]
                rows = rows.view(state.num_rows, top_k * hidden)
            elif expansion is not None:
                rows = elastic_layout.reduce_slots(x, expansion.row_of_slot)
            if weights is not None and expansion is not None:
                weights = elastic_layout.take_rows(weights, expansion.row_of_slot.view(-1), True).view(
                    -1, top_k
                )
            elif weights is not None:
                weights = weights.masked_fill(handle.recv_topk_idx < 0, 0.0)
            combined = engine.empty(state.num_tokens, rows.size(1), dtype=x.dtype)
            combined_weights = None
            if weights is not None:
                combined_weights = engine.empty(state.num_tokens, top_k, dtype=torch.float32)
            kept = () if sums_at_owner else biases
            engine.order_after(before_epilogue)
            high_throughput.combine(engine, rows, weights, kept, state, (combined, combined_weights), sms)
            if sums_at_owner:
                combined = _sum_slots(combined.view(-1, top_k, hidden), biases)
        event = engine.finish(bool(async_with_compute_stream), (x, topk_weights, *biases))
        engine.hand_over([combined, combined_weights])
        return combined, combined_weights, event

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_handle(self, handle: object, engine: Engine) -> None:
        if not isinstance(handle, EPHandle):
            raise invalid("handle", arguments.describe(handle), "what dispatch() of this buffer returned")
        if handle.state.buffer is not self._base or handle.topk_idx.device != engine.device:
            raise invalid(
                "handle", "one of another buffer or device", "what dispatch() of this buffer returned"
            )

    def _check_repeat(
        self, handle: EPHandle, engine: Engine, data: Tensor, topk_idx: object, stats: object, do_expand: bool
    ) -> None:
        self._check_handle(handle, engine)
        for argument, value in (("topk_idx", topk_idx), ("cumulative_local_expert_recv_stats", stats)):
            if value is not None:
                raise invalid(argument, arguments.describe(value), "None with a handle")
        if do_expand != handle.do_expand:
            raise invalid("do_expand", do_expand, f"{handle.do_expand}, as in the handle's dispatch")
        if data.size(0) != handle.state.num_tokens:
            raise invalid(
                "x", arguments.describe(data), f"the {handle.state.num_tokens} rows of the dispatch"
            )

    def _check_routes(
        self, topk_idx: object, data: Tensor, num_experts: object, do_expand: bool
    ) -> tuple[Tensor, int]:
        most = arguments.MAX_EXPERTS_PER_RANK * self.num_ranks
        experts = check_whole("num_experts", num_experts, 1, most)
        ids = arguments.check_topk_idx(topk_idx, data.size(0), data.device)
        arguments.check_expert_ids(ids, experts)
        if do_expand:
            arguments.check_distinct_experts(ids)
        return ids, experts

    def _check_weights(self, topk_weights: object, ids: Tensor) -> Tensor | None:
        if topk_weights is None:
            return None
        shape = tuple(ids.shape)
        return arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), ids.device)

    def _check_max_tokens(self, given: object, num_tokens: int) -> int:
        most = (
            self.num_max_tokens_per_rank
            if given is None
            else check_whole("num_max_tokens_per_rank", given, 0)
        )
        if most < num_tokens:
            raise invalid("num_max_tokens_per_rank", most, f"at least the {num_tokens} tokens of x")
        return most

    def _check_stats(self, stats: object, num_experts: int, engine: Engine) -> Tensor | None:
        if stats is None:
            return None
        each = ceil_div(num_experts, self.num_ranks)
        local = max(min(each, num_experts - each * self.rank_idx), 0)
        name = "cumulative_local_expert_recv_stats"
        return arguments.check_tensor(name, stats, (local,), (torch.int32,), engine.device)


def _sum_slots(slots: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
    """Return bf16 [T, hidden]: biases plus slots [T, K, hidden] in ascending order, in float32."""
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for term in (*biases, *slots.unbind(1)):
        total += term.float()
    return total.to(slots.dtype)


def _flat(outputs: tuple[Payload, Tensor | None, Tensor | None]) -> list[Tensor | None]:
    data, *rest = outputs
    return [*(data if isinstance(data, tuple) else (data,)), *rest]
