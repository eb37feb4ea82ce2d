# SPDX-License-Identifier: Apache-2.0
"""The line between the two sides of ``weft bench transfer``: JSON messages of two ranks, with bytes in them."""

from __future__ import annotations

import base64
import json
import time
from collections import deque
from typing import Any

from weft.bench.transfer_loads import BUFFER_BYTES
from weft.errors import PeerLost, invalid
from weft.runtime.bootstrap import Bootstrap

TIMEOUT_S = 120.0
MESSAGE_BYTES_MAX = 4 * BUFFER_BYTES
_PART_BYTES = 4 << 20  # a message of ranks may have a few times as many
_MORE, _LAST = b"+", b"."  # what a part begins with


def to_json(value: object) -> object:
    """Return bytes as JSON can carry them."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(type(value).__name__)


def from_json(value: dict[str, Any]) -> Any:
    """Undo ``to_json``."""
    return base64.b64decode(value["base64"]) if set(value) == {"base64"} else value


class Line:
    """JSON messages between two ranks. ``host``: this side's address as the other side knows it.

    A message goes once the other side receives, or sends, too. A lost other side raises PeerLost.
    """

    def __init__(self, ranks: Bootstrap, host: str) -> None:
        self.host = host
        self._ranks = ranks
        self._come: deque[bytes] = deque()
        self._coming = bytearray()  # parts of the next

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, default=to_json).encode()
        for at in range(0, len(body), _PART_BYTES):
            part = body[at : at + _PART_BYTES]
            self._exchange((_LAST if at + _PART_BYTES >= len(body) else _MORE) + part, TIMEOUT_S)

    def recv(self) -> Any:
        until = time.monotonic() + TIMEOUT_S
        while not self._come:
            self._exchange(b"", until - time.monotonic())
        return json.loads(self._come.popleft(), object_hook=from_json)

    def _exchange(self, body: bytes, timeout_s: float) -> None:
        try:
            theirs = self._ranks.all_gather(body, timeout_s)[1 - self._ranks.rank]
        except PeerLost as error:
            raise PeerLost(f"bench transfer: the other side is lost: {error}") from None
        self._coming += theirs[1:]
        if len(self._coming) > MESSAGE_BYTES_MAX:
            raise invalid("message", f"{len(self._coming)} bytes", f"up to {MESSAGE_BYTES_MAX}")
        if theirs[:1] == _LAST:
            self._come.append(bytes(self._coming))
            self._coming.clear()
