# SPDX-License-Identifier: Apache-2.0
"""``weft.Buffer``: expert-parallel dispatch and combine with DeepEP's interface."""

from __future__ import annotations

from typing import Any

import torch

from weft import _core
from weft.errors import Error, invalid
from weft.moe.config import Config
from weft.moe.engine import Engine
from weft.moe.events import EventHandle, EventOverlap
from weft.moe.handle import DispatchHandle, DispatchState
from weft.runtime.communicator import connect

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}  # what combine sums: kElementBf16, kElementFp32


class Buffer:
    """Sends the tokens of a mixture-of-experts layer to the ranks of their experts, and brings results back."""

    num_sms = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        allow_nvlink_for_normal_mode: bool = True,
        timeout_s: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        if group is None and comm is None:
            raise invalid(
                "group", "None", "a torch.distributed process group, or comm: an mpi4py communicator"
            )
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._comm = comm
        self._timeout_s = timeout_s
        self._engines: dict[torch.device, Engine] = {}
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.runtime: Engine | None = self._engine(self.device)
        self.rank = self._communicator.rank
        self.group_size = self._communicator.size

    def _engine(self, device: torch.device) -> Engine:
        """Return what this buffer has on a device; made, collectively, at the first call with its tensors."""
        if device not in self._engines:
            self._communicator = connect(self.group, self._comm, device, self._timeout_s)
            self._engines[device] = Engine(
                self._communicator, device, self.num_nvl_bytes, self.num_rdma_bytes, self._timeout_s
            )
        return self._engines[device]

    # -- layout ------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count tokens per rank and per expert, and say which token goes to which rank."""
        engine = self._engine(topk_idx.device)
        num_tokens, num_topk = topk_idx.shape
        engine.begin(previous_event)
        per_rank = engine.empty(self.group_size, dtype=torch.int32, on_comm_stream=allocate_on_comm_stream)
        per_expert = engine.empty(num_experts, dtype=torch.int32, on_comm_stream=allocate_on_comm_stream)
        in_rank = engine.empty(
            num_tokens, self.group_size, dtype=torch.bool, on_comm_stream=allocate_on_comm_stream
        )
        engine.core.layout(
            topk_idx=topk_idx.data_ptr(),
            id_bytes=topk_idx.element_size(),
            tokens=num_tokens,
            top_k=num_topk,
            experts=num_experts,
            tokens_per_rank=per_rank.data_ptr(),
            tokens_per_expert=per_expert.data_ptr(),
            token_in_rank=in_rank.data_ptr(),
            stream=engine.stream,
        )
        event = engine.finish(async_finish, (topk_idx, per_rank, per_expert, in_rank))
        return per_rank, None, per_expert, in_rank, event

    # -- dispatch ----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Payload,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Payload, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle, EventOverlap
    ]:
        """Send each row of ``x`` to every rank that owns one of its experts."""
        rows, scales = x if isinstance(x, tuple) else (x, None)
        engine = self._engine(rows.device)
        num_sms = (config or Config(self.num_sms)).num_sms
        engine.begin(previous_event)
        if handle is not None:
            state = handle.state
            received = self._send_rows(engine, rows, scales, None, None, state, state.num_rows, num_sms)
            recv_x = received.payload()
            event = engine.finish(async_finish, (rows, scales))
            return recv_x, None, None, None, handle, event

        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        num_tokens, num_experts = rows.shape[0], num_tokens_per_expert.shape[0]
        top_k = topk_idx.shape[1] if topk_idx is not None else 0
        memory = {
            "send_row": engine.empty(num_tokens, self.group_size, dtype=torch.int32),
            "slot_base": engine.empty(num_tokens, dtype=torch.int32),
            "prefix": engine.empty(self.group_size, self.group_size, dtype=torch.int32),
        }
        counts_unknown = num_worst_tokens > 0
        notified = engine.core.notify(
            format=self._format(rows, scales, topk_idx),
            token_in_rank=is_token_in_rank.data_ptr(),
            tokens_per_expert=num_tokens_per_expert.data_ptr(),
            tokens=num_tokens,
            experts=num_experts,
            handle=_core.HandleMemory(*(tensor.data_ptr() for tensor in memory.values())),
            wait=not counts_unknown,
            stream=engine.stream,
        )
        most_copies = min(self.group_size, top_k) if top_k else self.group_size
        num_rows = num_worst_tokens if counts_unknown else notified.received_rows
        state = DispatchState(
            buffer=self,
            handle_id=notified.handle_id,
            num_experts=num_experts,
            num_tokens=num_tokens,
            num_rows=num_rows,
            staging_rows=num_tokens * most_copies if counts_unknown else notified.sent_rows,
            counts_unknown=counts_unknown,
            slot=torch.empty(0, dtype=torch.int32),
            **memory,
        )
        received = self._send_rows(engine, rows, scales, topk_idx, topk_weights, state, num_rows, num_sms)
        state = DispatchState(**{**state.__dict__, "slot": received.slot()})
        counts = (
            []
            if counts_unknown
            else [
                -(-count // expert_alignment) * expert_alignment for count in notified.tokens_per_local_expert
            ]
        )
        event = engine.finish(
            async_finish, (rows, scales, topk_idx, topk_weights, is_token_in_rank, *memory.values())
        )
        sent_to = memory["prefix"][self.rank] - (memory["prefix"][self.rank - 1] if self.rank else 0)
        handle = DispatchHandle(
            state,
            (
                state.prefix,
                sent_to.view(-1, 1),
                state.prefix[:, self.rank].contiguous().view(-1, 1),
                received.token(),
                is_token_in_rank,
                state.send_row,
            ),
        )
        return received.payload(), received.ids(), received.weights(), counts, handle, event

    def _format(self, rows: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor | None) -> Any:
        hidden = rows.shape[1]
        combine_bytes = hidden * (2 if rows.element_size() <= 2 else 4)
        return _core.RowFormat(
            row_bytes=hidden * rows.element_size(),
            scale_words=scales.shape[1] if scales is not None else 0,
            top_k=topk_idx.shape[1] if topk_idx is not None else 0,
            id_bytes=topk_idx.element_size() if topk_idx is not None else 8,
            element=rows.element_size(),
            combine_row_bytes=combine_bytes,
        )

    def _send_rows(
        self,
        engine: Engine,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        state: DispatchState,
        num_rows: int,
        num_sms: int,
    ) -> _Received:
        row_format = self._format(rows, scales, topk_idx)
        received = engine.core.dispatch(
            format=row_format,
            x=rows.data_ptr(),
            scales=scales.data_ptr() if scales is not None else 0,
            scale_token_stride=scales.stride(0) if scales is not None else 0,
            scale_word_stride=scales.stride(1) if scales is not None else 0,
            topk_idx=topk_idx.data_ptr() if topk_idx is not None else 0,
            topk_weights=topk_weights.data_ptr() if topk_weights is not None else 0,
            tokens=state.num_tokens,
            experts=state.num_experts,
            handle=state.memory(),
            handle_id=state.handle_id,
            rows=num_rows,
            staging_rows=state.staging_rows,
            counts_unknown=state.counts_unknown,
            num_sms=num_sms,
            stream=engine.stream,
        )
        return _Received(engine, received, row_format, num_rows, rows, scales, topk_idx)

    # -- combine -----------------------------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return rows to their tokens and sum them, unweighted, in rank order."""
        engine, state = self._engine(x.device), handle.state
        if state.buffer is not self:
            raise invalid("handle", "the handle of another buffer", "what this buffer's dispatch returned")
        biases = bias if isinstance(bias, tuple) else (bias, None)
        top_k = topk_weights.shape[1] if topk_weights is not None else 0
        engine.begin(previous_event)
        combined = engine.empty(
            state.num_tokens, x.shape[1], dtype=x.dtype, on_comm_stream=allocate_on_comm_stream
        )
        combined_weights = (
            engine.empty(state.num_tokens, top_k, dtype=torch.float32, on_comm_stream=allocate_on_comm_stream)
            if topk_weights is not None
            else None
        )
        engine.core.combine(
            row_bytes=x.shape[1] * x.element_size(),
            top_k=top_k,
            element=_ELEMENTS[x.dtype],
            x=x.data_ptr(),
            topk_weights=topk_weights.data_ptr() if topk_weights is not None else 0,
            slot=state.slot.data_ptr(),
            bias0=biases[0].data_ptr() if biases[0] is not None else 0,
            bias1=biases[1].data_ptr() if biases[1] is not None else 0,
            combined=combined.data_ptr(),
            combined_weights=combined_weights.data_ptr() if combined_weights is not None else 0,
            tokens=state.num_tokens,
            handle=state.memory(),
            handle_id=state.handle_id,
            staging_rows=state.staging_rows,
            num_sms=(config or Config(self.num_sms)).num_sms,
            stream=engine.stream,
        )
        event = engine.finish(
            async_finish, (x, topk_weights, *biases, combined, combined_weights, state.send_row, state.prefix)
        )
        return combined, combined_weights, event

    def destroy(self) -> None:
        """Free the window. Collective; only for a buffer made with ``explicitly_destroy``."""
        if not self.explicitly_destroy:
            raise Error("explicitly_destroy: got False, allowed: True for a buffer that is destroyed by hand")
        self.runtime = None
        self._engines.clear()


class _Received:
    """Typed views of the two pieces that a dispatch got: rows and scales; ids, weights and origins."""

    def __init__(
        self,
        engine: Engine,
        received: Any,
        row_format: Any,
        num_rows: int,
        sent: torch.Tensor,
        sent_scales: torch.Tensor | None,
        sent_ids: torch.Tensor | None,
    ) -> None:
        self._layout = received.layout
        self._rows = engine.piece(received.rows_at, self._layout.rows_bytes)
        self._meta = engine.piece(received.meta_at, self._layout.meta_bytes)
        self._format = row_format
        self._num_rows = num_rows
        self._sent, self._sent_scales, self._sent_ids = sent, sent_scales, sent_ids

    def _view(self, piece: torch.Tensor, offset: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = self._num_rows * width * dtype.itemsize
        return piece[offset : offset + num_bytes].view(dtype).view(self._num_rows, width)

    def payload(self) -> Payload:
        rows = self._view(self._rows, 0, self._sent.shape[1], self._sent.dtype)
        if self._sent_scales is None:
            return rows
        return rows, self._view(
            self._rows, self._layout.scales, self._format.scale_words, self._sent_scales.dtype
        )

    def ids(self) -> torch.Tensor | None:
        if self._sent_ids is None:
            return None
        return self._view(self._meta, 0, self._format.top_k, self._sent_ids.dtype)

    def weights(self) -> torch.Tensor | None:
        if self._sent_ids is None:
            return None
        return self._view(self._meta, self._layout.weights, self._format.top_k, torch.float32)

    def token(self) -> torch.Tensor:
        return self._view(self._meta, self._layout.token, 1, torch.int32).view(-1)

    def slot(self) -> torch.Tensor:
        return self._view(self._meta, self._layout.slot, 1, torch.int32).view(-1)
