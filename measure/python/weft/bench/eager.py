# SPDX-License-Identifier: Apache-2.0
"""Calls one after another, as a program without CUDA graphs makes them: what each costs the host, and how long it is.

    def turn(clock: Eager) -> None:
        with clock.together("weft round_trip"):
            handle = clock.call("weft dispatch", lambda: buffer.low_latency_dispatch(x, ids, 64, 256))[2]
            clock.call("weft combine", lambda: buffer.low_latency_combine(y, ids, weights, handle))

    clock = Eager(on_gpu=False)
    clock.measure(turn, rounds=20, warmup=3)
    times = clock.slowest(group)["weft dispatch"]     # Times(enqueue_us=..., eager_us=...)

Where ranks wait for each other, the slowest dispatch and the slowest combine of a round are more than its slowest pair:
``together`` takes the time of the pair, too.

``enqueue_us``: on a GPU, until the call returns, which is when its kernels are enqueued (a call that waits for counts
returns later); on the CPU, the processor time of the call without that of its kernels.
``eager_us``: from the end of the call before to the end of this one, on the GPU's clock where there is one; kernels
included. Both are medians over the rounds, of each round's slowest rank.

On a GPU the calls are made three times. An event after each tells their ends apart, but costs the host as much as a
part of a call. So ``enqueue_us`` is from a second time without such events, and ``eager_us`` of a turn as a whole from
a third one, in which nothing but the calls is done.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed

from weft import _core
from weft.bench.report import Row, slowest_rank

_BATCHES = 5  # of a turn's rounds on a GPU, each a sample of the turn as a whole
_LEAST_TURNS = 10  # of a batch: the event behind it costs the host a part of a call


@dataclass(frozen=True)
class Times:
    """The cost of a call, in microseconds. ``enqueue_us`` is None where host and kernel cannot be told apart."""

    enqueue_us: float | None
    eager_us: float


class _Pass(enum.Enum):
    """The notes of one more pass over the calls."""

    ENDS = enum.auto()  # of each call, by an event
    HOST = enum.auto()  # when each call returns
    WHOLE = enum.auto()  # nothing of a single call


@dataclass
class _Laps:
    enqueue_us: list[float] = field(default_factory=list)
    # Where a span begins and ends, and how many turns it is: of one call, or of some turns as a whole.
    apart: list[tuple[Any, Any, int]] = field(default_factory=list)
    whole: list[tuple[Any, Any, int]] = field(default_factory=list)


class Eager:
    """Takes the time of calls in a row; one caller.

    Args: on_gpu: calls end on the current CUDA stream, else when they return.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        # Ranks on the CPU share cores: what others do there is no part of a call.
        self._clock = time.perf_counter_ns if on_gpu else time.thread_time_ns
        self._laps: dict[str, _Laps] = {}
        self._together: set[str] = set()
        self._pass = _Pass.ENDS
        self._spare: list[Any] = []
        self._enqueued_us = 0.0  # of all calls so far
        self._last: Any = None

    def measure(self, turn: Callable[[Eager], None], rounds: int, warmup: int) -> None:
        """Make the calls of ``turn`` again and again: ``warmup`` times, which do not count, then ``rounds`` times.

        Several calls with the same turn add up.
        """
        kept, self._laps = self._laps, {}
        for _ in range(warmup):
            turn(self)
        if self._on_gpu:  # an event is made when it is first recorded
            self._spare = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(self._laps) + 1)]
            for event in self._spare:
                event.record()
        self._laps = kept
        self._last = self._mark()
        for _ in range(rounds):
            turn(self)
        if self._on_gpu:
            self._measure_as_a_whole(turn, rounds)

    def _measure_as_a_whole(self, turn: Callable[[Eager], None], rounds: int) -> None:
        batch = max(_LEAST_TURNS, -(-rounds // _BATCHES))
        self._pass = _Pass.HOST
        for _ in range(rounds):
            turn(self)
        self._pass = _Pass.WHOLE
        ends = [self._mark()]
        for _ in range(_BATCHES):
            for _ in range(batch):
                turn(self)
            ends.append(self._mark())
        self._pass = _Pass.ENDS
        for name, laps in self._laps.items():
            if name in self._together or len(self._laps) == 1:
                laps.whole += [(*pair, batch) for pair in pairwise(ends)]

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Return ``function()``; keep its times under ``name``."""
        if self._pass is _Pass.WHOLE:
            return function()
        kernel_ns, started = _core.host_kernel_ns(), self._clock()
        result = function()
        host_ns = self._clock() - started
        kernel_ns = _core.host_kernel_ns() - kernel_ns
        before = self._last
        if self._pass is _Pass.ENDS:
            self._last = self._mark()
        enqueue_us = (host_ns - kernel_ns) / 1e3
        self._enqueued_us += enqueue_us
        self._keep(name, enqueue_us, kernel_ns > 0, before)
        return result

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Keep the calls made inside, which are a whole turn, as one, too, under ``name``."""
        self._together.add(name)
        before, enqueued_us, kernel_ns = self._last, self._enqueued_us, _core.host_kernel_ns()
        yield
        if self._pass is not _Pass.WHOLE:
            self._keep(name, self._enqueued_us - enqueued_us, _core.host_kernel_ns() > kernel_ns, before)

    def _keep(self, name: str, enqueue_us: float, ran_on_host: bool, before: Any) -> None:
        laps = self._laps.setdefault(name, _Laps())
        if self._pass is _Pass.HOST or (ran_on_host and not self._on_gpu):
            laps.enqueue_us.append(enqueue_us)
        if self._pass is _Pass.ENDS:
            laps.apart.append((before, self._last, 1))

    def slowest(self, group: Any) -> dict[str, Times]:
        """Return the times of every name. Collective over ``group``; every rank made the same calls."""
        if self._on_gpu:
            torch.cuda.synchronize()
        mine = {
            name: (laps.enqueue_us, [self._between_us(*ends) for ends in laps.whole or laps.apart])
            for name, laps in self._laps.items()
        }
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(of_ranks, mine, group=group)
        found = {}
        for name in mine:
            enqueue_us, eager_us = (slowest_rank([of[name][kind] for of in of_ranks]) for kind in (0, 1))
            found[name] = Times(
                statistics.median(enqueue_us) if enqueue_us else None, statistics.median(eager_us)
            )
        return found

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_us(self, before: Any, after: Any, calls: int) -> float:
        us = before.elapsed_time(after) * 1e3 if self._on_gpu else (after - before) / 1e3
        return float(us) / calls


def add_times(row: Row, mine: Times | None, of_peers: dict[str, Times]) -> None:
    """Add Weft's times to a row's columns, and those of the peers as ``<peer>_enqueue_us`` and ``<peer>_eager_us``."""
    of_all = {"": mine, **{f"{peer}_": times for peer, times in of_peers.items()}}
    for prefix, times in of_all.items():
        if times is None:
            continue
        if times.enqueue_us is not None:
            row.extra[f"{prefix}enqueue_us"] = round(times.enqueue_us, 3)
        row.extra[f"{prefix}eager_us"] = round(times.eager_us, 3)


def time_columns(rows: list[Row]) -> list[str]:
    """Return the columns that add_times() made, for the table; Weft's first."""
    found = dict.fromkeys(
        name for row in rows for name in row.extra if name.endswith(("enqueue_us", "eager_us"))
    )
    return sorted(found, key=lambda name: name not in ("enqueue_us", "eager_us"))
