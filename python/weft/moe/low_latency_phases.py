# SPDX-License-Identifier: Apache-2.0
"""How a low-latency call is started: both phases at once, or the send now and the receive by a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.autograd import profiler

from weft.errors import Error
from weft.moe.device_context import DeviceContext
from weft.moe.events import EventOverlap, finished_event
from weft.runtime import spans
from weft.runtime.modes import outside_modes

Hook = Callable[[], None]


def launch(
    context: DeviceContext,
    name: Literal["low_latency_dispatch", "low_latency_combine"],
    calls: Any,
    tensors: tuple[Tensor | None, ...],
    async_finish: bool,
    return_recv_hook: bool,
    on_receive: Callable[[], None] | None = None,
) -> tuple[EventOverlap, Hook | None]:
    """Run both phases on the communication stream, or send on the current one and return the hook.

    calls: the core's, of the form at hand; tensors: its arguments, in its order. on_receive: called by the hook,
    once the receive phase is launched.
    Raises: weft.Error, with nothing sent, while the hook of the call before the last one is still to be run.
    """
    if context.unreceived:
        _check_hooks(context)
    is_watched = profiler._is_profiler_enabled or spans.NVTX
    if return_recv_hook:
        send = spans.around(f"{name}.send", calls.send) if is_watched else calls.send
        sent = send(*tensors, context.current_stream)
        return finished_event(), _ReceiveHook(context, name, calls, sent, tensors, on_receive)
    run = spans.around(name, calls.run) if is_watched else calls.run
    context.low_latency_calls = (
        run(*tensors, context.stream, context.current_stream, not async_finish) or context.low_latency_calls
    )
    if not async_finish:
        return finished_event(), None
    event = context.finish(async_finish, tensors)
    event.extra_tensors = tuple(tensor for tensor in tensors if tensor is not None)
    return event, None


class _ReceiveHook:
    """Launches the receive phase, once, and keeps the call's tensors alive until then."""

    def __init__(
        self,
        context: DeviceContext,
        name: str,
        calls: Any,
        sent: Any,
        tensors: tuple[Tensor | None, ...],
        on_receive: Callable[[], None] | None,
    ) -> None:
        self._context = context
        self._name = name
        self._on_receive = on_receive
        self._calls = calls
        self._sent = sent
        self._tensors: tuple[Tensor | None, ...] | None = tensors
        self._number: int = sent.number  # 0 for a captured call, which sends nothing yet
        if self._number:
            context.low_latency_calls = self._number
            context.unreceived[self._number] = name

    @outside_modes
    def __call__(self) -> None:
        if self._tensors is None:
            raise Error("hook: called a second time, allowed: once for each call that returned one")
        if self._number:
            self._context.unreceived.pop(self._number, None)
        receive = self._calls.receive
        if profiler._is_profiler_enabled or spans.NVTX:
            receive = spans.around(f"{self._name}.receive", receive)
        receive(self._sent)
        self._tensors = None
        if self._on_receive is not None:
            self._on_receive()


# Ranks tell each other what they have received, and a call waits, on every rank, until all have received the
# call before the last one. A hook that is forgotten would therefore stall everybody until the deadline, and
# then look like a lost rank, or with enable_shrink mask this one. This rank alone can tell the difference.


def _check_hooks(context: DeviceContext) -> None:
    late = [name for number, name in context.unreceived.items() if number < context.low_latency_calls]
    if late and not context.is_capturing:
        raise Error(
            f"hook: that of the {late[0]}() before the last call has not run, allowed: a hook runs before the "
            "second call after its own; where it was dropped, destroy the buffer"
        )
