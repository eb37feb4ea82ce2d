# SPDX-License-Identifier: Apache-2.0
"""The phases of a P2PAllToAll: on which stream each runs, in which window, and what a send's tensors are until then.

    turns, order = Turns(contexts, max_in_flight), PhaseOrder(contexts, device, num_sms)
    context = turns.next()                       # for a new exchange
    ids = SavedInput("topk_idx", topk_idx)             # a tensor that later phases read: ids.tensor()
    turns.check_send(context)                    # before each send
    sent = order.send(context, run, (x, ids))    # run(stream) launches the phase
    turns.note_sent(context, sent, "dispatch_recv")
    with order.making(): rows = torch.empty(...) # what the receive is to fill
    turns.begin_receive(handle)                  # of the send before it
    order.receive(context, run, given=(), made=(rows,))

Streams: without ``num_sms`` phases run on the current stream. With it they run on few SMs, on a stream of their own: a
send after what the current stream has got, a receive after its send, and the current stream then waits for the receive.
So what the current stream gets between the two runs beside both.
Windows: all ranks must find the same one. So only what all of them call counts: not what fails on one of them, nor when
a handle dies.
Tensors: on the CPU a later phase reads a copy, so that the caller may write the tensor again. On CUDA that would be one
more kernel in each send: it is the caller's, and refused where torch has written it meanwhile.
Threads: one caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import Error, invalid
from weft.moe.device_context import DeviceContext

if TYPE_CHECKING:
    from weft.moe.p2p import P2PHandle

Tensors = Sequence[Tensor | None]
Run = Callable[[int], Any]
_NOT_COUNTED = -1


class Turns:
    """The windows of one object, by turns."""

    def __init__(self, contexts: Sequence[DeviceContext], max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_last_use = list(contexts)  # by an exchange that began there, the oldest first
        self._pending = dict.fromkeys(contexts, 0)  # sends whose receive is to come

    def next(self) -> DeviceContext:
        """Return the window for a new exchange: the least recently taken of those where no receive is to come."""
        return min(self._by_last_use, key=lambda context: self._pending[context] > 0)

    def check_send(self, context: DeviceContext) -> None:
        """Refuse a send that would wait for a receive of this rank's own: see src/moe/low_latency.h."""
        late = context.low_latency.late_receive
        if late is not None and not context.is_capturing:
            raise Error(
                f"{late}: still to be called for the exchange before the last one, allowed: at most "
                f"max_in_flight ({self._max_in_flight}) at once"
            )

    def note_sent(self, context: DeviceContext, sent: Any, receive: str) -> None:
        """Note a send, whose receive is the phase of that name."""
        if receive == "dispatch_recv":
            self._by_last_use.remove(context)
            self._by_last_use.append(context)
        self._pending[context] += 1
        context.low_latency.note_unreceived(sent.number, receive)

    def begin_receive(self, handle: P2PHandle) -> None:
        """Note the receive that follows a handle's last send. It counts also where it fails, of rows that do not fit.

        Raises: weft.Error where it failed before, and a later send has told peers that its rows have been read.
        """
        context, number = handle.context, int(handle.sent.number)
        if not handle.is_pending:
            if number and number != context.low_latency.calls:
                given = "one whose receive failed, and after another send"
                raise invalid(
                    "handle", given, "the receive once more before that, or no more of this exchange"
                )
            return
        handle.is_pending = False
        context.low_latency.note_received(number)
        self._pending[context] -= 1


class PhaseOrder:
    """The order of all phases of one object, whose contexts these are."""

    def __init__(self, contexts: Sequence[DeviceContext], device: torch.device, num_sms: int) -> None:
        self._device = device
        self._is_one = len(contexts) == 1
        self._own_stream: Any = contexts[0].comm_stream if num_sms else None  # None on the CPU
        self._stream = contexts[0].stream  # the same, for the core
        self._last: tuple[int, Any] | None = None  # stream and event of the last phase on a caller's

    def send(self, context: DeviceContext, run: Run, tensors: Tensors) -> Any:
        """Launch a send of ``tensors``."""
        if self._own_stream is None:
            return self._run_here(context, run)
        self._after_caller(context)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._own_stream)
        return run(self._stream)

    def making(self) -> AbstractContextManager[Any]:
        """Return a context in which torch makes tensors for a receive to fill."""
        return nullcontext() if self._own_stream is None else torch.cuda.stream(self._own_stream)

    def receive(self, context: DeviceContext, run: Run, given: Tensors, made: Tensors) -> None:
        """Launch a receive into tensors of the caller's, which the current stream may still be at, and made ones."""
        if self._own_stream is None:
            self._run_here(context, run)
            return
        if any(tensor is not None for tensor in given):
            self._after_caller(context)
        for tensor in given:
            if tensor is not None:
                tensor.record_stream(self._own_stream)
        run(self._stream)
        context.core.wait(context.current_stream, self._stream)
        context.hand_over(made)

    def _after_caller(self, context: DeviceContext) -> None:
        context.core.wait(self._stream, context.current_stream)

    def _run_here(self, context: DeviceContext, run: Run) -> Any:
        """Run a phase on the current stream, after the one before it.

        A context orders its own phases. Where there are several, a receive of one could take all SMs while a send of
        another waits for one, on two ranks crosswise; so phases run in the order in which all ranks call them.
        """
        stream = context.current_stream
        if self._is_one or not context.is_cuda or context.is_capturing:
            return run(stream)
        if self._last is not None and self._last[0] != stream:
            self._last[1].wait(torch.cuda.current_stream(self._device))
        result = run(stream)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._last = (stream, event)
        return result


def times_written(tensor: Tensor) -> int:
    """Return how often torch has written a tensor in place; -1 of one of inference mode, where it does not count."""
    return _NOT_COUNTED if tensor.is_inference() else int(tensor._version)


class SavedInput:
    """A tensor as a send got it. name: of the argument."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name = name
        self._tensor = tensor.clone() if tensor.is_cpu else tensor
        self._times_written = times_written(self._tensor)

    def tensor(self) -> Tensor:
        """Return it. Raises: weft.Error where it has been written since."""
        if times_written(self._tensor) != self._times_written:
            raise invalid(self._name, "a tensor written after its send", "left as it is until combine_recv()")
        return self._tensor
