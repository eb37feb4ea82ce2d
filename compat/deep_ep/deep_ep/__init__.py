# SPDX-License-Identifier: Apache-2.0
"""Weft under the names that programs written for DeepEP import. Nothing is implemented here."""

from deep_ep import utils
from deep_ep._C import topk_idx_t
from deep_ep.buffer import Buffer
from weft import __version__ as _weft_version
from weft.moe.config import Config
from weft.moe.domains import get_logical_domain_size, get_physical_domain_size
from weft.moe.elastic import ElasticBuffer
from weft.moe.elastic_handle import EPHandle
from weft.moe.events import EventHandle, EventOverlap
from weft.moe.foreign_variables import understand_deep_ep as _understand
from weft.moe.hybrid import HybridEPBuffer

_understand()

__version__ = f"2.1.0+weft.{_weft_version}"

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
