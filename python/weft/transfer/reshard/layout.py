# SPDX-License-Identifier: Apache-2.0
"""Where the elements of named tensors lie: boxes of indices on ranks, and the bytes of memory behind them.

Pure data: numpy alone, no torch, no engine. A layout is made from boxes (here), from rules by name (``rules.py``) or
from DTensors (``dtensors.py``), and parts that ranks made of their own are merged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import invalid, quoted
from weft.runtime.tensors import index_of
from weft.transfer.buffers import whole

Ints = npt.NDArray[np.int64]

DIMS = 4  # tensors of fewer dimensions have leading ones of extent 1
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True)
class TensorMeta:
    """Shape and type of a whole tensor, as the checkpoint has it.

    Args:
        shape: 0 to 4 extents.
        dtype: torch's name of the type, without ``torch.``.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.shape) > DIMS:
            raise invalid("shape", self.shape, f"0 to {DIMS} dimensions")
        object.__setattr__(
            self, "shape", tuple(whole("shape", extent, (1 << 31) - 1) for extent in self.shape)
        )
        if self.dtype not in ITEM_BYTES:
            raise invalid("dtype", quoted(self.dtype), ", ".join(sorted(ITEM_BYTES)))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Box:
    """Elements ``start`` to ``stop`` (exclusive) of a tensor, and where a rank has them.

    Args:
        rank: who has them.
        tensor: the tensor's name.
        start, stop: indices, one for each dimension.
        memory: name of the memory on that rank; None: the tensor's name.
        offset: of the element ``start`` in the memory, bytes.
        strides: bytes from one index to the next, for each dimension; None: dense, the last dimension innermost.
    """

    rank: int
    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    memory: str | None = None
    offset: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Columns:
    """Boxes as arrays, one row for each: ``rank``, ``tensor``, ``memory`` and ``offset`` [n]; the others [n, 4]."""

    rank: Ints
    tensor: Ints
    start: Ints
    stop: Ints
    memory: Ints
    offset: Ints
    strides: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: Any) -> Columns:
        """Return the boxes that an index array or mask selects."""
        return Columns(*(column[rows] for column in self.arrays()))

    def arrays(self) -> tuple[Ints, ...]:
        return self.rank, self.tensor, self.start, self.stop, self.memory, self.offset, self.strides

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        return Columns(*(np.concatenate(column) for column in zip(*(p.arrays() for p in parts), strict=True)))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each rank of one side has which elements.

    ``Layout.boxed``, ``Layout.merged``, ``layout_by_rules`` and ``layout_of`` make one.

    Memory without a box is padding: a plan leaves it alone.

    Args:
        tensors: every tensor by its name.
        boxes: what ranks have; tensor and memory are numbers in ``names`` and ``memories``.
        memories: names of memories; ranks may use the same ones.
        tied: names that are other names' tensors, such as ``{"lm_head.weight": "embed.weight"}``. Their boxes count as
            the other's, once where both have the same memory.
    Raises: weft.Error naming the first box that is wrong.
    """

    tensors: Mapping[str, TensorMeta]
    boxes: Columns
    memories: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for alias, name in self.tied.items():
            if name not in self.tensors or name in self.tied:
                raise invalid(
                    "tied", f"{alias!r} as {name!r}", "names of tensors that are not tied themselves"
                )
            if alias in self.tensors and self.tensors[alias] != self.tensors[name]:
                raise invalid("tied", f"{alias!r} as {name!r}", "tensors of one shape and type")
        self._check_boxes()
        number = {name: i for i, name in enumerate(self.tensors)}
        own = np.array([number[self.tied.get(name, name)] for name in self.tensors], np.int64)
        boxes = replace(self.boxes, tensor=own[self.boxes.tensor]) if self.tied else self.boxes
        object.__setattr__(self, "boxes", _ordered(boxes))

    def _check_boxes(self) -> None:
        boxes, extents = self.boxes, self.extents[self.boxes.tensor]
        is_wrong = ((boxes.start < 0) | (boxes.stop < boxes.start) | (boxes.stop > extents)).any(axis=1)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise invalid(
                "boxes",
                f"{self.describe(row)} of a tensor of {self.tensors[self.names[boxes.tensor[row]]].shape}",
                "0 <= start <= stop <= the tensor's shape",
            )
        # Memory repeats no element and no address is below its memory's begin.
        is_wrong = (boxes.offset < 0) | ((boxes.strides <= 0) & (boxes.stop - boxes.start > 1)).any(axis=1)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            given = (
                f"{self.describe(row)} with offset {boxes.offset[row]}, strides {boxes.strides[row].tolist()}"
            )
            raise invalid("boxes", given, "offsets of 0 or more, strides above 0")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of tensors, in the order of their numbers."""
        return tuple(self.tensors)

    @cached_property
    def extents(self) -> Ints:
        """int64[tensors, 4]: shapes with leading ones."""
        shapes = [(1,) * (DIMS - len(meta.shape)) + meta.shape for meta in self.tensors.values()]
        return np.array(shapes, np.int64).reshape(-1, DIMS)

    @cached_property
    def item_bytes(self) -> Ints:
        """int64[tensors]: bytes of an element."""
        return np.array([meta.item_bytes for meta in self.tensors.values()], np.int64)

    @cached_property
    def nbytes(self) -> Ints:
        """int64[boxes]: bytes of each box."""
        volume = np.prod(self.boxes.stop - self.boxes.start, axis=1)
        return np.asarray(volume * self.item_bytes[self.boxes.tensor], np.int64)

    @cached_property
    def ranks(self) -> int:
        """One more than the largest rank that has a box."""
        return int(self.boxes.rank.max()) + 1 if len(self.boxes) else 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal: equal for equal layouts, however they were made."""
        tensors = [(name, meta.shape, meta.dtype) for name, meta in self.tensors.items()]
        sha = hashlib.sha256(json.dumps([tensors, self.memories, sorted(self.tied.items())]).encode())
        for column in self.boxes.arrays():
            sha.update(np.ascontiguousarray(column, "<i8").tobytes())
        return sha.hexdigest()

    def describe(self, row: int) -> str:
        """Return the name, rank and indices of a box, for messages."""
        name = self.names[self.boxes.tensor[row]]
        skipped = DIMS - len(self.tensors[name].shape)
        start, stop = self.boxes.start[row, skipped:], self.boxes.stop[row, skipped:]
        indices = ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
        return f"{name}[{indices}] of rank {self.boxes.rank[row]}"

    @staticmethod
    def boxed(
        tensors: Mapping[str, TensorMeta], boxes: Iterable[Box], *, tied: Mapping[str, str] | None = None
    ) -> Layout:
        """Return the layout of explicit boxes.

        Args:
            tensors: every tensor by its name.
            boxes: what ranks have, in any order. A box that is given twice counts once.
        Raises: weft.Error for a box of no tensor, with another number of dimensions, or beyond its tensor.
        """
        given = list(boxes)
        tensors = _sorted(tensors)
        numbers = {name: number for number, name in enumerate(tensors)}
        memories = sorted({box.memory or box.tensor for box in given})
        memory_numbers = {name: number for number, name in enumerate(memories)}
        rows = np.empty((len(given), 4 + 3 * DIMS), np.int64)
        for row, box in zip(rows, given, strict=True):
            if box.tensor not in numbers:
                raise invalid("boxes", f"a box of {box.tensor!r}", "names in tensors")
            start, stop, strides = _full(box, tensors[box.tensor])
            memory = memory_numbers[box.memory or box.tensor]
            rank = whole("rank", box.rank, (1 << 31) - 1)
            values = [rank, numbers[box.tensor], *start, *stop, memory, box.offset, *strides]
            if any(index_of(value) is None for value in values):  # an array would cut them off
                raise invalid("boxes", quoted(box), "whole numbers")
            row[:] = values
        parts = np.split(rows, np.cumsum([1, 1, DIMS, DIMS, 1, 1]), axis=1)
        columns = Columns(*(p[:, 0] if p.shape[1] == 1 else p for p in parts))
        return Layout(tensors, columns, tuple(memories), dict(tied or {}))

    @staticmethod
    def merged(parts: Sequence[Layout]) -> Layout:
        """Return what all parts have: each rank's own, for instance. A box that several parts have counts once.

        Raises: weft.Error when two parts have a tensor of one name in other shapes or types, or tie a name otherwise.
        """
        tensors: dict[str, TensorMeta] = {}
        tied: dict[str, str] = {}
        for part in parts:
            for name, meta in part.tensors.items():
                if tensors.setdefault(name, meta) != meta:
                    raise invalid(
                        "parts", f"{name!r} as {tensors[name]} and {meta}", "one shape and type of a name"
                    )
            for alias, name in part.tied.items():
                if tied.setdefault(alias, name) != name:
                    raise invalid("parts", f"{alias!r} tied to {tied[alias]!r} and {name!r}", "one of them")
        tensors = _sorted(tensors)
        memories = sorted({name for part in parts for name in part.memories})
        columns = [part.renumbered(tensors, memories) for part in parts]
        return Layout(tensors, Columns.joined(columns), tuple(memories), tied)

    def renumbered(self, tensors: Iterable[str], memories: Iterable[str]) -> Columns:
        """Return the boxes with numbers of tensors and memories in other lists, which have all their names."""
        to = {name: number for number, name in enumerate(tensors)}
        memory_to = {name: number for number, name in enumerate(memories)}
        b = self.boxes
        numbers = np.array([to[name] for name in self.names], np.int64)[b.tensor]
        memory_numbers = np.array([memory_to[name] for name in self.memories], np.int64)[b.memory]
        return Columns(b.rank, numbers, b.start, b.stop, memory_numbers, b.offset, b.strides)


def _sorted(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    for name, meta in tensors.items():
        if not isinstance(name, str) or not isinstance(meta, TensorMeta):
            raise invalid("tensors", f"{quoted(name)}: {quoted(meta)}", "names with TensorMeta")
    return dict(sorted(tensors.items()))


def _full(box: Box, meta: TensorMeta) -> tuple[list[int], list[int], list[int]]:
    """Return start, stop and strides of a box with leading dimensions of extent 1."""
    dims = len(meta.shape)
    for what, given in (("start", box.start), ("stop", box.stop), ("strides", box.strides)):
        if given is not None and len(given) != dims:
            raise invalid(
                f"{what} of a box of {box.tensor!r}", quoted(given), f"{dims} numbers, one a dimension"
            )
    lead = DIMS - dims
    strides = box.strides
    if strides is None:
        local = [b - a for a, b in zip(box.start, box.stop, strict=True)]
        strides = dense_strides(local, meta.item_bytes)
    return [0] * lead + list(box.start), [1] * lead + list(box.stop), [1] * lead + list(strides)


def dense_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a dense array whose last dimension is innermost."""
    strides = [item_bytes]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides[: len(shape)]))


def _ordered(boxes: Columns) -> Columns:
    """Return boxes by tensor, start, stop, rank and place, without empty ones and doubles."""
    boxes = boxes.take((boxes.stop > boxes.start).all(axis=1))
    # A dimension of extent 1 is never walked: its stride is kept as 1, so that equal layouts have equal digests.
    boxes = replace(boxes, strides=np.where(boxes.stop - boxes.start == 1, 1, boxes.strides))
    keys = [
        boxes.tensor,
        *boxes.start.T,
        *boxes.stop.T,
        boxes.rank,
        boxes.memory,
        boxes.offset,
        *boxes.strides.T,
    ]
    boxes = boxes.take(np.lexsort(keys[::-1]))
    is_new = np.ones(len(boxes), bool)
    if len(boxes) > 1:
        is_new[1:] = False
        for column in boxes.arrays():
            differs = column[1:] != column[:-1]
            is_new[1:] |= differs.any(axis=1) if differs.ndim == 2 else differs
    return boxes.take(is_new)
