# SPDX-License-Identifier: Apache-2.0
"""Caches what an analysis finds of an algorithm.

@cached
def direct_messages(algorithm: Algorithm) -> DirectMessages: ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from weft.collectives.ir import Algorithm

_MOST_KNOWN = 256
_Found = TypeVar("_Found")


def cached(analyse: Callable[[Algorithm], _Found]) -> Callable[[Algorithm], _Found]:
    """Return ``analyse``, made once for an algorithm: by identity, so it must not change afterwards. Threads: any."""
    known: dict[int, tuple[Algorithm, _Found]] = {}  # by id(); holds the algorithm, so that it stays its own

    @functools.wraps(analyse)
    def cached_or_analysed(algorithm: Algorithm) -> _Found:
        held = known.get(id(algorithm))
        if held is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            held = known[id(algorithm)] = algorithm, analyse(algorithm)
        return held[1]

    return cached_or_analysed
