# SPDX-License-Identifier: Apache-2.0
"""``weft.Buffer``: expert-parallel dispatch and combine with DeepEP's interface.

    buffer = weft.Buffer(group, num_nvl_bytes=1 << 28)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=topk_idx, topk_weights=topk_weights)
    combined, _, _ = buffer.combine(my_experts(recv_x, recv_idx, recv_weights), handle)

T tokens here, N rows received here, R ranks, E experts, K slots per token. Rank r owns the ceil(E / R)
experts from r * ceil(E / R) on; the last ranks own fewer where E is not a multiple of R.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments, trace
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import (
    MAX_BYTES,
    MAX_SMS,
    Config,
    check_flags,
    check_integer,
    check_number,
    low_latency_size_hint,
    recommended_combine_config,
    recommended_dispatch_config,
)
from weft.moe.device_context import DeviceContext
from weft.moe.events import EventHandle, EventOverlap
from weft.moe.high_throughput_calls import HighThroughputCalls
from weft.moe.low_latency import LowLatencyCalls


class Buffer(HighThroughputCalls, LowLatencyCalls):
    """Sends the tokens of a mixture-of-experts layer to the ranks of their experts, and brings results back.

    Args:
        group: the ranks: a torch process group of any backend (only objects are exchanged through it), or
            anything else that weft.Communicator takes.
        num_nvl_bytes: room for received rows, in bytes, at first; a dispatch that needs more grows it.
        num_rdma_bytes: room for low-latency calls, as get_low_latency_rdma_size_hint() says; else not used: what
            high-throughput calls need between nodes is set aside besides.
        low_latency_mode: allow low-latency calls. High-throughput calls work whether or not.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_nvlink_for_normal_mode, allow_mnnvl,
            use_fabric: taken for compatibility; Weft chooses the way to each peer by itself.
        explicitly_destroy: memory is freed by destroy(), not when the object goes.
        enable_shrink: a rank that stays silent in a low-latency call is masked instead of raising PeerLost.
        comm: an mpi4py communicator, where there is no group.
        timeout_s: bound of every wait for a peer, in seconds; 0 takes WEFT_TIMEOUT_S.
        device: what this rank computes on; None is torch's current GPU, or the CPU where there is none. CPU
            tensors are always taken too.
    Raises: weft.Error naming a wrong argument; weft.PeerLost naming ranks that stayed away.

    Every method is collective, that is called by all ranks in the same order, but the statics, get_comm_stream(),
    get_local_buffer_tensor(), get_dispatch_layout(), take_trace() and those of masks. Exceptions of a wrong
    argument are raised before anything is written or sent, so the call can be repeated. After PeerLost only
    destroy() makes sense.
    Streams: on CUDA, a call with ``previous_event`` or ``async_finish`` runs on a communication stream of high priority
    that first waits for the event or, without one, for the current stream. With ``async_finish`` the caller waits for
    the returned event; otherwise the current stream has, and the returned event is empty. A call with neither runs on
    the current stream. On the CPU a call is finished when it returns.
    Threads: one caller at a time; waiting for a peer releases the interpreter's lock.
    """

    num_sms: ClassVar[int] = 20  # of the configurations that get_dispatch_config() and its twin recommend
    _asked_sms: ClassVar[int] = 0

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
        timeout_s = check_number("timeout_s", timeout_s, 0)
        check_flags(
            low_latency_mode=low_latency_mode,
            explicitly_destroy=explicitly_destroy,
            enable_shrink=enable_shrink,
        )
        self.group = comm if group is None else group
        self.num_nvl_bytes = check_integer("num_nvl_bytes", num_nvl_bytes, 0, MAX_BYTES)
        self.num_rdma_bytes = check_integer("num_rdma_bytes", num_rdma_bytes, 0, MAX_BYTES)
        check_integer("num_qps_per_rank", num_qps_per_rank, 0)
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        self._contexts = BufferContexts(
            "Buffer",
            group,
            comm,
            device=device,
            heap_bytes=lambda _: self.num_nvl_bytes,
            low_latency_bytes=self.num_rdma_bytes if self.low_latency_mode else 0,
            timeout_s=timeout_s,
            may_mask=self.enable_shrink,
            explicitly_destroy=self.explicitly_destroy,
        )
        self.device = self._contexts.device
        self.rank, self.group_size = self._contexts.rank, self._contexts.size

    # -- statics ---------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether kernels use what sm_90 brought: always, as they are compiled for the GPU at hand."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set how many SMs high-throughput calls use unless their config says: an even number above 0.

        Until then a call without a config uses as many as fill the GPU's links.
        """
        number = check_integer("num_sms", new_num_sms, 2, MAX_SMS)
        if number % 2:
            raise invalid("num_sms", number, "an even number above 0")
        Buffer.num_sms = Buffer._asked_sms = number

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of everything that the current stream has queued."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return num_rdma_bytes for low-latency calls of at most this shape; see low_latency_size_hint."""
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the recommended configuration of dispatch for any number of ranks."""
        return recommended_dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the recommended configuration of combine for any number of ranks."""
        return recommended_combine_config(num_ranks, Buffer.num_sms)

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> DeviceContext | None:
        """What calls run on; None after destroy()."""
        return self._contexts.main

    def destroy(self) -> None:
        """Wait for all ranks, then give the memory back; tensors that live in it stay valid until they go.

        Raises: weft.Error unless made with ``explicitly_destroy``, or when called twice; weft.PeerLost naming a
        rank that is gone, unless made with ``enable_shrink``: the memory is given back all the same.
        """
        self._contexts.destroy()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy the buffer, made with ``explicitly_destroy`` or not; after an error without waiting for others."""
        self._contexts.close(is_clean=error is None)

    def __repr__(self) -> str:
        return self._contexts.describe(
            "Buffer", num_nvl_bytes=self.num_nvl_bytes, num_rdma_bytes=self.num_rdma_bytes
        )

    def get_comm_stream(self) -> Any:
        """Return the torch.cuda.Stream that calls run on; on the CPU, the current torch.cpu.Stream."""
        return self._contexts.comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return a view of this rank's memory: 1-D, or its first size.numel() elements in that shape.

        Args:
            offset: bytes from the start, a multiple of the element's.
            use_rdma_buffer: of the num_rdma_bytes for low-latency calls, instead of the num_nvl_bytes.
        Its contents belong to calls: whoever writes must know that none is under way or still to be read.
        """
        arguments.check_dtype("dtype", dtype)
        check_flags(use_rdma_buffer=use_rdma_buffer)
        context = self._contexts.alive()
        begin, num_bytes = (
            context.low_latency_part() if use_rdma_buffer else context.rows_part(self.num_nvl_bytes)
        )
        offset = check_integer("offset", offset, 0, num_bytes)
        if offset % dtype.itemsize:
            raise invalid("offset", offset, f"a multiple of the element's {dtype.itemsize} bytes")
        room = (num_bytes - offset) // dtype.itemsize
        shape = torch.Size((room,)) if size is None else arguments.check_shape("size", size)
        if shape.numel() > room:
            raise invalid(
                "size", f"{list(shape)}: {shape.numel()} elements", f"at most {room} after the offset"
            )
        return context.permanent_view(begin + offset, shape.numel() * dtype.itemsize).view(dtype).view(shape)

    def take_trace(self) -> trace.Trace:
        """Return what kernels on this buffer's device noted since the last look, once they have all finished.

        With WEFT_TRACE_SPANS above 0 in the environment kernels note when each warp did or awaited what: see
        ``weft.moe.trace.Span``. That costs them a few percent.
        Raises: weft.Error without that option.
        """
        return trace.take_from(self._contexts.alive())
