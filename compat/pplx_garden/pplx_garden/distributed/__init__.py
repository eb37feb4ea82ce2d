# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, on torch.distributed."""

from weft.moe.p2p_pplx import ParallelGroup

__all__ = ["ParallelGroup"]
