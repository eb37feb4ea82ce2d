# SPDX-License-Identifier: Apache-2.0
"""Weft's calls as operators that torch.compile understands.

    moe = weft.ops.ExpertOps(buffer)          # outside the compiled function
    collectives = weft.ops.CollectiveOps(comm)

    @torch.compile(fullgraph=True)
    def layer(x, topk_idx, topk_weights):
        rows = moe.dispatch(x, topk_idx, topk_weights, num_experts=8, num_worst_tokens=64)
        y = experts(rows.x, rows.topk_idx, rows.topk_weights)
        return moe.combine(y, rows.handle)

Each call is an operator of the library ``weft`` (``torch.ops.weft``) with a fake implementation, which gives shapes,
and, but for the low-latency calls, with gradients. Operators change none of their inputs and return new tensors.
Every rank must run the same operators in the same order, so compile the same function on all of them.
"""

from __future__ import annotations

from weft.ops.collectives import CollectiveOps
from weft.ops.moe import ExpertOps, LowLatencyRows, Rows

__all__ = ["CollectiveOps", "ExpertOps", "LowLatencyRows", "Rows"]
