# SPDX-License-Identifier: Apache-2.0
"""How a low-latency call is started: both phases at once, or the send now and the receive by a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from weft import _core
from weft.errors import Error
from weft.moe.engine import Engine
from weft.moe.events import EventOverlap

Hook = Callable[[], None]


def launch(
    engine: Engine,
    name: Literal["dispatch", "combine"],
    call: Any,
    tensors: tuple[Tensor | None, ...],
    async_finish: bool,
    return_recv_hook: bool,
    on_receive: Callable[[], None] | None = None,
) -> tuple[EventOverlap, Hook | None]:
    """Run both phases on the communication stream, or send on the current one and return the hook.

    on_receive: called once the receive phase is launched.
    Raises: weft.Error, with nothing sent, while the hook of the call before the last one is still to be run.
    """
    _check_hooks(engine)
    start = getattr(engine.low_latency, name)
    call.ticket = engine.low_latency.next_ticket()
    if return_recv_hook:
        call.stream = engine.current_stream
        start(call, _core.PHASE_SEND)
        return EventOverlap(), _ReceiveHook(engine, name, call, tensors, on_receive)
    engine.begin(None)
    call.stream = engine.stream
    start(call, _core.PHASE_SEND | _core.PHASE_RECEIVE)
    _count(engine)
    if on_receive is not None:
        on_receive()
    event = engine.finish(async_finish, tensors)
    if async_finish:
        event.extra_tensors = tuple(tensor for tensor in tensors if tensor is not None)
    return event, None


class _ReceiveHook:
    """Launches the receive phase, once, and keeps the call's tensors alive until then."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        call: Any,
        tensors: tuple[Tensor | None, ...],
        on_receive: Callable[[], None] | None,
    ) -> None:
        self._engine = engine
        self._on_receive = on_receive
        self._start: Callable[[Any, int], None] = getattr(engine.low_latency, name)
        self._call = call
        self._tensors: tuple[Tensor | None, ...] | None = tensors
        self._number = _count(engine)
        if self._number is not None:
            engine.unreceived[self._number] = f"low_latency_{name}"

    def __call__(self) -> None:
        if self._tensors is None:
            raise Error("hook: called a second time, allowed: once for each call that returned one")
        if self._number is not None:
            self._engine.unreceived.pop(self._number, None)
        self._start(self._call, _core.PHASE_RECEIVE)
        self._tensors = None
        if self._on_receive is not None:
            self._on_receive()


# Ranks tell each other what they have received, and a call waits, on every rank, until all have received the
# call before the last one. A hook that is forgotten would therefore stall everybody until the deadline, and
# then look like a lost rank, or with enable_shrink mask this one. This rank alone can tell the difference.


def _check_hooks(engine: Engine) -> None:
    late = [name for number, name in engine.unreceived.items() if number < engine.low_latency_calls]
    if late and not engine.is_capturing:
        raise Error(
            f"hook: got none run of the {late[0]}() before the last call, allowed: a hook runs before the "
            "second call after its own; where it was dropped, destroy the buffer"
        )


def _count(engine: Engine) -> int | None:
    """Count a call that was sent. Return its number; None for a captured one, which sends nothing yet."""
    if engine.is_capturing:
        return None
    engine.low_latency_calls += 1
    return engine.low_latency_calls
