# SPDX-License-Identifier: Apache-2.0
"""The numbers in a rank's XML that its ranks and chunks stand for, and the XML of ranks that are alike.

lines = rotated_texts(rotation, lambda numbers: text_of_rank_0(numbers))   # one text for every rank

The text of rank 0 is made once, with places for these numbers, and filled in for each rank: a ring of 1000 ranks has a
million steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from weft.collectives.ir import Span
from weft.collectives.rotation import Rotation


class Numbers:
    """How a text names ranks and chunks: by their numbers."""

    def rank(self, rank: int) -> object:
        return rank

    def index(self, span: Span) -> object:
        return span.index


class _Places(Numbers):
    """Leaves places for them, and keeps what goes there: base, first, end and what is added for every rank."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self.rows: list[tuple[int, int, int, int]] = []

    def rank(self, rank: int) -> object:
        return self._place(rank, 0, self._rotation.ranks, 1) if rank >= 0 else rank

    def index(self, span: Span) -> object:
        area = self._rotation.area(span.buffer, span.index)
        return self._place(span.index, area.first, area.end, area.part) if area and area.part else span.index

    def _place(self, *row: int) -> object:
        base, first, end, step = row
        self.rows.append((base, first, end, step))
        return "%d"


def rotated_texts(rotation: Rotation, text_of_first: Callable[[Numbers], str]) -> Iterator[str]:
    """Yield the text of every rank. ``text_of_first`` makes rank 0's, without any per cent sign of its own."""
    places = _Places(rotation)
    text = text_of_first(places)
    base, first, end, step = np.array(places.rows, np.int64).reshape(-1, 4).T
    for rank in range(rotation.ranks):
        yield text % tuple(((base - first + rank * step) % (end - first) + first).tolist())
