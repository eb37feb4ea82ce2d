# SPDX-License-Identifier: Apache-2.0
"""What the floor of ``weft bench collective`` takes a rank to move at least."""

from __future__ import annotations

import pytest

from weft.bench.collective.floors import Bytes, least_bytes

KIB = 1 << 10


@pytest.mark.parametrize(
    ("call", "nodes", "per_node", "wanted"),
    [
        # One node: nothing is sent. A sum of 4 parts reads 4 and writes 1: 2.5 copies of a part.
        ("all_to_all", 1, 4, Bytes(0, 64 * KIB)),
        ("all_gather", 1, 4, Bytes(0, 64 * KIB)),
        ("reduce_scatter", 1, 4, Bytes(0, 40 * KIB)),
        ("all_reduce", 1, 4, Bytes(0, 88 * KIB)),
        # Two nodes of two: half of an exchange crosses; of the others each rank carries half of its node's.
        ("all_to_all", 2, 2, Bytes(32 * KIB, 32 * KIB)),
        ("all_gather", 2, 2, Bytes(16 * KIB, 48 * KIB)),
        ("reduce_scatter", 2, 2, Bytes(16 * KIB, 72 * KIB)),
        ("all_reduce", 2, 2, Bytes(32 * KIB, 104 * KIB)),
        ("broadcast", 2, 2, None),
    ],
)
def test_the_least_that_a_rank_moves(call: str, nodes: int, per_node: int, wanted: Bytes | None) -> None:
    assert least_bytes(call, 64 * KIB, nodes, per_node) == wanted
