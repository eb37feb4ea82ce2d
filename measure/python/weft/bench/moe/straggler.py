# SPDX-License-Identifier: Apache-2.0
"""Which rank delays the others: ``weft bench moe --straggler``, from kernels' traces of a few more samples.

A rank is slow when its peers wait for it much longer than it waits for them. On the CPU ranks may have to share
cores; then the rank that gets a core last delays the others without being slow. So there its own time has to be longer
too, in every sample: from when it was free to make the call until the call's end, without its waits for peers and for a
core.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.moe.trace import WAIT, CallsOfRanks, TracedCall

# By how much longer than the others, and by which share of the call, a rank has to be to be called slow.
_SLOW_US = 5.0
_SLOW_SHARE = 0.2


@dataclass(frozen=True)
class _Lateness:
    """Of one kind of call, per rank, us: medians over samples where nothing else is said."""

    late: list[float]  # how much longer it keeps its peers than they keep it
    own_beyond: list[float] | None  # least own time, beyond what the other ranks' is; None on GPUs
    core_wait: list[float] | None  # None on GPUs
    call: float  # the shortest call of any

    def slow_ranks(self) -> list[int]:
        limit_us = max(_SLOW_US, _SLOW_SHARE * self.call)
        slow = [rank for rank, us in enumerate(self.late) if us > max(limit_us, max(self.late) / 2)]
        return [rank for rank in slow if self.own_beyond is None or self.own_beyond[rank] > limit_us]


def straggler_lines(of_ranks: CallsOfRanks) -> list[str]:
    """Say, for every call, how much longer each rank keeps its peers than they keep it, and which one is slow."""
    lines, any_is_slow, most_core_wait_us = [], False, 0.0
    for name in dict.fromkeys(call.name for call in of_ranks[0]):
        seen = _lateness(of_ranks, name)
        lines.append(f"{name}: keeps its peers longer than they keep it, us: {_in_words(seen.late)}")
        slow = seen.slow_ranks()
        lines += [
            f"{name}: rank {rank} is slow: its peers wait {seen.late[rank]:.0f} us for it" for rank in slow
        ]
        any_is_slow = any_is_slow or bool(slow)
        most_core_wait_us = max(most_core_wait_us, *(seen.core_wait or [0.0]))
    if not any_is_slow:
        lines.append("no rank is slow")
    if most_core_wait_us > _SLOW_US:
        lines.append(
            f"ranks share cores here: one waits up to {most_core_wait_us:.0f} us for a core in a call (all its "
            "threads together); whoever gets one last is not called slow"
        )
    return lines


def _lateness(of_ranks: CallsOfRanks, name: str) -> _Lateness:
    keeps: dict[int, list[float]] = defaultdict(list)
    is_kept: dict[int, list[float]] = defaultdict(list)
    same = [[call for call in calls if call.name == name] for calls in of_ranks]
    for observer, calls in enumerate(same):
        for call in calls:
            for peer, us in _waited_us(call, observer).items():
                keeps[peer].append(us)
                is_kept[observer].append(us)
    late = [max(_median(keeps[rank]) - _median(is_kept[rank]), 0.0) for rank in range(len(of_ranks))]
    knows_cores = all(call.core_wait_us is not None for calls in same for call in calls)
    return _Lateness(
        late,
        _own_beyond_us(same) if knows_cores else None,
        [_median([call.core_wait_us or 0.0 for call in calls]) for calls in same] if knows_cores else None,
        min((call.ended_ns() - call.began_ns()) / 1e3 for calls in same for call in calls),
    )


def _waited_us(call: TracedCall, observer: int) -> dict[int, float]:
    """Return the longest wait for each peer."""
    longest: dict[int, float] = defaultdict(float)
    for span in call.spans:
        if span.peer is None or span.peer == observer or not span.name.startswith(WAIT):
            continue
        longest[span.peer] = max(longest[span.peer], (span.end_ns - span.begin_ns) / 1e3)
    return longest


def _own_us(call: TracedCall) -> float:
    """Return what the call took beside waiting for peers, by any warp, and for a core."""
    waiting_ns, reached_ns = 0, call.lined_up_ns
    for span in sorted(call.spans, key=lambda span: span.begin_ns):
        if span.name.startswith(WAIT) and span.end_ns > reached_ns:
            waiting_ns += span.end_ns - max(span.begin_ns, reached_ns)
            reached_ns = span.end_ns
    own_us = (call.ended_ns() - call.lined_up_ns - waiting_ns) / 1e3 - (call.core_wait_us or 0.0)
    return max(own_us, 0.0)


def _own_beyond_us(same: list[list[TracedCall]]) -> list[float]:
    own = [[_own_us(call) for call in calls] for calls in same]
    typical = [_median(of_rank) for of_rank in own]
    others = [_median([*typical[:rank], *typical[rank + 1 :]]) for rank in range(len(own))]
    return [min(of_rank) - beside for of_rank, beside in zip(own, others, strict=True)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _in_words(values: Sequence[float]) -> str:
    return ", ".join(f"rank {rank} {us:.1f}" for rank, us in enumerate(values))
