# SPDX-License-Identifier: Apache-2.0
"""pplx-garden's all-to-all with Weft behind it."""

from weft.moe.p2p_pplx import P2PAllToAll, P2PCombineHandle, P2PDispatchHandle

__all__ = ["P2PAllToAll", "P2PCombineHandle", "P2PDispatchHandle"]
