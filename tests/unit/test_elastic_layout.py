# SPDX-License-Identifier: Apache-2.0
"""The expanded layout against a plain loop: odd sizes, many slots, dropped rows."""

from __future__ import annotations

import pytest
import torch

from weft.moe.elastic_layout import Expansion, count_experts, expand, reduce_slots


def _ids(num_rows: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Each row's slots name different experts of this rank, -1 where they are elsewhere."""
    made = torch.Generator().manual_seed(num_rows * 100 + top_k)
    order = torch.rand(num_rows, max(top_k, num_experts) * 2, generator=made).argsort(dim=1)[:, :top_k]
    return torch.where(order < num_experts, order, -1)


def _by_hand(
    ids: torch.Tensor, num_experts: int, alignment: int, num_rows: int
) -> tuple[list[list[int]], list[int]]:
    row_of_slot = [[-1] * ids.size(1) for _ in range(ids.size(0))]
    slot_of_row = [-1] * num_rows
    begin = 0
    for expert in range(num_experts):
        row = begin
        for token, slots in enumerate(ids.tolist()):
            for slot, of in enumerate(slots):
                if of == expert:
                    if row < num_rows:
                        row_of_slot[token][slot] = row
                        slot_of_row[row] = token * ids.size(1) + slot
                    row += 1
        begin += -(-(row - begin) // alignment) * alignment
    return row_of_slot, slot_of_row


def _expansion(ids: torch.Tensor, alignment: int, num_rows: int, may_wait: bool = True) -> Expansion:
    return expand(ids, count_experts(ids, 5, alignment), num_rows, may_wait)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("alignment", [1, 3, 16])
@pytest.mark.parametrize("sizes", [(0, 2), (1, 1), (7, 3), (33, 40)], ids=str)
def test_rows_lie_by_expert_then_token(sizes: tuple[int, int], alignment: int, dtype: torch.dtype) -> None:
    ids = _ids(*sizes, 5).to(dtype)
    slots = count_experts(ids, 5, alignment).slots.tolist()
    assert slots == [int((ids == expert).sum()) for expert in range(5)]
    whole = sum(-(-count // alignment) * alignment for count in slots)
    for num_rows in (whole, whole + 4, max(whole - 3, 0)):
        got = _expansion(ids, alignment, num_rows)
        row_of_slot, slot_of_row = _by_hand(ids, 5, alignment, num_rows)
        assert got.row_of_slot.tolist() == (row_of_slot if sizes[0] else [])
        assert got.slot_of_row.tolist() == slot_of_row


@pytest.mark.parametrize("sizes", [(0, 40), (1, 17), (33, 40), (9, 4)], ids=str)
def test_slots_are_summed_in_order_however_many_there_are(sizes: tuple[int, int]) -> None:
    ids = _ids(*sizes, 5)
    num_rows = int((ids >= 0).sum())
    packed, plain = (_expansion(ids, 1, num_rows, may_wait) for may_wait in (True, False))
    assert plain.rows_of_token is plain.row_of_slot
    assert packed.rows_of_token.size(1) <= (5 if sizes[1] > 16 else sizes[1])
    y = torch.randn(num_rows, 24).bfloat16()
    wanted = torch.zeros(sizes[0], 24)
    for token, rows in enumerate(packed.row_of_slot.tolist()):
        for row in rows:
            wanted[token] += y[row].float() if row >= 0 else 0
    for expansion in (packed, plain):
        assert torch.equal(reduce_slots(y, expansion.rows_of_token), wanted.bfloat16())
