# SPDX-License-Identifier: Apache-2.0
"""Where the time of calls goes: ``weft bench moe --trace FILE``.

After the measured samples a few more are taken of every call, and what the kernels noted of them is gathered
(Buffer.take_trace). Spans of one sample lie side by side over all ranks: on the CPU by the clock that ranks
share, on GPUs, whose clocks differ, by the end of the call's first exchange, which all ranks reach within about
a microsecond. The picture is Chrome's trace format: open it at https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from weft.moe.trace import Span
from weft.runtime.files import write_file
from weft.runtime.tables import Column, Table

SPANS_PER_BUFFER = 1 << 18
TRACED_SAMPLES = 5
_GAP_NS = 20_000  # between calls in the picture
WAIT = "wait "  # how the names of spans begin that are waits


@dataclass(frozen=True)
class TracedCall:
    """The trace of one call on one rank.

    lined_up_ns: by the same clock as the spans on the CPU: since when the rank was free to make the call.
    core_wait_us: how long its threads, together, waited for a core since then; None where nobody knows.
    """

    name: str
    spans: list[Span]
    num_dropped: int
    lined_up_ns: int = 0
    core_wait_us: float | None = None

    def began_ns(self) -> int:
        """Return when its first span began."""
        return min((span.begin_ns for span in self.spans), default=0)

    def ended_ns(self) -> int:
        """Return when its last span ended."""
        return max((span.end_ns for span in self.spans), default=0)

    def met_ns(self) -> int:
        """Return when its first exchange with all peers was over."""
        waits = [span for span in self.spans if span.name.startswith(WAIT)]
        first = min(waits, key=lambda span: span.end_ns, default=None)
        return max((s.end_ns for s in waits if first and s.name == first.name), default=self.began_ns())


class Tracer:
    """Takes what one rank's kernels note of each call. One per rank; not collective."""

    def __init__(self, buffer: Any, on_gpu: bool) -> None:
        self._buffer = buffer
        self._on_gpu = on_gpu
        self.calls: list[TracedCall] = []
        buffer.take_trace()
        self.line_up()

    def line_up(self) -> None:
        """Note that this rank is free to make its next call."""
        self._lined_up_ns = time.monotonic_ns()
        self._core_wait_us = self._core_wait_so_far_us()

    def traced(self, name: str, call: Callable[[], Any]) -> Any:
        """Return ``call()``, and keep what was noted meanwhile under ``name``."""
        result = call()
        trace = self._buffer.take_trace()
        before_us, now_us = self._core_wait_us, self._core_wait_so_far_us()
        waited_us = None if before_us is None or now_us is None else max(now_us - before_us, 0.0)
        self.calls.append(TracedCall(name, trace.spans, trace.num_dropped, self._lined_up_ns, waited_us))
        self.line_up()
        return result

    def _core_wait_so_far_us(self) -> float | None:
        """Return how long threads of this process were ready to run and did not: for kernels on the CPU."""
        if self._on_gpu:
            return None
        try:
            files = list(Path("/proc/self/task").glob("*/schedstat"))
            return sum(int(file.read_text().split()[1]) for file in files) / 1e3 if files else None
        except (OSError, ValueError, IndexError):  # a thread that ended meanwhile, or another kernel's format
            return None


CallsOfRanks = list[list[TracedCall]]  # [rank][call]; all ranks made the same calls


def write_chrome(path: Path, of_ranks: CallsOfRanks, clock_is_shared: bool) -> None:
    """Write all spans as a Chrome trace: a process per rank, a thread per warp, calls one after the other."""
    events = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in range(len(of_ranks))
    ]
    start_ns = 0
    for same in zip(*of_ranks, strict=True):
        zeros = _zeros(list(same), clock_is_shared)
        for rank, (call, zero_ns) in enumerate(zip(same, zeros, strict=True)):
            events += [_event(rank, span, start_ns - zero_ns) for span in call.spans]
        start_ns += max(call.ended_ns() - zero for call, zero in zip(same, zeros, strict=True)) + _GAP_NS
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _zeros(same: list[TracedCall], clock_is_shared: bool) -> list[int]:
    """Return, per rank, what its clock shows at the start of one call's picture."""
    if clock_is_shared:
        return [min(call.began_ns() for call in same)] * len(same)
    lead_ns = max(call.met_ns() - call.began_ns() for call in same)
    return [call.met_ns() - lead_ns for call in same]


def _event(rank: int, span: Span, shift_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": rank,
        "tid": span.block * 64 + span.warp,
        "ts": (span.begin_ns + shift_ns) / 1e3,
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "args": {"block": span.block, "warp": span.warp, "peer": span.peer},
    }


def print_phases(console: Console, of_ranks: CallsOfRanks) -> None:
    """Print, for every call and kind of span: how many, how long, from when to when; means over samples."""
    numbers = ("spans", "warps", "us each", "us per warp", "first at us", "last until us")
    columns = [Column("call", is_key=True), Column("span", is_key=True, never_folds=True)]
    columns += [Column(head, is_number=True) for head in numbers]
    table = Table("where the time goes (per sample, mean over samples and ranks)", columns)
    last = ""
    for (call, span), cells in _phases(of_ranks):
        table.add(call if call != last else "", span, *cells)
        last = call
    table.print(console)
    dropped = sum(call.num_dropped for calls in of_ranks for call in calls)
    if dropped:
        console.print(f"  {dropped} spans were dropped: set WEFT_TRACE_SPANS higher", highlight=False)


def _phases(of_ranks: CallsOfRanks) -> Iterator[tuple[tuple[str, str], list[str]]]:
    grouped: dict[tuple[str, str], list[tuple[int, list[Span]]]] = defaultdict(list)
    for call in (call for calls in of_ranks for call in calls):
        by_name = defaultdict(list)
        for span in call.spans:
            by_name[span.name].append(span)
        for name, spans in by_name.items():
            grouped[call.name, name].append((call.began_ns(), spans))
    for key, samples in grouped.items():
        lengths = [[span.end_ns - span.begin_ns for span in spans] for _, spans in samples]
        warps = [len({(span.block, span.warp) for span in spans}) for _, spans in samples]
        yield (
            key,
            [
                f"{_mean(len(of_sample) for of_sample in lengths):.0f}",
                f"{_mean(warps):.0f}",
                f"{_mean(ns for of_sample in lengths for ns in of_sample) / 1e3:.1f}",
                f"{_mean(sum(ns) / n for ns, n in zip(lengths, warps, strict=True)) / 1e3:.1f}",
                f"{_mean(min(s.begin_ns for s in spans) - zero for zero, spans in samples) / 1e3:.1f}",
                f"{_mean(max(s.end_ns for s in spans) - zero for zero, spans in samples) / 1e3:.1f}",
            ],
        )


def _mean(values: Any) -> float:
    return statistics.fmean(values)
