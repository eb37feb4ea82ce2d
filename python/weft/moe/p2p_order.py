# SPDX-License-Identifier: Apache-2.0
"""In which order the phases of a P2PAllToAll run, and on which stream.

    order = PhaseOrder(contexts, device, num_sms)
    sent = order.send(context, run, (x, ids))            # run(stream) launches the phase
    with order.making(): rows = torch.empty(...)         # what the receive is to fill
    order.receive(context, run, made=(rows,))

Without ``num_sms`` phases run on the current stream. With it they run on few SMs, on a stream of their own: a send
after what the current stream has got, a receive after its send, and the current stream then waits for the receive. So
what the current stream gets between the two runs beside both.
Threads: one caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.moe.device_context import DeviceContext

Tensors = Sequence[Tensor | None]
Run = Callable[[int], Any]


class PhaseOrder:
    """The order of all phases of one object, whose contexts these are."""

    def __init__(self, contexts: Sequence[DeviceContext], device: torch.device, num_sms: int) -> None:
        self._device = device
        self._is_one = len(contexts) == 1
        self._beside: Any = contexts[0].comm_stream if num_sms else None  # None on the CPU
        self._stream = contexts[0].stream  # the same, for the core
        self._last: tuple[int, Any] | None = None  # stream and event of the last phase on a caller's

    def send(self, context: DeviceContext, run: Run, tensors: Tensors) -> Any:
        """Launch a send of ``tensors``."""
        if self._beside is None:
            return self._run_here(context, run)
        self._after_caller(context)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._beside)
        return run(self._stream)

    def making(self) -> AbstractContextManager[Any]:
        """Return a context in which torch makes tensors for a receive to fill."""
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)

    def receive(self, context: DeviceContext, run: Run, given: Tensors, made: Tensors) -> None:
        """Launch a receive into tensors of the caller's, which the current stream may still be at, and made ones."""
        if self._beside is None:
            self._run_here(context, run)
            return
        if any(tensor is not None for tensor in given):
            self._after_caller(context)
        for tensor in given:
            if tensor is not None:
                tensor.record_stream(self._beside)
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
