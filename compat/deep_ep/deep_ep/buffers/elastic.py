# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP 2 keeps its elastic buffer."""

from weft.moe.domains import get_logical_domain_size, get_physical_domain_size
from weft.moe.elastic import ElasticBuffer
from weft.moe.elastic_handle import EPHandle
from weft.moe.events import EventHandle, EventOverlap

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
]
