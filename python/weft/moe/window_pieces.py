# SPDX-License-Identifier: Apache-2.0
"""When a piece of the window that held a received tensor can be written again on a GPU.

    pieces = WindowPieces(core.give_back, comm_stream, CudaStreams(device))
    lease = pieces.lease(context, offset)       # of the core: src/bind/leases.h, as is what a storage has of it
    share = lease.share()                      # kept alive by a storage in that piece
    share.lies_at(address, num_bytes, device)
    pieces.reclaim()                           # before the communication stream writes into what was given back

Peers write into a piece once a later call of this rank has told them to. So the communication stream first waits for
what was queued, when the last tensor of the piece died, on the stream current when it was leased and on the one
that was current when it died, and later calls come after that. Streams that ``Tensor.record_stream()`` named may lag
behind for long, and must not hold up later calls: their pieces stay out until they are done, as torch does it with
memory of its own, unless there is no other room.

Torch keeps streams, and frees storages by ``resize_(0)``, for its own memory only. ``watch_torch()`` therefore puts
functions in front of ``torch.Tensor.record_stream`` and ``torch.UntypedStorage.resize_``, which do the same for
pieces of a window, and call torch's for all others.
Threads: tensors may die, be freed, and have streams recorded, in any thread; the rest is for one caller at a time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from weft import _core
from weft.runtime import profiled_memory
from weft.runtime.held_storage import refuse_held
from weft.runtime.plain import PLAIN_TYPES
from weft.runtime.streams import current_stream

_core.watch_shares(sys.is_finalizing, profiler, profiled_memory.tell)


class WindowPieces(_core.Pieces):  # type: ignore[misc]
    """The pieces of one window that are out, or on their way back.

    Args:
        give_back: makes an offset free. comm_stream: waits for pieces. cuda: what CudaStreams is.
        give_back_after: does so with an offset, once the communication stream waits for what a stream, given by its
            number, has got; returns False where a graph is captured. None: pieces are all kept here.
        follow: orders later calls after what a stream, given by its number, has got. None: they run on comm_stream.
    """

    def __init__(
        self,
        give_back: Callable[[int], object],
        comm_stream: Any,
        cuda: Any,
        give_back_after: Callable[[int, int], bool] | None = None,
        follow: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(give_back, cuda.current, give_back_after)
        self._give_back = give_back
        self._comm_stream = comm_stream
        self._cuda = cuda
        self._follow = follow
        self.returned: list[_Returned] = []  # that wait for streams here

    def take_later(self, offset: int, home: int, now: int, recorded: dict[int, Any]) -> None:
        """Note what a piece has to wait for; nothing here waits.

        home, now: the streams when it was leased and when its last storage died, by their numbers.
        """
        soon = {number: self._cuda.stream(number) for number in (home, now)}
        late = [stream for number, stream in recorded.items() if number not in soon]
        late = [
            stream for stream in late if stream.cuda_stream != self._comm_stream.cuda_stream
        ]  # it waits itself
        piece = _Returned(
            offset, [_Mark(stream) for stream in soon.values()], [_Mark(stream) for stream in late]
        )
        piece.settle(self._cuda)
        self.returned.append(piece)

    def reclaim_if_any(self) -> None:
        """Do as reclaim(), outside of captures, where there is anything to do."""
        if self.returned and not self._cuda.is_capturing(self._cuda.stream(self._cuda.current())):
            self.reclaim()

    def reclaim(self, wait: bool = False) -> bool:
        """Free the pieces that recorded streams are done with; return whether there was one.

        wait: free all, and let the communication stream wait for recorded streams, too.
        """
        pending: list[_Returned] = []
        gave = False
        while self.returned:
            piece = self.returned.pop()
            if not piece.settle(self._cuda) or (piece.late and not wait):
                pending.append(piece)
                continue
            for mark in (*piece.soon, *piece.late):
                self._comm_stream.wait_event(mark.event)
            if self._follow is not None:
                self._follow(self._comm_stream.cuda_stream)
            self._give_back(piece.offset)
            gave = True
        self.returned += pending
        return gave


class CudaStreams:
    """What WindowPieces asks CUDA about the streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # () -> the number of the stream that is current in this thread
        self.current: Callable[[], int] = functools.partial(current_stream, device.index)

    def stream(self, number: int) -> Any:
        """Return torch's object of a stream."""
        return torch.cuda.ExternalStream(number, self._device)

    def is_capturing_here(self) -> bool:
        """Return whether the current stream records a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_capturing(self, stream: Any) -> bool:
        """Return whether a stream records a CUDA graph, so that events of it mean nothing outside."""
        if stream.cuda_stream == self.current():
            return self.is_capturing_here()
        with torch.cuda.stream(stream):
            return bool(torch.cuda.is_current_stream_capturing())


class _Mark:
    """What a stream had queued when its event was recorded: None while it is being captured in a graph."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event: Any = None

    def settle(self, cuda: Any) -> bool:
        """Record the event, unless that is done; return whether there is one."""
        if self.event is None and not cuda.is_capturing(self.stream):
            self.event = self.stream.record_event()
        return self.event is not None


class _Returned:
    """A piece on its way back, after what is waited for, and after what is asked for now and then."""

    def __init__(self, offset: int, soon: list[_Mark], late: list[_Mark]) -> None:
        self.offset = offset
        self.soon = soon
        self.late = late

    def settle(self, cuda: Any) -> bool:
        """Record what is to be recorded, forget late ones that are done; return whether all have events."""
        has_all = all([mark.settle(cuda) for mark in (*self.soon, *self.late)])
        if cuda.is_capturing_here():  # where to ask for an event would end the capture
            return has_all
        self.late = [mark for mark in self.late if mark.event is None or not mark.event.query()]
        return has_all


def note_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Note that a stream uses a tensor, if it lies in a piece of a window."""
    if not _core.has_shares() or type(tensor) not in PLAIN_TYPES:
        return
    storage = tensor.untyped_storage()
    lease = None if _core.is_freed(storage._cdata) else _core.lease_of(storage.data_ptr())
    if lease is not None:
        lease.recorded[stream.cuda_stream] = stream


def free_storage(storage: torch.UntypedStorage) -> bool:
    """Free a storage that lies in a piece of a window; return whether it does.

    Whoever uses it afterwards gets an error (where torch has a way to say so). Freeing it again does nothing, as with
    torch's own memory.
    """
    if not _core.has_shares() or storage.device.type == "meta":  # which tells no address
        return False
    if _core.is_freed(storage._cdata):
        return True
    refuse_held(storage)
    is_ours: bool = _core.free_share(storage._cdata, storage.data_ptr())
    if is_ours and _set_access_error is not None:
        _set_access_error(storage._cdata, "The memory of this tensor was freed by resize_(0).")
    return is_ours


_set_access_error = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def watch_torch() -> None:
    """Have record_stream() and resize_() of torch serve pieces of windows, from now on. Once is enough."""
    torchs_record, torchs_resize = torch.Tensor.record_stream, torch.UntypedStorage.resize_
    if getattr(torchs_record, "knows_windows", False):
        return

    @functools.wraps(torchs_record)
    def record_stream(self: torch.Tensor, s: Any) -> None:
        note_stream(self, s)
        torchs_record(self, s)

    @functools.wraps(torchs_resize)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        return self if size == 0 and free_storage(self) else torchs_resize(self, size)

    record_stream.knows_windows = True  # type: ignore[attr-defined]
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
