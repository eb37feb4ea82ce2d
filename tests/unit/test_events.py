# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

import weft
from weft.moe.events import EventHandle, EventOverlap, handle_of


def test_event_without_cuda_is_complete() -> None:
    event = EventHandle()
    assert event.is_complete()
    event.current_stream_wait()


def test_waiting_runs_the_hook_once() -> None:
    calls: list[int] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: calls.append(1))
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert calls == [1]


def test_second_hook_is_refused_until_the_first_has_run() -> None:
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: None)
    with pytest.raises(weft.Error, match="hook"):
        overlap.register_hook_after_wait(lambda: None)
    overlap.current_stream_wait()
    overlap.register_hook_after_wait(lambda: None)


def test_waiting_without_an_event_is_refused() -> None:
    with pytest.raises(weft.Error, match="event"):
        EventOverlap().current_stream_wait()


def test_releasing_drops_the_event_and_its_tensors() -> None:
    overlap = EventOverlap(EventHandle(), (torch.zeros(1),))
    overlap.current_stream_wait(release_handle=True)
    assert overlap.event is None
    assert overlap.extra_tensors is None


def test_with_waits_at_its_end_and_releases_only_when_asked() -> None:
    calls: list[int] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: calls.append(1))
    with overlap:
        assert calls == []
    assert calls == [1]
    with overlap(release_handle=True) as same:
        assert same is overlap
        assert overlap.event is not None
    assert overlap.event is None
    with overlap:
        pass


@pytest.mark.parametrize("previous", [None, EventOverlap(), EventOverlap(EventHandle()), EventHandle()])
def test_either_kind_of_event_is_taken(previous: EventOverlap | EventHandle | None) -> None:
    handle = handle_of(previous, "previous_event")
    assert handle is None or isinstance(handle, EventHandle)


def test_anything_else_is_refused_by_name() -> None:
    with pytest.raises(weft.Error, match=r"previous_event: got int"):
        handle_of(3, "previous_event")  # type: ignore[arg-type]
