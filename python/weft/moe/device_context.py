# SPDX-License-Identifier: Apache-2.0
"""What a Buffer has on one device: the core object, its communication stream, and views of its window.

A tensor that a dispatch returns on CUDA lives in the window, because peers write it there. Its memory goes back to
the window's heap when the last tensor that shares it is gone and streams are done with it: see window_pieces. On
the CPU many rows live there too, and all else is a copy.
Threads: one caller at a time; tensors may die in any thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from weft import _core
from weft.errors import invalid
from weft.moe.arguments import describe
from weft.moe.domains import Domains, domains_of
from weft.moe.events import EventHandle, EventOverlap
from weft.moe.host_memory import LARGE_BYTES, HostMemory
from weft.moe.window_pieces import CudaStreams, WindowPieces, watch_torch
from weft.runtime.allocation import (
    PART_BYTES,
    TensorSpec,
    allocator_on,
    not_a_view,
    strides_in_order,
    tensor_maker,
)
from weft.runtime.streams import current_stream

_NOWHERE = 16
RANKS_PER_RDMA_GROUP = 8  # what num_tokens_per_rdma_rank counts by where all ranks map each other
# The stream of a call, and the caller's; whether the first waits for the second, and then the second for the first.
# A call that does both runs on the caller's, outside of graphs: CallOrder in src/moe/buffer.h.
Order = tuple[int, int, bool, bool]
_NO_ORDER: Order = (0, 0, False, False)
# By type: its code and bits in DLPack, as old as __dlpack__() itself. Others are described by their bytes.
_EXCHANGED_TYPES = {
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}
# Of DLPack 1.1, where this torch reads them.
_LATER_EXCHANGED_TYPES = {torch.float8_e4m3fn: (10, 8), torch.float8_e5m2: (12, 8)}


def _can_be_exchanged(dtype: torch.dtype) -> bool:
    try:
        return bool(from_dlpack(torch.empty(1, dtype=dtype)).dtype is dtype)
    except (RuntimeError, TypeError, BufferError):
        return False


_EXCHANGED_TYPES |= {
    dtype: coded for dtype, coded in _LATER_EXCHANGED_TYPES.items() if _can_be_exchanged(dtype)
}
# from_dlpack() asks for streams first, of an object: here nothing waits for any.
_from_capsule: Any = torch._C._from_dlpack


def _retyped(words: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on a GPU of a type that DLPack lacks, in the memory of another one. It is no view of that."""
    part = torch.empty(0, dtype=dtype, device=words.device)
    return part.set_(words.untyped_storage(), 0, shape, strides_in_order(shape))


def _with_global_scale(
    rows: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return NVFP4 rows, their scales, and global scales f32[N, 1], of scales whose last one is the global one."""
    # Of one row or none, contiguous() would give the parts themselves, which share their memory.
    parts = scales.split((scales.size(1) - 1, 1), dim=1)
    blocks, whole = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return rows, blocks, not_a_view(whole.view(torch.float32))


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor is for the core: 0 for None, never 0 for a tensor, be it empty."""
    return 0 if tensor is None else tensor.data_ptr() or _NOWHERE


class DeviceContext:
    """The core buffer of one device and what orders work on it.

    Args:
        communicator: the ranks.
        heap_bytes, low_latency_bytes: parts of the window. timeout_s: bound of every wait.
        single_rank_domains: where ranks do not all map each other, each is a domain of its own.
    """

    def __init__(
        self,
        communicator: Any,
        device: torch.device,
        heap_bytes: int,
        low_latency_bytes: int,
        timeout_s: float,
        may_mask: bool = False,
        single_rank_domains: bool = False,
    ) -> None:
        self.device = device
        self.communicator = communicator
        self.is_cuda = device.type == "cuda"
        self.core = _core.MoeBuffer.create(
            communicator, heap_bytes, low_latency_bytes, timeout_s, single_rank_domains=single_rank_domains
        )
        # The domain of each rank: those that all map each other. () where all do. An elastic buffer's logical groups
        # are these, too, but one where each rank was asked to be alone.
        self.domains: tuple[int, ...] = tuple(self.core.domains)
        self.group_key = _group_key(communicator, self.domains)
        self._logical_groups = (
            [0] * int(communicator.size) if single_rank_domains or not self.domains else list(self.domains)
        )
        self._handle_buffer = int(self.core.handle_buffer_key)
        self.planned_sms = int(self.core.planned_sms)  # of calls whose caller names no number; 1 on the CPU
        self.planned_combine_sms = int(self.core.planned_combine_sms)  # the same of a combine
        self.comm_stream: Any = torch.cuda.Stream(device=device, priority=-1) if self.is_cuda else None
        # The communication stream for the core; 0 on the CPU, where calls finish before they return.
        self.stream = int(self.comm_stream.cuda_stream) if self.comm_stream is not None else 0
        self._ordinal = device.index if self.is_cuda else -1
        self.low_latency = _core.LowLatency.create(self.core, may_mask)
        self.layout_stream: int | None = None  # of a layout that no call was ordered after yet
        # Whether the communication stream may have got work that no barrier was ordered after yet.
        self.is_comm_in_use = False
        watch_torch()
        self._pieces: _core.Pieces = (
            WindowPieces(
                self.core.give_back,
                self.comm_stream,
                CudaStreams(device),
                self.core.give_back_after,
                self.core.follow,
            )
            if self.is_cuda
            else _core.Pieces(self.core.give_back, None, None)
        )
        self.allocator = allocator_on(device, None if self.is_cuda else HostMemory().strided)
        # What plans of high-throughput calls go by. It keeps the core, not this.
        self.high_throughput = _core.HighThroughput(
            buffer=self.core,
            device=device,
            pieces=self._pieces,
            allocator=self.allocator,
            host_allocator=allocator_on(torch.device("cpu")),
            from_capsule=_from_capsule,
            retyped=_retyped,
            exchanged=_EXCHANGED_TYPES,
            int32=torch.int32,
            int64=torch.int64,
            with_global_scale=_with_global_scale,
            large_bytes=LARGE_BYTES,
            group_key=self.group_key,
            domains=self.domains,
        )

    def check_handle(self, handle: object, kind: Any, call: str) -> Any:
        """Return the state of a handle that ``call``() returned to this group of ranks, on this device.

        handle: of ``kind``, or the tensors that one consists of, as autograd saves them.
        Raises: weft.Error for anything else.
        """
        known: Any = handle if isinstance(handle, kind) else None
        state = kind.state_of(handle) if known is None else known.state
        if known is not None and (state is None or not state.is_in_place):
            state = known.state = self._state_after_move(known, kind, call)
        if state is not None and state.group_key == self.group_key:
            return state
        ranks = f"the same {self.communicator.size} ranks, on {self.device}"
        tensors = ", or all of its tensors" if issubclass(kind, tuple) else ""
        allowed = f"the {kind.__name__} that {call}() returned to {ranks}{tensors}"
        given = "the handle of other ranks, or of another device" if state is not None else describe(handle)
        raise invalid("handle", given, allowed)

    def _state_after_move(self, handle: Any, kind: Any, call: str) -> Any:
        """Return the state of a handle whose tensors are elsewhere by now."""
        state = kind.state_of(handle)
        if state is None:
            allowed = f"what {call}() returned, with its tensors as they were"
            raise invalid("handle", "one with tensors that were resized, replaced, moved or freed", allowed)
        return state

    def lacks_room_for(self, state: Any) -> bool:
        """Return whether a handle comes from another buffer, so that this window has not grown for it yet."""
        return state.handle_id >> _core.HANDLE_NUMBER_BITS != self._handle_buffer and not self.is_capturing

    def make_room_for(self, state: Any, row_format: Any, num_rows: int) -> None:
        """Grow the window for num_rows received rows and those that come back, if need be: ranks' hosts meet."""
        self.core.make_room_for(format=row_format, rows=num_rows, staging_rows=state.staging_rows)

    @functools.cached_property
    def logical(self) -> Domains:
        """How an elastic buffer's ranks are grouped."""
        return domains_of(self._logical_groups)

    @functools.cached_property
    def scaleup_places(self) -> torch.Tensor:
        """The place of each rank in its logical group, i64[ranks] on the device."""
        return torch.tensor(self.logical.place_of, device=self.device)

    @property
    def has_sums_of_nodes(self) -> bool:
        """Whether combine sums rows of several ranks, and rounds, before they return to their token."""
        return len(set(self.domains)) < len(self.domains)

    @functools.cached_property
    def rdma_places(self) -> torch.Tensor | None:
        """The group of each rank on the device, i64[1, ranks]; None where there is but one."""
        if not self.is_internode_available():
            return None
        return torch.tensor([self.rdma_groups], device=self.device)

    # -- memory ----------------------------------------------------------------------------------------------

    def permanent_view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return uint8[num_bytes] of the window, which stays mapped as long as the view."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        view: torch.Tensor = from_dlpack(self.core.view(offset, num_bytes, self))
        return view

    def rows_part(self, num_bytes: int) -> tuple[int, int]:
        """Return (offset, bytes) of the window's part for received rows, at most ``num_bytes``."""
        begin = int(self.core.low_latency_end)
        return begin, min(num_bytes, int(self.core.window_bytes) - begin)

    def low_latency_part(self) -> tuple[int, int]:
        """Return (offset, bytes) of the window's part for low-latency rows, without their signals."""
        control_bytes = int(_core.low_latency_region_bytes(self.communicator.size, 0))
        begin = int(self.core.low_latency_begin) + control_bytes
        return begin, max(int(self.core.low_latency_end) - begin, 0)

    def reclaim(self, wait: bool = False) -> bool:
        """Make pieces that were given back usable by later calls, after which the communication stream waits.

        wait: also those that recorded streams still use.
        Returns whether there were any.
        """
        if not isinstance(self._pieces, WindowPieces) or self.is_capturing:
            return False
        self.core.reclaim(self.stream)
        return self._pieces.reclaim(wait)

    def reclaim_waiting(self) -> bool:
        """As reclaim(wait=True): the core asks for it where a call finds no room."""
        return self.reclaim(wait=True)

    # -- order -----------------------------------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph: then nothing runs yet."""
        return self.is_cuda and bool(torch.cuda.is_current_stream_capturing())

    @property
    def current_stream(self) -> int:
        """The caller's stream for the core; 0 on the CPU."""
        stream: int = current_stream(self._ordinal) if self.is_cuda else 0
        return stream

    def order(self, previous: EventHandle | None, async_finish: bool) -> Order:
        """Return how the core is to order a call; order it after ``previous``, if there is one."""
        if not self.is_cuda:
            return _NO_ORDER
        current = current_stream(self._ordinal)
        is_side_by_side = async_finish or previous is not None
        if self.layout_stream is not None:
            on = self.stream if is_side_by_side else current
            self._wait_for_layout(on, None if previous is not None else current)
        if is_side_by_side:
            self.is_comm_in_use = True
        if previous is not None:
            previous.stream_wait(self.comm_stream)
        if isinstance(self._pieces, WindowPieces) and self._pieces.returned:
            self._pieces.reclaim_if_any()
        return self.stream, current, previous is None, not async_finish

    def order_of_all(self) -> Order:
        """Return the order of a barrier: after the current stream and whatever the communication stream has got."""
        if not self.is_cuda:
            return _NO_ORDER
        current = current_stream(self._ordinal)
        if not self.is_comm_in_use:
            return self.stream, current, True, True
        self.is_comm_in_use = self.is_capturing  # a graph orders nothing outside of it
        self.core.wait(self.stream, current)
        return self.stream, current, False, True

    @property
    def as_ordered(self) -> Order:
        """The order of a call between begin() and finish(), which have seen to that."""
        return self.stream, self.current_stream, False, False

    def call_after(self, previous: EventHandle | None) -> AbstractContextManager[Any]:
        """Begin a call on the communication stream, which ends with finish() and hand_over().

        Returns a context in which all of it goes there: what ``as_ordered`` orders, and what is torch's own.
        """
        self.begin(previous)
        return self.on_comm_stream()

    def begin(self, previous: EventHandle | None) -> None:
        """Order the communication stream after ``previous``, or else after the current stream."""
        if not self.is_cuda:
            return
        self.is_comm_in_use = True
        self._wait_for_layout(self.stream, None if previous is not None else self.current_stream)
        if previous is not None:
            previous.stream_wait(self.comm_stream)
        else:
            self.core.wait(self.stream, self.current_stream)
        self.reclaim()

    def _wait_for_layout(self, on: int, waited_for: int | None) -> None:
        """Order the stream of a call after a layout on another stream than the one that it waits for anyway."""
        stream, is_covered = self.layout_stream, self.layout_stream == waited_for
        if stream is None or (
            not is_covered and self.is_capturing
        ):  # graphs wait for nothing outside of them
            return
        if not is_covered:
            self.core.wait(on, stream)
        self.layout_stream = None

    def finish(self, async_finish: bool, tensors: tuple[torch.Tensor | None, ...]) -> EventOverlap:
        """End a call: the caller waits for the event it gets, or the current stream waits now.

        One that order() began is at its end, but for the event of async_finish.
        """
        if not self.is_cuda:
            return EventOverlap(EventHandle() if async_finish else None)
        self.is_comm_in_use = True
        if not async_finish:
            self.core.wait(self.current_stream, self.stream)
            return EventOverlap(None)
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.comm_stream)
                tensor.record_stream(current)
        return EventOverlap(EventHandle(self.comm_stream))

    def order_after(self, event: EventHandle | None) -> None:
        """Make what the communication stream gets from now on wait for an event too."""
        if self.is_cuda and event is not None:
            event.stream_wait(self.comm_stream)

    def hand_over(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Tell torch that tensors allocated for the communication stream are used on the current one."""
        if not self.is_cuda:
            return
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(current)

    @property
    def num_sms(self) -> int:
        """How many SMs the device has; on the CPU, no bound."""
        if not self.is_cuda:
            return 1 << 16
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, allocated for the stream that is current."""
        made: torch.Tensor = self.allocator.empty(shape, dtype)
        return made

    def maker(
        self,
        *specs: TensorSpec | None,
        together: Sequence[int] = (),
        part_bytes: int = PART_BYTES,
        first_is_all: bool = False,
    ) -> Callable[[], list[Any]]:
        """Return what makes an uninitialised tensor of each spec, None for None: tensor_maker() says how."""
        return tensor_maker(self.allocator, specs, together, part_bytes, first_is_all)

    def on_comm_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's work goes to the communication stream, if any."""
        self.is_comm_in_use = True
        return torch.cuda.stream(self.comm_stream) if self.is_cuda else nullcontext()

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Return a context in which empty() allocates for the communication stream, if asked to."""
        return self.on_comm_stream() if on_comm_stream else nullcontext()

    def trace_log(self) -> torch.Tensor | None:
        """Return the bytes where kernels note what took how long; None unless WEFT_TRACE_SPANS asks for it."""
        if not self.core.trace_bytes:
            return None
        log: torch.Tensor = from_dlpack(self.core.trace_view(self))
        return log

    def synchronize_current(self) -> None:
        """Wait, on the host, until the current and the communication stream have done all they got."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait, on the host, until the communication stream has done all it got, and every call its work."""
        if self.is_cuda:
            self.core.follow(self.stream)
            self.comm_stream.synchronize()

    # -- what callers of DeepEP ask: how ranks are grouped, as its formulas count them. None of it is collective. -----

    def is_available(self) -> bool:
        """Return True: whoever has the object can call it."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the ranks make more than one group."""
        return self.get_num_rdma_ranks() > 1

    @functools.cached_property
    def rdma_groups(self) -> tuple[int, ...]:
        """The group of each rank: where not all map each other, those that do; else eight ranks each."""
        size = int(self.communicator.size)
        return self.domains or tuple(rank // RANKS_PER_RDMA_GROUP for rank in range(size))

    def get_num_rdma_ranks(self) -> int:
        """Return how many groups there are."""
        return max(self.rdma_groups) + 1

    def get_rdma_rank(self) -> int:
        """Return the group that this rank is in."""
        return self.rdma_groups[int(self.communicator.rank)]

    def get_root_rdma_rank(self, global_root: bool) -> int:
        """Return this rank's place in its group where ``global_root``, else 0."""
        rank = int(self.communicator.rank)
        return self.rdma_groups[:rank].count(self.rdma_groups[rank]) if global_root else 0

    def get_local_device_id(self) -> int:
        """Return the index of the CUDA device; 0 on the CPU."""
        return self.device.index or 0


def _group_key(communicator: Any, domains: tuple[int, ...]) -> int:
    """Return a number of these ranks in this order, their devices and domains, as this one of them sees it."""
    ranks = [(facts["host"], facts["process"], facts["device"]) for facts in communicator.facts]
    text = repr((communicator.rank, ranks, domains)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1  # fits an int64
