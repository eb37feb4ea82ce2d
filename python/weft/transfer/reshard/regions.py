# SPDX-License-Identifier: Apache-2.0
"""Boxes of many tensors intersected with boxes of many tensors, by sorting, not by all pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.transfer.reshard.layout import DIMS, Ints


@dataclass(frozen=True)
class Regions:
    """Boxes of elements, whoever holds them. Those of region i are ``boxes[first[i] : first[i + 1]]``, by rank.

    Attributes:
        tensor: int64[n], in ascending order.
        start, stop: int64[n, 4].
        first: int64[n + 1].
        boxes: rows of a layout's boxes.
    """

    tensor: Ints
    start: Ints
    stop: Ints
    first: Ints
    boxes: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def volume(self) -> Ints:
        """int64[n]: elements of each."""
        return np.asarray(np.prod(self.stop - self.start, axis=1), np.int64)

    @property
    def count(self) -> Ints:
        """int64[n]: how many boxes hold each."""
        return np.diff(self.first)


def regions_of(tensor: Ints, start: Ints, stop: Ints, boxes: Ints) -> Regions:
    """Return the different regions among rows; ``boxes`` are what each row stands for, kept in the rows' order."""
    order = np.lexsort((*stop.T[::-1], *start.T[::-1], tensor))
    tensor, start, stop = tensor[order], start[order], stop[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (
        (tensor[1:] != tensor[:-1])
        | (start[1:] != start[:-1]).any(axis=1)
        | (stop[1:] != stop[:-1]).any(axis=1)
    )
    first = np.append(np.flatnonzero(is_new), len(order))
    return Regions(tensor[is_new], start[is_new], stop[is_new], first, boxes[order])


def ranges(first: Ints, count: Ints) -> Ints:
    """Return first[0], first[0] + 1, ... ``count[0]`` of them, then those of the next."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(first - (ends - count), count), np.int64)


def overlaps(a: Regions, b: Regions) -> tuple[Ints, Ints]:
    """Return all pairs of a region of ``a`` and one of ``b`` that have elements in common, by the latter."""
    if not len(a) or not len(b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    tensors = int(max(a.tensor[-1], b.tensor[-1])) + 1
    sweep = _sweep_dimension(a, tensors)
    extent = np.zeros(tensors, np.int64)
    for side in (a, b):
        np.maximum.at(extent, side.tensor, side.stop[np.arange(len(side)), sweep[side.tensor]])
    base = np.cumsum(extent + 1) - (extent + 1)  # tensors stand one after another on one line
    a_low, a_high = _on_line(a, sweep, base)
    b_low, b_high = _on_line(b, sweep, base)
    order = np.argsort(a_low, kind="stable")
    # The first that can reach up to b's begin, and the first that begins at b's end or behind it.
    begin = np.searchsorted(np.maximum.accumulate(a_high[order]), b_low, "right")
    end = np.searchsorted(a_low[order], b_high, "left")
    count = np.maximum(end - begin, 0)
    of_a, of_b = order[ranges(begin, count)], np.repeat(np.arange(len(b)), count)
    meet = np.ones(len(of_a), bool)
    for dim in range(DIMS):
        meet &= a.start[of_a, dim] < b.stop[of_b, dim]
        meet &= b.start[of_b, dim] < a.stop[of_a, dim]
    return of_a[meet], of_b[meet]


def _on_line(side: Regions, sweep: Ints, base: Ints) -> tuple[Ints, Ints]:
    rows, dims, begin = np.arange(len(side)), sweep[side.tensor], base[side.tensor]
    return begin + side.start[rows, dims], begin + side.stop[rows, dims]


def _sweep_dimension(side: Regions, tensors: int) -> Ints:
    """Return, for each tensor, the dimension in which regions begin at the most places."""
    places = []
    for dim in range(DIMS):
        width = int(side.stop[:, dim].max()) + 1
        begins = np.unique(side.tensor * width + side.start[:, dim])
        places.append(np.bincount(begins // width, minlength=tensors))
    return np.asarray(np.argmax(places, axis=0), np.int64)


def cells_of(regions: Regions) -> Regions:
    """Return regions that do not overlap: where some do, those of their tensor are cut at all their edges."""
    of_a, of_b = overlaps(regions, regions)
    crossed = np.unique(regions.tensor[of_a[of_a != of_b]])
    if not len(crossed):
        return regions
    is_crossed = np.isin(regions.tensor, crossed)
    whole = ranges(regions.first[:-1][~is_crossed], regions.count[~is_crossed])
    kept = np.repeat(np.flatnonzero(~is_crossed), regions.count[~is_crossed])
    rows = [(regions.tensor[kept], regions.start[kept], regions.stop[kept], regions.boxes[whole])]
    bounds = np.searchsorted(regions.tensor, [crossed, crossed + 1])
    for begin, end in bounds.T:
        rows += [_cut(regions, row, _edges(regions, begin, end)) for row in range(begin, end)]
    tensor, start, stop, boxes = (np.concatenate(column) for column in zip(*rows, strict=True))
    return regions_of(tensor, start, stop, boxes)


def _edges(regions: Regions, begin: int, end: int) -> list[Ints]:
    both = np.concatenate([regions.start[begin:end], regions.stop[begin:end]])
    return [np.unique(both[:, dim]) for dim in range(DIMS)]


def _cut(regions: Regions, row: int, edges: list[Ints]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return rows for what the edges make of a region: tensor, start, stop, box."""
    lows, highs = [], []
    for dim, at in enumerate(edges):
        begin, end = np.searchsorted(at, [regions.start[row, dim], regions.stop[row, dim]])
        lows.append(at[begin:end])
        highs.append(at[begin + 1 : end + 1])
    start = np.stack(np.meshgrid(*lows, indexing="ij"), axis=-1).reshape(-1, DIMS)
    stop = np.stack(np.meshgrid(*highs, indexing="ij"), axis=-1).reshape(-1, DIMS)
    boxes = regions.boxes[regions.first[row] : regions.first[row + 1]]
    cells, holders = len(start), len(boxes)
    return (
        np.full(cells * holders, regions.tensor[row]),
        np.repeat(start, holders, axis=0),
        np.repeat(stop, holders, axis=0),
        np.tile(boxes, cells),
    )
