# SPDX-License-Identifier: Apache-2.0
"""What an all-to-all of this package is, for checks of type."""

from weft.moe.p2p_pplx import AllToAllKernel

__all__ = ["AllToAllKernel"]
