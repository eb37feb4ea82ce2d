# SPDX-License-Identifier: Apache-2.0
"""What a call must move, and the least time a machine can need for it.

On the CPU the floor is the time that this machine's memcpy, one thread per rank and all ranks at once, needs
for the bytes that a rank receives, measured in the same run. On GPUs it is a bare exchange of the bytes that leave
one, of the same run, too (weft.bench.exchange_floor).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.testing import oracle

FP8_GROUP = 128


@dataclass(frozen=True)
class Traffic:
    """Rows of one set of routes, means over the ranks.

    Attributes:
        received: rows that a rank receives, one per (token, rank); its own included.
        egress: the same without its own: what leaves a rank.
        selections: (token, expert) pairs of a rank's tokens.
    """

    received: float
    egress: float
    selections: float


def traffic_of(routes: list[Tensor], experts: int) -> Traffic:
    """Count the rows of one set of routes."""
    num_ranks = len(routes)
    received, kept, selections = 0, 0, 0
    for rank, topk_idx in enumerate(routes):
        per_rank = oracle.layout(topk_idx, experts, num_ranks)[0]
        received += int(per_rank.sum())
        kept += int(per_rank[rank])
        selections += int((topk_idx >= 0).sum())
    return Traffic(received / num_ranks, (received - kept) / num_ranks, selections / num_ranks)


def row_bytes(dtype: str, hidden: int) -> int:
    """Return the payload bytes of one row: bf16, or fp8 with a float32 scale per 128 channels."""
    return 2 * hidden if dtype == "bf16" else hidden + 4 * (-(-hidden // FP8_GROUP))
