# SPDX-License-Identifier: Apache-2.0
"""What torch sees of one call of the backend "weft": the work that its caller waits for, and a profiler's event."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

profilers: Any = torch.autograd  # exports what it offers backends without a word of it in its types


class Event:
    """What a profiler sees of one call. It ends in another thread, so that profilers count it as asynchronous."""

    def __init__(self, name: str, given: Any) -> None:
        tensors = _tensors(given)
        self._handle = profilers._record_function_with_args_enter(f"weft:{name}", *tensors)

    def end_here(self) -> None:
        """End it in this thread."""
        profilers._record_function_with_args_exit(self._handle)

    def end(self) -> None:
        """End it in a thread of its own."""
        ending = threading.Thread(target=self.end_here)
        ending.start()
        ending.join()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from _tensors(part)


def seen_as(name: str, given: int = 0) -> Callable[[Any], Any]:
    """Show a method to profilers as "weft:``name``", with the tensors of positional argument ``given``.

    The method's object says in ``_is_seen`` whether a call is shown already.
    """

    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> Any:
            if not profilers._profiler_enabled() or self._is_seen:
                return method(self, *args, **options)
            event = Event(name, args[given] if given < len(args) else [])
            self._is_seen = True  # calls that this one is made of are not shown
            try:
                return method(self, *args, **options)
            finally:
                self._is_seen = False
                event.end()

        return run

    return wrap


def finished_work(result: Any) -> Any:
    """Return torch's work of a call that is finished, with its result."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Pending(torch._C._distributed_c10d.Work):
    """A send or receive under way. torch's own work of a future forgets what went wrong when it is waited for."""

    def __init__(self, future: Any, source: int = -1) -> None:
        super().__init__()
        self._future = future
        self.source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future

    def _source_rank(self) -> int:
        """Return the rank that sent what was received; -1 before it is known, and for a send."""
        return self.source
