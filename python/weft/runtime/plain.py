# SPDX-License-Identifier: Apache-2.0
"""Tensors that can be taken as they are: whose shape, type and device say all that a call has to know.

    if address := plain_address(x):       # a call with this signature was checked before
        run(address)

Others (subclasses, views with gaps, conjugated or freed ones) go through the checks, which say what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from weft import _core

_ROW_ALIGNMENT_BYTES = 16
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # a subclass of its own may be anything


def plain_address_by_python(value: object) -> int:
    if type(value) not in PLAIN_TYPES or value.layout is not torch.strided or value.is_nested:  # type: ignore[attr-defined]
        return 0
    assert isinstance(value, torch.Tensor)
    if not value.is_contiguous() or value.is_neg() or value.is_quantized:
        return 0
    needed = value.storage_offset() * value.element_size() + value.nbytes
    # Less, where the storage was freed or cut, be it behind an offset.
    return value.data_ptr() if value.untyped_storage().nbytes() >= needed else 0


def signature_by_python(tensors: tuple[torch.Tensor | None, ...], *options: object) -> Hashable:
    try:
        forms = _plain_forms(tensors)
        signature = (forms, *_typed(options))
        hash(signature)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # of what only looks like a tensor
        return ()
    return signature if forms else ()


def _typed(options: tuple[object, ...]) -> tuple[Any, ...]:
    return tuple(
        (tuple, _typed(option)) if type(option) is tuple else (type(option), option) for option in options
    )


def _plain_forms(values: tuple[torch.Tensor | None, ...]) -> Hashable:
    forms: list[Any] = []
    for value in values:
        if value is None:
            forms.append(None)
            continue
        place = plain_address_by_python(value)
        if not place or value.dtype.is_complex:  # whose memory may be conjugated
            return ()
        forms += (value.dtype, value.shape, value.device, place % _ROW_ALIGNMENT_BYTES == 0)
    return tuple(forms)


def _unknown(*_: object) -> None:
    return None


# The core reads a tensor in a third of the time, where torch (2.10 and newer) describes tensors to C programs.
_table: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_core_reads = _table is not None and _core.read_plain_tensors_by(_table, PLAIN_TYPES)

# (value) -> where a tensor's elements lie in a row; 0 where that is to be asked: of an empty tensor, too. A complex
# tensor may be conjugated, which its memory does not show; it is the caller's to look.
plain_address: Callable[[object], int] = _core.plain_address if _core_reads else plain_address_by_python
# (tensors, *options) -> a call's signature: type, shape and device of each tensor, whether it begins where rows may,
# and which are None; and the options: bytes, numbers, True, False, None or tuples of such. Empty where a tensor is
# not plain, or an option is something else: then the call has to be checked.
signature_of: Callable[..., Hashable] = _core.signature_of if _core_reads else signature_by_python
# (plans, tensors, options) -> what such a dispatch returns; None for one that is to be checked: moe/low_latency_plan.py
known_low_latency_dispatch: Callable[..., Any] = _core.known_low_latency_dispatch if _core_reads else _unknown
# (plans, tensors, options, state of the handle) -> the same of a combine
known_low_latency_combine: Callable[..., Any] = _core.known_low_latency_combine if _core_reads else _unknown
# (*values) -> where they begin: the same bytes as before, unless one has moved or lost its memory.
addresses: Callable[..., bytes] = _core.addresses

__all__ = [
    "PLAIN_TYPES",
    "addresses",
    "known_low_latency_combine",
    "known_low_latency_dispatch",
    "plain_address",
    "signature_of",
]
