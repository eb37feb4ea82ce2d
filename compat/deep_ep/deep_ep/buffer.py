# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 1 keeps its buffer."""

from weft.moe.buffer import Buffer
from weft.moe.config import Config
from weft.moe.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
