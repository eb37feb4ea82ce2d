# SPDX-License-Identifier: Apache-2.0
"""What a slot holds, symbolically: the sum of some ranks' original chunks.

    Chunk(0, 3) + Chunk(1, 3)      # rank 0's chunk 3 plus rank 1's chunk 3

A value is a multiset, so a chunk that was added twice differs from one that was added once.
"""

from __future__ import annotations


class Value:
    """An immutable multiset of (rank, chunk index) summands; ``parts`` is sorted."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[tuple[int, int], ...]) -> None:
        self.parts = parts

    @property
    def origin_rank(self) -> int:
        """The rank that the chunk came from; of a sum, the lowest."""
        return self.parts[0][0]

    @property
    def origin_index(self) -> int:
        """The index that the chunk had where it came from; of a sum, that of the lowest rank's."""
        return self.parts[0][1]

    def __add__(self, other: Value) -> Value:
        return Value(tuple(sorted(self.parts + other.parts)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return "+".join(f"C({rank},{index})" for rank, index in self.parts)


class Chunk(Value):
    """Rank ``rank``'s original chunk ``index``. The destination is told to programs that ask, and not compared."""

    __slots__ = ("dst_index", "dst_rank")

    def __init__(self, rank: int, index: int, dst_rank: int = -1, dst_index: int = -1) -> None:
        super().__init__(((rank, index),))
        self.dst_rank = dst_rank
        self.dst_index = dst_index


def total(ranks: int, index: int) -> Value:
    """Return the sum over all ranks of their chunk ``index``."""
    return Value(tuple([(rank, index) for rank in range(ranks)]))


def difference(found: Value | None, wanted: Value) -> str:
    """Say in words how ``found`` differs from ``wanted``."""
    if found is None:
        return f"holds nothing, should hold {wanted!r}"
    missing = _subtract(wanted, found)
    surplus = _subtract(found, wanted)
    parts = [f"holds {found!r}, should hold {wanted!r}"]
    if missing:
        parts.append("missing " + ", ".join(f"C({r},{c})" for r, c in missing))
    if surplus:
        parts.append("too much " + ", ".join(f"C({r},{c})" for r, c in surplus))
    return "; ".join(parts)


def _subtract(left: Value, right: Value) -> list[tuple[int, int]]:
    rest = list(right.parts)
    out = []
    for part in left.parts:
        if part in rest:
            rest.remove(part)
        else:
            out.append(part)
    return out
