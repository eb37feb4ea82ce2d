# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 1 keeps its buffer."""

from weft import _core
from weft.moe.config import Config
from weft.moe.deep_ep_branches import buffer_of
from weft.moe.events import EventHandle, EventOverlap

Buffer = buffer_of(_core.config().deep_ep_branch)

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
