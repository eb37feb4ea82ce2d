# SPDX-License-Identifier: Apache-2.0
"""EPHandle: what an elastic dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import MAX_SMS, check_integer
from weft.moe.elastic_layout import Expansion, ExpertCounts, count_experts
from weft.runtime.plain import signature_of
from weft.runtime.streams import current_stream


@dataclass(repr=False)
class EPHandle:
    """The routes of one ``ElasticBuffer.dispatch``. T tokens, K slots, N rows here, R ranks, Le local experts.

    Attributes:
        topk_idx: [T, K], a clone where dispatch got do_handle_copy, else the caller's tensor itself.
        num_recv_tokens: N; num_expanded_tokens: rows of the expanded layout, 0 without it. Both are the worst case
            when the host did not wait for counts.
        num_recv_tokens_per_expert_list: aligned counts; empty when the host did not wait.
        psum_num_recv_tokens_per_scaleup_rank: i32[scale-up ranks], inclusive over the places of source ranks in their
            nodes, all nodes together. Rows themselves come by source rank.
        psum_num_recv_tokens_per_expert: i32[Le]. Expanded: where a segment's real rows end; else the inclusive sum
            of aligned counts.
        num_unaligned_recv_tokens_per_expert: i32[Le].
        recv_src_metadata: i32[N, K + 2]: source rank * num_max_tokens_per_rank + source token; source rank * K +
            right-most local slot; per slot its expanded row, -1 for none. Undefined in the tail of a worst case.
        dst_buffer_slot_idx: i32[T, K]: a slot's row among those that this rank sends to its expert's rank, or -1.
        token_metadata_at_forward, channel_linked_list: None; what forwarding between nodes keeps is in state.
        state, expansion, recv_topk_idx, sums_at_owner, late, checked: of Weft's own calls; sums_at_owner says that
            combine brings back every slot's row, to be summed at the token's rank.

    The five from psum_num_recv_tokens_per_scaleup_rank to dst_buffer_slot_idx are worked out when they are first asked
    for, on the stream of the dispatch, which the current stream then waits for; in a CUDA graph at once. So the last
    of them reads topk_idx only then.

    Fields can be set; calls refuse what does not fit the dispatch. A handle belongs to its dispatch, and serves every
    buffer of the same ranks on the same devices.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor = field(init=False)
    psum_num_recv_tokens_per_expert: Tensor = field(init=False)
    num_unaligned_recv_tokens_per_expert: Tensor = field(init=False)
    recv_src_metadata: Tensor = field(init=False)
    dst_buffer_slot_idx: Tensor = field(init=False)
    state: _core.DispatchState
    expansion: Expansion | None
    recv_topk_idx: Tensor
    sums_at_owner: bool
    late: LateFields
    token_metadata_at_forward: None = None
    channel_linked_list: None = None
    checked: Hashable = ()  # the signature of the fields that check_fields() has seen to be right

    def __getattr__(self, name: str) -> Any:
        """Work out a field that nobody has asked for."""
        if name not in LATE_FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self.late.get(name)
        setattr(self, name, value)
        return value

    def __repr__(self) -> str:
        tokens, top_k = self.topk_idx.shape
        rows = f"{self.num_recv_tokens} rows here" + (", expanded" if self.do_expand else "")
        return f"EPHandle({tokens} tokens, top-{top_k} of {self.num_experts} experts, {rows})"

    @staticmethod
    def state_of(_entries: object) -> None:
        """Return None: no collection of tensors stands for this handle."""

    def deterministic_sort(self) -> None:
        """Do nothing: rows always come in ascending order of source rank and token."""


@dataclass
class LateFields:
    """What those fields of a handle follow from that calls themselves do not need: some 40 small kernels make them.

    num_experts: of a rank that has all of its, and of this one. stream: the dispatch's, by its number; 0 on the CPU.
    """

    state: _core.DispatchState
    rank: int
    topk_idx: Tensor
    recv_topk_idx: Tensor
    expansion: Expansion | None
    num_experts: tuple[int, int]
    alignment: int
    max_tokens: int
    scaleup_places: Tensor
    num_places: int
    stream: int

    @functools.cached_property
    def counts(self) -> ExpertCounts:
        """The slots of each expert of this rank."""
        return count_experts(self.recv_topk_idx, self.num_experts[1], self.alignment)

    def get(self, name: str) -> Tensor:
        """Return a field, ready for the current stream."""
        device, make = self.recv_topk_idx.device, LATE_FIELDS[name]
        if device.type != "cuda" or current_stream(device.index) == self.stream:
            return make(self)
        if torch.cuda.is_current_stream_capturing():  # which may not wait for a stream outside
            return make(self)
        current, own = torch.cuda.current_stream(device), torch.cuda.ExternalStream(self.stream, device)
        with torch.cuda.stream(own):
            value = make(self)
        current.wait_stream(own)
        value.record_stream(current)
        return value


LATE_FIELDS: dict[str, Callable[[LateFields], Tensor]] = {
    "psum_num_recv_tokens_per_scaleup_rank": lambda of: scaleup_psum(
        of.state.prefix[:, of.rank], of.scaleup_places, of.num_places
    ),
    "psum_num_recv_tokens_per_expert": lambda of: expert_psum(of.counts, of.expansion is not None),
    "num_unaligned_recv_tokens_per_expert": lambda of: of.counts.slots,
    "recv_src_metadata": lambda of: source_metadata(
        of.state, of.rank, of.recv_topk_idx, of.expansion, of.max_tokens
    ),
    "dst_buffer_slot_idx": lambda of: destination_slots(of.topk_idx, of.state.send_row, of.num_experts[0]),
}


def check_fields(handle: EPHandle, device: torch.device) -> None:
    """Refuse a handle of which a field that calls read was set to what does not fit its dispatch."""
    state, expansion = handle.state, handle.expansion
    tensors: tuple[Tensor, ...] = (handle.topk_idx, handle.recv_topk_idx)
    if isinstance(expansion, Expansion):
        tensors = (*tensors, expansion.row_of_slot, expansion.slot_of_row, expansion.rows_of_token)
    of_state = (state.num_tokens, state.num_rows, state.top_k)
    set_by_hand = (handle.num_sms, handle.do_expand, handle.sums_at_owner, handle.num_expanded_tokens)
    signature = signature_of(tensors, of_state, set_by_hand, expansion is None, device.index)
    if signature and signature == handle.checked:
        return
    _check_each_field(handle, device)
    handle.checked = signature


def _check_each_field(handle: EPHandle, device: torch.device) -> None:
    state, expansion = handle.state, handle.expansion
    for name, num_rows in (("topk_idx", state.num_tokens), ("recv_topk_idx", state.num_rows)):
        given, shape = getattr(handle, name), (num_rows, state.top_k)
        arguments.check_tensor(f"handle.{name}", given, shape, arguments.IDS, device)
    check_integer("handle.num_sms", handle.num_sms, 0, MAX_SMS)
    for name in ("do_expand", "sums_at_owner"):
        if type(getattr(handle, name)) is not bool:
            raise invalid(f"handle.{name}", getattr(handle, name), "True or False, as in its dispatch")
    if not handle.do_expand:
        if expansion is not None:
            raise invalid("handle.expansion", "an expansion", "None for a dispatch without do_expand")
        return
    if not isinstance(expansion, Expansion):
        raise invalid("handle.expansion", expansion, "that of its dispatch")
    rows = check_integer("handle.num_expanded_tokens", handle.num_expanded_tokens, 0)
    slots = (state.num_rows, state.top_k)
    arguments.check_tensor("handle.expansion", expansion.row_of_slot, slots, (torch.int32,), device)
    arguments.check_tensor("handle.expansion", expansion.slot_of_row, (rows,), (torch.int64,), device)
    of_tokens = (state.num_rows, "slots")
    arguments.check_tensor("handle.expansion", expansion.rows_of_token, of_tokens, (torch.int32,), device)


def expert_psum(counts: ExpertCounts, do_expand: bool) -> Tensor:
    """Return psum_num_recv_tokens_per_expert."""
    return (counts.begins + counts.slots if do_expand else counts.ends).to(torch.int32)


def scaleup_psum(prefix: Tensor, places: Tensor, num_places: int) -> Tensor:
    """Return psum_num_recv_tokens_per_scaleup_rank of rows from ranks 0..i, prefix i32[R], and places i64[R]."""
    counts = prefix.diff(prepend=prefix.new_zeros(1))
    return prefix.new_zeros(num_places).index_add_(0, places, counts).cumsum(0, dtype=torch.int32)


def right_most_slots(recv_topk_idx: Tensor) -> Tensor:
    """Return i32[N]: each row's right-most slot with an expert here; -1 for none."""
    slots = torch.arange(recv_topk_idx.size(1), dtype=torch.int32, device=recv_topk_idx.device)
    return slots.expand_as(recv_topk_idx).masked_fill(recv_topk_idx < 0, -1).amax(dim=1)


def source_metadata(
    state: _core.DispatchState, rank: int, recv_topk_idx: Tensor, expansion: Expansion | None, max_tokens: int
) -> Tensor:
    """Return recv_src_metadata of the rows that ``rank`` received."""
    num_rows, top_k = recv_topk_idx.shape
    ends = state.prefix[:, rank].contiguous()
    rows = torch.arange(num_rows, dtype=torch.int32, device=recv_topk_idx.device)
    src_rank = torch.searchsorted(ends, rows, right=True).to(torch.int32)
    right_most = right_most_slots(recv_topk_idx)
    row_of_slot = torch.full_like(recv_topk_idx, -1) if expansion is None else expansion.row_of_slot
    origin = torch.stack((src_rank * max_tokens + state.token, src_rank * top_k + right_most), dim=1)
    return torch.cat((origin, row_of_slot.to(torch.int32)), dim=1)


def destination_slots(topk_idx: Tensor, send_row: Tensor, experts_per_rank: int) -> Tensor:
    """Return dst_buffer_slot_idx."""
    owner = topk_idx.long().clamp(min=0).div(experts_per_rank, rounding_mode="floor")
    owner = owner.clamp(max=send_row.size(1) - 1)
    return send_row.gather(1, owner).masked_fill(topk_idx < 0, -1)
