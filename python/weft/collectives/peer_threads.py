# SPDX-License-Identifier: Apache-2.0
"""Threads in which sends, or receives, wait: those of one peer in order, those of different peers concurrently.

    receivers = PeerThreads("weft-recv")
    receivers.of(3)(run)          # after what rank 3 was given to before
    receivers.exclusive()(run_any)  # after all that was submitted before, and before all that comes later
    receivers.end()               # take nothing more

With one thread for all peers ranks that receive in another order than others send to them would wait in a circle.
Threads: one caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

Run = Callable[[], object]  # raises nothing
_EVERYONE = -1


class PeerThreads:
    """A thread for each peer, begun when it is first needed. name: what the threads are called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._last: dict[int, Future[None]] = {}  # by peer: what ends last

    def of(self, peer: int) -> Callable[[Run], None]:
        """Return what takes a message of one peer."""
        return partial(self._submit, peer)

    def exclusive(self) -> Callable[[Run], None]:
        """Return what takes a message of some peer, beside which no other one is under way."""
        return partial(self._submit, _EVERYONE)

    def end(self) -> None:
        """Take nothing more; threads end with what they have."""
        for thread in self._threads.values():
            thread.shutdown(wait=False)

    def _submit(self, peer: int, run: Run) -> None:
        if peer not in self._threads:
            self._threads[peer] = ThreadPoolExecutor(1, f"{self._name}-{peer}")
        first = self._last if peer == _EVERYONE else {_EVERYONE: self._last.get(_EVERYONE)}
        earlier = [future for future in first.values() if future is not None and not future.done()]
        self._last[peer] = self._threads[peer].submit(_run_after, earlier, run)


def _run_after(earlier: Sequence[Future[None]], run: Run) -> None:
    wait(earlier)
    run()


__all__ = ["PeerThreads"]
