# SPDX-License-Identifier: Apache-2.0
"""What kernels noted of their time: see Buffer.take_trace(). The layout is that of kernels/core/trace.h."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from weft import _core
from weft.errors import invalid

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct("<IIQ")
_SPAN = struct.Struct("<QQHHHH")
_NO_PEER = 0xFFFF


class Span(NamedTuple):
    """What one warp did, or waited for, from begin_ns to end_ns of its device's clock.

    Attributes:
        name: e.g. ``combine.push``; a wait's starts with ``wait `` and names the operation as errors do.
        peer: the rank it was about, or None.
        block, warp: who noted it.
    """

    name: str
    begin_ns: int
    end_ns: int
    peer: int | None
    block: int
    warp: int


class Trace(NamedTuple):
    """The spans since the last look, in no order, and how many more there was no room for."""

    spans: list[Span]
    num_dropped: int


def take_from(*contexts: Any) -> Trace:
    """Return what kernels of the contexts of a device noted since the last look, once they have all finished.

    Raises: weft.Error without WEFT_TRACE_SPANS.
    """
    spans: list[Span] = []
    num_dropped = 0
    for context in contexts:
        log = context.trace_log()
        if log is None:
            raise invalid("WEFT_TRACE_SPANS", 0, "room for the spans of a trace, such as 100000")
        if context.is_cuda:
            import torch

            torch.cuda.synchronize(context.device)
        taken = take(log)
        spans += taken.spans
        num_dropped += taken.num_dropped
    return Trace(spans, num_dropped)


_name_of = functools.cache(_core.span_name)


def take(log: Tensor) -> Trace:
    """Read the log, uint8 [bytes] on any device, and empty it. What writes to it must have finished."""
    count, capacity, _ = _HEADER.unpack(bytes(log[: _HEADER.size].cpu().numpy()))
    kept = min(count, capacity)
    raw = bytes(log[_HEADER.size : _HEADER.size + kept * _SPAN.size].cpu().numpy())
    log[:4].zero_()
    spans = [
        Span(_name_of(what), begin_ns, end_ns, None if peer == _NO_PEER else peer, block, warp)
        for begin_ns, end_ns, what, peer, block, warp in _SPAN.iter_unpack(raw)
    ]
    return Trace(spans, count - kept)
