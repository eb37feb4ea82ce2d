# SPDX-License-Identifier: Apache-2.0
"""Checks that a tensor's memory holds its values, for all that moves bytes of tensors.

    if why := unlike_memory(tensor):
        raise invalid("tensor", why, PLAIN)

Tensors without memory pass for others until somebody touches them: those of FakeTensorMode and of torch.func
transforms, and those whose storage was resized under them (FSDP does so to free parameters). Of others the memory
holds something else than their values: of conjugated and negated views, of quantised, sparse and nested tensors.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from weft.errors import invalid

if TYPE_CHECKING:
    import torch


# What is allowed where unlike_memory() objects.
PLAIN = "a tensor whose memory holds its values"


def unlike_memory(tensor: torch.Tensor) -> str:
    """Return why a tensor's values are not what its memory holds, in words: "" where they are."""
    if str(tensor.layout) != "torch.strided":
        return str(tensor.layout)
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantised tensor of {tensor.dtype}"
    if tensor.is_conj():
        return "a conjugated view, which resolve_conj() makes plain"
    if tensor.is_neg():
        return "a negated view, which resolve_neg() makes plain"
    return lacking_memory(tensor)


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


__all__ = ["PLAIN", "contiguous", "index_of", "is_unreadable", "lacking_memory", "unlike_memory"]
