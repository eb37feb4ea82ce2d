# SPDX-License-Identifier: Apache-2.0
"""Weft: GPU-driven communication for mixture-of-experts models and custom collectives."""

from __future__ import annotations

from weft.errors import Error, PeerLost
from weft.runtime import nvrtc

__version__ = "0.1.0"
__all__ = ["Error", "PeerLost", "__version__"]

nvrtc.install()
