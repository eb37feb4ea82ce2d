# SPDX-License-Identifier: Apache-2.0
"""Weft: GPU-driven communication for mixture-of-experts models and custom collectives."""

from __future__ import annotations

import atexit
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from weft.errors import Error, NotInstalled, PeerLost
from weft.runtime import torch_registration

if TYPE_CHECKING:
    from weft.moe.buffer import Buffer
    from weft.moe.config import Config
    from weft.moe.elastic import ElasticBuffer
    from weft.moe.elastic_handle import EPHandle
    from weft.moe.events import EventHandle, EventOverlap
    from weft.moe.hybrid import HybridEPBuffer
    from weft.moe.p2p import P2PAllToAll, P2PRows
    from weft.runtime.communicator import Communicator, Window
    from weft.runtime.metrics import metrics

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
    "HybridEPBuffer",
    "NotInstalled",
    "P2PAllToAll",
    "P2PRows",
    "PeerLost",
    "Window",
    "__version__",
    "metrics",
]

# Imported at first use: `import weft` takes milliseconds and works without torch, and writing, verifying and drawing
# collective programs works without the extension, which a build does before it has one.
_LAZY = {
    "Communicator": "weft.runtime.communicator",
    "Window": "weft.runtime.communicator",
    "Buffer": "weft.moe.buffer",
    "Config": "weft.moe.config",
    "EPHandle": "weft.moe.elastic_handle",
    "ElasticBuffer": "weft.moe.elastic",
    "EventHandle": "weft.moe.events",
    "EventOverlap": "weft.moe.events",
    "HybridEPBuffer": "weft.moe.hybrid",
    "P2PAllToAll": "weft.moe.p2p",
    "P2PRows": "weft.moe.p2p",
    "metrics": "weft.runtime.metrics",
}


# Parts that come with their own names; `weft.transfer` needs no import of its own.
_PARTS = ("collectives", "errors", "moe", "ops", "transfer")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})


def __getattr__(name: str) -> object:
    if name == "_core":  # `from weft import _core` comes here first
        return _load_core()
    if name in _PARTS:
        return _import(f"weft.{name}", name)
    if name not in _LAZY:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(_import(_LAZY[name], name), name)
    globals()[name] = value
    return value


def _import(module: str, name: str) -> ModuleType:
    """Import what has ``weft.<name>``. Raises: NotInstalled where a package of others is missing that it needs."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "torch").partition(".")[0]
        if package == "weft":
            raise
        raise NotInstalled(f"weft.{name}", package) from None


def _load_core() -> ModuleType:
    """Import the extension, refuse settings that it cannot read, and tell it where packages have libraries for it."""
    core = import_module("weft._core")
    core.config_check()
    from weft.runtime import libfabric, nvrtc

    nvrtc.install(core)
    libfabric.offer(core)
    atexit.register(core.finish_preparing)
    return core


torch_registration.register()
