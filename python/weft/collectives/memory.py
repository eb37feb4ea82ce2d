# SPDX-License-Identifier: Apache-2.0
"""What every slot holds while a program is written, and how often it was written.

Of ranks that are alike (weft.collectives.rotation) rank 0's slots stand for all: what rank r holds in a chunk is what
rank 0 holds in the chunk that stands for it, rotated.
"""

from __future__ import annotations

import dataclasses

from weft.collectives.contract import Collective
from weft.collectives.rotation import Rotation
from weft.collectives.values import Value


@dataclasses.dataclass(frozen=True)
class Place:
    """Consecutive slots of one rank, by their canonical names."""

    rank: int
    buffer: str
    index: int


class Memory:
    """The slots of all ranks, or those of rank 0 where ``rotation`` says what the others hold."""

    def __init__(self, contract: Collective, rotation: Rotation | None = None) -> None:
        self.rotation = rotation
        self.buffers = contract.start().buffers if rotation is None else [contract.start_of_first()]
        self._version: dict[tuple[int, str, int], int] = {}

    def own(self, place: Place) -> Place:
        """Return the place that stands for this one."""
        if self.rotation is None or place.rank == 0:
            return place
        return Place(0, place.buffer, self.rotation.index(place.buffer, place.index, -place.rank))

    def length(self, rank: int, buffer: str) -> int:
        return len(self._of(rank).get(buffer, ()))

    def read(self, place: Place, size: int) -> list[Value | None]:
        """Return what ``size`` slots hold; fewer where the buffer ends before."""
        own = self.own(place)
        found = self._of(own.rank).get(own.buffer, [])[own.index : own.index + size]
        if self.rotation is None or place.rank == 0:
            return found
        return [value and self.rotation.value(value, place.rank) for value in found]

    def write(self, place: Place, values: list[Value]) -> None:
        """Store values and count the write. Scratch grows."""
        own = self.own(place)
        if self.rotation is not None:
            values = [self.rotation.value(value, -place.rank) for value in values]
        slots = self._of(own.rank).setdefault(own.buffer, [])
        end = own.index + len(values)
        if end > len(slots):
            slots.extend([None] * (end - len(slots)))
        slots[own.index : end] = values
        for at in range(own.index, end):
            key = (own.rank, own.buffer, at)
            self._version[key] = self._version.get(key, 0) + 1

    def versions(self, place: Place, size: int) -> list[int]:
        """Return how often each slot was written."""
        own = self.own(place)
        if size == 1:
            return [self._version.get((own.rank, own.buffer, own.index), 0)]
        keys = ((own.rank, own.buffer, own.index + at) for at in range(size))
        return [self._version.get(key, 0) for key in keys]

    def _of(self, rank: int) -> dict[str, list[Value | None]]:
        return self.buffers[0 if self.rotation is not None else rank]
