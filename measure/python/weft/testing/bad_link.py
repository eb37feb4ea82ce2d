# SPDX-License-Identifier: Apache-2.0
"""A bad cable: a program that forwards Ethernet frames between two tap devices, late, in another order, twice or not.

    with Machines(2, BadLink(seed=3, delay_ms=1, jitter_ms=2, loss=0.005, reorder=0.02)) as machines:
        ...
    machines.link_reports          # what it did to frames, one Report for each cable

The devices are in two network namespaces, the ends of the cable. Each direction is a link of its own: its frames' fates
are drawn from the seed, one after the other. Machines starts it as ``python bad_link.py '{"ends": ..., "link": ...}'``,
with nothing but the standard library. It prints ``ready``, and at SIGTERM its Report. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_TUN = "/dev/net/tun"
_SET_INTERFACE, _TAP, _NO_PREFIX = 0x400454CA, 0x0002, 0x1000  # TUNSETIFF, IFF_TAP, IFF_NO_PI
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FRAME_BYTES = 65536
_FRAMES_AT_ONCE = 64  # of one end, before the other is looked at


@dataclass(frozen=True)
class BadLink:
    """The faults of a cable. Shares are of frames, 0 to 1; times are of each direction.

    seed: of all that is drawn.
    delay_ms, jitter_ms: every frame is late by the first and by up to the second; that alone keeps their order.
    reorder, overtake_ms: so many are later still, by up to so much, and overtaken by what follows.
    duplicate, loss: so many come twice, or never.
    rate_mbit: bits in a microsecond; 0: no limit. A frame that would wait longer than ``queue_ms`` for its turn is
    lost.
    cut_every_s, cut_s: from time to time nothing passes for so long; 0: never.
    """

    seed: int = 0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    reorder: float = 0.0
    overtake_ms: float = 5.0
    duplicate: float = 0.0
    loss: float = 0.0
    rate_mbit: float = 0.0
    queue_ms: float = 100.0
    cut_every_s: float = 0.0
    cut_s: float = 0.0


@dataclass
class Report:
    """How many frames a cable, or one direction of it, was given, and what became of them."""

    frames: int = 0
    lost: int = 0  # by chance
    doubled: int = 0
    overtaken: int = 0
    crowded_out: int = 0  # by its rate
    cut: int = 0  # by a cut, or an end that was down

    def add(self, other: Report) -> None:
        """Add another's numbers."""
        for name, count in dataclasses.asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class Fate:
    """The fate of one frame: when its copies arrive, in seconds after it was sent; none if it is lost."""

    copies: tuple[float, ...]
    is_overtaken: bool = False


def fates(link: BadLink, direction: int) -> Iterator[Fate]:
    """Yield the fates of a direction's frames, in order; the same for the same seed. Rate and cuts are not in them."""
    draw = random.Random(f"{link.seed}/{direction}")
    while True:
        is_lost, is_double = draw.random() < link.loss, draw.random() < link.duplicate
        is_overtaken = draw.random() < link.reorder
        late_ms = link.delay_ms + draw.random() * link.jitter_ms
        more_ms = draw.random() * link.overtake_ms
        if is_lost:
            yield Fate(())
            continue
        first = (late_ms + (more_ms if is_overtaken else 0)) * 1e-3
        copies = (first, (late_ms + more_ms) * 1e-3) if is_double else (first,)
        yield Fate(copies, is_overtaken)


@dataclass
class Direction:
    """One direction: takes frames from one end and says when they are to leave by the other."""

    link: BadLink
    number: int
    report: Report = field(default_factory=Report)
    free_at: float = 0.0  # the link
    last_at: float = 0.0  # the last frame that was in order leaves
    _fates: Iterator[Fate] = field(init=False)

    def __post_init__(self) -> None:
        self._fates = fates(self.link, self.number)

    def take(self, now: float, nbytes: int) -> list[float]:
        """Return when copies of a frame that came now are to leave."""
        self.report.frames += 1
        fate = next(self._fates)
        if self._is_cut(now):
            self.report.cut += 1
            return []
        start = max(now, self.free_at)
        if start - now > self.link.queue_ms * 1e-3:
            self.report.crowded_out += 1
            return []
        if self.link.rate_mbit:
            start += nbytes * 8 / (self.link.rate_mbit * 1e6)
            self.free_at = start
        if not fate.copies:
            self.report.lost += 1
            return []
        first, *second = (start + late for late in fate.copies)
        if fate.is_overtaken:
            self.report.overtaken += 1
        else:
            first = self.last_at = max(first, self.last_at)
        self.report.doubled += len(second)
        return [first, *second]

    def _is_cut(self, now: float) -> bool:
        return self.link.cut_every_s > 0 and now % self.link.cut_every_s < self.link.cut_s


def open_tap(namespace: str, name: str) -> int:
    """Make a tap device in a namespace and return its descriptor; the device lives as long as that. Raises: OSError."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    inside = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(inside)
        tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_PREFIX))
        return tap
    finally:
        _enter(home)
        os.close(home)
        os.close(inside)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def forward(ends: tuple[int, int], link: BadLink) -> Report:
    """Forward frames between two taps until SIGTERM; return what became of them."""
    directions = (Direction(link, 0), Direction(link, 1))
    waiting: list[tuple[float, int, int, bytes]] = []  # when, number, the end by which it leaves, frame
    is_over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: is_over.append(number))
    number = 0
    while not is_over:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            try:
                os.write(ends[end], frame)
            except OSError:  # that end is down, or its queue full
                directions[1 - end].report.cut += 1
        left_s = waiting[0][0] - now if waiting else 0.2
        ready, _, _ = select.select(ends, [], [], min(max(left_s, 0.0), 0.2))
        for tap in ready:
            came = ends.index(tap)
            for _ in range(_FRAMES_AT_ONCE):
                try:
                    frame = os.read(tap, _FRAME_BYTES)
                except OSError:  # nothing more, or the end is down
                    break
                for at in directions[came].take(time.monotonic(), len(frame)):
                    number += 1
                    heapq.heappush(waiting, (at, number, 1 - came, frame))
    report = directions[0].report
    report.add(directions[1].report)
    return report


def main() -> None:
    """Be the cable that the argument describes."""
    settings = json.loads(sys.argv[1])
    taps = [open_tap(namespace, name) for namespace, name in settings["ends"]]
    print("ready", flush=True)
    report = forward((taps[0], taps[1]), BadLink(**settings["link"]))
    print(json.dumps(dataclasses.asdict(report)), flush=True)


if __name__ == "__main__":
    main()
