# SPDX-License-Identifier: Apache-2.0
"""Which network ports the Weft processes of this user have open, and who reaches them.

    for one in listeners():
        print(one.where(), one.has_secret)

Sockets and their owners are what the kernel says of them in ``/proc``; whether a process has a job secret is what its
counters say (``weft top``). A process that has counted nothing yet is not seen.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("weft.transfer")
_LISTENS = "0A"  # of /proc/net/tcp
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Listener:
    """One open port. ``interface``: "" where it is not one of this process's network."""

    pid: int
    command: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    interface: str
    has_secret: bool

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host reach it."""
        return self.address.is_loopback

    def where(self) -> str:
        """Return "10.0.0.1:2345, open to the network of eth0"."""
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        if self.is_local:
            return f"{host}:{self.port}, open to this host alone"
        if self.address.is_unspecified:
            return f"{host}:{self.port}, open to every network"
        return f"{host}:{self.port}, open to the network of {self.interface or 'its interface'}"


def listeners() -> list[Listener]:
    """Return the open TCP ports of this user's processes that have a communicator or an engine."""
    from weft.runtime.top import look  # which brings the tables of a terminal

    interfaces = dict(_interfaces())
    found = []
    for one in look():
        with suppress(OSError):  # it has ended
            sockets = _sockets(Path("/proc") / str(one.pid))
            for inode, address, port in _listening(Path("/proc") / str(one.pid)):
                if inode in sockets:
                    facts = (interfaces.get(str(address), ""), bool(one.counted["has_secret"]))
                    found.append(Listener(one.pid, one.command, address, port, *facts))
    return found


_was_warned = False
_OF_THIS_HOST = ("loopback", "fabric:shm")  # networks of this host alone


def warn_of_open_engine(provider: str) -> None:
    """Say once that this process's engine takes whoever calls, if others than this host can."""
    global _was_warned
    if _was_warned or provider in _OF_THIS_HOST:
        return
    process, where = Path("/proc/self"), "its NIC"
    if provider == "fabric:tcp":
        with suppress(OSError):
            sockets = _sockets(process)
            found = [one for one in _listening(process) if one[0] in sockets and not one[1].is_loopback]
            if not found:
                return
            where = ", ".join(f"{address}:{port}" for _, address, port in found)
    _was_warned = True
    _log.warning(
        "this process has a transfer engine without a secret: whoever reaches %s is taken for a peer. Set "
        "WEFT_JOB_SECRET, to auto or to a secret, or give secret=",
        where,
    )


def _sockets(process: Path) -> set[str]:
    found = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                found.add(match[1])
    return found


def _listening(process: Path) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Yield (inode, address, port) of every listening TCP socket of a process's network."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(process / "net" / table) as file:
            for fields in (line.split() for line in list(file)[1:]):
                if fields[3] == _LISTENS:
                    host, port = fields[1].split(":")
                    yield fields[9], _address(host), int(port, 16)


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address that /proc prints as words of the host's byte order."""
    words = struct.unpack(f">{len(digits) // 8}I", bytes.fromhex(digits))
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield (address, name) of this process's network interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
                yield socket.inet_ntoa(answer[20:24]), name
    with suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            yield str(ipaddress.ip_address(bytes.fromhex(digits))), name


__all__ = ["Listener", "listeners", "warn_of_open_engine"]
