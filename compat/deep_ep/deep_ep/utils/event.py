# SPDX-License-Identifier: Apache-2.0
"""Events."""

from weft.moe.events import (
    EventHandle,
    EventOverlap,
)

__all__ = [
    "EventHandle",
    "EventOverlap",
]
