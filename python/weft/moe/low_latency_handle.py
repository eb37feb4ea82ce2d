# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch leaves for its combine."""

from __future__ import annotations

import functools
import itertools
import struct
import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.moe.handle import facts_of
from weft.runtime.allocation import padded, part_of, parts_of
from weft.runtime.tensors import lacking_memory

_KIND = 0x57454654_4C4C  # of the facts in a handle: another number than those of other handles
_MADE_AT_ONCE = 256
_blocks = itertools.count(1)  # of numbers of handles
_combine_rows: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


unused_statuses: tuple[list[Tensor], list[Tensor]] = ([], [])  # not received, and received


def make_statuses(is_received: bool) -> None:
    """Add statuses of new handles to the unused ones. A tensor takes longer than all else of a handle."""
    first = next(_blocks) * _MADE_AT_ONCE
    words = array("q", [int(is_received)]) * (2 * _MADE_AT_ONCE)
    words[1::2] = array("q", range(first, first + _MADE_AT_ONCE))
    with torch.inference_mode(False):  # autograd may save them in a later call
        together = _tensor_over(words)
        unused_statuses[is_received].extend(parts_of(together, 2, _MADE_AT_ONCE))


def _tensor_over(words: array[int]) -> Tensor:
    """Return them as i64[len(words)] on the CPU that nobody can free or resize under others who share its memory."""
    return torch.frombuffer(words, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class LowLatencyAgreement:
    """What a dispatch and its combine agree on. low_latency_agreement() makes them: equal ones are one object."""

    group_key: int
    num_tokens: int
    top_k: int
    had_weights: bool
    max_tokens: int
    hidden: int
    num_experts: int
    rows_shape: tuple[int, int, int]  # of the received rows: Le, R * M, hidden

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """All but the shape."""
        of_call = (self.group_key, self.num_tokens, self.top_k, int(self.had_weights))
        return (*of_call, self.max_tokens, self.hidden, self.num_experts)

    @functools.cached_property
    def key(self) -> bytes:
        """All of it, for signatures of calls."""
        return struct.pack("=10q", *self.numbers, *self.rows_shape)

    @functools.cached_property
    def facts(self) -> Tensor:
        """What a handle carries of it, i64[8] on the CPU."""
        with torch.inference_mode(False):  # autograd may save them in a later call
            return _tensor_over(array("q", (_KIND, *self.numbers)))

    @functools.cached_property
    def entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a handle has of it: M, hidden and E, i64 of no dimension; and the facts."""
        facts = self.facts
        with torch.inference_mode(False):
            return part_of(facts, 5, ()), part_of(facts, 6, ()), part_of(facts, 7, ()), facts


low_latency_agreement = functools.lru_cache(maxsize=256)(LowLatencyAgreement)


def routes_lengths(
    mode: Any, max_tokens: int, top_k: int, num_experts: int, has_weights: bool, num_rows: int
) -> tuple[int, int]:
    """Return the elements of a handle's routes where src_info lies behind them, and where it is the caller's.

    num_rows: of all experts of this rank.
    """
    words = int(mode.routes_words(int(max_tokens), int(top_k), int(num_experts), has_weights))
    return padded(words, torch.int32.itemsize) + num_rows, words


def combine_rows_of(state: _core.LowLatencyHandleState) -> Tensor | None:
    """Return what get_next_low_latency_combine_buffer() gave for a handle."""
    return _combine_rows.get(state.number)


def keep_combine_rows(state: _core.LowLatencyHandleState, rows: Tensor) -> None:
    """Keep them as long as the state, or another one of the same tensors."""
    state.combine_rows = _combine_rows[state.number] = rows


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """The handle of a low-latency dispatch, a tuple of tensors: (src_info, layout_range, M, hidden, E, routes, facts,
    status), of which DeepEP has the first five.

    src_info i32[Le, R * M]: each row's token at its source. layout_range i64[Le, R]: count (low 32 bits) and
    first row (high 32 bits) of the rows from each source. M, hidden, E: i64 of no dimension. These three, facts i64[8]
    and status i64[2] are on the CPU.

    state is what the core reads: agreement, routes and status. The first word of the status is 1 once the dispatch has
    received, else routes hold nothing yet: the hook is still to be run. The second is a number that no other handle of
    this process has. Handles of the same tensors share them.

    The tensors are all that a handle is: ``ctx.save_for_backward(*handle)`` keeps one, and ``ctx.saved_tensors`` is one
    again, for any buffer of the same ranks on the same devices.
    """

    state: _core.LowLatencyHandleState | None

    def __new__(cls, entries: Iterable[Tensor]) -> LowLatencyHandle:
        """Return the handle that these entries are; its state is None where they are not a handle's."""
        handle = super().__new__(cls, entries)
        handle.state = cls.state_of(tuple(handle))
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tensors, of which the copy is a handle again."""
        return LowLatencyHandle, (tuple(self),)

    @staticmethod
    def state_of(entries: object) -> _core.LowLatencyHandleState | None:
        """Return the state that a handle's entries hold; None where these are not a handle's."""
        if not isinstance(entries, (tuple, list)) or len(entries) != 8:
            return None
        src_info, _, _, _, _, routes, carried, status = entries
        facts = facts_of(carried, _KIND, 8)
        if facts is None or not all(isinstance(entry, Tensor) for entry in entries):
            return None
        if src_info.dim() != 2 or routes.dtype != torch.int32 or status.shape != (2,):
            return None
        if not routes.is_contiguous() or lacking_memory(routes):
            return None
        if status.device.type != "cpu" or status.dtype != torch.int64 or routes.device != src_info.device:
            return None
        _, group_key, num_tokens, top_k, had_weights, max_tokens, hidden, num_experts = facts
        rows_shape = (int(src_info.size(0)), int(src_info.size(1)), hidden)
        agreement = low_latency_agreement(
            group_key, num_tokens, top_k, bool(had_weights), max_tokens, hidden, num_experts, rows_shape
        )
        state = _core.LowLatencyHandleState(agreement, routes, status)
        state.combine_rows = combine_rows_of(state)
        return state
