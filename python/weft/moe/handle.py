# SPDX-License-Identifier: Apache-2.0
"""What a high-throughput dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft import _core
from weft.runtime.tensors import lacking_memory

KIND = 0x57454654_4854  # of the facts in a handle: another number than those of other handles


class DispatchHandle(tuple):  # type: ignore[type-arg]
    """The handle of ``Buffer.dispatch``: a tuple of tensors.

    Where all ranks map each other: those of DeepEP's in a node and three more.
    (rank_prefix_matrix i32[R, R], channel_prefix_matrix i32[R, 1], recv_channel_prefix_matrix i32[R, 1],
    recv_src_idx i32[N], is_token_in_rank bool[T, R], send_head i32[T, R], slot_base i32[T], slot i32[N], facts
    i64[8] on the CPU). Weft has one channel per rank pair. The first entry, at [i][rank], counts the rows that
    this rank got from ranks 0..i.

    Where they do not, with D domains of at most W ranks that do: seven of Weft's own, then DeepEP's ten across nodes,
    of one channel each.
    (rank_prefix_matrix i32[R, R], facts i64[10] on the CPU, send_row i32[T, R], slot_base i32[T], slot i32[N], routes,
    records; is_token_in_rank bool[T, R], rdma_channel_prefix_matrix i32[I, 1], gbl_channel_prefix_matrix i32[R, 1],
    recv_rdma_channel_prefix_matrix i32[I, 1], recv_rdma_rank_prefix_sum i32[D], recv_gbl_channel_prefix_matrix
    i32[R, 1], recv_gbl_rank_prefix_sum i32[R], recv_src_meta u8[N, 4]: the row's token at its source, send_rdma_head
    i32[T, I], send_nvl_head i32[messages, W]). handle[-4][i] counts the rows that this rank got from ranks 0..i.

    The tensors are all that a handle is: ``ctx.save_for_backward(*handle)`` keeps one, and ``ctx.saved_tensors``
    is one again, for any buffer of the same ranks on the same devices. Entries are there when the dispatch's event
    was waited for; taking them out of the tuple does nothing. Who writes to them changes the routes. They may move, as
    share_memory_() moves one, but keep their shapes.

    state: what calls read of them (src/bind/dispatch_state.h). Those of one dispatch share it.
    """

    state: _core.DispatchState | None

    def __new__(cls, entries: Iterable[torch.Tensor]) -> DispatchHandle:
        """Return the handle that these entries are; its state is None where they are not a handle's."""
        handle = super().__new__(cls, entries)
        handle.state = cls.state_of(tuple(handle))
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tensors, of which the copy is a handle again."""
        return DispatchHandle, (tuple(self),)

    @staticmethod
    def state_of(entries: object) -> _core.DispatchState | None:
        """Return the state that a handle's entries hold; None where these are not a handle's."""
        if not isinstance(entries, (tuple, list)) or len(entries) not in (9, 17):
            return None
        if not all(isinstance(entry, torch.Tensor) for entry in entries):
            return None
        routes: torch.Tensor | None = None
        records: torch.Tensor | None = None
        if len(entries) == 9:
            facts = facts_of(entries[8], KIND, 8)
            prefix, _, _, token, in_rank, send_row, slot_base, slot, _ = entries
        else:
            facts = facts_of(entries[1], KIND, 10)
            prefix, _, send_row, slot_base, slot, routes, records, in_rank, *_ = entries
            token = entries[_SOURCE_META]
            if token.dtype != torch.uint8 or not token.is_contiguous():
                return None
            token = token.view(torch.int32).flatten()
        if facts is None:
            return None
        _, group_key, rank, handle_id, num_experts, top_k, staging_rows, counts_unknown, *more = facts
        ranks = prefix.size(0) if prefix.dim() == 2 else 0
        tokens, rows = slot_base.numel(), slot.numel()
        shapes: tuple[tuple[int, ...], ...] = (
            (ranks, ranks),
            (rows,),
            (tokens, ranks),
            (tokens, ranks),
            (tokens,),
            (rows,),
        )
        parts = [prefix, token, in_rank, send_row, slot_base, slot]
        if routes is not None and records is not None:
            parts += [routes, records]
            shapes += tuple((words,) for words in more)
        if any(
            entry.shape != shape
            or entry.dtype != (torch.bool if entry is in_rank else torch.int32)
            or entry.device != slot.device
            or not entry.is_contiguous()
            or lacking_memory(entry)
            for entry, shape in zip(parts, shapes, strict=True)
        ):
            return None
        sizes = (group_key, rank, handle_id, num_experts, top_k, tokens, rows, staging_rows)
        tensors = (in_rank, send_row, slot_base, prefix, slot, token, None, routes, records)
        return _core.DispatchState((*sizes, bool(counts_unknown)), tensors)


_SOURCE_META = -3


def entries_across_nodes(
    state: _core.DispatchState, sent: torch.Tensor, facts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return a handle's entries: those of Weft, then views of what the kernels wrote.

    The latter are DeepEP's ten, in the order of the core's route_words().
    """
    assert state.routes is not None
    assert state.records is not None
    ranks, domains = state.prefix.size(0), max(state.domains) + 1
    widest = max(state.domains.count(domain) for domain in range(domains))
    sizes = [state.num_tokens * domains, ranks * domains, domains]
    send_pair, pairs, handed_on, _ = state.routes.split([*sizes, state.routes.numel() - sum(sizes)])
    received = state.prefix.narrow(1, state.rank, 1)
    mine = (state.prefix, facts, state.send_row, state.slot_base, state.slot, state.routes, state.records)
    return (
        *mine,
        state.is_token_in_rank,
        pairs.view(ranks, domains)[state.rank].view(-1, 1),
        sent,
        handed_on.view(-1, 1),
        handed_on,
        received,
        received.squeeze(1),
        state.token.view(torch.uint8).view(-1, 4),
        send_pair.view(-1, domains),
        state.records.view(-1, widest),
    )


def facts_of(entry: object, kind: int, length: int) -> list[int] | None:
    """Return the numbers that a handle of this kind carries in a tensor on the CPU; None where it is not one."""
    if not isinstance(entry, torch.Tensor) or entry.device.type != "cpu":
        return None
    if entry.dtype != torch.int64 or entry.shape != (length,) or lacking_memory(entry):
        return None
    numbers: list[int] = entry.tolist()
    return numbers if numbers[0] == kind else None
