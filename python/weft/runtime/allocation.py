# SPDX-License-Identifier: Apache-2.0
"""Uninitialised tensors, allocated for the stream that is current, by the shortest way that torch has.

    forms = (tensor_form((128, 7168), torch.bfloat16), tensor_form((8,), torch.int32), tensor_form((9,), torch.int32))
    make = OutputMaker(forms, device, large=..., together=(1, 2)).shortest()
    rows, routes, places = make()        # again and again; the last two share memory, but are no views

torch.empty takes some 3 us of the host, more than most of the code around it here. The functions by which torch's
compiled code allocates take a sixth of that; the one for CUDA knows the current device only. They take memory from
torch's allocators. That code's function for tensors of one memory takes a twentieth of the time of split().
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import _core

PART_BYTES = 512  # as torch aligns memory of its own on GPUs
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


def new_on_cuda(form: TensorForm, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor. device: with its number."""
    shape, strides, dtype = form
    if _short_way is not None and _current_device() == device.index:
        made: torch.Tensor = _short_way(shape, strides, dtype)
        return made
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _host_by_torch(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# (shape, strides, dtype) -> an uninitialised tensor on the CPU
new_on_host: Callable[..., torch.Tensor] = _short_way_on_host or _host_by_torch


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


def empty_words_on_host(count: int) -> torch.Tensor:
    """Return i64[count] on the CPU, to be filled."""
    return new_on_host((count,), (1,), torch.int64)


class OutputMaker:
    """Makes what calls of one signature fill: a tensor of each form, None for None.

    Args:
        device: with its number.
        large: makes a tensor on the CPU of a form of 1 MiB or more.
        together: the places of contiguous forms of one type that lie in one memory: of no results that a caller may
            free, but each piece of memory costs the host as much as all else of a tensor.
        part_bytes: each of those begins at a multiple of it.
        first_is_whole: the first of those is all of their memory, longer than its form, and without a shape. That saves
            one part.
    """

    def __init__(
        self,
        forms: Sequence[TensorForm | None],
        device: torch.device,
        large: Callable[[TensorForm], torch.Tensor],
        together: Sequence[int] = (),
        part_bytes: int = PART_BYTES,
        first_is_whole: bool = False,
    ) -> None:
        self._device, self._large, self._count = device, large, len(forms)
        self._memory = [(i, form) for i, form in enumerate(forms) if form is not None and i not in together]
        self._parts = _parts_of(forms, together, part_bytes)
        if self._parts:
            place, shape, _, offset = self._parts[-1]
            form = forms[place]
            assert form is not None
            whole = tensor_form((offset + math.prod(shape),), form[2])
            no_place = len(forms)
            self._memory.append((self._parts.pop(0)[0] if first_is_whole else no_place, whole))

    def shortest(self) -> Callable[[], list[Any]]:
        """Return what makes the same tensors in fewer steps, where torch has its short ways; else this object."""
        is_host = self._device.type == "cpu"
        short_way = _short_way_on_host if is_host else _short_way
        is_large = is_host and any(_is_large(form) for _, form in self._memory)
        if short_way is None or _reinterpret is None or is_large:
            return self
        asked = (None, None) if is_host else (_current_device, self._device.index)
        made: Callable[[], list[Any]] = _core.TensorMaker(
            *(short_way, _reinterpret, self._count, self._memory, self._parts), *asked, self
        )
        return made

    def __call__(self) -> list[Any]:
        """Return new tensors, for the stream that is current."""
        results: list[Any] = [None] * (self._count + 1)
        for place, form in self._memory:
            results[place] = last = self._new(form)
        for place, shape, strides, offset in self._parts:
            results[place] = _part(last, shape, strides, offset)
        return results[: self._count]

    def _new(self, form: TensorForm) -> torch.Tensor:
        if self._device.type != "cpu":
            return new_on_cuda(form, self._device)
        return self._large(form) if _is_large(form) else new_on_host(*form)


Part = tuple[int, tuple[int, ...], tuple[int, ...], int]  # a place, a shape, strides, an offset in elements


def _parts_of(forms: Sequence[TensorForm | None], together: Sequence[int], part_bytes: int) -> list[Part]:
    """Return where each of the forms lies in their one memory, the last one last."""
    parts: list[Part] = []
    end = 0
    for place in together:
        form = forms[place]
        if form is not None:
            shape, strides, dtype = form
            parts.append((place, shape, strides, end))
            end += padded(math.prod(shape), dtype.itemsize, part_bytes)
    return parts


def padded(count: int, item_bytes: int, part_bytes: int = PART_BYTES) -> int:
    """Return how many elements a part takes of its memory, where another one follows it."""
    return -(-count * item_bytes // part_bytes) * part_bytes // item_bytes


def _is_large(form: TensorForm) -> bool:
    return math.prod(form[0]) * form[2].itemsize >= _LARGE_BYTES


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
    "OutputMaker",
    "TensorForm",
    "empty_words_on_host",
    "new_on_cuda",
    "new_on_host",
    "padded",
    "part_of",
    "parts_of",
    "strides_in_order",
    "tensor_form",
]
