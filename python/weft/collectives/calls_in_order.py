# SPDX-License-Identifier: Apache-2.0
"""The order of a group's calls: each runs in its caller's thread or in another, after all calls that were made before.

    order = CallsInOrder("weft-collectives")
    order.here(call)            # in this thread, and its result
    order.in_thread(call)       # in a thread of the group, while the caller goes on
    order.end()                 # wait for what is under way

The thread lives while it has calls, and a moment longer. Threads: one caller at a time. A call that is made inside a
running call, in the group's thread, runs at once, as it belongs to that call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from weft.errors import Error, PeerLost

Result = TypeVar("Result")
# Runs a call and returns what went wrong, if anything. Given an error, it does not run, and ends with that.
Run = Callable[[Exception | None], Exception | None]
_LOOK_S = 1.0  # how often a wait looks whether the thread is still there
_LINGER_S = 0.05  # a thread is begun in 0.1 ms, and its last moment delays the end of a program


class CallsInOrder:
    """Calls of one group, one after the other. name: what the thread is called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._runs: deque[Run] = deque()
        self._under_way = 0  # calls handed over that have not ended
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def here(self, call: Callable[[], Result]) -> Result:
        """Run a call in this thread, once all before it have ended; return, or raise, what it does."""
        if self._under_way and not self._is_own_thread():
            self._wait()
        return call()

    def in_thread(self, run: Run) -> None:
        """Run a call in the group's thread, once all before it have ended."""
        if self._is_own_thread():
            run(None)
            return
        with self._changed:
            self._under_way += 1
            self._runs.append(run)
            if self._thread is None or not self._thread.is_alive():  # the parent's is none of a fork
                self._thread = threading.Thread(target=self._work, name=self._name)
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        """Wait until no call is under way. Calls queued behind one that lost a peer are not run."""
        self._is_ending = True
        if not self._is_own_thread():
            self._wait()

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _wait(self) -> None:
        """Wait until nothing is under way: each call has its own deadline, and the thread outlives them all."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._under_way == 0, _LOOK_S):
                if self._thread is None or not self._thread.is_alive():  # as in a forked process
                    raise Error(
                        f"{self._name}: waited for {self._under_way} calls, and their thread has ended",
                        "system",
                    )

    def _work(self) -> None:
        lost: Exception | None = None
        while (run := self._next()) is not None:
            is_last = self._is_ending or not threading.main_thread().is_alive()
            error = run(lost if is_last else None)
            if lost is None and isinstance(error, PeerLost):
                lost = error
            del run, error  # they keep the tensors of the call, and the next one may be long in coming
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _next(self) -> Run | None:
        """Return the next call; None, and no thread any more, when none comes for a moment."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._runs, _LINGER_S):
                self._thread = None
                return None
            return self._runs.popleft()


__all__ = ["CallsInOrder"]
