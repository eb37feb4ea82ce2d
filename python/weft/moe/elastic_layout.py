# SPDX-License-Identifier: Apache-2.0
"""The expanded layout: one row per (token, local expert), and its way back to one row per token.

Received rows [N, hidden] with local expert ids [N, K] become rows [X, hidden] grouped by expert. Segments start
at multiples of an alignment; inside one, rows keep the order of source rank, source token and slot. Sizes are
fixed beforehand and nothing here waits for a GPU, so it can be captured in a graph.
Threads: any; work goes to the current stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.moe.config import align
from weft.runtime.allocation import not_a_view

_MANY_SLOTS = 16  # a map of experts travels as one slot for each


@dataclass(frozen=True)
class ExpertCounts:
    """Of one rank's experts: slots i32[Le]; where aligned segments begin, and end with their padding, i64[Le]."""

    slots: Tensor
    begins: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Expansion:
    """row_of_slot i32[N, K]: a slot's expanded row, or -1. slot_of_row i64[X]: its inverse, -1 for padding.

    rows_of_token: the rows of a token in the order of its slots, i32[N, n] with -1 behind them: row_of_slot itself, or
    with many slots, most of which have no expert here, fewer columns.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    rows_of_token: Tensor


def count_experts(topk_idx: Tensor, num_local_experts: int, alignment: int) -> ExpertCounts:
    """Count the slots of each local expert in ids [N, K], -1 elsewhere."""
    keys = _expert_keys(topk_idx, num_local_experts)
    slots = keys.new_zeros(num_local_experts + 1).scatter_add_(0, keys, torch.ones_like(keys))
    slots = slots[:num_local_experts]
    padded = slots if alignment == 1 else slots + (-slots).remainder(alignment)
    ends = padded.cumsum(0)
    return ExpertCounts(slots.to(torch.int32), ends - padded, ends)


def expand(topk_idx: Tensor, counts: ExpertCounts, num_rows: int, may_wait: bool) -> Expansion:
    """Give every slot with a local expert its row. Rows past ``num_rows`` are dropped.

    may_wait: the host may wait for the GPU.
    """
    sorted_keys, by_expert = _expert_keys(topk_idx, counts.slots.size(0)).sort(stable=True)
    # How much further back an expert's first row lies than its first slot; slots without one go past the last row.
    shift = counts.begins - (counts.slots.cumsum(0) - counts.slots)
    shift = torch.nn.functional.pad(shift, (0, 1), value=num_rows)
    slots = torch.arange(by_expert.size(0), device=by_expert.device)
    sorted_rows = (shift[sorted_keys] + slots).clamp_(max=num_rows)  # num_rows: none
    slot_of_row = by_expert.new_full((num_rows + 1,), -1).scatter_(0, sorted_rows, by_expert)
    rows = torch.empty_like(by_expert).scatter_(0, by_expert, sorted_rows)
    row_of_slot = rows.masked_fill_(rows == num_rows, -1).to(torch.int32).view(topk_idx.shape)
    packed = _packed(row_of_slot) if may_wait and topk_idx.size(1) > _MANY_SLOTS else row_of_slot
    return Expansion(row_of_slot, slot_of_row[:num_rows], packed)


def _packed(row_of_slot: Tensor) -> Tensor:
    """Return each token's rows first, in the order of its slots, in as many columns as the longest has."""
    has_none = row_of_slot < 0
    most = 0 if has_none.size(0) == 0 else has_none.size(1) - int(has_none.sum(1).min())
    return row_of_slot.gather(1, has_none.sort(dim=1, stable=True).indices[:, :most])


def most_expanded_rows(num_rows: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """Return the rows that any routes of ``num_rows`` tokens with different experts need."""
    slots = num_rows * min(top_k, num_local_experts)
    return align(slots + (alignment - 1) * num_local_experts, alignment)


def take_rows(rows: Tensor, row_of: Tensor, fill_zero: bool) -> Tensor:
    """Return rows[row_of]: any type, contiguous [N, ...]; where row_of is -1, 0 or, without fill_zero, anything."""
    words = _widest_words(rows)
    if rows.size(0) == 0:
        taken = words.new_zeros((row_of.size(0), *words.shape[1:]))
    else:
        taken = words.index_select(0, row_of.clamp(min=0).long())
        if fill_zero:
            taken.masked_fill_((row_of < 0).view(-1, *[1] * (words.dim() - 1)), 0)
    return taken.view(rows.dtype)


def reduce_slots(y: Tensor, rows_of_token: Tensor) -> Tensor:
    """Return y's type [N, hidden]: per token its rows of y [X, hidden], summed in slot order, rounded once."""
    total = torch.zeros((rows_of_token.size(0), y.size(1)), dtype=torch.float32, device=y.device)
    if y.size(0) == 0:
        return total.to(y.dtype)
    words, has_none, rows = _widest_words(y), rows_of_token < 0, rows_of_token.clamp(min=0)
    for slot in range(rows_of_token.size(1)):
        taken = words.index_select(0, rows[:, slot]).masked_fill_(has_none[:, slot, None], 0)
        total += taken.view(y.dtype)
    return total.to(y.dtype)


def at_slots(rows: Tensor, slot_of_row: Tensor, top_k: int) -> Tensor:
    """Return [N, top_k * hidden]: each row of [N, hidden] at its slot, 0 elsewhere; a row without a slot nowhere."""
    wide = rows.new_zeros((rows.size(0), top_k + 1, rows.size(1)))
    at = torch.where(slot_of_row < 0, top_k, slot_of_row.long())
    wide.scatter_(1, at.view(-1, 1, 1).expand(-1, 1, rows.size(1)), rows.unsqueeze(1))
    return wide[:, :top_k].contiguous().view(rows.size(0), top_k * rows.size(1))


def column_major(scales: Tensor) -> Tensor:
    """Return [N, n] column-major, its token dimension padded to a multiple of 4 rows (16 bytes)."""
    num_rows, words = scales.shape
    storage = scales.new_zeros((words, align(num_rows, 4)))
    storage[:, :num_rows] = scales.T
    return not_a_view(storage[:, :num_rows].T)


def _expert_keys(topk_idx: Tensor, num_local_experts: int) -> Tensor:
    ids = topk_idx.reshape(-1).long()
    return ids.masked_fill(ids < 0, num_local_experts)


def _widest_words(rows: Tensor) -> Tensor:
    """Return rows as integers that torch can index: 8 bytes where a row has a whole number of them."""
    if rows.dim() == 1 or rows.size(-1) * rows.element_size() % 8:
        return rows.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
        )
    return rows.view(torch.int64) if rows.storage_offset() * rows.element_size() % 8 == 0 else rows
