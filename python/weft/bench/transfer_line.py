# SPDX-License-Identifier: Apache-2.0
"""The line between the two sides of ``weft bench transfer``: JSON messages over a socket, with bytes in them."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

from weft.bench.transfer_loads import BUFFER_BYTES
from weft.errors import PeerLost, invalid

TIMEOUT_S = 120.0
MESSAGE_BYTES_MAX = 4 * BUFFER_BYTES


def to_json(value: object) -> object:
    """Return bytes as JSON can carry them."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(type(value).__name__)


def from_json(value: dict[str, Any]) -> Any:
    """Undo ``to_json``."""
    return base64.b64decode(value["base64"]) if set(value) == {"base64"} else value


@contextlib.contextmanager
def naming_the_loss() -> Iterator[None]:
    """Raise what breaks a connection inside the block as PeerLost."""
    try:
        yield
    except TimeoutError:
        raise PeerLost(f"bench transfer: the other side is lost: no word for {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise PeerLost(f"bench transfer: the other side is lost: {error}") from None


class Line:
    """JSON messages over a connection, each with its length in front. A lost other side raises PeerLost."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(TIMEOUT_S)

    @property
    def host(self) -> str:
        """This side's address as the other side knows it."""
        name = self._connection.getsockname()
        return str(name[0]) if self._connection.family == socket.AF_INET else "127.0.0.1"

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, default=to_json).encode()
        with naming_the_loss():
            self._connection.sendall(struct.pack("<I", len(body)) + body)

    def recv(self) -> Any:
        (count,) = struct.unpack("<I", self._exactly(4))
        if count > MESSAGE_BYTES_MAX:
            raise invalid("message", f"{count} bytes", f"up to {MESSAGE_BYTES_MAX}")
        return json.loads(self._exactly(count), object_hook=from_json)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            with naming_the_loss():
                part = self._connection.recv(count - len(parts))
            if not part:
                raise PeerLost("bench transfer: the other side closed its connection")
            parts += part
        return bytes(parts)
