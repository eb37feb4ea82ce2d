# SPDX-License-Identifier: Apache-2.0
"""What ``weft bench transfer`` measures: its rows, and what each of them moves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import invalid
from weft.transfer.engine import ANY_RAIL

MIB = 1 << 20
BUFFER_BYTES = 64 * MIB
PAGE_BYTES, PAGES = 4096, 1000
RATE_BYTES = (8, 64, 512, 4096)
RAIL_BYTES = 16 * MIB
LARGE_BYTES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True)
class Load:
    """One row to measure: ``count`` operations of ``nbytes`` per repetition, ``window`` of them under way."""

    call: str
    nbytes: int
    count: int
    window: int
    pool: int = 1  # paged_write: pages are picked out of so many times as many
    rail: int = ANY_RAIL  # of the engine; the raw loop has but one

    @property
    def kind(self) -> str:
        """What the loops in C++ call it."""
        return "write" if self.call == "write_rate" else self.call

    def to_core(self, repeats: int) -> tuple[str, int, int, int, int, int]:
        """Return what both loops in C++ take, in their order."""
        return (self.kind, self.nbytes, self.count, self.window, self.pool, repeats)

    @property
    def moved_bytes(self) -> int:
        """Bytes of one operation."""
        return PAGE_BYTES * PAGES if self.call == "paged_write" else self.nbytes

    @property
    def operations(self) -> int:
        """Operations per repetition, for the time of one."""
        if self.call == "paged_write":
            return 1
        return 2 * self.count if self.call == "write_imm_latency" else self.count


def plan_loads(calls: Sequence[str] | None, quick: bool, rails: int) -> list[Load]:
    """Return the rows to measure, in order. Raises: weft.Error for calls that there are none of.

    With several rails there is a row for each alone, too.
    """
    volume = (8 if quick else 64) * MIB
    large = [Load(call, n, max(volume // n, 1), 16) for call in ("write", "read") for n in LARGE_BYTES]
    loads = [Load("write_imm_latency", n, 200 if quick else 2000, 1) for n in (8, 4096)]
    # Over tcp the speed depends on how the two processes fall into step: long repetitions see all of it.
    loads += [Load("write_rate", n, 1000 if quick else 20000, 64) for n in RATE_BYTES]
    loads += [Load("paged_write", PAGE_BYTES, PAGES, 64, pool) for pool in (1, 4)]
    loads += large
    if rails > 1:
        loads += [Load("write", RAIL_BYTES, max(volume // RAIL_BYTES, 1), 16, rail=i) for i in range(rails)]
    loads += [Load("scatter", n, max(volume // n // 4, 1), 16) for n in (64 << 10, MIB)]
    known = list(dict.fromkeys(load.call for load in loads))
    for call in calls or ():
        if call not in known:
            raise invalid("--calls", call, ", ".join(known))
    return [load for load in loads if not calls or load.call in calls]


def pairs_of(load: Load) -> list[tuple[int, int]]:
    """Return the local and remote offsets that one request of another engine moves."""
    if load.call == "paged_write":
        chance = random.Random(1)
        here, there = (chance.sample(range(load.count * load.pool), load.count) for _ in range(2))
        return [(a * load.nbytes, b * load.nbytes) for a, b in zip(here, there, strict=True)]
    places = max(BUFFER_BYTES // load.nbytes, 1)
    return [(i % places * load.nbytes,) * 2 for i in range(load.count)]
