# SPDX-License-Identifier: Apache-2.0
"""Tensors that can be taken as they are: whose shape, type and device say all that a call has to know.

    if address := plain_address(x):       # a call with this signature was checked before
        run(address)

Others (subclasses, views with gaps, conjugated or freed ones) go through the checks, which say what is wrong.
"""

from __future__ import annotations

import torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # a subclass of its own may be anything


def plain_address(value: object) -> int:
    """Return where a tensor's elements lie in a row; 0 where that is to be asked: of an empty tensor, too.

    A complex tensor may be conjugated, which its memory does not show; it is the caller's to look.
    """
    if type(value) not in PLAIN_TYPES or value.layout is not torch.strided or value.is_nested:  # type: ignore[attr-defined]
        return 0
    assert isinstance(value, torch.Tensor)
    if not value.is_contiguous() or value.is_neg():
        return 0
    needed = value.storage_offset() * value.element_size() + value.nbytes
    # Less, where the storage was freed or cut, be it behind an offset.
    return value.data_ptr() if value.untyped_storage().nbytes() >= needed else 0


__all__ = ["PLAIN_TYPES", "plain_address"]
