# SPDX-License-Identifier: Apache-2.0
"""What a call must move, and the least time a machine can need for it.

On the CPU the floor is the time that this machine's memcpy, one thread per rank and all ranks at once, needs
for the bytes that a rank receives, measured in the same run. On 8 H200 joined by NVLink it is a published
measurement of bare one-shot exchanges between the 8 GPUs (docs/benchmarks.md). Elsewhere no floor is known.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from weft.testing import oracle

FP8_GROUP = 128

# 8 H200: bytes that each GPU pushes to each of 7 peers -> microseconds, flags included, best over SM counts.
H200_EXCHANGE_US = (
    (16, 3.8),
    (16_384, 5.4),
    (131_072, 6.1),
    (602_112, 15.4),
    (917_504, 21.1),
    (1_204_224, 25.9),
    (1_835_008, 36.7),
    (3_670_016, 71.6),
)
H200_EGRESS_GBS = 358.0  # large pushes


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


def h200_floor_us(egress_bytes: float, ranks: int, gpus: list[str]) -> float | None:
    """Return the floor of an exchange in which every GPU sends ``egress_bytes`` in all; None off 8 H200."""
    if ranks != 8 or len(gpus) < 8 or not all("H200" in name for name in gpus):
        return None
    per_peer = egress_bytes / (ranks - 1)
    table = H200_EXCHANGE_US
    if per_peer >= table[-1][0]:
        return egress_bytes / (H200_EGRESS_GBS * 1e3)
    for (left, left_us), (right, right_us) in itertools.pairwise(table):
        if per_peer <= right:
            share = max(0.0, (per_peer - left) / (right - left))
            return left_us + share * (right_us - left_us)
    return None
