# SPDX-License-Identifier: Apache-2.0
"""Messages of a rank to itself: a copy from the tensor of each send into that of the receive that takes it, in order.

own = OwnMessages(rank, timeout_s)
own.send(tensor, tag)       # in one thread
own.recv(target, tag)       # in another
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import torch

from weft.errors import Error


@dataclass
class _Message:
    tensor: torch.Tensor
    tag: int
    claim: threading.Lock = field(default_factory=threading.Lock)  # held while it is taken or dropped
    is_over: threading.Event = field(default_factory=threading.Event)
    error: Error | None = None


class OwnMessages:
    """The messages of one rank to itself. Threads: one that sends and one that receives at a time."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._sent: queue.SimpleQueue[_Message] = queue.SimpleQueue()

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Return when a receive has taken it. On CUDA what writes it is in the current stream.

        Raises: Error when none comes in time, or one of another size, type or tag.
        """
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        message = _Message(tensor, tag)
        self._sent.put(message)
        if not message.is_over.wait(self._timeout_s) and message.claim.acquire(blocking=False):
            raise self._unmatched("send", "receive")
        if not message.is_over.wait(self._timeout_s):
            raise Error(
                f"rank {self._rank}: the receive of its own message took over {self._timeout_s:g} s", "system"
            )
        if message.error is not None:
            raise message.error

    def recv(self, target: torch.Tensor, tag: int) -> None:
        """Fill a tensor with the next message. Raises: Error as send() does."""
        try:
            message = self._sent.get(timeout=self._timeout_s)
            while not message.claim.acquire(blocking=False):
                message = self._sent.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._unmatched("receive", "send") from None
        try:
            message.error = self._mismatch(message, target, tag)
            if message.error is not None:
                raise message.error
            with torch.no_grad():
                target.view(-1).copy_(message.tensor.view(-1))
            if target.is_cuda:
                torch.cuda.current_stream(target.device).synchronize()  # the sender may write again
        finally:
            message.is_over.set()

    def _mismatch(self, message: _Message, target: torch.Tensor, tag: int) -> Error | None:
        sent, wanted = _form(message.tensor, message.tag), _form(target, tag)
        if sent == wanted:
            return None
        return Error(f"rank {self._rank} called send of {sent} to itself, and recv of {wanted}")

    def _unmatched(self, one: str, other: str) -> Error:
        return Error(
            f"rank {self._rank}: a {one} of the rank's own had no {other} in {self._timeout_s:g} s", "system"
        )


def _form(tensor: torch.Tensor, tag: int) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} with tag {tag}"


__all__ = ["OwnMessages"]
