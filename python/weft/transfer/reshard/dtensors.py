# SPDX-License-Identifier: Apache-2.0
"""Layouts from state dicts of torch. Only what is asked of tensors is used, so that torch is not imported here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.errors import invalid, quoted
from weft.transfer.buffers import whole
from weft.transfer.reshard.layout import Box, Layout, TensorMeta, dense_strides

Ranges = list[tuple[int, int]]


def layout_of(
    state: Mapping[str, Any], *, ranks: Iterable[int] = (0,), tied: Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a state dict: memories are its entries, by their names.

    DTensors say where all ranks of their mesh have what, so that one rank's state dict is enough where all have the
    same entries; else ``Layout.merged`` joins those of several. The indices of a strided shard (FSDP over tensor
    parallelism) are derived: a rank can have several boxes of one.

    Args:
        state: names with DTensors, or tensors.
        ranks: who have whole copies of entries that are no DTensors.
        tied: names that are other names' tensors; a state dict may have both or one of them.
    Raises: weft.Error for a partial DTensor, placements that are not known, and local tensors that are not contiguous.
    """
    tensors: dict[str, TensorMeta] = {}
    boxes: list[Box] = []
    everyone = [whole("ranks", rank) for rank in ranks]
    for name, value in state.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise invalid(f"state[{name!r}]", quoted(value), "a tensor")
        meta = TensorMeta(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))
        local = getattr(value, "_local_tensor", value)
        if not local.is_contiguous():
            raise invalid(f"state[{name!r}]", f"strides {tuple(local.stride())}", "a contiguous local tensor")
        tensors[name] = meta
        if hasattr(value, "device_mesh"):
            boxes += boxes_of_dtensor(name, meta, np.asarray(value.device_mesh.mesh), value.placements)
        else:
            zeros = (0,) * len(meta.shape)
            boxes += [Box(rank, name, zeros, meta.shape) for rank in everyone]
    return Layout.boxed(tensors, boxes, tied=tied)


def boxes_of_dtensor(name: str, meta: TensorMeta, mesh: Any, placements: Sequence[Any]) -> list[Box]:
    """Return the boxes of all ranks of a mesh.

    Args:
        mesh: the ranks, an array with one dimension for each placement.
        placements: torch's ``Shard``, ``_StridedShard`` and ``Replicate``, or what has their names and fields.
    """
    boxes: list[Box] = []
    for place in np.ndindex(mesh.shape):
        held: list[Ranges] = [[(0, extent)] for extent in meta.shape]
        for coordinate, size, placement in zip(place, mesh.shape, placements, strict=True):
            kind = type(placement).__name__
            if kind == "Replicate":
                continue
            if kind not in ("Shard", "_StridedShard"):
                raise invalid(
                    f"placements of {name!r}", quoted(placement), "Shard, _StridedShard and Replicate"
                )
            dim = placement.dim % len(meta.shape)
            factor = int(placement.split_factor) if kind == "_StridedShard" else 1
            held[dim] = _shard(held[dim], size, coordinate, factor)
        boxes += _boxes(int(mesh[place]), name, meta, held)
    return boxes


def _shard(held: Ranges, parts: int, part: int, factor: int) -> Ranges:
    """Return what a rank keeps of ranges: its chunk of each of ``factor`` chunks, as torch cuts them."""
    length = sum(b - a for a, b in held)
    kept: Ranges = []
    for outer in range(factor):
        begin, end = _chunk(length, factor, outer)
        a, b = _chunk(end - begin, parts, part)
        kept += _sub(held, begin + a, begin + b)
    return kept


def _chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    size = -(-length // parts)
    return min(part * size, length), min((part + 1) * size, length)


def _sub(held: Ranges, begin: int, end: int) -> Ranges:
    """Return positions ``begin`` to ``end`` of ranges that stand one after another; neighbours become one."""
    found: Ranges = []
    at = 0
    for a, b in held:
        lo, hi = max(begin, at), min(end, at + b - a)
        if lo < hi:
            found.append((a + lo - at, a + hi - at))
        at += b - a
    return found


def _boxes(rank: int, name: str, meta: TensorMeta, held: list[Ranges]) -> list[Box]:
    """Return a box for every combination of a rank's ranges; its memory has them densely, in their order."""
    held = [_joined(ranges) for ranges in held]
    strides = dense_strides([sum(b - a for a, b in ranges) for ranges in held], meta.item_bytes)
    boxes = []
    for ranges in itertools.product(*(_positioned(one) for one in held)):
        offset = sum(at * stride for (at, _a, _b), stride in zip(ranges, strides, strict=True))
        start, stop = tuple(a for _at, a, _b in ranges), tuple(b for _at, _a, b in ranges)
        boxes.append(Box(rank, name, start, stop, None, offset, strides))
    return boxes


def _joined(ranges: Ranges) -> Ranges:
    joined: Ranges = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


def _positioned(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Return each range with the place where it begins among those before it."""
    found, at = [], 0
    for a, b in ranges:
        found.append((at, a, b))
        at += b - a
    return found
