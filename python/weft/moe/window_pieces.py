# SPDX-License-Identifier: Apache-2.0
"""When a piece of the window, in which a received tensor lay, can be written again on a GPU.

    pieces = WindowPieces(core.give_back, comm_stream, CudaStreams(device))
    lease = pieces.lend(context, offset)
    share = lease.share()                      # kept alive by a storage in that piece
    share.lies_at(address, num_bytes, device, can_be_freed=True)
    pieces.reclaim()                           # before the communication stream writes into what was given back

Peers write into a piece once a later call of this rank has told them to. So the communication stream first waits for
what was queued, when the last tensor of the piece died, on the stream that was current when it was lent and on the one
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

from weft.runtime import profiled_memory
from weft.runtime.plain import PLAIN_TYPES
from weft.runtime.streams import current_stream

_out: dict[int, Share] = {}  # what is out, by the address at which its storage begins
# What resize_(0) freed, by torch's object of the storage, as long as that is alive: another may begin there by then.
_freed: dict[int, Share] = {}


class Lease:
    """One piece that is out; it goes back when none of its shares is left."""

    def __init__(self, pieces: WindowPieces | HostPieces, owner: object, offset: int, home: Any) -> None:
        self.recorded: dict[int, Any] = {}  # streams by their numbers
        self._pieces = pieces
        self._owner = owner  # keeps the window mapped
        self._offset = offset
        self._home = home

    def share(self) -> StorageOwner:
        """Return what a storage in this piece keeps alive."""
        return StorageOwner(Share(self))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._pieces.take_back(self._offset, self._home, self.recorded)


class Share:
    """What one storage has of a piece, until it dies or is freed."""

    def __init__(self, lease: Lease) -> None:
        self.lease: Lease | None = lease
        self.can_be_freed = False
        self.address = 0
        self._freed_storage = 0
        self._told: tuple[int, torch.device] | None = None  # what torch's profiler knows of: bytes, and where

    def lies_at(self, address: int, num_bytes: int, device: torch.device) -> None:
        """Watch the storage that begins at this address."""
        self.address = address
        _out[address] = self
        if profiled_memory.tell(address, num_bytes, device):
            self._told = num_bytes, device

    def free(self, storage: int) -> None:
        """Let go of the piece, before torch's object of the storage dies."""
        self._freed_storage = storage
        _freed[storage] = self
        self._let_go()

    def end(self) -> None:
        """Let go of the piece, as the storage dies."""
        _freed.pop(self._freed_storage, None)
        self._let_go()

    def _let_go(self) -> None:
        if _out.get(self.address) is self:  # else another storage begins there now
            del _out[self.address]
        self.lease = None
        if self._told is not None:
            (num_bytes, device), self._told = self._told, None
            profiled_memory.tell(self.address, -num_bytes, device)


class StorageOwner:
    """Ends a share when its storage dies: what the storage's memory is owned by."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def lies_at(self, address: int, num_bytes: int, device: torch.device, can_be_freed: bool) -> None:
        """Watch the storage of so many bytes that begins at this address. can_be_freed: resize_(0) ends the share."""
        self._share.can_be_freed = can_be_freed
        self._share.lies_at(address, num_bytes, device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._share.end()


class WindowPieces:
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
        self._give_back = give_back
        self._comm_stream = comm_stream
        self._cuda = cuda
        self._give_back_after = give_back_after
        self._follow = follow
        self.returned: list[_Returned] = []  # that wait for streams here

    def lend(self, owner: object, offset: int) -> Lease:
        """Return the lease of a piece. owner: what keeps its memory."""
        return Lease(self, owner, offset, self._cuda.current())

    def take_back(self, offset: int, home: Any, recorded: dict[int, Any]) -> None:
        """Note what the piece has to wait for; nothing here waits."""
        now = self._cuda.current()
        is_simple = not recorded and now.cuda_stream == home.cuda_stream
        if is_simple and self._give_back_after and self._give_back_after(offset, now.cuda_stream):
            return
        soon = {stream.cuda_stream: stream for stream in (home, now)}
        late = [stream for number, stream in recorded.items() if number not in soon]
        late = [
            stream for stream in late if stream.cuda_stream != self._comm_stream.cuda_stream
        ]  # it waits itself
        piece = _Returned(
            offset, [_Mark(stream) for stream in soon.values()], [_Mark(stream) for stream in late]
        )
        piece.settle(self._cuda)
        self.returned.append(piece)

    def reclaim_kept(self) -> None:
        """Do as reclaim(), outside of captures, where there is anything to do."""
        if self.returned and not self._cuda.is_capturing(self._cuda.current()):
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


class HostPieces:
    """The pieces of a window in memory of the host, where calls finish before they return: one is free at once."""

    def __init__(self, give_back: Callable[[int], object]) -> None:
        self._give_back = give_back

    def lend(self, owner: object, offset: int) -> Lease:
        """Return the lease of a piece. owner: what keeps its memory."""
        return Lease(self, owner, offset, None)

    def take_back(self, offset: int, _home: None, _recorded: dict[int, Any]) -> None:
        """Make the piece free."""
        self._give_back(offset)


class CudaStreams:
    """What WindowPieces asks CUDA about the streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Any] = {}  # by number; an object for a number may outlive its stream

    def current(self) -> Any:
        """Return the stream that is current in this thread."""
        number = current_stream(self._device.index)
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = torch.cuda.current_stream(self._device)
        return known

    def is_capturing(self, stream: Any) -> bool:
        """Return whether a stream records a CUDA graph, so that events of it mean nothing outside."""
        if stream.cuda_stream == self.current().cuda_stream:
            return bool(torch.cuda.is_current_stream_capturing())
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
        self.late = [mark for mark in self.late if mark.event is None or not mark.event.query()]
        return has_all


def note_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Note that a stream uses a tensor, if it lies in a piece of a window."""
    if not _out or type(tensor) not in PLAIN_TYPES:
        return
    storage = tensor.untyped_storage()
    share = None if storage._cdata in _freed else _out.get(storage.data_ptr())
    lease = share.lease if share else None
    if lease is not None:
        lease.recorded[stream.cuda_stream] = stream


def free_storage(storage: torch.UntypedStorage) -> bool:
    """Free a storage that lies in a piece of a window; return whether it does.

    Whoever uses it afterwards gets an error (where torch has a way to say so). A storage that others share with
    whom freed it, as ids and weights of a dispatch share theirs with its handle, stays until all of them are gone.
    Freeing it again does nothing, as with torch's own memory.
    """
    if storage._cdata in _freed:
        return True
    share = _out.get(storage.data_ptr()) if _out else None
    if share is None:
        return False
    if share.can_be_freed:
        share.free(storage._cdata)
        if _set_access_error is not None:
            _set_access_error(storage._cdata, "The memory of this tensor was freed by resize_(0).")
    return True


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
