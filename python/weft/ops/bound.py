# SPDX-License-Identifier: Apache-2.0
"""Operators take numbers and tensors only: a buffer or communicator is known to them by a number."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from weft.errors import Error

_numbers = itertools.count(1)
_bound: weakref.WeakValueDictionary[int, Bound] = weakref.WeakValueDictionary()


class Bound:
    """Something that operators run on, as long as this object lives; ``key`` is its number."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.key = next(_numbers)
        _bound[self.key] = self

    def __repr__(self) -> str:
        return f"weft.ops.{type(self).__name__}({self.target!r})"


def target_of(key: int) -> Any:
    """Return what the number stands for. Raises: Error, code closed, where that is gone."""
    found = _bound.get(key)
    if found is None:
        raise Error(
            f"weft.ops: operator on number {key}, whose ExpertOps or CollectiveOps object is gone", "closed"
        )
    return found.target
