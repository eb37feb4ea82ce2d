# SPDX-License-Identifier: Apache-2.0
"""Two small language helpers that DeepEP 2 offers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Method = Callable[..., T]


def value_or(value: T | None, default: T) -> T:
    """Return value, or default if it is None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[Method[T]], Method[T]]:
    """Cache a method's results as functools.lru_cache does, without keeping its object alive."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        caches: weakref.WeakKeyDictionary[Any, Callable[..., T]] = weakref.WeakKeyDictionary()

        @functools.wraps(method)
        def cached(self: Any, *args: Any, **kwargs: Any) -> T:
            if self not in caches:
                weak = weakref.ref(self)
                caches[self] = functools.lru_cache(maxsize, typed)(lambda *a, **k: method(weak(), *a, **k))
            return caches[self](*args, **kwargs)

        return cached

    return decorate
