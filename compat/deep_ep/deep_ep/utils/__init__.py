# SPDX-License-Identifier: Apache-2.0
"""Helpers that programs and tests import beside the buffer."""

from weft.moe.events import EventHandle, EventOverlap
from weft.testing.launch import check_nvlink_connections

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
