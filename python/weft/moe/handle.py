# SPDX-License-Identifier: Apache-2.0
"""What a high-throughput dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from weft import _core
from weft.runtime.allocation import empty_words_on_host, part_of
from weft.runtime.plain import addresses
from weft.runtime.tensors import lacking_memory

_KIND = 0x57454654_4854  # of the facts in a handle: another number than those of other handles


@dataclass(eq=False)
class DispatchState:
    """The routes of one dispatch, which nobody changes. R ranks, T tokens sent from here, N rows received here.

    group_key: of the ranks and their devices. handle_id: which dispatch this is, on all of them.
    send_row i32[T, R]: a token's place among the rows for a rank, or -1. slot_base i32[T]: its first place in
    the staging of combine. prefix i32[R, R]: rows that rank j gets from ranks 0..i. slot i32[N]: a received
    row's place in its owner's staging. token i32[N]: its row at its source. sum_place i32[T, R]: when combine
    adds a rank's row; None: ranks ascending. routes, records i32[...]: what else the core keeps where ranks do not
    all map each other, else None; islands: the island of each rank then, else ().
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
    routes: torch.Tensor | None = None
    records: torch.Tensor | None = None
    islands: tuple[int, ...] = ()

    @functools.cached_property
    def core(self) -> Any:
        """All of it that the core goes by."""
        memory = _core.HandleMemory(
            self.send_row, self.slot_base, self.prefix, self.sum_place, self.routes, self.records
        )
        sizes = (self.num_tokens, self.num_experts, self.num_rows, self.staging_rows)
        return _core.DispatchHandle(memory, self.handle_id, *sizes, self.counts_unknown)

    def __post_init__(self) -> None:
        """Note where the tensors are while nobody else has them."""
        _ = self.places

    @functools.cached_property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The tensors that calls with the handle read."""
        every = (
            self.send_row,
            self.slot_base,
            self.prefix,
            self.slot,
            self.sum_place,
            self.routes,
            self.records,
        )
        return tuple(tensor for tensor in every if tensor is not None)

    @functools.cached_property
    def places(self) -> bytes:
        """Where those were at first."""
        return addresses(*self.kept)

    @property
    def is_in_place(self) -> bool:
        """Whether they are there still, so that ``core`` is right."""
        return addresses(*self.kept) == self.places

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what names the memory of these tensors, which is not that of their copies."""
        places = ("core", "kept", "places")
        return {name: value for name, value in self.__dict__.items() if name not in places}


class DispatchHandle(tuple):  # type: ignore[type-arg]
    """The handle of ``Buffer.dispatch``: a tuple of tensors.

    Where all ranks map each other: those of DeepEP's in a node and three more.
    (rank_prefix_matrix i32[R, R], channel_prefix_matrix i32[R, 1], recv_channel_prefix_matrix i32[R, 1],
    recv_src_idx i32[N], is_token_in_rank bool[T, R], send_head i32[T, R], slot_base i32[T], slot i32[N], facts
    i64[8] on the CPU). Weft has one channel per rank pair. The first entry, at [i][rank], counts the rows that
    this rank got from ranks 0..i.

    Where they do not, with I islands of at most W ranks that do: seven of Weft's own, then DeepEP's ten across nodes,
    of one channel each.
    (rank_prefix_matrix i32[R, R], facts i64[10] on the CPU, send_row i32[T, R], slot_base i32[T], slot i32[N], routes,
    records; is_token_in_rank bool[T, R], rdma_channel_prefix_matrix i32[I, 1], gbl_channel_prefix_matrix i32[R, 1],
    recv_rdma_channel_prefix_matrix i32[I, 1], recv_rdma_rank_prefix_sum i32[I], recv_gbl_channel_prefix_matrix
    i32[R, 1], recv_gbl_rank_prefix_sum i32[R], recv_src_meta u8[N, 4]: the row's token at its source, send_rdma_head
    i32[T, I], send_nvl_head i32[messages, W]). handle[-4][i] counts the rows that this rank got from ranks 0..i.

    The tensors are all that a handle is: ``ctx.save_for_backward(*handle)`` keeps one, and ``ctx.saved_tensors``
    is one again, for any buffer of the same ranks on the same devices. Entries are there when the dispatch's event
    was waited for; taking them out of the tuple does nothing. Who writes to them changes the routes. They may move, as
    share_memory_() moves one, but keep their shapes.
    """

    state: DispatchState | None

    def __new__(cls, entries: Iterable[torch.Tensor]) -> DispatchHandle:
        """Return the handle that these entries are; its state is None where they are not a handle's."""
        handle = super().__new__(cls, entries)
        handle.state = cls.state_of(tuple(handle))
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tensors, of which the copy is a handle again."""
        return DispatchHandle, (tuple(self),)

    @staticmethod
    def state_of(entries: object) -> DispatchState | None:
        """Return the state that a handle's entries hold; None where these are not a handle's."""
        if not isinstance(entries, (tuple, list)) or len(entries) not in (9, 17):
            return None
        if not all(isinstance(entry, torch.Tensor) for entry in entries):
            return None
        routes: torch.Tensor | None = None
        records: torch.Tensor | None = None
        if len(entries) == 9:
            facts = facts_of(entries[8], _KIND, 8)
            prefix, _, _, token, in_rank, send_row, slot_base, slot, _ = entries
        else:
            facts = facts_of(entries[1], _KIND, 10)
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
            routes=routes,
            records=records,
        )


_SOURCE_META = -3


def dispatch_form(
    context: Any,
    row_format: Any,
    num_tokens: int,
    num_experts: int,
    keep_weights: bool,
    has_global_scale: bool,
) -> Any:
    """Return the core's calls of dispatches along new routes, which make a DispatchState and a DispatchHandle.

    context: a DeviceContext.
    """
    alike = {
        "group_key": context.group_key,
        "rank": int(context.communicator.rank),
        "num_experts": num_experts,
        "top_k": row_format.top_k,
        "num_tokens": num_tokens,
        "islands": context.islands,
    }
    return _core.DispatchForm(
        receiving=context.receiving,
        format=row_format,
        tokens=num_tokens,
        experts=num_experts,
        keep_weights=keep_weights,
        has_global_scale=has_global_scale,
        kind=_KIND,
        facts=alike,
        state_type=DispatchState,
        handle_type=DispatchHandle,
        part=part_of,
        empty_words=empty_words_on_host,
        across_nodes=_entries_across_nodes,
    )


def _entries_across_nodes(
    state: DispatchState, sent: torch.Tensor, facts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return a handle's entries: those of Weft, then views of what the kernels wrote.

    The latter are DeepEP's ten, in the order of the core's route_words().
    """
    assert state.routes is not None
    assert state.records is not None
    ranks, islands = state.prefix.size(0), max(state.islands) + 1
    widest = max(state.islands.count(island) for island in range(islands))
    sizes = [state.num_tokens * islands, ranks * islands, islands]
    send_pair, pairs, handed_on, _ = state.routes.split([*sizes, state.routes.numel() - sum(sizes)])
    received = state.prefix.narrow(1, state.rank, 1)
    mine = (state.prefix, facts, state.send_row, state.slot_base, state.slot, state.routes, state.records)
    return (
        *mine,
        state.is_token_in_rank,
        pairs.view(ranks, islands)[state.rank].view(-1, 1),
        sent,
        handed_on.view(-1, 1),
        handed_on,
        received,
        received.squeeze(1),
        state.token.view(torch.uint8).view(-1, 4),
        send_pair.view(-1, islands),
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
