# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch leaves for its combine."""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.moe.handle import facts_of, handle_again
from weft.runtime.allocation import part_of
from weft.runtime.plain import addresses
from weft.runtime.tensors import lacking_memory

_KIND = 0x57454654_4C4C  # of the facts in a handle: another number than those of other handles
_MADE_AT_ONCE = 256
_blocks = itertools.count(1)  # of numbers of handles
_combine_rows: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


_unused: tuple[list[Tensor], list[Tensor]] = ([], [])  # statuses made in advance: not received, and received


def new_status(is_received: bool) -> Tensor:
    """Return the status of a new handle. Many are made at once: a tensor takes longer than all else of a handle."""
    unused = _unused[is_received]
    try:
        return unused.pop()
    except IndexError:
        first = next(_blocks) * _MADE_AT_ONCE
        with torch.inference_mode(False):  # autograd may save them in a later call
            numbers = torch.arange(first, first + _MADE_AT_ONCE, dtype=torch.int64, device="cpu")
            together = torch.stack((torch.full_like(numbers, int(is_received)), numbers), dim=1)
            unused += [part_of(together, 2 * i, (2,)) for i in range(_MADE_AT_ONCE)]
        return unused.pop()


@dataclass(frozen=True, eq=False)
class LowLatencyForm:
    """What a dispatch and its combine agree on. low_latency_form() makes them: equal ones are one object."""

    group_key: int
    num_tokens: int
    top_k: int
    had_weights: bool
    max_tokens: int
    hidden: int
    num_experts: int
    rows_shape: tuple[int, int, int]  # of the received rows: Le, R * M, hidden

    @functools.cached_property
    def facts(self) -> Tensor:
        """What a handle carries of it, i64[8] on the CPU."""
        numbers = (self.group_key, self.num_tokens, self.top_k, self.had_weights)
        sizes = (self.max_tokens, self.hidden, self.num_experts)
        return torch.tensor((_KIND, *numbers, *sizes), dtype=torch.int64, device="cpu")

    @functools.cached_property
    def entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a handle has of it: M, hidden and E, i64 of no dimension; and the facts."""
        facts = self.facts
        return facts[5], facts[6], facts[7], facts


low_latency_form = functools.lru_cache(maxsize=256)(LowLatencyForm)


@dataclass
class LowLatencyState:
    """What a dispatch leaves for its combine.

    status i64[2] on the CPU: 1 once the dispatch has received, else routes hold nothing yet: the hook is still to be
    run; and a number that no other handle of this process has. Handles that are the same tensors share it.
    """

    form: LowLatencyForm
    routes: Tensor
    status: Tensor
    _was_received: bool = False  # status[0], once it was seen to be 1
    _kept_rows: Tensor | None = None

    @property
    def group_key(self) -> int:
        """The ranks, as DeviceContext.group_key has them."""
        return self.form.group_key

    @property
    def is_received(self) -> bool:
        """Whether the routes are there, or will be before anything that is launched later."""
        self._was_received = self._was_received or bool(self.status[0])
        return self._was_received

    def __post_init__(self) -> None:
        """Note where the routes are while nobody else has them."""
        self._place = addresses(self.routes)

    @property
    def is_in_place(self) -> bool:
        """Whether the routes are where they were at first, with their memory."""
        return addresses(self.routes) == self._place

    def receive(self) -> None:
        """Note that the dispatch has received, or will before anything that is launched later."""
        # Autograd, which may have saved it, shall not take this for a change.
        ctypes.c_int64.from_address(self.status.data_ptr()).value = 1
        self._was_received = True

    @property
    def combine_rows(self) -> Tensor | None:
        """What get_next_low_latency_combine_buffer() gave for this handle."""
        return _combine_rows.get(int(self.status[1]))

    @combine_rows.setter
    def combine_rows(self, rows: Tensor) -> None:
        self._kept_rows = _combine_rows[int(self.status[1])] = rows


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """The handle of a low-latency dispatch, a tuple of tensors: (src_info, layout_range, M, hidden, E, routes, facts,
    status), of which DeepEP has the first five.

    src_info i32[Le, R * M]: each row's token at its source. layout_range i64[Le, R]: count (low 32 bits) and
    first row (high 32 bits) of the rows from each source. M, hidden, E: i64 of no dimension. These three, facts i64[8]
    and status i64[2] are on the CPU.

    The tensors are all that a handle is: ``ctx.save_for_backward(*handle)`` keeps one, and ``ctx.saved_tensors`` is one
    again, for any buffer of the same ranks on the same devices.
    """

    state: LowLatencyState

    def __new__(cls, state: LowLatencyState, src_info: Tensor, layout_range: Tensor) -> LowLatencyHandle:
        """Return the handle with its state beside the tensors."""
        max_tokens, hidden, num_experts, facts = state.form.entries
        entries = (src_info, layout_range, max_tokens, hidden, num_experts, state.routes, facts, state.status)
        handle = tuple.__new__(cls, entries)
        handle.state = state
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tensors, of which the copy is a handle again."""
        return handle_again, (LowLatencyHandle, tuple(self))

    @staticmethod
    def state_of(entries: object) -> LowLatencyState | None:
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
        form = low_latency_form(
            group_key, num_tokens, top_k, bool(had_weights), max_tokens, hidden, num_experts, rows_shape
        )
        state = LowLatencyState(form, routes, status)
        state._kept_rows = state.combine_rows
        return state
