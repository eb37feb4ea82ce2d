# SPDX-License-Identifier: Apache-2.0
"""Uninitialised tensors, allocated for the stream that is current, by the shortest way that torch has.

    allocator = allocator_on(device, large=...)
    specs = (tensor_spec((128, 7168), torch.bfloat16), tensor_spec((8,), torch.int32), tensor_spec((9,), torch.int32))
    make = tensor_maker(allocator, specs, together=(1, 2))
    rows, routes, places = make()        # again and again; the last two share memory, but are no views

torch.empty takes some 3 us of the host, more than most of what surrounds it here. The functions that torch's compiled
code allocates with take a sixth of that; the one for CUDA knows the current device only. They take memory from torch's
allocators. What that code makes tensors of one memory with takes a twentieth of what split() does. The core calls them
(src/bind/tensor_maker.h); a torch without them has its public ones called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import _core

PART_BYTES = 512  # as torch aligns memory of its own on GPUs
TensorSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides in elements, type

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_short_way: Any = getattr(_guards, "_empty_strided_cuda", None)
_short_way_on_host: Any = getattr(_guards, "_empty_strided_cpu", None)
_reinterpret: Any = getattr(_guards, "_reinterpret_tensor", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def tensor_spec(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> TensorSpec:
    """Return the spec of a tensor without gaps. strides: in elements; None: rows in order."""
    return shape, strides_in_order(shape) if strides is None else strides, dtype


def _by_torch(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


# (shape, strides, dtype) -> an uninitialised tensor on the CPU
new_on_host: Callable[..., torch.Tensor] = _short_way_on_host or functools.partial(
    _by_torch, torch.device("cpu")
)


def _part_by_set(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    part = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return part.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, shape, strides)


_part: Any = _reinterpret or _part_by_set


def part_of(
    tensor: torch.Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return a tensor of the memory of another one, of the same type, from element ``offset`` of that.

    strides: in elements; None: rows in order. It is no view, as far as autograd can tell: it may be changed in place,
    and what saved the other does not see it.
    """
    made: torch.Tensor = _part(tensor, shape, strides_in_order(shape) if strides is None else strides, offset)
    return made


def parts_of(tensor: torch.Tensor, length: int, count: int) -> list[torch.Tensor]:
    """Return a tensor's memory in so many parts, each of so many elements, as part_of() makes them."""
    return [_part(tensor, (length,), (1,), length * i) for i in range(count)]


def not_a_view(view: torch.Tensor) -> torch.Tensor:
    """Return a view's elements as a tensor of their memory that is no view, as part_of() makes one."""
    return part_of(view, 0, tuple(view.shape), view.stride())


def allocator_on(device: torch.device, large: Callable[..., torch.Tensor] | None = None) -> _core.Allocator:
    """Return what makes tensors there. device: with its number.

    large: as new_on_host(), for tensors of 1 MiB or more on the CPU.
    """
    if device.type == "cpu":
        return _core.Allocator(
            empty=new_on_host,
            part=_part,
            current_device=None,
            elsewhere=new_on_host,
            large=large,
            device=None,
            large_bytes=_LARGE_BYTES,
        )
    elsewhere = functools.partial(_by_torch, device)
    return _core.Allocator(
        empty=_short_way or elsewhere,
        part=_part,
        current_device=_current_device if _short_way else None,
        elsewhere=elsewhere,
        large=None,
        device=device.index,
        large_bytes=0,
    )


def tensor_maker(
    allocator: _core.Allocator,
    specs: Sequence[TensorSpec | None],
    together: Sequence[int] = (),
    part_bytes: int = PART_BYTES,
    first_is_all: bool = False,
) -> Callable[[], list[Any]]:
    """Return what makes all that calls of one signature fill: a tensor of each spec, None for None.

    Args:
        together: the places of contiguous specs of one type that lie in one memory: of no results that a caller may
            free, but each piece of memory costs the host as much as all else of a tensor.
        part_bytes: each of those begins at a multiple of it.
        first_is_all: the first of those is all of their memory, longer than its spec, and without a shape. That saves
            one part.
    """
    memory = [(i, spec) for i, spec in enumerate(specs) if spec is not None and i not in together]
    parts = _parts_of(specs, together, part_bytes)
    if parts:
        place, shape, _, offset = parts[-1]
        spec = specs[place]
        assert spec is not None
        whole = tensor_spec((offset + math.prod(shape),), spec[2])
        no_place = len(specs)
        memory.append((parts.pop(0)[0] if first_is_all else no_place, whole))
    made: Callable[[], list[Any]] = _core.TensorMaker(allocator, len(specs), memory, parts)
    return made


Part = tuple[int, tuple[int, ...], tuple[int, ...], int]  # a place, a shape, strides, an offset in elements


def _parts_of(specs: Sequence[TensorSpec | None], together: Sequence[int], part_bytes: int) -> list[Part]:
    """Return where each of the specs lies in their one memory, the last one last."""
    parts: list[Part] = []
    end = 0
    for place in together:
        spec = specs[place]
        if spec is not None:
            shape, strides, dtype = spec
            parts.append((place, shape, strides, end))
            end += padded(math.prod(shape), dtype.itemsize, part_bytes)
    return parts


def padded(count: int, item_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Return how many elements a part takes of its memory, where another one follows it."""
    return -(-count * item_bytes // part_bytes) * part_bytes // item_bytes


_LARGE_BYTES = 1 << 20  # smaller pieces on the CPU the C library keeps itself


@functools.lru_cache(maxsize=4096)  # calls ask for the same ones again and again
def strides_in_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


__all__ = [
    "PART_BYTES",
    "TensorSpec",
    "allocator_on",
    "new_on_host",
    "padded",
    "part_of",
    "parts_of",
    "strides_in_order",
    "tensor_maker",
    "tensor_spec",
]
