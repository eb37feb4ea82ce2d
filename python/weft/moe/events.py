# SPDX-License-Identifier: Apache-2.0
"""Events: what a call that returned early lets its caller wait for.

    event = buffer.capture()                      # everything queued so far
    with other_call(..., async_finish=True)[-1]:  # waits when the block ends
        work_that_overlaps()

On CUDA an event is recorded on a stream, and waiting makes the current stream wait, never the host. On the
CPU calls finish before they return, so an event is complete from the start and waiting is free. Wherever
Weft takes a previous event it takes an ``EventOverlap``, an ``EventHandle`` or None.
Threads: an object is used by one thread at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from weft.errors import Error, invalid


class EventHandle:
    """Everything queued on a CUDA stream so far; complete from the start where CUDA is not in use.

    Args: stream: the CUDA stream to record on; None takes the current one.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is not None or torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(stream or torch.cuda.current_stream())

    def __repr__(self) -> str:
        return f"EventHandle({'no stream' if self._event is None else repr(self._event)})"

    def current_stream_wait(self) -> None:
        """Make the current CUDA stream wait for the event; the host goes on at once."""
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream())

    def stream_wait(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the event; the host goes on at once."""
        if self._event is not None:
            self._event.wait(stream)

    def is_complete(self) -> bool:
        """Return whether everything recorded has finished; never blocks."""
        return self._event is None or bool(self._event.query())


class EventOverlap:
    """An ``EventHandle`` or None, the tensors it keeps alive, and a hook to run once it has been waited for.

    Args:
        event: what to wait for; None when the call has already finished for the current stream.
        extra_tensors: kept alive as long as this object, because the stream may still use them.
    Attributes:
        hook_after_wait: what the next wait calls, without arguments, and then forgets; None when there is nothing.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    event: EventHandle | None = None
    extra_tensors: tuple[torch.Tensor, ...] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _release_on_exit = False

    def __repr__(self) -> str:
        kept = len(self.extra_tensors or ())
        return f"EventOverlap({'finished' if self.event is None else repr(self.event)}, keeps {kept} tensors)"

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait, then run and forget the hook.

        Args: release_handle: drop the event and the tensors it keeps alive afterwards.
        Raises: weft.Error when there is no event; what the hook raises, which then stays for another wait.
        """
        if self.event is None:
            raise Error("event: got None, allowed: an EventHandle; the call that made it had finished")
        self.event.current_stream_wait()
        hook = self.hook_after_wait
        if hook is not None:
            hook()
            if self.hook_after_wait is hook:  # else it has named the next one itself
                self.hook_after_wait = None
        if release_handle:
            self.event = None
            self.extra_tensors = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Run a function once, at the next wait. Raises: weft.Error when one is registered already."""
        if self.hook_after_wait is not None:
            raise invalid("hook_after_wait", "a second hook", "one hook until the next wait")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return this object; with ``release_handle`` the next ``with`` block drops its event as it ends."""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release_handle, self._release_on_exit = self._release_on_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle)


# () -> EventOverlap(), of a call that has finished for the current stream, without a call of its constructor
finished_event: Callable[[], EventOverlap] = functools.partial(object.__new__, EventOverlap)

PreviousEvent = EventOverlap | EventHandle | None


def handle_of(previous_event: PreviousEvent, argument: str) -> EventHandle | None:
    """Return the event to wait for, or None; weft.Error naming ``argument`` for any other type."""
    event = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
    if event is None or isinstance(event, EventHandle):
        return event
    raise invalid(argument, type(event).__name__, "an EventOverlap, an EventHandle or None")
