# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring ranks of an ElasticBuffer, for pipeline parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft import _core
from weft.errors import Error
from weft.moe import arguments
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_SMS, align, check_integer
from weft.moe.device_context import address
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES
from weft.runtime import spans

_MESSAGE_ALIGNMENT_BYTES = 32
_MOST_BYTES = 1 << 40
_MOST_IN_FLIGHT = 1 << 16


def ring_bytes(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
    """Return what ElasticBuffer.get_pp_buffer_size_hint() does."""
    each = align(check_integer("num_max_tensor_bytes", num_max_tensor_bytes, 0), _MESSAGE_ALIGNMENT_BYTES)
    in_flight = check_integer("num_max_inflight_tensors", num_max_inflight_tensors, 0)
    return align(each * in_flight * 4, BUFFER_ALIGNMENT_BYTES)


class RingMessages:
    """The messages of one buffer. ElasticBuffer says what each call does."""

    def __init__(self, contexts: BufferContexts) -> None:
        self._contexts = contexts
        self._ring: Any = None

    def set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Set the largest message, and how many may be on their way."""
        max_bytes = check_integer("num_max_tensor_bytes", num_max_tensor_bytes, 1, _MOST_BYTES)
        in_flight = check_integer("num_max_inflight_tensors", num_max_inflight_tensors, 1, _MOST_IN_FLIGHT)
        context = self._contexts.alive()
        context.synchronize_current()
        self._ring = _core.Ring.create(context.core, max_bytes, in_flight)

    def send(self, t: Tensor, dst_rank_idx: int, num_sms: int) -> None:
        """Send a tensor to a neighbour."""
        ring, message = self._message("dst_rank_idx", t, dst_rank_idx, num_sms)
        spans.run("pp_send", ring.send, **message)

    def receive(self, t: Tensor, src_rank_idx: int, num_sms: int) -> None:
        """Fill a tensor with the next message of a neighbour."""
        ring, message = self._message("src_rank_idx", t, src_rank_idx, num_sms)
        spans.run("pp_recv", ring.receive, **message)

    def drop(self) -> None:
        """Give the memory back."""
        self._ring = None

    def _message(self, argument: str, t: Tensor, peer: int, num_sms: int) -> tuple[Any, dict[str, int]]:
        """Check a message. Return what carries it, and its description for the core."""
        context = self._contexts.alive()
        if self._ring is None:
            raise Error("pp_set_config: got no call yet, allowed: messages after it")
        shape = tuple(t.shape) if isinstance(t, Tensor) else ()
        arguments.check_tensor("t", t, shape, (), context.device)
        return self._ring, {
            "data": address(t),
            "bytes": t.numel() * t.element_size(),
            "peer": check_integer(argument, peer, 0, self._contexts.size - 1),
            "num_sms": check_integer("num_sms", num_sms, 0, MAX_SMS),
            "stream": context.current_stream,
        }
