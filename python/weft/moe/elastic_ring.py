# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring ranks of an ElasticBuffer, for pipeline parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft import _core
from weft.errors import Error
from weft.moe import arguments
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_SMS, align, check_whole
from weft.moe.device_context import address
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES
from weft.runtime import spans

_MESSAGE_ALIGNMENT_BYTES = 32
_MOST_BYTES = 1 << 40
_MOST_IN_FLIGHT = 1 << 16


class RingMessages:
    """The part of ElasticBuffer that sends tensors around the circle of ranks. See there for what calls share.

    Ranks r and r + 1, and the last and the first, are neighbours. Messages from one rank to another arrive in
    the order in which they were sent; the two directions, and both neighbours, are independent.
    """

    _contexts: BufferContexts

    def __init__(self) -> None:
        super().__init__()
        self._ring: Any = None

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Return num_bytes of a buffer for such messages, a multiple of 2 MiB, by DeepEP's formula.

        Weft's slots have memory of their own, which pp_set_config() takes.
        """
        each = align(check_whole("num_max_tensor_bytes", num_max_tensor_bytes, 0), _MESSAGE_ALIGNMENT_BYTES)
        in_flight = check_whole("num_max_inflight_tensors", num_max_inflight_tensors, 0)
        return align(each * in_flight * 4, BUFFER_ALIGNMENT_BYTES)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Set the largest message, and how many to one neighbour may be sent before it has received any.

        Collective, with the same values on all ranks. Messages that were sent and not received are dropped.
        Raises: weft.Error on all ranks that were given different values; weft.PeerLost naming a rank that stays
        away.
        """
        max_bytes = check_whole("num_max_tensor_bytes", num_max_tensor_bytes, 1, _MOST_BYTES)
        in_flight = check_whole("num_max_inflight_tensors", num_max_inflight_tensors, 1, _MOST_IN_FLIGHT)
        context = self._contexts.alive()
        context.synchronize_current()
        self._ring = _core.Ring.create(context.core, max_bytes, in_flight)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a tensor to a neighbour, in order on the current stream. On the CPU it is sent on return.

        Args:
            t: contiguous, of any type and size up to pp_set_config()'s, on the buffer's device. It may be
                changed when the stream has passed the call.
            dst_rank_idx: this rank's next or previous one.
            num_sms: 0: chosen by size.
        Waits, on a GPU in the stream, while the neighbour has yet to receive num_max_inflight_tensors earlier
        ones. Raises: weft.Error naming a wrong argument; weft.PeerLost naming a neighbour that stayed silent,
        on CUDA at a later call.
        """
        ring, message = self._message("dst_rank_idx", t, dst_rank_idx, num_sms)
        spans.run("pp_send", ring.send, **message)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Fill a tensor with the next message of a neighbour, in order on the current stream.

        Args:
            t: as for pp_send(), with as many bytes as were sent; the type is not looked at.
            src_rank_idx: this rank's next or previous one.
        Raises: as pp_send(); weft.Error too when the message has another size: it is dropped, and the next one
        can be received.
        """
        ring, message = self._message("src_rank_idx", t, src_rank_idx, num_sms)
        spans.run("pp_recv", ring.receive, **message)

    def _drop_ring(self) -> None:
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
            "peer": check_whole(argument, peer, 0, self._contexts.size - 1),
            "num_sms": check_whole("num_sms", num_sms, 0, MAX_SMS),
            "stream": context.current_stream,
        }
