# SPDX-License-Identifier: Apache-2.0
"""The least time of an exchange between H200 GPUs of one host, from bare kernels (docs/benchmarks.md, Floors)."""

from __future__ import annotations

import itertools

# 8 H200: bytes that each GPU pushes to each of 7 peers -> microseconds, flags included, best over SM counts.
_EXCHANGE_US = (
    (16, 3.8),
    (16_384, 5.4),
    (131_072, 6.1),
    (602_112, 15.4),
    (917_504, 21.1),
    (1_204_224, 25.9),
    (1_835_008, 36.7),
    (3_670_016, 71.6),
)
_PEERS = 7
_EGRESS_GBS = 358.0  # large pushes


def h200_exchange_us(egress_bytes: float, gpus: list[str]) -> float | None:
    """Return how long an exchange takes in which every GPU sends ``egress_bytes`` in all, to any number of peers.

    Measured between 8 GPUs. Fewer share the same links of each GPU to the switch, so that egress bounds them alike;
    their exchange of flags alone may be a little shorter than the 3.8 us of eight.

    Args:
        egress_bytes: what leaves each GPU.
        gpus: names of the GPUs that take part.

    Returns:
        Microseconds, or None where some GPU is no H200 or there are not 2 to 8 of them.
    """
    if not 2 <= len(gpus) <= _PEERS + 1 or not all("H200" in name for name in gpus):
        return None
    per_peer = egress_bytes / _PEERS
    if per_peer >= _EXCHANGE_US[-1][0]:
        return egress_bytes / (_EGRESS_GBS * 1e3)
    for (left, left_us), (right, right_us) in itertools.pairwise(_EXCHANGE_US):
        if per_peer <= right:
            share = max(0.0, (per_peer - left) / (right - left))
            return left_us + share * (right_us - left_us)
    return None
