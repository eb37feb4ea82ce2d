# SPDX-License-Identifier: Apache-2.0
"""Plain tensors: shape, type and device say all that a call has to know of them.

    plan = find_plan(plans, (x, topk_idx), b"dispatch", num_experts)      # plans: a PlanBook
    if plan is None:
        plan = plans.keep(checked_and_planned(x, topk_idx, num_experts), (x, topk_idx), b"dispatch", num_experts)
    plan.run(x, topk_idx)

Others (subclasses, views with gaps, conjugated or freed ones) go through the checks, which say what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from weft import _core

_ROW_ALIGNMENT_BYTES = 16
_MOST_PLANS = 4096
_Plan = TypeVar("_Plan")
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


def find_by_python(plans: Any, tensors: tuple[torch.Tensor | None, ...], *options: object) -> Any:
    signature = signature_by_python(tensors, *options)
    return plans.get(signature) if signature else None


class PlanBook(dict[Hashable, Any]):
    """Planned calls by their signatures. A call that find_plan() finds here has nothing left to be checked for but
    where its tensors are, and what a signature cannot hold.
    """

    def keep(self, plan: _Plan, tensors: tuple[torch.Tensor | None, ...], *options: object) -> _Plan:
        """Return the plan; calls of that signature find it from now on. One without a signature is of no other call."""
        if signature := signature_of(tensors, *options):
            if len(self) >= _MOST_PLANS:
                self.clear()
            self[signature] = plan
        return plan


def _unknown(*_: object) -> None:
    return None


# The core reads a tensor in a third of the time, where torch (2.10 and newer) describes tensors to C programs.
_table: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_core_reads = _table is not None and _core.read_plain_tensors_by(_table, PLAIN_TYPES)

# (value) -> where a tensor's elements lie in a row; 0 where that is to be asked: of an empty tensor, too. A complex
# tensor may be conjugated, which its memory does not show; it is the caller's to look.
plain_address: Callable[[object], int] = _core.plain_address if _core_reads else plain_address_by_python
# (tensors, *options) -> a call's signature: type, shape and device of each tensor, whether it begins where rows may,
# and which are None; and the options: text, numbers, True, False, None or tuples of such. Empty where a tensor is
# not plain, or an option is something else: then the call has to be checked.
signature_of: Callable[..., Hashable] = _core.signature_of if _core_reads else signature_by_python
# (plans, tensors, *options) -> the plan of a PlanBook for calls of that signature; None for one that is to be checked.
find_plan: Callable[..., Any] = _core.find_plan if _core_reads else find_by_python
# (plans, tensors, options) -> what such a dispatch returns; None for one that is to be checked: moe/low_latency_plan.py
known_low_latency_dispatch: Callable[..., Any] = _core.known_low_latency_dispatch if _core_reads else _unknown
# (plans, tensors, options, state of the handle) -> the same of a combine
known_low_latency_combine: Callable[..., Any] = _core.known_low_latency_combine if _core_reads else _unknown

__all__ = [
    "PLAIN_TYPES",
    "PlanBook",
    "find_plan",
    "known_low_latency_combine",
    "known_low_latency_dispatch",
    "plain_address",
    "signature_of",
]
