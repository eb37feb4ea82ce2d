# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 2 keeps its elastic buffer.

Weft has none yet, so ElasticBuffer and EPHandle are absent: a program that probes for them finds out here.
"""

from weft.moe.domains import get_logical_domain_size, get_physical_domain_size
from weft.moe.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "get_logical_domain_size", "get_physical_domain_size"]
