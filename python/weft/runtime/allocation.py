# SPDX-License-Identifier: Apache-2.0
"""Uninitialised tensors, allocated for the stream that is current, by the shortest way that torch has.

    rows, counts = new_on_cuda((tensor_form((128, 7168), torch.bfloat16), tensor_form((8,), torch.int32)), device)
    last = part_of(counts, 3, (5,))      # of the same memory, but no view

torch.empty takes some 3 us of the host, more than most of what surrounds it here. The functions that torch's compiled
code allocates with take a sixth of that; the one for CUDA knows the current device only. They take memory from torch's
allocators. What that code makes tensors of one memory with takes a twentieth of what split() does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

TensorForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides in elements, type

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_short_way: Any = getattr(_guards, "_empty_strided_cuda", None)
_short_way_on_host: Any = getattr(_guards, "_empty_strided_cpu", None)
_reinterpret: Any = getattr(_guards, "_reinterpret_tensor", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def tensor_form(
    shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> TensorForm:
    """Return the form of a tensor without gaps. strides: in elements; None: rows in order."""
    return shape, strides_in_order(shape) if strides is None else strides, dtype


def new_on_cuda(forms: Iterable[TensorForm | None], device: torch.device) -> list[Any]:
    """Return an uninitialised tensor of each form, None for None. device: with its number."""
    if _short_way is not None and _current_device() == device.index:
        return [None if form is None else _short_way(*form) for form in forms]
    empty = torch.empty_strided
    return [None if form is None else empty(*form[:2], dtype=form[2], device=device) for form in forms]


def new_on_host(form: TensorForm) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU."""
    shape, strides, dtype = form
    if _short_way_on_host is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    made: torch.Tensor = _short_way_on_host(shape, strides, dtype)
    return made


def _part_by_set(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    part = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return part.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, shape, strides)  # type: ignore[call-overload, no-any-return]


_part: Any = _reinterpret or _part_by_set


def part_of(tensor: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor of the memory of another one, of the same type, from element ``offset`` of that.

    It is no view, as far as autograd can tell: it may be changed in place, and what saved the other does not see it.
    """
    made: torch.Tensor = _part(tensor, shape, strides_in_order(shape), offset)
    return made


@functools.lru_cache(maxsize=4096)  # calls ask for the same ones again and again
def strides_in_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


__all__ = ["TensorForm", "new_on_cuda", "new_on_host", "part_of", "strides_in_order", "tensor_form"]
