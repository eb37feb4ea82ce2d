# SPDX-License-Identifier: Apache-2.0
"""torch's monitored barrier, which uses only keys of a store: rank 0 names the ranks that stayed away.

A rank's n-th arrival is the key here/RANK/n, and gone/RANK/n once it waits no more; go/RANK/n is the answer.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from weft.errors import PeerLost


class MonitoredBarrier:
    """The arrivals of one group's ranks. ``store``: a part of the group's, for these keys alone."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._arrivals = [0] * size

    def wait(self, limit: float, wait_all_ranks: bool) -> None:
        """Wait up to ``limit`` seconds. Raises: PeerLost, as torch's monitored_barrier() promises."""
        if self._rank == 0:
            self._watch_arrivals(limit, wait_all_ranks)
        else:
            self._arrive(limit)

    def _watch_arrivals(self, limit: float, wait_all_ranks: bool) -> None:
        ends = time.monotonic() + limit
        missing: list[int] = []
        is_late = False
        for rank in range(1, self._size):
            is_late = not wait_all_ranks and time.monotonic() >= ends
            if is_late:
                break
            if not self._has_come(rank, ends):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        is_failed = is_late or bool(missing)
        for rank in range(1, self._size):
            if self._has_come(rank, 0):
                self._store.set(f"go/{rank}/{self._arrivals[rank]}", b"lost" if is_failed else b"go")
                self._arrivals[rank] += 1
        after = f"after {round(limit * 1000)} ms"
        if is_late:
            raise PeerLost(f"Rank 0 timed out in monitoredBarrier {after}")
        if missing:
            names = ", ".join(map(str, missing))
            raise PeerLost(f"Rank{'s' * wait_all_ranks} {names} failed to pass monitoredBarrier {after}")

    def _has_come(self, rank: int, ends: float) -> bool:
        """Return whether a rank waits for an answer, at a point in time at the latest."""
        while _has(self._store, f"here/{rank}/{self._arrivals[rank]}", ends - time.monotonic()):
            if not self._store.check([f"gone/{rank}/{self._arrivals[rank]}"]):
                return True
            self._arrivals[rank] += 1
        return False

    def _arrive(self, limit: float) -> None:
        own = f"{self._rank}/{self._arrivals[self._rank]}"
        self._arrivals[self._rank] += 1
        for left in ("go", "gone"):  # by a group that was there before under the same name
            self._store.delete_key(f"{left}/{own}")
        self._store.set(f"here/{own}", b"")
        is_answered = _has(self._store, f"go/{own}", limit)
        is_over = is_answered and bytes(self._store.get(f"go/{own}")) == b"go"
        if is_answered:
            self._store.delete_key(f"here/{own}")
        else:
            self._store.set(f"gone/{own}", b"")
        if not is_over:
            raise PeerLost(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0. Rank 0's error says who is missing."
            )


def _has(store: Any, key: str, timeout_s: float) -> bool:
    """Return whether a store gets a key within a time."""
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
    except Exception:  # each torch version has another type for "timed out"
        return bool(store.check([key]))
    return True
