# SPDX-License-Identifier: Apache-2.0
"""Layouts from rules by name: how a framework cuts, joins, turns and pads its parameters over a mesh of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from weft.errors import Error, invalid, quoted
from weft.transfer.reshard.layout import DIMS, Columns, Ints, Layout, TensorMeta, dense_strides

Coordinates = Callable[[re.Match[str]], "int | Iterable[int]"]


@dataclass(frozen=True)
class Split:
    """A cut over a mesh axis into fewer parts than it has ranks: neighbours hold the same one.

    Args:
        axis: of the mesh.
        parts: how many; the axis has a multiple of it. 8 key heads over 16 ranks: ``Split("tp", 8)``.
    """

    axis: str
    parts: int


@dataclass(frozen=True)
class Rule:
    """Where tensors lie whose whole name matches ``pattern``. Axes of the mesh that it does not name hold copies.

    Args:
        pattern: a regular expression; its groups may be used by ``on``, ``memory`` and ``order``.
        shard: dimension -> the mesh axis, or axes from outer to inner, that cut it into chunks of ceil(n / parts).
        on: mesh axis -> a function of the match that returns the coordinate, or coordinates, where the tensor is: the
            stage of a layer, the ranks of an expert and of its copies.
        memory: name of the memory, with groups as ``\\g<name>``; by default the tensor's own. Tensors of one memory are
            joined along its first dimension: query, key and value, gate and up, the experts of a layer.
        order: a number, or a function of the match that returns a tuple, which sorts the tensors of one memory. Where
            ``groups`` is above 1, tensors that differ in its last number alone are interleaved.
        groups: how many blocks the rows of a rank are cut into, which alternate with those of the other tensors: the
            heads of a fused query, key and value; as many as rows for interleaved gate and up.
        dims: the order of the dimensions in memory, outer to inner: ``(1, 0)`` for a transposed matrix.
        pad: dimension -> the extent that is cut, above the tensor's own: a padded vocabulary.
    """

    pattern: str
    shard: Mapping[int, str | Split | list[str | Split] | tuple[str | Split, ...]] = field(
        default_factory=dict
    )
    on: Mapping[str, Coordinates] = field(default_factory=dict)
    memory: str | None = None
    order: int | Callable[[re.Match[str]], tuple[int, ...]] = 0
    groups: int = 1
    dims: tuple[int, ...] | None = None
    pad: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        try:
            return re.compile(self.pattern)
        except re.error as error:
            raise invalid("pattern", f"{self.pattern!r} ({error})", "a regular expression") from None


@dataclass(frozen=True)
class _Cut:
    """The same cut of equal tensors on the same ranks: rank [n]; start, stop, local (with padding) [n, dims]."""

    rank: Ints
    start: Ints
    stop: Ints
    local: Ints


def layout_by_rules(
    tensors: Mapping[str, TensorMeta],
    mesh: Mapping[str, int],
    rules: Sequence[Rule],
    *,
    tied: Mapping[str, str] | None = None,
) -> Layout:
    """Return the layout that the first matching rule of each tensor gives.

    Args:
        tensors: every tensor by its name. Aliases in ``tied`` need no rule, and get no memory.
        mesh: axis -> size, outer to inner; rank 0 is the first of all axes, rank 1 the next of the last.
        rules: tried in this order.
        tied: names that are other names' tensors.
    Raises: weft.Error naming the tensor that no rule matches, an unknown axis, a dimension that a tensor has not.
    """
    mesh_of = _Mesh(mesh)
    cuts: dict[Any, _Cut] = {}
    placed = _Placed(dict(sorted(tensors.items())))
    for number, (name, meta) in enumerate(placed.tensors.items()):
        if name in (tied or {}):
            continue
        index, rule, match = _first(rules, name)
        on = {axis: _coordinates(find(match)) for axis, find in rule.on.items()}
        key = (index, meta, tuple(on.items()))
        if key not in cuts:
            try:
                cuts[key] = mesh_of.cut(rule, meta, on)
            except Error as error:
                raise Error(f"{error}; of {name!r}, by the rule {rule.pattern!r}", error.code) from None
        memory = name if rule.memory is None else match.expand(rule.memory)
        order = rule.order(match) if callable(rule.order) else (rule.order,)
        placed.add(number, cuts[key], rule, meta, memory, order)
    return Layout(placed.tensors, placed.columns(), placed.memory_names(), dict(tied or {}))


def _first(rules: Sequence[Rule], name: str) -> tuple[int, Rule, re.Match[str]]:
    for index, rule in enumerate(rules):
        if match := rule.compiled.fullmatch(name):
            return index, rule, match
    raise invalid("rules", f"none for {name!r}", "a rule that matches every tensor")


def _coordinates(given: int | Iterable[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


class _Mesh:
    def __init__(self, axes: Mapping[str, int]) -> None:
        for axis, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise invalid("mesh", f"{axis!r}: {quoted(size)}", "sizes of 1 or more")
        self.axes = dict(axes)
        ranks = np.arange(math.prod(axes.values()), dtype=np.int64)
        places = np.unravel_index(ranks, tuple(axes.values())) if axes else ()
        self.coordinate = {
            axis: np.asarray(place, np.int64) for axis, place in zip(axes, places, strict=True)
        }
        self.ranks = ranks

    def cut(self, rule: Rule, meta: TensorMeta, on: Mapping[str, tuple[int, ...]]) -> _Cut:
        """Return who holds which part of a tensor. Raises: weft.Error for axes and dimensions that are not there."""
        chosen = np.ones(len(self.ranks), bool)
        for axis, places in on.items():
            size = self.size(axis, "on")
            if any(not 0 <= place < size for place in places):
                raise invalid("on", f"{axis!r} at {places}", f"0 to {size - 1}")
            chosen &= np.isin(self.coordinate[axis], places)
        rank = self.ranks[chosen]
        full = np.array(meta.shape, np.int64)
        start = np.zeros((len(rank), len(full)), np.int64)
        for dim, extent in rule.pad.items():
            if not 0 <= dim < len(full) or extent < full[dim]:
                raise invalid(
                    "pad", f"{dim}: {extent}", f"dimensions of {meta.shape}, and extents not below theirs"
                )
        local = np.broadcast_to([rule.pad.get(d, n) for d, n in enumerate(meta.shape)], start.shape).copy()
        for dim, axes in rule.shard.items():
            if not 0 <= dim < len(full):
                raise invalid("shard", dim, f"dimensions of {meta.shape}")
            for one in axes if isinstance(axes, list | tuple) else [axes]:
                part, parts = self.part(one)
                chunk = -(-local[:, dim] // parts)
                begin = np.minimum(part[chosen] * chunk, local[:, dim])
                local[:, dim] = np.minimum(begin + chunk, local[:, dim]) - begin
                start[:, dim] += begin
        return _Cut(rank, np.minimum(start, full), np.minimum(start + local, full), local)

    def part(self, axis: str | Split) -> tuple[Ints, int]:
        """Return which part each rank has, and how many parts there are."""
        if isinstance(axis, str):
            return self.coordinate_of(axis, "shard"), self.axes[axis]
        if not isinstance(axis, Split):
            raise invalid("shard", quoted(axis), f"Split, or axes of the mesh: {', '.join(self.axes)}")
        size = self.size(axis.axis, "shard")
        if not isinstance(axis.parts, int) or axis.parts < 1 or size % axis.parts:
            raise invalid("parts", quoted(axis.parts), f"a divisor of {size}, the size of {axis.axis!r}")
        return self.coordinate[axis.axis] // (size // axis.parts), axis.parts

    def size(self, axis: str, argument: str) -> int:
        self.coordinate_of(axis, argument)
        return self.axes[axis]

    def coordinate_of(self, axis: str, argument: str) -> Ints:
        if axis not in self.axes:
            raise invalid(argument, quoted(axis), f"axes of the mesh: {', '.join(self.axes)}")
        return self.coordinate[axis]


class _Placed:
    """Parts of tensors, gathered one tensor at a time; columns() gives all their places in memory at once."""

    def __init__(self, tensors: dict[str, TensorMeta]) -> None:
        self.tensors = tensors
        self._memories: dict[str, int] = {}
        self._orders: list[tuple[int, ...]] = []
        self._cuts: list[_Cut] = []
        self._facts: list[tuple[int, int, int]] = []  # tensor, memory, groups
        self._starts: list[Ints] = []
        self._stops: list[Ints] = []
        self._strides: list[Ints] = []
        self._known: dict[Any, tuple[Ints, Ints, Ints]] = {}

    def add(
        self, tensor: int, cut: _Cut, rule: Rule, meta: TensorMeta, memory: str, order: tuple[int, ...]
    ) -> None:
        key = (id(cut), rule.dims)
        if key not in self._known:
            self._known[key] = self._full(cut, rule, meta)
        start, stop, strides = self._known[key]
        if rule.groups < 1 or (rule.groups > 1 and (rule.dims or np.any(cut.local[:, 0] % rule.groups))):
            raise invalid(
                "groups", rule.groups, f"divisors of the rows of {list(self.tensors)[tensor]!r} on each rank"
            )
        self._cuts.append(cut)
        self._orders.append(order)
        self._facts.append((tensor, self._memories.setdefault(memory, len(self._memories)), rule.groups))
        self._starts.append(start)
        self._stops.append(stop)
        self._strides.append(strides)

    @staticmethod
    def _full(cut: _Cut, rule: Rule, meta: TensorMeta) -> tuple[Ints, Ints, Ints]:
        """Return start, stop and byte strides [n, 4] of a cut's parts, as they lie in memories of their own."""
        dims, lead = len(meta.shape), DIMS - len(meta.shape)
        order = tuple(range(dims)) if rule.dims is None else rule.dims
        if sorted(order) != list(range(dims)):
            raise invalid("dims", quoted(rule.dims), f"an order of 0 to {dims - 1}")
        strides = np.ones((len(cut.rank), DIMS), np.int64)
        for local in np.unique(cut.local, axis=0):
            own = dense_strides([int(local[d]) for d in order], meta.item_bytes)
            rows = (cut.local == local).all(axis=1)
            for dim, stride in zip(order, own, strict=True):
                strides[rows, lead + dim] = stride
        widen = ((0, 0), (lead, 0))
        return np.pad(cut.start, widen), np.pad(cut.stop, widen, constant_values=1), strides

    def memory_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._memories))

    def columns(self) -> Columns:
        """Return all boxes. Tensors of one rank and memory lie one after another, by their order."""
        counts = [len(cut.rank) for cut in self._cuts]
        if not sum(counts):
            empty, wide = np.zeros(0, np.int64), np.zeros((0, DIMS), np.int64)
            return Columns(empty, empty, wide, wide, empty, empty, wide)
        number = {name: i for i, name in enumerate(self.memory_names())}
        to = np.array([number[name] for name in self._memories], np.int64)
        facts = np.repeat(np.array(self._facts, np.int64), counts, axis=0)
        section, place = (np.repeat(column, counts) for column in _ranked(self._orders))
        item = np.array([meta.item_bytes for meta in self.tensors.values()], np.int64)[facts[:, 0]]
        nbytes = np.concatenate([np.prod(cut.local, axis=1) for cut in self._cuts]) * item
        rank = np.concatenate([cut.rank for cut in self._cuts])
        memory, groups = to[facts[:, 1]], facts[:, 2]
        offset, group_bytes = _places(rank, memory, section, place, groups, nbytes)
        boxes = Columns(
            rank,
            facts[:, 0],
            np.concatenate(self._starts),
            np.concatenate(self._stops),
            memory,
            offset,
            np.concatenate(self._strides),
        )
        is_grouped = groups > 1
        if not is_grouped.any():
            return boxes
        dims = np.array([len(meta.shape) for meta in self.tensors.values()], np.int64)
        rows_dim = DIMS - dims[facts[:, 0]]
        rows = np.concatenate([cut.local[:, :1].sum(axis=1) for cut in self._cuts]) // groups
        is_single = is_grouped & (rows == 1)  # rows alternate: one box with another stride
        boxes.strides[is_single, rows_dim[is_single]] = group_bytes[is_single]
        is_grouped &= ~is_single
        pieces = [boxes.take(~is_grouped)]
        pieces += [
            _blocks(boxes.take([i]), int(rows_dim[i]), int(rows[i]), int(group_bytes[i]))
            for i in np.flatnonzero(is_grouped)
        ]
        return Columns.joined(pieces)


def _ranked(orders: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """Return numbers that sort like orders, and those that sort like orders without their last number."""
    number_of = {order: i for i, order in enumerate(sorted(set(orders)))}
    section_of = {order: i for i, order in enumerate(sorted({order[:-1] for order in orders}))}
    sections = np.array([section_of[order[:-1]] for order in orders], np.int64)
    return sections, np.array([number_of[order] for order in orders], np.int64)


def _places(
    rank: Ints, memory: Ints, section: Ints, place: Ints, groups: Ints, nbytes: Ints
) -> tuple[Ints, Ints]:
    """Return where each part begins in its memory, and the bytes of one group of all tensors of its section."""
    order = np.lexsort((place, section, memory, rank))
    rank, memory, section, groups, nbytes = (a[order] for a in (rank, memory, section, groups, nbytes))
    new_memory = np.r_[True, (rank[1:] != rank[:-1]) | (memory[1:] != memory[:-1])]
    new_section = new_memory | np.r_[True, section[1:] != section[:-1]]
    ahead = np.cumsum(nbytes) - nbytes
    memory_begin = ahead[new_memory][np.cumsum(new_memory) - 1]
    which = np.cumsum(new_section) - 1
    first = np.flatnonzero(new_section)
    section_begin, section_groups = ahead[first][which], groups[first][which]
    if np.any(groups != section_groups):
        raise invalid("groups", "different numbers for tensors of one memory", "one number for all of them")
    section_bytes = np.add.reduceat(nbytes, first)[which]
    begin = section_begin - memory_begin + (ahead - section_begin) // groups
    offset, group_bytes = np.empty_like(begin), np.empty_like(begin)
    offset[order], group_bytes[order] = begin, section_bytes // groups
    return offset, group_bytes


def _blocks(box: Columns, dim: int, rows: int, group_bytes: int) -> Columns:
    """Return a part cut into blocks of ``rows`` rows that lie ``group_bytes`` apart."""
    begins = np.arange(box.start[0, dim], box.stop[0, dim], rows)
    blocks = box.take(np.zeros(len(begins), np.int64))
    blocks.start[:, dim] = begins
    blocks.stop[:, dim] = np.minimum(begins + rows, box.stop[0, dim])
    blocks.offset[:] += np.arange(len(begins)) * group_bytes
    return blocks
