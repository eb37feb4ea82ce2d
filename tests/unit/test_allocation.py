# SPDX-License-Identifier: Apache-2.0
"""Uninitialised tensors by torch's short ways and by its public ones: the same tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.runtime import allocation
from weft.runtime.allocation import allocator_on, part_of, tensor_maker, tensor_spec

CPU = torch.device("cpu")
SPECS = (
    tensor_spec((3, 4), torch.bfloat16),
    tensor_spec((7,), torch.int32),
    None,
    tensor_spec((5, 3, 2), torch.float32, (1, 10, 5)),
    tensor_spec((0, 3), torch.int32),
    tensor_spec((2, 131), torch.int32),
)


def _large(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype)


def _maker(
    together: tuple[int, ...],
    is_short: bool,
    monkeypatch: pytest.MonkeyPatch,
    first_is_all: bool = False,
) -> Callable[[], list[Any]]:
    if not is_short:  # a torch without its short ways
        monkeypatch.setattr(allocation, "_part", allocation._part_by_set)
        monkeypatch.setattr(allocation, "new_on_host", functools.partial(allocation._by_torch, CPU))
    return tensor_maker(allocator_on(CPU, _large), SPECS, together, first_is_all=first_is_all)


def _described(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@pytest.mark.parametrize("together", [(), (5, 1), (1, 4, 5), (2, 1)], ids=str)
@pytest.mark.parametrize("is_short", [True, False], ids=["short", "public"])
def test_every_form_is_made_anew(
    together: tuple[int, ...], is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _maker(together, is_short, monkeypatch)
    first, second = make(), make()
    wanted = [None if form is None else (*form, CPU) for form in SPECS]
    assert [_described(tensor) for tensor in first] == wanted == [_described(tensor) for tensor in second]
    places: list[range] = []
    for number, tensor in enumerate(tensor for tensor in (*first, *second) if tensor is not None):
        assert tensor._base is None
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(number)
        places.append(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    for number, tensor in enumerate(tensor for tensor in (*first, *second) if tensor is not None):
        assert (tensor == number).all()  # nobody else wrote here
    filled = sorted((place for place in places if len(place)), key=lambda place: place.start)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(filled))


@pytest.mark.parametrize("is_short", [True, False], ids=["short", "public"])
def test_only_those_asked_for_share_memory(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def storages(together: tuple[int, ...]) -> int:
        made = _maker(together, is_short, monkeypatch)()
        return len({tensor.untyped_storage()._cdata for tensor in made if tensor is not None})

    assert storages(()) == 5
    assert storages((5, 1)) == 4


@pytest.mark.parametrize("is_short", [True, False], ids=["short", "public"])
def test_the_first_may_be_all_of_the_memory(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _maker((1, 5), is_short, monkeypatch, first_is_all=True)()
    whole, part = made[1], made[5]
    assert whole is not None and part is not None
    assert _described(part) == (*tensor_spec((2, 131), torch.int32), CPU)
    begin = (part.data_ptr() - whole.data_ptr()) // whole.element_size()
    assert begin >= 7 and whole.numel() == begin + part.numel()
    assert whole.untyped_storage()._cdata == part.untyped_storage()._cdata


def test_large_results_come_from_their_maker() -> None:
    form = tensor_spec((1 << 20,), torch.uint8)
    made = tensor_maker(allocator_on(CPU, _large), (form, SPECS[0]))()
    assert (made[0] == 7).all()
    assert _described(made[1]) == (*tensor_spec((3, 4), torch.bfloat16), CPU)


@pytest.mark.parametrize("is_short", [True, False], ids=["short", "public"])
def test_a_part_is_no_view(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_short:
        monkeypatch.setattr(allocation, "_part", allocation._part_by_set)
    whole = torch.arange(20, dtype=torch.int32)[4:]
    part = part_of(whole, 2, (3, 2))
    assert part.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert part._base is None
    part.add_(1)
    assert whole[2] == 7
    assert whole._version == 0  # autograd, which may have saved it, does not see the change


def test_one_tensor_is_row_major() -> None:
    allocator = allocator_on(CPU, _large)
    for shape in ((), (3,), (5, 0, 2), (4, 3)):
        made = allocator.empty(shape, torch.float32)
        assert _described(made) == (*tensor_spec(shape, torch.float32), CPU)
    assert (allocator.empty((1 << 20,), torch.uint8) == 7).all()
