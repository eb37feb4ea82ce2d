# SPDX-License-Identifier: Apache-2.0
"""Which window an exchange of a P2PAllToAll gets, and which receives are still to come there.

    turns = Turns(contexts, max_in_flight)
    context = turns.next()                       # for a new exchange
    turns.check_send(context)                    # before each send
    turns.note_sent(context, sent, "dispatch_recv")
    turns.begin_receive(handle)                  # of the send before it

All ranks must find the same window. So only what all of them call counts here: not what fails on one of them, nor when
a handle dies. Threads: one caller at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import Error, invalid
from weft.moe.device_context import DeviceContext

if TYPE_CHECKING:
    from weft.moe.p2p import P2PHandle


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
