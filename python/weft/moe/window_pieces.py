# SPDX-License-Identifier: Apache-2.0
"""When a piece of the window, in which a received tensor lay, can be written again on a GPU.

    pieces = WindowPieces(core.give_back, comm_stream, CudaStreams(device))
    lease = pieces.lend(engine, offset)        # kept alive by the tensors in that piece
    pieces.reclaim()                           # before the communication stream writes into what was given back

Peers write into a piece once this rank's communication stream has told them to. So that stream first waits for what
was queued, when the last tensor of the piece died, on the stream that was current when it was lent and on the one
that was current when it died. Streams that ``Tensor.record_stream()`` named may lag behind for long, and must not
hold up later calls: their pieces stay out until they are done, as torch does it with memory of its own, unless there
is no other room.

Torch keeps streams for its own memory only. ``watch_record_stream()`` therefore puts a function in front of
``torch.Tensor.record_stream``, which notes the stream where a tensor lies in a window, and then calls torch's.
Threads: tensors may die, and streams be recorded, in any thread; the rest is for one caller at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_recorded: dict[int, dict[int, Any]] = {}  # by address of a piece that is out: streams by their numbers
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no memory to ask for


class Lease:
    """One piece that is out; it goes back when nobody has this object any more."""

    def __init__(self, pieces: WindowPieces, owner: object, offset: int, home: Any) -> None:
        self._pieces = pieces
        self._owner = owner  # keeps the window mapped
        self._offset = offset
        self._home = home
        self._address = 0

    def lies_at(self, address: int) -> None:
        """Have streams noted for tensors whose storage begins at this address."""
        self._address = address
        _recorded[address] = {}

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._pieces.take_back(self._offset, self._home, _recorded.pop(self._address, {}))


class WindowPieces:
    """The pieces of one window that are out, or on their way back.

    Args:
        give_back: makes an offset free. comm_stream: writes into free pieces. cuda: what CudaStreams is.
    """

    def __init__(self, give_back: Callable[[int], object], comm_stream: Any, cuda: Any) -> None:
        self._give_back = give_back
        self._comm_stream = comm_stream
        self._cuda = cuda
        self._returned: list[_Returned] = []

    def lend(self, owner: object, offset: int) -> Lease:
        """Return the lease of a piece. owner: what keeps its memory."""
        return Lease(self, owner, offset, self._cuda.current())

    def take_back(self, offset: int, home: Any, recorded: dict[int, Any]) -> None:
        """Note what the piece has to wait for; nothing here waits."""
        soon = {stream.cuda_stream: stream for stream in (home, self._cuda.current())}
        late = [stream for number, stream in recorded.items() if number not in soon]
        late = [stream for stream in late if stream.cuda_stream != self._comm_stream.cuda_stream]
        piece = _Returned(
            offset, [_Mark(stream) for stream in soon.values()], [_Mark(stream) for stream in late]
        )
        piece.settle(self._cuda)
        self._returned.append(piece)

    def reclaim(self, wait: bool = False) -> bool:
        """Free the pieces that recorded streams are done with; return whether there was one.

        wait: free all, and let the communication stream wait for recorded streams, too.
        """
        pending: list[_Returned] = []
        gave = False
        while self._returned:
            piece = self._returned.pop()
            if not piece.settle(self._cuda) or (piece.late and not wait):
                pending.append(piece)
                continue
            for mark in (*piece.soon, *piece.late):
                self._comm_stream.wait_event(mark.event)
            self._give_back(piece.offset)
            gave = True
        self._returned += pending
        return gave


class CudaStreams:
    """What WindowPieces asks CUDA about the streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        """Return the stream that is current in this thread."""
        return torch.cuda.current_stream(self._device)

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
    if _recorded and type(tensor) in _PLAIN:
        streams = _recorded.get(tensor.untyped_storage().data_ptr())
        if streams is not None:
            streams[stream.cuda_stream] = stream


def watch_record_stream() -> None:
    """Have torch.Tensor.record_stream() tell note_stream(), from now on. Does nothing a second time."""
    torchs_own = torch.Tensor.record_stream
    if getattr(torchs_own, "notes_streams", False):
        return

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        note_stream(self, stream)
        torchs_own(self, stream)

    record_stream.notes_streams = True  # type: ignore[attr-defined]
    record_stream.__doc__ = torchs_own.__doc__
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
