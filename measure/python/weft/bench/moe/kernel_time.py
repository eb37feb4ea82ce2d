# SPDX-License-Identifier: Apache-2.0
"""How long Weft's kernels themselves run, by stamps that they take: ``kernel_us``, beside a graph's time by events.

A graph's events contain some microseconds of the graph itself. So a second buffer of the same run has kernels compiled
to note when each block began and ended, and nothing else; the buffer that is timed by events
has none of that. A call's time is that from the first block's start to the last one's end, on each rank by its own
clock; the slowest rank counts. Of calls in a row each kernel is found by itself: no block of one starts before all of
the one before have ended.

The kernels of other libraries take no stamps. torch's profiler says when they began and ended (``profiled_times``).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from weft import _core
from weft.bench.moe.clock import Bench
from weft.bench.report import Row, slowest_rank

SAMPLES = 20
_SPANS = "100000"
_NAME = "WEFT_TRACE_SPANS"
_MARK = "spin_kernel"  # what torch.cuda._sleep() launches
Call = Callable[[], Any]


@contextmanager
def noting_blocks() -> Iterator[None]:
    """Let buffers that are made inside have kernels that note when their blocks began and ended."""
    before = os.environ.get(_NAME)
    os.environ[_NAME] = _SPANS
    _core.config_reload()
    _core.trace_blocks_only(True)
    try:
        yield
    finally:
        _core.trace_blocks_only(False)
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before
        _core.config_reload()


def is_possible(bench: Bench) -> bool:
    """Return whether this run has kernels' times: not beside a trace of everything."""
    return not bench.options.trace


def spans_of(bench: Bench, buffer: Any, call: Call) -> list[Any]:
    """Return the spans that one call leaves in the buffer's trace, all ranks starting together. Collective."""
    bench.line_up()
    buffer.take_trace()
    bench.line_up()
    call()
    spans: list[Any] = buffer.take_trace().spans
    return spans


def kernel_times(bench: Bench, buffer: Any, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Return each call's samples in microseconds, of the slowest rank. Collective.

    Args:
        buffer: made inside noting_blocks(), of which the calls are. calls: made one after the other in each sample.
    """
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(SAMPLES):
        for name, call in calls.items():
            if spans := spans_of(bench, buffer, call):
                mine[name].append(_us(min(s.begin_ns for s in spans), max(s.end_ns for s in spans)))
    return _slowest(bench, mine)


def kernels_in_a_row(bench: Bench, buffer: Any, call: Call, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the samples of the kernels that one call starts again and again in the order of ``names``. Collective."""
    mine: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(max(SAMPLES // 5, 1)):
        bench.line_up()
        buffer.take_trace()
        bench.line_up()
        call()
        kernels = launches_of(buffer.take_trace().spans)
        for at, kernel in enumerate(kernels[len(names) :]):  # ranks meet in the first ones
            mine[names[at % len(names)]].append(_us(*kernel))
    return _slowest(bench, mine)


def times_of_others(
    bench: Bench, names: Iterable[str], calls_by_row: Callable[[str], dict[str, Call]]
) -> dict[str, dict[str, list[float]]]:
    """Return profiled_times() of each buffer that is not Weft's, by its name. Collective."""
    return {name: profiled_times(bench, calls_by_row(name)) for name in names if name != "weft"}


def profiled_times(bench: Bench, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Return each call's samples in microseconds, of the slowest rank, by torch's profiler. Collective.

    From the start of the first kernel, copy or memset that a call brings to its GPU, to the end of the last one.
    {} where the profiler lost some.
    """
    for call in calls.values():
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(SAMPLES):
            for call in calls.values():
                bench.line_up()
                torch.cuda._sleep(1)
                call()
                torch.cuda._sleep(1)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    ran = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    spans = spans_between_marks(ran)
    names = list(calls)
    mine = {name: [end - begin for begin, end in spans[at :: len(names)]] for at, name in enumerate(names)}
    return _slowest(bench, mine if len(spans) == SAMPLES * len(names) else {})


def spans_between_marks(ran: list[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Return when what ran between the marks of each pair began and ended, given names, starts and ends."""
    found: list[tuple[float, float]] = []
    marks = 0
    inside: list[tuple[float, float]] = []
    for name, begin, end in sorted(ran, key=lambda one: one[1]):
        if _MARK in name:
            marks += 1
            if inside:
                found.append((inside[0][0], max(end for _, end in inside)))
            inside = []
        elif marks % 2:
            inside.append((begin, end))
    return found


def launches_of(spans: list[Any]) -> list[tuple[int, int]]:
    """Return when each kernel began and ended, given spans of their blocks, in order."""
    found: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.begin_ns):
        if found and span.begin_ns < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_ns))
        else:
            found.append((span.begin_ns, span.end_ns))
    return found


def add_kernel_times(
    rows: list[Row], times: dict[str, list[float]], others: dict[str, dict[str, list[float]]]
) -> None:
    """Add ``kernel_us`` to the row of each call, by the names of rows; and of a call in a row ``kernel_warm_us``.

    ``others``: what other libraries took, by their names: ``deep_ep_kernel_us``.
    """
    for row in rows:
        for library, theirs in others.items():
            if theirs.get(row.call):
                row.extra[f"{library}_kernel_us"] = round(statistics.median(theirs[row.call]), 3)
        for column, name in (("kernel_us", row.call), ("kernel_warm_us", f"{row.call} in a row")):
            if times.get(name):
                row.extra[column] = round(statistics.median(times[name]), 3)
        if row.call == "ht_dispatch" and times.get("cached"):
            row.extra["cached_kernel_us"] = round(statistics.median(times["cached"]), 3)


def _us(begin_ns: int, end_ns: int) -> float:
    return (end_ns - begin_ns) / 1e3


def _slowest(bench: Bench, mine: dict[str, list[float]]) -> dict[str, list[float]]:
    of_ranks: list[Any] = [None] * bench.me.size
    torch.distributed.all_gather_object(of_ranks, mine, group=bench.me.group)
    names = [name for name in of_ranks[0] if all(name in of_rank for of_rank in of_ranks)]
    return {name: slowest_rank([of_rank[name] for of_rank in of_ranks]) for name in names}
