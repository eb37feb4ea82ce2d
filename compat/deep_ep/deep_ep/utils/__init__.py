# SPDX-License-Identifier: Apache-2.0
"""Helpers that programs and tests import beside the buffer."""

from typing import Any

from weft.moe.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


def __getattr__(name: str) -> Any:
    if name != "check_nvlink_connections":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weft.testing import launch  # which a build of Weft may leave out (WEFT_MEASURE=OFF)

    return launch.check_nvlink_connections
