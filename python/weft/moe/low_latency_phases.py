# SPDX-License-Identifier: Apache-2.0
"""How a low-latency call is started: both phases at once, or the send now and the receive by a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft import _core
from weft.errors import Error
from weft.moe.engine import Engine
from weft.moe.events import EventOverlap

Hook = Callable[[], None]


def launch(
    engine: Engine,
    start: Callable[[Any, int], None],
    call: Any,
    tensors: tuple[Tensor | None, ...],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[EventOverlap, Hook | None]:
    """Run both phases on the communication stream, or send on the current one and return the hook."""
    call.ticket = engine.low_latency.next_ticket()
    if return_recv_hook:
        call.stream = engine.current_stream
        start(call, _core.PHASE_SEND)
        return EventOverlap(), _ReceiveHook(start, call, tensors)
    engine.begin(None)
    call.stream = engine.stream
    start(call, _core.PHASE_SEND | _core.PHASE_RECEIVE)
    event = engine.finish(async_finish, tensors)
    if async_finish:
        event.extra_tensors = tuple(tensor for tensor in tensors if tensor is not None)
    return event, None


class _ReceiveHook:
    """Launches the receive phase, once, and keeps the call's tensors alive until then."""

    def __init__(
        self, start: Callable[[Any, int], None], call: Any, tensors: tuple[Tensor | None, ...]
    ) -> None:
        self._start = start
        self._call = call
        self._tensors: tuple[Tensor | None, ...] | None = tensors

    def __call__(self) -> None:
        if self._tensors is None:
            raise Error("hook: called a second time, allowed: once for each call that returned one")
        self._start(self._call, _core.PHASE_RECEIVE)
        self._tensors = None
