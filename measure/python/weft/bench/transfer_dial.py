# SPDX-License-Identifier: Apache-2.0
"""How server and client of ``weft bench transfer`` find each other: one address, and a secret that both know."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator

from weft import _core
from weft.errors import PeerLost, invalid
from weft.runtime.bootstrap import Bootstrap, TcpAddress

_DIAL_S = 10.0
_SERVE_S = 7 * 24 * 3600.0  # for a client to come
_ELSEWHERE = ("198.51.100.1", 9)  # an address of documentation: nothing is sent there


def own_address() -> str:
    """Return the address of this machine on the network that leads elsewhere; without one, of this machine alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def free_port(host: str) -> int:
    """Return a port of ``host`` that is free now. Raises: weft.Error for an address of another machine."""
    try:
        with socket.create_server((host, 0)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise invalid("--host", host, f"an address of this machine ({error})") from None


@contextlib.contextmanager
def serving(host: str, port: int) -> Iterator[Bootstrap]:
    """Print where and how a client comes; yield the two ranks once one has come that knows the secret."""
    print(f"serving on {host}:{port}", flush=True)
    if not _core.config().job_secret:
        secret = secrets.token_hex(16)
        _core.use_job_secret(secret)
        print(
            f"the client's command: WEFT_JOB_SECRET={secret} weft bench transfer client {host}:{port}",
            flush=True,
        )
    meeting = TcpAddress(f"{host}:{port}", 0, 2)
    try:
        meeting.all_gather(b"", _SERVE_S)
        yield meeting
    finally:
        meeting.close()


@contextlib.contextmanager
def dialled(address: str | None) -> Iterator[tuple[Bootstrap, str]]:
    """Yield the two ranks, and this side's address as a server knows it.

    Raises: weft.Error for what is no address or not its secret, PeerLost.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise invalid("address", address or "nothing", "HOST:PORT that the server printed")
    try:  # TcpAddress would wait for a server that comes later
        with socket.create_connection((host, int(port)), _DIAL_S) as probe:
            own = str(probe.getsockname()[0]) if probe.family == socket.AF_INET else "127.0.0.1"
    except OSError as error:
        raise PeerLost(f"bench transfer: no server answers at {address}: {error}") from None
    meeting = TcpAddress(f"{host}:{port}", 1, 2)
    try:
        meeting.all_gather(b"", _DIAL_S)
        yield meeting, own
    finally:
        meeting.close()
