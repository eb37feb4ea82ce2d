# SPDX-License-Identifier: Apache-2.0
"""What the calls of an engine check of their arguments before the core sees them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from weft.errors import invalid, quoted
from weft.runtime.tensors import index_of
from weft.transfer.buffers import Pages, whole
from weft.transfer.handles import (
    Memory,
    Peer,
    Remote,
)


def length_within(nbytes: int | None, of: Memory | Remote, **offsets: int) -> int:
    """Return ``nbytes``, or how many bytes of ``of`` lie behind the first offset."""
    for name, offset in offsets.items():
        whole(name, offset)
    if nbytes is None:
        return max(of.nbytes - next(iter(offsets.values())), 0)
    return whole("nbytes", nbytes)


def given_handle(argument: str, given: Any, wanted: type[Any]) -> Any:
    """Return what the extension knows ``given`` by. Raises: weft.Error unless it is of the type ``wanted``."""
    if not isinstance(given, wanted):
        raise invalid(argument, type(given).__name__, wanted.__name__)
    return given.core


def given_memory(argument: str, given: Any) -> Any:
    """Return what the extension knows local memory by. Raises: weft.Error unless it is where it was registered."""
    core = given_handle(argument, given, Memory)
    if not given.held.is_in_place():
        raise invalid(
            argument, "memory that was resized since it was registered", "memory in place until unregister()"
        )
    return core


def given_target(argument: str, given: Any) -> Any:
    """Return what the extension knows memory by. Raises: weft.Error unless it may be written to, too."""
    core = given_memory(argument, given)
    if given.span.is_read_only:
        raise invalid(argument, "read-only memory", "memory that may be written to")
    return core


def given_flag(argument: str, given: Any) -> bool:
    if index_of(given) not in (0, 1):
        raise invalid(argument, quoted(given), "True or False")
    return bool(given)


def given_bytes(argument: str, given: Any) -> bytes:
    if not isinstance(given, bytes | bytearray | memoryview):
        raise invalid(argument, type(given).__name__, "bytes")
    return bytes(given)


def given_places(remote_offset: int, local_offset: int, nbytes: int) -> tuple[int, int, int]:
    return whole("offset", remote_offset), whole("offset", local_offset), whole("nbytes", nbytes)


def given_seconds(argument: str, given: float | None) -> float | None:
    if given is None:
        return None
    if not isinstance(given, int | float) or not given > 0:
        raise invalid(argument, quoted(given), "seconds above 0")
    return as_float(given)


def as_float(seconds: float) -> float:
    """Return seconds as the core takes them; integers can be beyond all floats."""
    return float(min(seconds, sys.float_info.max))


def given_pages(argument: str, given: Any) -> tuple[int, int, list[int], int]:
    if not isinstance(given, Pages):
        raise invalid(argument, type(given).__name__, "Pages")
    return given.to_core()


def given_list(argument: str, given: Any, wanted: type[Any]) -> list[Any]:
    """Return ``given`` as a list. Raises: weft.Error unless all of it is of the type ``wanted``."""
    if not isinstance(given, Sequence) or not all(isinstance(one, wanted) for one in given):
        raise invalid(argument, quoted(given), f"a sequence of {wanted.__name__}")
    return list(given)


def given_peers(argument: str, given: Any) -> list[Any]:
    """Return the extension's peers. Raises: weft.Error for anything but a sequence of different peers."""
    peers = given_list(argument, given, Peer)
    for peer in peers:
        if peers.count(peer) > 1:  # it would be waited for twice, and say that this engine had come twice
            raise invalid(argument, f"{peer.name!r} {peers.count(peer)} times", "every peer once")
    return [peer.core for peer in peers]


def given_names(argument: str, given: Any) -> list[str]:
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(n, str) for n in given)
    ):
        raise invalid(argument, quoted(given), "a sequence of names")
    return list(given)


def given_name(argument: str, given: Any) -> str:
    if not isinstance(given, str):
        raise invalid(argument, quoted(given), "text")
    return given
