# SPDX-License-Identifier: Apache-2.0
"""When a piece of the window is written again: streams and events are stand-ins that note what was asked of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from weft import _core
from weft.moe import window_pieces
from weft.moe.window_pieces import WindowPieces, free_storage, note_stream, watch_torch


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
    def __init__(self, *streams: Stream) -> None:
        self.by_number = {stream.cuda_stream: stream for stream in streams}
        self.now = streams[0]
        self.captured: set[int] = set()

    def current(self) -> int:
        return self.now.cuda_stream

    def stream(self, number: int) -> Stream:
        return self.by_number[number]

    def is_capturing(self, stream: Stream) -> bool:
        return stream.cuda_stream in self.captured

    def is_capturing_here(self) -> bool:
        return self.is_capturing(self.now)


class Window:
    """Pieces of a window, what became free of them, and the streams."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.comm, self.main, self.side, self.other = (Stream(number) for number in range(1, 5))
        self.cuda = Cuda(self.main, self.comm, self.side, self.other)
        self.pieces = WindowPieces(self.free.append, self.comm, self.cuda)

    def lease(self, offset: int) -> tuple[Any, torch.Tensor]:
        """Return the owner of the only storage in a piece, and a tensor there, which here does not keep it."""
        return self.storage_in(self.pieces.lease(object(), offset))

    def storage_in(self, lease: Any) -> tuple[Any, torch.Tensor]:
        tensor, owner = torch.zeros(8), lease.share()
        owner.lies_at(tensor.untyped_storage().data_ptr(), tensor.nbytes, tensor.device)
        return owner, tensor


def test_a_piece_is_free_after_what_its_stream_had_queued() -> None:
    window = Window()
    owner, _ = window.lease(256)
    assert not window.pieces.reclaim()
    del owner
    assert window.free == []
    assert len(window.main.events) == 1  # recorded as it died
    assert window.pieces.reclaim()
    assert (window.free, window.comm.waits) == ([256], [window.main.cuda_stream])
    assert not window.pieces.reclaim()


def test_who_dies_on_another_stream_waits_for_its_own_too() -> None:
    window = Window()
    owner, _ = window.lease(256)
    window.cuda.now = window.side
    del owner
    assert window.pieces.reclaim()
    assert window.comm.waits == [window.main.cuda_stream, window.side.cuda_stream]


def test_events_are_not_asked_for_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a capture whose thread asks whether an event is done."""
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor, window.side)
    window.cuda.now = window.other
    window.cuda.captured = {window.other.cuda_stream}
    monkeypatch.setattr(Event, "query", lambda _: pytest.fail("asked during a capture"))
    del owner
    assert not window.pieces.reclaim()
    monkeypatch.undo()
    window.cuda.captured = set()
    window.side.events[0].is_done = True
    assert window.pieces.reclaim()
    assert window.free == [256]


def test_recorded_streams_keep_a_piece_until_they_are_done() -> None:
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor[2:].view(2, 3), window.side)  # any tensor of that storage
    note_stream(tensor, window.side)
    note_stream(tensor, window.other)
    note_stream(torch.zeros(8), window.other)
    del owner
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
    owner, tensor = window.lease(256)
    note_stream(tensor, window.side)
    del owner
    assert not window.pieces.reclaim()
    assert window.pieces.reclaim(wait=True)
    assert window.free == [256]
    assert sorted(window.comm.waits) == [window.main.cuda_stream, window.side.cuda_stream]


def test_the_communication_stream_and_the_own_one_need_not_be_recorded() -> None:
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor, window.comm)
    note_stream(tensor, window.main)
    del owner
    assert window.pieces.reclaim()
    assert window.comm.waits == [window.main.cuda_stream]


@pytest.mark.parametrize("captured", ["main", "side"])
def test_what_dies_while_a_graph_is_captured_waits_for_the_end_of_it(captured: str) -> None:
    """An event that is recorded then would belong to the graph."""
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor, window.side)
    window.cuda.captured = {getattr(window, captured).cuda_stream}
    del owner
    assert not window.pieces.reclaim(wait=True)
    assert getattr(window, captured).events == []
    window.cuda.captured = set()
    assert window.pieces.reclaim(wait=True)
    assert window.free == [256]
    assert sorted(window.comm.waits) == [window.main.cuda_stream, window.side.cuda_stream]


def test_a_place_that_is_leased_again_starts_without_streams() -> None:
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor, window.side)
    window.side.record_event().is_done = True
    del owner
    again = window.pieces.lease(object(), 512).share()
    again.lies_at(tensor.untyped_storage().data_ptr(), tensor.nbytes, tensor.device)
    del again
    window.pieces.reclaim()
    assert window.free == [512]


def test_tensors_die_in_any_thread() -> None:
    window = Window()
    owners = [window.lease(256 * number)[0] for number in range(200)]
    threads = [threading.Thread(target=owners.pop) for _ in range(len(owners))]
    for thread in threads:
        thread.start()
        window.pieces.reclaim()
    for thread in threads:
        thread.join()
    window.pieces.reclaim()
    assert sorted(window.free) == [256 * number for number in range(200)]
    assert _core.count_shares() == (0, 0)


def test_torchs_record_stream_notes_streams_and_does_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    window, calls = Window(), []

    def torchs_own(self: torch.Tensor, stream: Any) -> None:
        calls.append((self.shape, stream))

    monkeypatch.setattr(torch.Tensor, "record_stream", torchs_own)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)
    watch_torch()
    watch_torch()  # once is enough
    owner, tensor = window.lease(256)
    tensor[:4].record_stream(window.side)
    torch.nn.Parameter(tensor).record_stream(window.other)
    torch.zeros(3, device="meta").record_stream(window.side)  # which has no memory
    assert calls == [((4,), window.side), ((8,), window.other), ((3,), window.side)]
    del owner
    assert (len(window.side.events), len(window.other.events)) == (1, 1)


def test_a_storage_that_is_freed_gives_its_piece_back_and_cannot_be_used() -> None:
    window = Window()
    owner, tensor = window.lease(256)
    note_stream(tensor, window.side)
    assert free_storage(tensor.untyped_storage())
    (side,) = window.side.events
    side.is_done = True
    assert window.pieces.reclaim()
    assert (window.free, window.comm.waits) == ([256], [window.main.cuda_stream])
    if window_pieces._set_access_error is not None:  # torch can tell
        with pytest.raises(RuntimeError, match="freed by resize_"):
            tensor.add_(1)
    del owner, tensor
    assert not window.pieces.reclaim()  # it went back once


def test_a_piece_of_several_storages_is_free_with_the_last() -> None:
    window = Window()
    lease = window.pieces.lease(object(), 256)
    (rows_owner, rows), (scales_owner, scales) = (window.storage_in(lease) for _ in range(2))
    del lease
    assert free_storage(rows.untyped_storage())
    assert not window.pieces.reclaim()
    assert scales.sum() == 0
    del scales_owner
    assert window.pieces.reclaim()
    assert window.free == [256]
    del rows_owner


def test_a_freed_place_that_is_leased_again_belongs_to_the_next() -> None:
    window = Window()
    first, tensor = window.lease(256)
    address = tensor.untyped_storage().data_ptr()
    assert free_storage(tensor.untyped_storage())
    second = window.pieces.lease(object(), 512).share()
    second.lies_at(address, 16, torch.device("cpu"))
    del first  # after the second began there
    assert _core.lease_of(address) is not None
    assert _core.count_shares() == (1, 0)
    window.pieces.reclaim()
    assert window.free == [256]
    del second
    window.pieces.reclaim()
    assert window.free == [256, 512]


@pytest.mark.parametrize("torch_can_tell", [True, False])
def test_who_frees_twice_frees_nobody_elses_rows(
    monkeypatch: pytest.MonkeyPatch, torch_can_tell: bool
) -> None:
    if not torch_can_tell:
        monkeypatch.setattr(window_pieces, "_set_access_error", None)
    window = Window()
    first, tensor = window.lease(256)
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    assert free_storage(storage)
    second = window.pieces.lease(object(), 512).share()  # where the first lay
    second.lies_at(address, 16, torch.device("cpu"))
    assert free_storage(storage)
    assert free_storage(tensor[2:].untyped_storage())
    note_stream(tensor, window.side)
    window.pieces.reclaim()
    assert window.free == [256]
    del first
    del second
    window.pieces.reclaim()
    assert (window.free, window.side.events) == ([256, 512], [])
    assert _core.count_shares() == (0, 0)


def test_torchs_resize_frees_pieces_and_does_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", torch.Tensor.record_stream)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)
    watch_torch()
    window = Window()
    owner, tensor = window.lease(256)
    tensor.untyped_storage().resize_(0)
    assert window.pieces.reclaim()
    others = torch.ones(8)
    others.untyped_storage().resize_(0)
    assert others.untyped_storage().nbytes() == 0
    assert others.untyped_storage().resize_(32).nbytes() == 32
    assert (
        torch.ones(8, device="meta").untyped_storage().resize_(0).nbytes() == 0
    )  # as torch.compile looks at a layer
    del owner


def test_a_piece_that_one_stream_used_goes_back_by_the_short_way() -> None:
    window = Window()
    given: list[tuple[int, int]] = []

    def give_back_after(offset: int, stream: int) -> bool:
        if window.cuda.captured:
            return False
        given.append((offset, stream))
        return True

    window.pieces = WindowPieces(window.free.append, window.comm, window.cuda, give_back_after)
    lease, _ = window.lease(256)
    del lease
    assert (given, window.main.events) == ([(256, window.main.cuda_stream)], [])
    assert not window.pieces.reclaim()
    lease, tensor = window.lease(512)
    note_stream(tensor, window.side)
    del lease
    lease, _ = window.lease(768)
    window.cuda.now = window.side
    del lease
    window.cuda.now = window.main
    window.cuda.captured = {window.main.cuda_stream}
    lease, _ = window.lease(1024)
    del lease
    assert given == [(256, window.main.cuda_stream)]  # others are kept, with the events they need
    window.cuda.captured = set()
    assert window.pieces.reclaim(wait=True)
    assert sorted(window.free) == [512, 768, 1024]
