# SPDX-License-Identifier: Apache-2.0
"""The module's name in DeepEP's hybrid-ep branch."""

from weft.moe.hybrid import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
