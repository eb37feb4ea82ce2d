# SPDX-License-Identifier: Apache-2.0
"""What a P2PAllToAll is made for: rows that are always enough, experts of each group, columns of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.errors import Error
from weft.moe.p2p_plans import DpColumn, P2PSizes
from weft.runtime.bootstrap import SingleRank


def sizes(**changed: Any) -> P2PSizes:
    given = {
        "max_num_tokens": 5,
        "num_experts": 7,
        "hidden_dim": 64,
        "num_experts_per_token": 3,
        "in_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
        "hidden_dim_scale": None,
        "scale_dtype": None,
        "expert_padding": 4,
        "max_recv_tokens": None,
        "max_tokens_per_expert": None,
        "max_private_tokens": None,
        "max_in_flight": 2,
        "dp_size": 1,
    }
    return P2PSizes(**{**given, **changed})


@pytest.mark.parametrize("padding", [1, 4, 128])
def test_rows_are_enough_however_tokens_choose_different_experts(padding: int) -> None:
    for groups in (1, 2, 3):
        for rank in range(groups):
            made = sizes(expert_padding=padding)
            experts, tokens = made.local_experts(groups, rank), 5 * groups
            slots = tokens * min(3, experts)
            # Spread evenly, or all in as few experts as a token may choose: each padded by itself.
            for spread in range(min(3, experts), experts + 1):
                counts = [slots // spread + (i < slots % spread) for i in range(spread)]
                padded = sum(-(-count // padding) * padding for count in counts)
                assert padded <= made.rows_of(groups, rank)
            assert made.rows_of(groups, rank) % padding == 0


def test_the_callers_bound_is_taken() -> None:
    assert sizes(max_recv_tokens=9).rows_of(3, 0) == 9


def test_the_last_groups_own_fewer_experts() -> None:
    assert [sizes().local_experts(3, rank) for rank in range(3)] == [3, 3, 1]
    assert [sizes(num_experts=2).local_experts(3, rank) for rank in range(3)] == [1, 1, 0]


def test_a_window_grows_with_what_it_is_for() -> None:
    least = sizes().window_bytes(2)
    for larger in ({"max_num_tokens": 600}, {"out_dtype": torch.float32, "hidden_dim": 4096}):
        assert sizes(**larger).window_bytes(2) > least


class _Everyone:
    """Six ranks that have all said their number."""

    size = 6

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        return [bytes([rank]) for rank in range(self.size)]


def test_a_column_has_one_rank_of_each_group() -> None:
    for rank in range(6):
        column = DpColumn(_Everyone(rank), 2)
        assert (column.rank, column.size) == (rank // 2, 3)
        assert column.all_gather(b"", 1.0) == [bytes([rank % 2 + 2 * group]) for group in range(3)]


def test_groups_must_come_out_even() -> None:
    with pytest.raises(Error, match="dp_size: got 3, allowed: a divisor of the 1 ranks"):
        DpColumn(SingleRank(), 3)
