# SPDX-License-Identifier: Apache-2.0
"""What a high-throughput dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from weft import _core

_KIND = 0x57454654_4854  # of the facts in a handle: another number than those of other handles


@dataclass(frozen=True)
class DispatchState:
    """The routes of one dispatch. R ranks, T tokens sent from here, N rows received here.

    group_key: of the ranks and their devices. handle_id: which dispatch this is, on all of them.
    send_row i32[T, R]: a token's place among the rows for a rank, or -1. slot_base i32[T]: its first place in
    the staging of combine. prefix i32[R, R]: rows that rank j gets from ranks 0..i. slot i32[N]: a received
    row's place in its owner's staging. token i32[N]: its row at its source. sum_place i32[T, R]: when combine
    adds a rank's row; None: ranks ascending.
    """

    group_key: int
    rank: int
    handle_id: int
    num_experts: int
    top_k: int  # 0 where no expert ids travelled
    num_tokens: int
    num_rows: int
    staging_rows: int
    counts_unknown: bool
    is_token_in_rank: torch.Tensor
    send_row: torch.Tensor
    slot_base: torch.Tensor
    prefix: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    sum_place: torch.Tensor | None = None

    @functools.cached_property
    def memory(self) -> Any:
        """The addresses for the core."""
        sum_place = 0 if self.sum_place is None else self.sum_place.data_ptr()
        return _core.HandleMemory(
            self.send_row.data_ptr(), self.slot_base.data_ptr(), self.prefix.data_ptr(), sum_place
        )


class DispatchHandle(tuple):  # type: ignore[type-arg]
    """The handle of ``Buffer.dispatch``: a tuple of tensors, those of DeepEP's in a node and three more.

    (rank_prefix_matrix i32[R, R], channel_prefix_matrix i32[R, 1], recv_channel_prefix_matrix i32[R, 1],
    recv_src_idx i32[N], is_token_in_rank bool[T, R], send_head i32[T, R], slot_base i32[T], slot i32[N], facts
    i64[8] on the CPU). Weft has one channel per rank pair. The first entry, at [i][rank], counts the rows that
    this rank got from ranks 0..i.

    The tensors are all that a handle is: ``ctx.save_for_backward(*handle)`` keeps one, and ``ctx.saved_tensors``
    is one again, for any buffer of the same ranks on the same devices. Entries are there when the dispatch's event
    was waited for; taking them out of the tuple does nothing. Who writes to them changes the routes.
    """

    state: DispatchState

    def __new__(cls, state: DispatchState, num_tokens_per_rank: torch.Tensor) -> DispatchHandle:
        """Return the handle with its state beside the tensors."""
        facts = (
            _KIND,
            state.group_key,
            state.rank,
            state.handle_id,
            state.num_experts,
            state.top_k,
            state.staging_rows,
            int(state.counts_unknown),
        )
        entries = (
            state.prefix,
            num_tokens_per_rank.view(-1, 1),
            state.prefix.narrow(1, state.rank, 1),
            state.token,
            state.is_token_in_rank,
            state.send_row,
            state.slot_base,
            state.slot,
            torch.tensor(facts, dtype=torch.int64, device="cpu"),
        )
        handle = super().__new__(cls, entries)
        handle.state = state
        return handle

    @staticmethod
    def state_of(entries: object) -> DispatchState | None:
        """Return the state that a handle's entries hold; None where these are not a handle's."""
        if not isinstance(entries, (tuple, list)) or len(entries) != 9:
            return None
        facts = facts_of(entries[8], _KIND, 8)
        prefix, _, _, token, in_rank, send_row, slot_base, slot, _ = entries
        if facts is None or not all(isinstance(entry, torch.Tensor) for entry in entries):
            return None
        _, group_key, rank, handle_id, num_experts, top_k, staging_rows, counts_unknown = facts
        ranks = prefix.size(0) if prefix.dim() == 2 else 0
        tokens, rows = slot_base.numel(), slot.numel()
        shapes = ((ranks, ranks), (rows,), (tokens, ranks), (tokens, ranks), (tokens,), (rows,))
        routes = (prefix, token, in_rank, send_row, slot_base, slot)
        if any(
            entry.shape != shape
            or entry.dtype != (torch.bool if entry is in_rank else torch.int32)
            or entry.device != slot.device
            or not entry.is_contiguous()
            for entry, shape in zip(routes, shapes, strict=True)
        ):
            return None
        return DispatchState(
            group_key,
            rank,
            handle_id,
            num_experts,
            top_k,
            tokens,
            rows,
            staging_rows,
            bool(counts_unknown),
            in_rank,
            send_row,
            slot_base,
            prefix,
            slot,
            token,
        )


def facts_of(entry: object, kind: int, length: int) -> list[int] | None:
    """Return the numbers that a handle of this kind carries in a tensor on the CPU; None where it is not one."""
    if not isinstance(entry, torch.Tensor) or entry.device.type != "cpu":
        return None
    if entry.dtype != torch.int64 or entry.shape != (length,):
        return None
    numbers: list[int] = entry.tolist()
    return numbers if numbers[0] == kind else None
