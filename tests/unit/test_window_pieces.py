# SPDX-License-Identifier: Apache-2.0
"""When a piece of the window is written again: streams and events are stand-ins that note what was asked of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from weft.moe import window_pieces
from weft.moe.window_pieces import Lease, WindowPieces, note_stream, watch_record_stream


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class Stream:
    """A stream by its number, with what it waits for and the events that were recorded on it."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[int] = []
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        self.waits.append(event.stream.cuda_stream)


class Cuda:
    def __init__(self, current: Stream) -> None:
        self.stream = current
        self.captured: set[int] = set()

    def current(self) -> Stream:
        return self.stream

    def is_capturing(self, stream: Stream) -> bool:
        return stream.cuda_stream in self.captured


class Window:
    """Pieces of a window, what became free of them, and the streams."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.comm, self.main, self.side, self.other = (Stream(number) for number in range(1, 5))
        self.cuda = Cuda(self.main)
        self.pieces = WindowPieces(self.free.append, self.comm, self.cuda)

    def lend(self, offset: int) -> tuple[Lease, torch.Tensor]:
        """Return a lease and a tensor in its piece, which here does not keep the lease."""
        tensor = torch.zeros(8)
        lease = self.pieces.lend(object(), offset)
        lease.lies_at(tensor.untyped_storage().data_ptr())
        return lease, tensor


def test_a_piece_is_free_after_what_its_stream_had_queued() -> None:
    window = Window()
    lease, _ = window.lend(256)
    assert not window.pieces.reclaim()
    del lease
    assert window.free == []
    assert len(window.main.events) == 1  # recorded as it died
    assert window.pieces.reclaim()
    assert (window.free, window.comm.waits) == ([256], [window.main.cuda_stream])
    assert not window.pieces.reclaim()


def test_who_dies_on_another_stream_waits_for_its_own_too() -> None:
    window = Window()
    lease, _ = window.lend(256)
    window.cuda.stream = window.side
    del lease
    assert window.pieces.reclaim()
    assert window.comm.waits == [window.main.cuda_stream, window.side.cuda_stream]


def test_recorded_streams_keep_a_piece_until_they_are_done() -> None:
    window = Window()
    lease, tensor = window.lend(256)
    note_stream(tensor[2:].view(2, 3), window.side)  # any tensor of that storage
    note_stream(tensor, window.side)
    note_stream(tensor, window.other)
    note_stream(torch.zeros(8), window.other)
    del lease
    (side,), (other,) = window.side.events, window.other.events
    assert not window.pieces.reclaim()
    side.is_done = True
    assert not window.pieces.reclaim()
    assert window.comm.waits == []  # later calls are not held up
    other.is_done = True
    assert window.pieces.reclaim()
    assert (window.free, window.comm.waits) == ([256], [window.main.cuda_stream])


def test_without_other_room_the_communication_stream_waits_for_recorded_ones() -> None:
    window = Window()
    lease, tensor = window.lend(256)
    note_stream(tensor, window.side)
    del lease
    assert not window.pieces.reclaim()
    assert window.pieces.reclaim(wait=True)
    assert window.free == [256]
    assert sorted(window.comm.waits) == [window.main.cuda_stream, window.side.cuda_stream]


def test_the_communication_stream_and_the_own_one_need_not_be_recorded() -> None:
    window = Window()
    lease, tensor = window.lend(256)
    note_stream(tensor, window.comm)
    note_stream(tensor, window.main)
    del lease
    assert window.pieces.reclaim()
    assert window.comm.waits == [window.main.cuda_stream]


@pytest.mark.parametrize("captured", ["main", "side"])
def test_what_dies_while_a_graph_is_captured_waits_for_the_end_of_it(captured: str) -> None:
    """An event that is recorded then would belong to the graph."""
    window = Window()
    lease, tensor = window.lend(256)
    note_stream(tensor, window.side)
    window.cuda.captured = {getattr(window, captured).cuda_stream}
    del lease
    assert not window.pieces.reclaim(wait=True)
    assert getattr(window, captured).events == []
    window.cuda.captured = set()
    assert window.pieces.reclaim(wait=True)
    assert window.free == [256]
    assert sorted(window.comm.waits) == [window.main.cuda_stream, window.side.cuda_stream]


def test_a_place_that_is_lent_again_starts_without_streams() -> None:
    window = Window()
    lease, tensor = window.lend(256)
    note_stream(tensor, window.side)
    window.side.record_event().is_done = True
    del lease
    again = window.pieces.lend(object(), 512)
    again.lies_at(tensor.untyped_storage().data_ptr())
    del again
    window.pieces.reclaim()
    assert window.free == [512]


def test_tensors_die_in_any_thread() -> None:
    window = Window()
    leases = [window.lend(256 * number)[0] for number in range(200)]
    threads = [threading.Thread(target=leases.pop) for _ in range(len(leases))]
    for thread in threads:
        thread.start()
        window.pieces.reclaim()
    for thread in threads:
        thread.join()
    window.pieces.reclaim()
    assert sorted(window.free) == [256 * number for number in range(200)]
    assert window_pieces._recorded == {}


def test_torchs_record_stream_notes_streams_and_does_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    window, calls = Window(), []

    def torchs_own(self: torch.Tensor, stream: Any) -> None:
        calls.append((self.shape, stream))

    monkeypatch.setattr(torch.Tensor, "record_stream", torchs_own)
    watch_record_stream()
    watch_record_stream()  # once is enough
    lease, tensor = window.lend(256)
    tensor[:4].record_stream(window.side)
    torch.nn.Parameter(tensor).record_stream(window.other)
    torch.zeros(3, device="meta").record_stream(window.side)  # which has no memory
    assert calls == [((4,), window.side), ((8,), window.other), ((3,), window.side)]
    del lease
    assert (len(window.side.events), len(window.other.events)) == (1, 1)
