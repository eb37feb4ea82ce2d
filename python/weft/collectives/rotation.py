# SPDX-License-Identifier: Apache-2.0
"""Rotational programs: rank r does what rank 0 does, with every rank and chunk rotated by r.

    rotation = rotation_of(AllGather(1000))           # None: the ranks of this contract are not alike
    rotation.index("o", 3, 5)                        # rank 0's o[3] is what o[8] is to rank 5

What holds for rank 0 of such a program holds for all, so it is compiled and verified once (compiler, verifier).
"""

from __future__ import annotations

import dataclasses

from weft.collectives.contract import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Buffer,
    Collective,
    ReduceScatter,
    SendRecv,
)
from weft.collectives.values import Chunk, Value


@dataclasses.dataclass(frozen=True)
class Area:
    """Chunks of a buffer, from ``first`` to before ``end``; ``part`` belong to each rank, 0: they do not rotate."""

    first: int
    end: int
    part: int

    def moved(self, index: int, by: int) -> int:
        if not self.part:
            return index
        return (index - self.first + by * self.part) % (self.end - self.first) + self.first

    def keeps_together(self, index: int, count: int) -> bool:
        """Return whether chunks that follow each other do so on every rank."""
        return not self.part or (index - self.first) % self.part + count <= self.part


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which chunk of rank r stands for which of rank 0. Chunks in no area do not rotate."""

    ranks: int
    areas: dict[str, list[Area]]

    def index(self, buffer: str, index: int, by: int) -> int:
        """Return what chunk ``index`` of a rank is called on the rank ``by`` further on."""
        area = self.area(buffer, index) if by else None
        return area.moved(index, by) if area else index

    def keeps_together(self, buffer: str, index: int, count: int) -> bool:
        """Return whether ``count`` chunks from ``index`` follow each other on every rank."""
        if count == 1:
            return True
        areas = [self.area(buffer, at) for at in (index, index + count - 1)]
        return areas[0] is areas[1] and (areas[0] is None or areas[0].keeps_together(index, count))

    def value(self, value: Value, by: int) -> Value:
        """Return what the rank ``by`` further on holds where a rank holds ``value``."""
        if by % self.ranks == 0:
            return value
        area, ranks = self.areas[Buffer.input][0], self.ranks
        if area.part:
            step, end = by * area.part, area.end
            parts = [((rank + by) % ranks, (index + step) % end) for rank, index in value.parts]
        else:
            parts = [((rank + by) % ranks, index) for rank, index in value.parts]
        if isinstance(value, Chunk):
            meant = (value.dst_rank + by) % self.ranks if value.dst_rank >= 0 else -1
            return Chunk(*parts[0], meant, self.index(Buffer.output, value.dst_index, by))
        return Value(tuple(sorted(parts)))

    def with_scratch(self, areas: list[Area]) -> Rotation:
        return dataclasses.replace(self, areas={**self.areas, Buffer.scratch: areas})

    def scaled(self, instances: int, scratch_chunks: int) -> Rotation:
        """Return the rotation of interleaved instances, whose scratch follows that of the instance before."""
        users = {
            name: [Area(a.first * instances, a.end * instances, a.part * instances) for a in areas]
            for name, areas in self.areas.items()
        }
        shifts = [number * scratch_chunks for number in range(instances)]
        own = self.areas.get(Buffer.scratch, [])
        users[Buffer.scratch] = [Area(a.first + by, a.end + by, a.part) for by in shifts for a in own]
        return dataclasses.replace(self, areas=users)

    def area(self, buffer: str, index: int) -> Area | None:
        """Return the area that a chunk is in, if any."""
        for area in self.areas.get(buffer, ()):
            if area.first <= index < area.end:
                return area
        return None


def rotation_of(contract: Collective) -> Rotation | None:
    """Return how the ranks of a contract are alike; None where they are not, or where it is not stated.

    AllReduce of a multiple of the ranks' chunks gives every rank as many, and moves them on with the ranks.
    """
    kind = type(contract)
    ranks, factor, chunks = contract.num_ranks, contract.chunk_factor, contract.chunks
    own = Area(0, factor, 0)
    of_all = Area(0, ranks * factor, factor)
    shared = Area(0, chunks, chunks // ranks if chunks % ranks == 0 else 0)
    known = {
        AllReduce: (shared, shared),
        AllGather: (own, of_all),
        ReduceScatter: (of_all, own),
        AllToAll: (of_all, of_all),
        AllToAllV: (of_all, of_all),
        SendRecv: (own, own),
    }
    if kind not in known:
        return None
    inputs, outputs = known[kind]
    return Rotation(ranks, {Buffer.input: [inputs], Buffer.output: [outputs]})
