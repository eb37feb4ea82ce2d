# SPDX-License-Identifier: Apache-2.0
"""Two engines learn each other's address and memory through a store, files or pipes that their processes share.

    peer, (cache,) = exchange(engine, store, "prefill", "decode")             # a torch store,
    peer, (cache,) = exchange(engine, "/shared/job17", "prefill", "decode")   # files /shared/job17.prefill, .decode,
    peer, () = exchange(engine, "-", "decode", "prefill", [memory])           # or stdin and stdout

Each side sends one line of text, with base64 of the bytes that ``engine.address`` and ``memory.descriptor`` return. A
descriptor holds a key: any reader of the line can reach that memory, unless engines have a secret.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import Error, PeerLost, invalid, quoted
from weft.runtime.roll_call import ask
from weft.transfer.arguments import given_list, given_name
from weft.transfer.engine import IMM_MAX, TransferEngine
from weft.transfer.handles import Memory, Peer, Remote

_MARK = "weft.transfer "  # how the line begins, among others that a process prints
_LONGEST_LINE_BYTES = 1 << 20
_ATTEMPT_S = 5.0  # to connect with what may be of a process that has ended
_NAP_S = 0.02
_THROUGH = "a torch store, the path that files begin with, '-' for stdin and stdout, or a pair of open files"


def exchange(
    engine: TransferEngine,
    through: Any,
    me: str,
    other: str,
    memories: Sequence[Memory] = (),
    *,
    timeout_s: float | None = None,
) -> tuple[Peer, list[Remote]]:
    """Meet one other engine: connect, attach its memory, and return both once it has done so, too.

    Args:
        through: a torch store (TCPStore, FileStore, ...); a path, to which each side writes ``PATH.ITS_NAME``, for its
            user alone, and which is gone afterwards; "-", or a pair of open files to read from and write to.
        me, other: what the two call themselves there; the other side calls with the names exchanged.
        memories: what this side registered with remote access, for the other.
        timeout_s: None: the engine's.
    Returns: the peer, and its memory in the order in which it was given there.
    Raises: PeerLost when the other does not come in time; Error for another kind of ``through``.
    """
    place = _place_of(through, given_name("me", me), given_name("other", other))
    if me == other:
        raise invalid("other", quoted(other), f"another name than me, {me!r}")
    mine = [memory.descriptor for memory in given_list("memories", memories, Memory)]
    limit_s = engine.timeout(timeout_s)
    until = time.monotonic() + limit_s
    place.give(_line_of(me, engine.address, mine))
    why = "nothing"
    while (left_s := until - time.monotonic()) > 0:
        line = place.take(left_s)
        if line is None:
            break
        address, descriptors = _read(line, other, place.where)
        try:
            peer = engine.connect(address, min(left_s, _ATTEMPT_S))
            remotes = [engine.attach(one, min(left_s, _ATTEMPT_S)) for one in descriptors]
        except Error as error:  # of an earlier run, perhaps; what it gives anew comes later
            why = f"what leads nowhere: {error}"
            place.refuse()
            continue
        engine.barrier([peer], IMM_MAX, max(until - time.monotonic(), 0))
        place.clear()
        return peer, remotes
    raise PeerLost(
        f"transfer.exchange: {me!r} waited {limit_s:g} s for {other!r} through {place.where}: expected its address, "
        f"saw {why}"
    )


def _line_of(name: str, address: bytes, descriptors: Sequence[bytes]) -> str:
    said = {
        "name": name,
        "address": base64.b64encode(address).decode(),
        "memory": [base64.b64encode(one).decode() for one in descriptors],
    }
    return _MARK + json.dumps(said) + "\n"


def _read(line: str, other: str, where: str) -> tuple[bytes, list[bytes]]:
    """Return address and descriptors of a line. Raises: Error for another text, and for another engine's."""
    try:
        said = json.loads(line.removeprefix(_MARK))
        name, address = said["name"], base64.b64decode(said["address"], validate=True)
        descriptors = [base64.b64decode(one, validate=True) for one in said["memory"]]
    except (ValueError, TypeError, KeyError) as error:
        raise invalid(
            where, f"{line[:60]!r} ({error})", f"what weft.transfer.exchange() of {other!r} writes"
        ) from None
    if name != other:
        raise invalid("other", quoted(other), f"{name!r}, which came through {where}")
    return address, descriptors


class _Place:
    """Where two sides leave each other a line. take() returns the other's, or None when ``limit_s`` has passed."""

    where = ""

    def give(self, line: str) -> None:
        raise NotImplementedError

    def take(self, limit_s: float) -> str | None:
        raise NotImplementedError

    def refuse(self) -> None:
        """Discard the last line taken: take() waits for another."""

    def clear(self) -> None:
        """Both sides have what they need."""


class _Readable(_Place):
    """A place that keeps lines, and is looked at again and again."""

    def __init__(self) -> None:
        self._taken: str | None = None
        self._refused: str | None = None

    def _look(self) -> str | None:
        raise NotImplementedError

    def take(self, limit_s: float) -> str | None:
        until = time.monotonic() + limit_s
        while True:
            line = self._look()
            if line is not None and line != self._refused:
                self._taken = line
                return line
            if time.monotonic() >= until:
                return None
            time.sleep(_NAP_S)

    def refuse(self) -> None:
        self._refused = self._taken


class _InStore(_Readable):
    def __init__(self, store: Any, me: str, other: str) -> None:
        super().__init__()
        self.where = type(store).__name__
        self._store, self._mine, self._theirs = store, f"weft.transfer/{me}", f"weft.transfer/{other}"

    def give(self, line: str) -> None:
        self._store.set(self._mine, line.encode())

    def take(self, limit_s: float) -> str | None:
        until = time.monotonic() + limit_s + 2 * _ATTEMPT_S

        def give_up() -> None:
            if time.monotonic() >= until:
                raise PeerLost(f"transfer.exchange: {self.where} does not answer")

        take = super().take
        return ask(lambda: take(limit_s), give_up)

    def _look(self) -> str | None:
        if not self._store.check([self._theirs]):
            return None
        return bytes(self._store.get(self._theirs)).decode(errors="replace")


class _InFiles(_Readable):
    def __init__(self, path: Path, me: str, other: str) -> None:
        super().__init__()
        for name, given in (("me", me), ("other", other)):
            if not given or "/" in given:
                raise invalid(name, quoted(given), "a name that can stand in a file's, without /")
        if not path.parent.is_dir():
            raise invalid("through", path, "a path in a folder that exists")
        self._mine, self._theirs = path.with_name(f"{path.name}.{me}"), path.with_name(f"{path.name}.{other}")
        self.where = str(self._theirs)

    def give(self, line: str) -> None:
        number, written = tempfile.mkstemp(
            prefix=f".{self._mine.name}.", dir=self._mine.parent
        )  # for this user alone
        with os.fdopen(number, "w") as file:
            file.write(line)
        os.replace(written, self._mine)

    def _look(self) -> str | None:
        try:
            return self._theirs.read_text(errors="replace")
        except FileNotFoundError:
            return None

    def clear(self) -> None:
        self._mine.unlink(missing_ok=True)


class _InPipes(_Place):
    """A pair of open files. By their descriptors, a byte at a time, so that what follows the line stays there."""

    def __init__(self, reader: Any, writer: Any, other: str) -> None:
        try:
            self._from, self._to = reader.fileno(), writer.fileno()
            writer.flush()
        except (AttributeError, OSError, ValueError) as error:
            raise invalid(
                "through", f"{quoted((reader, writer))} ({error})", "open files with a fileno()"
            ) from None
        self._other = other
        self.where = str(getattr(reader, "name", reader))

    def give(self, line: str) -> None:
        left = line.encode()
        while left:
            left = left[os.write(self._to, left) :]

    def take(self, limit_s: float) -> str | None:
        until = time.monotonic() + limit_s
        line = b""
        while (left_s := until - time.monotonic()) > 0:
            if not select.select([self._from], [], [], left_s)[0]:
                break
            byte = os.read(self._from, 1)
            if not byte:
                raise PeerLost(
                    f"transfer.exchange: {self.where} ended before {self._other!r} gave its address"
                )
            line = (line + byte)[-_LONGEST_LINE_BYTES:]
            if byte == b"\n":
                if line.startswith(_MARK.encode()):
                    return line.decode(errors="replace")
                line = b""
        return None


def _place_of(through: Any, me: str, other: str) -> _Place:
    if through == "-":
        return _InPipes(sys.stdin, sys.stdout, other)
    if isinstance(through, (str, os.PathLike)):
        return _InFiles(Path(through), me, other)
    if isinstance(through, (tuple, list)) and len(through) == 2:
        reader, writer = through
        return _InPipes(reader, writer, other)
    if all(callable(getattr(through, name, None)) for name in ("set", "get", "check")):
        return _InStore(through, me, other)
    raise invalid("through", quoted(through), _THROUGH)
