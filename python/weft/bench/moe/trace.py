# SPDX-License-Identifier: Apache-2.0
"""Where the time of calls goes: ``weft bench moe --trace FILE`` and ``--straggler``.

After the measured samples a few more are taken of every call, and what the kernels noted of them is gathered
(Buffer.take_trace). Spans of one sample lie side by side over all ranks: on the CPU by the clock that ranks
share, on GPUs, whose clocks differ, by the end of the call's first exchange, which all ranks reach within about
a microsecond. The picture is Chrome's trace format: open it at https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.moe.trace import Span

SPANS_PER_BUFFER = 1 << 18
TRACED_SAMPLES = 5
_GAP_NS = 20_000  # between calls in the picture
_WAIT = "wait "
# A rank is slow when others wait for it by this much longer than for the others, and by this share of the call.
_SLOW_US = 5.0
_SLOW_SHARE = 0.2


@dataclass(frozen=True)
class TracedCall:
    """What one rank noted of one call."""

    name: str
    spans: list[Span]
    num_dropped: int

    def began_ns(self) -> int:
        """Return when its first span began."""
        return min((span.begin_ns for span in self.spans), default=0)

    def ended_ns(self) -> int:
        """Return when its last span ended."""
        return max((span.end_ns for span in self.spans), default=0)

    def met_ns(self) -> int:
        """Return when its first exchange with all peers was over."""
        waits = [span for span in self.spans if span.name.startswith(_WAIT)]
        first = min(waits, key=lambda span: span.end_ns, default=None)
        return max((s.end_ns for s in waits if first and s.name == first.name), default=self.began_ns())


class Tracer:
    """Takes what one rank's kernels note of each call. One per rank; not collective."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.calls: list[TracedCall] = []
        buffer.take_trace()

    def traced(self, name: str, call: Callable[[], Any]) -> Any:
        """Return ``call()``, and keep what was noted meanwhile under ``name``."""
        result = call()
        trace = self._buffer.take_trace()
        self.calls.append(TracedCall(name, trace.spans, trace.num_dropped))
        return result


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
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


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
    table = Table(title="where the time goes (per sample, mean over samples and ranks)")
    for column in ("call", "span"):
        table.add_column(column)
    for column in ("spans", "warps", "us each", "us per warp", "first at us", "last until us"):
        table.add_column(column, justify="right")
    last = ""
    for (call, span), cells in _phases(of_ranks):
        table.add_row(call if call != last else "", span, *cells)
        last = call
    console.print(table)
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


def straggler_lines(of_ranks: CallsOfRanks) -> list[str]:
    """Say, for every call, how much longer each rank keeps its peers than they keep it, and which one is slow."""
    lines = []
    for name in dict.fromkeys(call.name for call in of_ranks[0]):
        late_us, call_us = _lateness_us(of_ranks, name)
        told = ", ".join(f"rank {rank} {us:.1f}" for rank, us in enumerate(late_us))
        lines.append(f"{name}: keeps its peers longer than they keep it, us: {told}")
        limit_us = max(_SLOW_US, _SLOW_SHARE * call_us, max(late_us) / 2)
        slow = [rank for rank, us in enumerate(late_us) if us > limit_us]
        lines += [
            f"{name}: rank {rank} is slow: its peers wait {late_us[rank]:.0f} us for it" for rank in slow
        ]
    if not any(" is slow: " in line for line in lines):
        lines.append("no rank is slow")
    return lines


def _lateness_us(of_ranks: CallsOfRanks, name: str) -> tuple[list[float], float]:
    """Return per rank how long it keeps its peers beyond what they keep it, and how long its own calls take."""
    keeps: dict[int, list[float]] = defaultdict(list)
    is_kept: dict[int, list[float]] = defaultdict(list)
    lengths_us = []
    for observer, calls in enumerate(of_ranks):
        for call in (call for call in calls if call.name == name):
            lengths_us.append((call.ended_ns() - call.began_ns()) / 1e3)
            for peer, us in _waited_us(call, observer).items():
                keeps[peer].append(us)
                is_kept[observer].append(us)
    late_us = [_median(keeps[rank]) - _median(is_kept[rank]) for rank in range(len(of_ranks))]
    return [max(us, 0.0) for us in late_us], min(lengths_us)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _waited_us(call: TracedCall, observer: int) -> dict[int, float]:
    """Return the longest wait for each peer."""
    longest: dict[int, float] = defaultdict(float)
    for span in call.spans:
        if span.peer is None or span.peer == observer or not span.name.startswith(_WAIT):
            continue
        longest[span.peer] = max(longest[span.peer], (span.end_ns - span.begin_ns) / 1e3)
    return longest
