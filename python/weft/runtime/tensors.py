# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has the memory that its shape promises.

    if lack := lacking_memory(tensor):
        raise invalid("tensor", lack, "a tensor with all its memory")

Tensors without it pass for others until somebody touches them: those of FakeTensorMode and of torch.func transforms,
and those whose storage was resized under them (FSDP does so to free parameters).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


__all__ = ["lacking_memory"]
