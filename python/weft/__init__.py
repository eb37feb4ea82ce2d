# SPDX-License-Identifier: Apache-2.0
"""Weft: GPU-driven communication for mixture-of-experts models and custom collectives."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from weft.errors import Error, PeerLost
from weft.runtime import nvrtc
from weft.runtime.communicator import Communicator, Window

if TYPE_CHECKING:
    from weft.moe.buffer import Buffer
    from weft.moe.config import Config
    from weft.moe.elastic import ElasticBuffer
    from weft.moe.elastic_handle import EPHandle
    from weft.moe.events import EventHandle, EventOverlap

__version__ = "0.1.0"
__all__ = [
    "Buffer",
    "Communicator",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "Error",
    "EventHandle",
    "EventOverlap",
    "PeerLost",
    "Window",
    "__version__",
]

nvrtc.install()

_NEEDS_TORCH = {  # imported at first use: `import weft` takes milliseconds and works without torch
    "Buffer": "weft.moe.buffer",
    "Config": "weft.moe.config",
    "EPHandle": "weft.moe.elastic_handle",
    "ElasticBuffer": "weft.moe.elastic",
    "EventHandle": "weft.moe.events",
    "EventOverlap": "weft.moe.events",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(import_module(_NEEDS_TORCH[name]), name)
    globals()[name] = value
    return value
