# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has the memory that its shape promises.

    if lack := lacking_memory(tensor):
        raise invalid("tensor", lack, "a tensor with all its memory")

Tensors without it pass for others until somebody touches them: those of FakeTensorMode and of torch.func transforms,
and those whose storage was resized under them (FSDP does so to free parameters).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from weft.errors import invalid

if TYPE_CHECKING:
    import torch


def lacking_memory(tensor: torch.Tensor) -> str:
    """Return what of its memory a strided tensor lacks, in words: "" if nothing. An empty tensor needs none."""
    elems = tensor.numel()
    if elems == 0:
        return ""
    try:
        held = tensor.untyped_storage().nbytes()
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return f"a {type(tensor).__name__} without storage"
    if not tensor.is_contiguous():
        elems = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    needed = (tensor.storage_offset() + elems) * tensor.element_size()
    if held < needed:
        return f"storage of {held} bytes under a tensor that needs {needed}"
    return "" if address else f"a {type(tensor).__name__} without memory"


def contiguous(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its elements in a row. Raises: weft.Error for one whose memory is not there to be read."""
    if lack := lacking_memory(tensor):
        raise invalid(argument, lack, "a tensor with all its memory")
    return tensor.contiguous()


def is_unreadable(value: Any) -> bool:
    """Return whether a value is a tensor whose elements are not there to be looked at."""
    return hasattr(type(value), "data_ptr") and lacking_memory(value) != ""


def index_of(value: Any) -> int | None:
    """Return the whole number that a value is, or None; a tensor that lacks its memory is not read."""
    if is_unreadable(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, NotImplementedError):  # a tensor of several elements has __index__, too
        return None


__all__ = ["contiguous", "index_of", "is_unreadable", "lacking_memory"]
