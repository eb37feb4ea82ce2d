# SPDX-License-Identifier: Apache-2.0
"""Arguments that a careless or hostile user passes: tensors that are not what they look like, and odd scalars.

    for name, make in tensors((4, 2)).items():
        refused_or_done(lambda: comm.all_reduce(make()))      # a result or weft.Error; anything else is raised

Makers return a fresh object each time, since some are used up by being looked at. Run what takes them in a process of
its own (weft.testing.ranks): the mistake that they look for is signal 11.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.errors import Error

Maker = Callable[[], Any]


def examples(count: int) -> Any:
    """Return hypothesis' settings for a function that draws so many cases, on every rank the same ones."""
    from hypothesis import HealthCheck, Phase, settings  # tests alone need it

    return settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def _freed(shape: tuple[int, ...], dtype: torch.dtype, left_bytes: int = 0, offset: int = 0) -> torch.Tensor:
    whole = torch.ones(offset + torch.Size(shape).numel(), dtype=dtype)
    return _freed_under(whole[offset:].view(shape), left_bytes)


def _freed_under(tensor: torch.Tensor, left_bytes: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(left_bytes)
    return tensor


def _fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(shape, dtype=dtype)


class _Wrapper(torch.Tensor):
    """A subclass without storage, as libraries make them."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(function))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "_Wrapper"


def without_memory(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Mapping[str, Maker]:
    """Return makers of tensors that claim ``shape`` (at least one element) and lack the memory for it, by name."""
    elems = torch.Size(shape).numel()
    return {
        "freed": lambda: _freed(shape, dtype),
        "freed behind an offset": lambda: _freed(shape, dtype, offset=8),
        "shrunk": lambda: _freed(shape, dtype, left_bytes=dtype.itemsize * elems - 1),
        "freed and strided": lambda: _freed_under(torch.ones((*shape, 2), dtype=dtype)[..., 0]),
        "fake": lambda: _fake(shape, dtype),
        "a wrapper": lambda: _Wrapper(shape, dtype),
        "meta": lambda: torch.ones(shape, dtype=dtype, device="meta"),
    }


def tensors(shape: tuple[int, ...]) -> Mapping[str, Maker]:
    """Return makers of hostile float32 tensors on the CPU that claim ``shape`` (at least one element), by name."""
    makers: dict[str, Maker] = {
        **without_memory(shape),
        "strided": lambda: torch.ones((*shape, 2))[..., 0],
        "expanded": lambda: torch.ones(1).expand(shape),
        "astronomic": lambda: torch.ones(1).expand(1 << 50),
        "sparse": lambda: torch.ones(shape).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8),
        "conjugated": lambda: torch.ones(shape, dtype=torch.complex64).conj(),
        "negated": lambda: torch.ones(shape, dtype=torch.complex64).conj().imag,
        "complex": lambda: torch.ones(shape, dtype=torch.complex128),
        "bits": lambda: torch.ones(shape, dtype=torch.uint8).view(torch.bits8),
        "without elements": lambda: torch.empty((0, *shape[1:])),
        "without dimensions": lambda: torch.tensor(1.0),
        "with a gradient": lambda: torch.ones(shape, requires_grad=True),
        "a parameter": lambda: torch.nn.Parameter(torch.ones(shape)),
        "for inference": _inference(shape),
        "of another type": lambda: torch.ones(shape, dtype=torch.float64),
        "of integers": lambda: torch.ones(shape, dtype=torch.int64),
    }
    return makers


def _inference(shape: tuple[int, ...]) -> Maker:
    def make() -> torch.Tensor:
        with torch.inference_mode():
            return torch.ones(shape)

    return make


def scalars() -> Mapping[str, Maker]:
    """Return makers of odd things that are no tensors, by name."""
    values: list[Any] = [
        *(None, True, -1, 0, 1, 2, 7, 1 << 31, 1 << 63, 1 << 70, 0.5, float("nan"), float("inf"), 1j),
        *(
            "",
            "sum",
            "text",
            "\0",
            b"bytes",
            [],
            [1],
            [0, 8],
            [-1, 9],
            [1 << 62] * 2,
            [[1]],
            (0.5, 0.5),
            {},
            {"a": 1},
        ),
        *(object(), int, range(2), torch.float32, torch.device("cpu")),
    ]
    return {repr(value)[:40]: functools.partial(_same, value) for value in values}


def _same(value: Any) -> Any:
    return value


def refused_or_done(act: Callable[[], Any]) -> Any:
    """Call ``act``; return its result, or the weft.Error that it raised. Raises: anything else that it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the tensors above
        try:
            return act()
        except Error as error:
            return error


__all__ = ["examples", "refused_or_done", "scalars", "tensors", "without_memory"]
