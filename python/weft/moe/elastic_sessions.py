# SPDX-License-Identifier: Apache-2.0
"""All-gather sessions of an ElasticBuffer: dispatches that send every row to every rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import Error, invalid
from weft.moe import arguments, high_throughput
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import align, ceil_div, check_integer
from weft.moe.device_context import DeviceContext
from weft.moe.events import EventOverlap
from weft.moe.high_throughput import Rows
from weft.runtime.allocation import not_a_view

_ROW_BYTES = 4096
_MOST_GATHERS = 32
_NUM_SMS = 20
Shapes = Sequence[int] | Sequence[Sequence[int]]


class GatherSessions:
    """The sessions of one buffer, one at a time. ElasticBuffer says what each call does."""

    def __init__(self, contexts: BufferContexts) -> None:
        self._contexts = contexts
        self._session_bytes = 0
        self._session_gathers = 0
        self._left: tuple[int, int] | None = None  # (bytes, gathers) of the open session

    def set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Set what one session may take."""
        self._session_bytes = check_integer("num_max_session_bytes", num_max_session_bytes, 0)
        self._session_gathers = check_integer(
            "num_max_all_gathers_per_session", num_max_all_gathers_per_session, 1, _MOST_GATHERS
        )

    def open(self) -> None:
        """Open a session."""
        self._contexts.alive()
        if self._left is not None or self._session_gathers == 0:
            state = "an open session" if self._left is not None else "no agrs_set_config()"
            raise invalid("session", state, "agrs_set_config() first, one session at a time")
        self._left = (self._session_bytes, self._session_gathers)

    def close(self) -> None:
        """Close it."""
        self._require_session()
        self._left = None

    def new_tensors(self, shapes: Shapes, dtype: torch.dtype) -> Any:
        """Return a tensor, or a tuple of them for several shapes."""
        left_bytes, _ = self._require_session()
        device = self._contexts.device
        item_bytes = arguments.check_dtype("dtype", dtype).itemsize
        each = _each(shapes)
        most = max((math.prod(shape) * item_bytes for shape in each), default=0)
        if most > left_bytes:
            raise invalid(
                "shapes", f"a tensor of {most} bytes", f"at most the {left_bytes} left in the session"
            )
        tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in each)
        return tensors[0] if _is_one(shapes) else tensors

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the gathered tensors, and what waits for them."""
        left_bytes, left_gathers = self._require_session()
        several = list(t) if isinstance(t, (list, tuple)) else [t]
        given = [tensor for tensor in several if isinstance(tensor, Tensor)]
        if not given or len(given) < len(several):
            raise invalid("t", arguments.describe(t), "a tensor, or a list of at least one")
        context = self._contexts.of("t", given[0])
        for tensor in given:
            arguments.check_tensor("t", tensor, tuple(tensor.shape), (), context.device)
        sizes = [_padded(tensor.numel() * tensor.element_size()) for tensor in given]
        taken = sum(sizes) * self._contexts.size
        if taken > left_bytes or left_gathers < 1:
            allowed = (
                f"{left_bytes} bytes and {left_gathers} calls, what agrs_set_config() leaves the session"
            )
            raise Error(f"t: got {taken} bytes in one more call, allowed: {allowed}", "capacity")
        self._left = (left_bytes - taken, left_gathers - 1)
        context.begin(None)
        with context.on_comm_stream():
            received = _gather_rows(context, _as_rows(given, sizes), _form_words(given))
            flat = received.view(self._contexts.size, -1)
            gathered = [_part(flat, sum(sizes[:i]), tensor) for i, tensor in enumerate(given)]
            if context.core.largest_piece_bytes < self._session_bytes:
                # A session has to fit, whatever the caller still holds of the sessions before it.
                gathered = [tensor.clone() for tensor in gathered]
            del received, flat
        event = context.finish(True, tuple(given))
        context.hand_over([*gathered])
        return (*gathered, _waiter(event))

    def _require_session(self) -> tuple[int, int]:
        if self._left is None:
            raise invalid("session", "none", "calls inside agrs_new_session() or after create_agrs_session()")
        return self._left


def session_bytes(group: Any, shapes: Shapes, dtype: torch.dtype) -> int:
    """Return what ElasticBuffer.get_agrs_num_max_session_bytes() does."""
    item_bytes = arguments.check_dtype("dtype", dtype).itemsize
    each = sum(_padded(math.prod(shape) * item_bytes) for shape in _each(shapes))
    return each * arguments.group_size(group)


def _gather_rows(context: DeviceContext, rows: Tensor, form: tuple[int, int]) -> Tensor:
    """Return uint8[R * rows, bytes]: every rank's rows, by one dispatch that goes everywhere.

    On the CPU ``form`` goes beside them, and ranks that gave something else are refused. A GPU's host does not wait.
    """
    ranks, num_rows = int(context.communicator.size), rows.size(0)
    looks = not context.is_cuda
    with context.on_comm_stream():
        in_rank = torch.ones((num_rows, ranks), dtype=torch.bool, device=context.device)
        per_expert = torch.zeros(1, dtype=torch.int32, device=context.device)
        words = torch.tensor([form], dtype=torch.int32).expand(num_rows, -1) if looks else None
        sent = Rows(rows, words, combine_rows=0)
        # On the CPU rows that are not as many shall come, to be looked at.
        plan = high_throughput.DispatchPlan(context, sent, 1, worst_rows=0 if looks else num_rows * ranks)
        most_tokens = 0 if looks else num_rows
        received, state, _ = plan.run(
            *(rows, words, None, None, in_rank, per_expert, None, most_tokens, _NUM_SMS, context.as_ordered)
        )
    gathered: Tensor = received.rows()
    came: Tensor | None = received.scales()
    if came is not None:
        _check_alike(came, state.prefix[:, context.communicator.rank], int(context.communicator.rank))
    return gathered


def _check_alike(words: Tensor, ends: Tensor, rank: int) -> None:
    """Refuse forms of ranks that differ: words i32[rows of all, 2], of which those of a rank end at ends i32[R]."""
    forms = words[torch.nn.functional.pad(ends[:-1].long(), (1, 0))].tolist()
    for other, form in enumerate(forms):
        if form == forms[rank]:
            continue
        mine, theirs = forms[rank][0], form[0]
        differ = f"{mine} bytes on rank {rank} and {theirs} on rank {other}"
        if mine == theirs:
            differ = f"other sizes or types on rank {rank} than on rank {other}"
        raise invalid("t", differ, "the same shapes and types on all ranks")


def _form_words(tensors: list[Tensor]) -> tuple[int, int]:
    """Return what all ranks have to give alike, as two words: bytes in all, and a checksum of sizes and types."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    types = [str(tensor.dtype) for tensor in tensors]
    return sum(sizes) & 0x7FFFFFFF, zlib.crc32(repr((sizes, types)).encode()) & 0x7FFFFFFF


def _as_rows(tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """Return uint8[n, row bytes]: the tensors one after the other, each padded to its size."""
    total = sum(sizes)
    row_bytes = min(_ROW_BYTES, max(total, 16))
    storage = torch.zeros(align(max(total, 16), row_bytes), dtype=torch.uint8, device=tensors[0].device)
    for i, tensor in enumerate(tensors):
        begin = sum(sizes[:i])
        storage[begin : begin + tensor.numel() * tensor.element_size()] = tensor.reshape(-1).view(torch.uint8)
    return storage.view(ceil_div(max(total, 16), row_bytes), row_bytes)


def _part(flat: Tensor, begin: int, like: Tensor) -> Tensor:
    num_bytes = like.numel() * like.element_size()
    piece = flat[:, begin : begin + num_bytes].contiguous()
    return not_a_view(piece.view(-1).view(like.dtype).view(flat.size(0), *like.shape))


def _waiter(event: EventOverlap) -> Callable[[], None]:
    return event.current_stream_wait


def _padded(num_bytes: int) -> int:
    return align(num_bytes, 16)


def _is_one(shapes: Shapes) -> bool:
    return all(isinstance(size, int) for size in shapes)


def _each(shapes: Shapes) -> list[torch.Size]:
    """Return shapes, one or several, each a tuple of sizes."""
    try:
        several: list[Any] = [shapes] if _is_one(shapes) else list(shapes)
    except TypeError:
        allowed = "a sequence of sizes, or of such sequences"
        raise invalid("shapes", arguments.describe(shapes), allowed) from None
    return [arguments.check_shape("shapes", shape) for shape in several]
