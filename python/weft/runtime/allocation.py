# SPDX-License-Identifier: Apache-2.0
"""Uninitialised CUDA tensors, allocated for the stream that is current, by the shortest way that torch has.

    rows, counts = new_on_cuda((tensor_form((128, 7168), torch.bfloat16), tensor_form((8,), torch.int32)), device)

torch.empty takes some 3 us of the host, more than most of what surrounds it here. The function that torch's compiled
code allocates with takes a sixth of that; it knows the current device only. Both take memory from torch's allocator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

TensorForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides in elements, type

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_short_way: Any = getattr(_guards, "_empty_strided_cuda", None)
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


@functools.lru_cache(maxsize=4096)  # calls ask for the same ones again and again
def strides_in_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


__all__ = ["TensorForm", "new_on_cuda", "strides_in_order", "tensor_form"]
