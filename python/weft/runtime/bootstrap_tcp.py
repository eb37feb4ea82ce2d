# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet at a TCP address: rank 0 listens there, the others connect to it.

Needs nothing but the address, which rank 0's machine must own. With a secret, both ends prove that they know
it (HMAC-SHA256 over fresh nonces) before anything else is said; it is never sent, and what follows is not
encrypted. Strangers who connect and say nothing are dropped, and keep nobody out.

Wire format, big-endian: the listener sends HELLO (magic, nonce); a rank answers JOIN (magic, rank, size,
nonce, proof); once everybody is there the listener confirms with its own proof. From then on frames: a length
and that many bytes, which are parts of a length and that many bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from weft import _core
from weft.errors import Error, PeerLost, from_core, invalid
from weft.runtime.bootstrap_secret import settle_job_secret
from weft.runtime.forks import claim
from weft.runtime.logs import printable

log = logging.getLogger("weft.bootstrap")

_MAGIC = b"weft-tcp"
_NONCE_BYTES = 16
_HELLO = struct.Struct(f"!8s{_NONCE_BYTES}s")
_JOIN = struct.Struct(f"!8sII{_NONCE_BYTES}s32s")
_LENGTH = struct.Struct("!Q")
_MOST_BYTES = 64 << 20  # of one frame: what is longer did not come from a bootstrap
_GRACE_S = 2.0  # how much longer a rank waits for rank 0, so that its account of what went wrong arrives
_TELL_AFTER_S = 5.0  # without an answer, a rank says that it still waits for rank 0
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH)  # no patience helps
_HELLO_S = 5.0  # a connection that says nothing for so long is not one of our ranks
_YOUNG_S = 0.2  # one that has waited for less is not dropped for others
_MOST_PENDING = 256  # connections that have not proven anything yet
_MOST_ADDRESSES = 64  # of callers without the secret that are told of
_BACKLOG = 1024


class _Deadline:
    """A point in time that socket operations may not pass."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        return max(self._at - time.monotonic(), 0.001)

    def passed(self) -> bool:
        return time.monotonic() >= self._at


class TcpAddress:
    """``size`` ranks that meet at ``address``, "host:port" of the machine that rank 0 runs on.

    Args:
        address: where rank 0 listens, reachable from every rank; IPv6 hosts in brackets.
        rank, size: this process, and how many there are.
        secret: the same bytes on every rank; None takes ``WEFT_JOB_SECRET``. Empty, or None without that setting,
            trusts whoever can reach the address.
    Connects at the first all_gather. Ranks may start in any order: whoever finds nobody listening tries again until
    the deadline, as rank 0 may only be starting. After an error it is closed. Raises: Error with the argument's name.
    """

    def __init__(self, address: str, rank: int, size: int, secret: bytes | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise invalid("address", f"'{address}'", "host:port with a port from 1 to 65535")
        if size < 1 or not 0 <= rank < size:
            raise invalid("rank and size", f"{rank} and {size}", "0 <= rank < size")
        self.rank, self.size = rank, size
        self._address = (host.strip("[]"), int(port))
        if secret is None:
            settle_job_secret()
        self._secret = _core.config().job_secret.encode() if secret is None else secret
        self._peers: dict[int, socket.socket] = {}  # rank 0: everyone else; others: rank 0
        self._is_closed = False

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        claim("bootstrap", self)
        if self._is_closed:
            raise Error("bootstrap: used after it was closed or had failed", "closed")
        if self.size == 1:
            return [data]
        until = _Deadline(timeout_s)
        try:
            if self.rank == 0:
                return self._gather(data, until, timeout_s)
            return self._take_part(data, until, timeout_s)
        except BaseException:
            self.close()  # the ranks no longer agree on what comes next
            raise

    def connection(self, timeout_s: float) -> socket.socket:
        """Return the connection to the other one of two ranks, both of which have proven to know the secret."""
        if self.size != 2:
            raise invalid("size", self.size, "2")
        self.all_gather(b"", timeout_s)
        return self._peers[1 - self.rank]

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._is_closed = True
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # Rank 0: collect one frame from everyone, answer with all of them, or with what went wrong.

    def _gather(self, data: bytes, until: _Deadline, timeout_s: float) -> list[bytes]:
        try:
            if not self._peers:
                self._accept_all(until, timeout_s)
            frames = {0: data} | self._collect(until, timeout_s)
        except Error as error:
            self._tell_all(_pack([b"error", error.code.encode(), str(error).encode()]))
            raise
        everyone = [frames[rank] for rank in range(self.size)]
        self._tell_all(_pack([b"ok", *everyone]))
        return everyone

    def _accept_all(self, until: _Deadline, timeout_s: float) -> None:
        host, port = self._address
        proofs: dict[int, bytes] = {}
        with self._listen() as listener, _Door(listener, self._verdict) as door:
            while len(self._peers) < self.size - 1:
                for peer, nonce, join in door.serve(until):
                    self._admit(peer, nonce, join, proofs)
                if until.passed():
                    missing = [rank for rank in range(1, self.size) if rank not in self._peers]
                    where = f"to connect to {host}:{port}"
                    raise PeerLost(lost_message(0, timeout_s, missing, where) + door.account())
        for rank, peer in self._peers.items():
            with contextlib.suppress(OSError):  # _collect() tells who is gone
                _send_frame(peer, _pack([b"ok", proofs[rank]]), until)

    def _listen(self) -> socket.socket:
        host, port = self._address
        try:
            family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise Error(f"rank 0: cannot listen at {host}:{port}: {error}", "system") from error
        if not self._secret and not ipaddress.ip_address(str(found[0]).split("%")[0]).is_loopback:
            log.warning(
                "rank 0 takes whoever connects to %s:%d for a rank of this job: WEFT_JOB_SECRET is not set",
                host,
                port,
            )
        return listener

    def _verdict(self, nonce: bytes, join: bytes) -> bool:
        """Return whether a JOIN proves that its sender knows the secret."""
        magic, rank, size, their_nonce, proof = _JOIN.unpack(join)
        claim = _claim(nonce, their_nonce, rank, size)
        return bool(magic == _MAGIC and hmac.compare_digest(proof, self._prove(b"join", claim)))

    def _admit(self, peer: socket.socket, nonce: bytes, join: bytes, proofs: dict[int, bytes]) -> None:
        """Let in who has proven to know the secret if it is a rank that is missing."""
        _, rank, size, their_nonce, _ = _JOIN.unpack(join)
        problem = self._objection(rank, size)
        if problem:
            _refuse(peer, problem)
            return
        self._peers[rank] = peer
        proofs[rank] = self._prove(b"welcome", _claim(nonce, their_nonce, rank, size))

    def _objection(self, rank: int, size: int) -> str:
        if size != self.size:
            return f"size: got {self.size} on rank 0, {size} on rank {rank}, allowed: the same on all ranks"
        if rank in self._peers or not 0 < rank < self.size:
            return f"rank: got {rank} twice, allowed: each rank once"
        return ""

    def _collect(self, until: _Deadline, timeout_s: float) -> dict[int, bytes]:
        """Return the next frame of every peer, in whatever order they come."""
        frames: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while len(frames) < len(self._peers):
                ready = selector.select(until.left_s())
                if not ready and until.passed():
                    missing = sorted(set(self._peers) - set(frames))
                    raise PeerLost(lost_message(0, timeout_s, missing))
                for key, _ in ready:
                    rank = key.data
                    selector.unregister(key.fileobj)
                    try:
                        frames[rank] = _receive_frame(self._peers[rank], until)
                    except OSError as error:
                        raise PeerLost(_gone_message(0, rank, error)) from error
        return frames

    def _tell_all(self, frame: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # that one is gone; the others are to hear it all the same
                _send_frame(peer, frame, _Deadline(_GRACE_S))

    # Other ranks.

    def _take_part(self, data: bytes, until: _Deadline, timeout_s: float) -> list[bytes]:
        if not self._peers:
            self._join(until, timeout_s)
        patience = _Deadline(until.left_s() + _GRACE_S)
        try:
            _send_frame(self._peers[0], data, patience)
        except OSError as error:
            raise PeerLost(_gone_message(self.rank, 0, error)) from error
        return self._answer(patience, timeout_s)

    def _join(self, until: _Deadline, timeout_s: float) -> None:
        """Connect and introduce ourselves, again where rank 0 dropped us among too many callers."""
        patience = until
        while not self._peers:
            self._peers[0] = self._knock(patience, timeout_s)
            try:
                self._introduce(self._peers[0], until, timeout_s)
            except _Dropped as error:
                self._peers.pop(0).close()
                if until.passed():
                    raise PeerLost(_gone_message(self.rank, 0, error)) from error
                patience = _Deadline(min(until.left_s(), _GRACE_S))  # nobody listens any more: it has died
                time.sleep(0.02)

    def _knock(self, until: _Deadline, timeout_s: float) -> socket.socket:
        """Connect to rank 0, which may not be listening yet."""
        host, port = self._address
        why, report_at = "", time.monotonic() + _TELL_AFTER_S
        while not until.passed():
            try:
                return socket.create_connection(self._address, timeout=min(until.left_s(), _TELL_AFTER_S))
            except socket.gaierror as error:
                raise invalid("address", f"'{host}'", f"a host that can be resolved ({error})") from error
            except OSError as error:
                why = str(error)
                if time.monotonic() >= report_at:
                    report_at = float("inf")
                    if error.errno in _NO_WAY:
                        break
                    log.warning(
                        "rank %d has not reached rank 0 at %s:%d yet (%s)", self.rank, host, port, why
                    )
                time.sleep(0.02)
        where = f"at {host}:{port} ({why}; is it the address of rank 0's machine, and is the way to it open?)"
        waited_s = timeout_s if until.passed() else timeout_s - until.left_s()
        raise PeerLost(lost_message(self.rank, waited_s, [0], where))

    def _introduce(self, peer: socket.socket, until: _Deadline, timeout_s: float) -> None:
        """Prove who we are, and see that rank 0 is who we expect."""
        host, port = self._address
        my_nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            magic, nonce = _HELLO.unpack(_receive(peer, _HELLO.size, until))
            if magic != _MAGIC:
                raise Error(f"address: {host}:{port} is used by something else", "system")
            claim = _claim(nonce, my_nonce, self.rank, self.size)
            proof = self._prove(b"join", claim)
            _send(peer, _JOIN.pack(_MAGIC, self.rank, self.size, my_nonce, proof), until)
        except TimeoutError:
            raise PeerLost(lost_message(self.rank, timeout_s, [0], f"at {host}:{port}")) from None
        except OSError as error:
            raise _Dropped(str(error)) from error
        welcome = self._answer(_Deadline(until.left_s() + _GRACE_S), timeout_s)
        if len(welcome) != 1 or not hmac.compare_digest(welcome[0], self._prove(b"welcome", claim)):
            raise Error("secret: the one given differs from rank 0's, allowed: the same on all ranks")

    def _answer(self, patience: _Deadline, timeout_s: float) -> list[bytes]:
        """Return the parts of rank 0's next frame; raise what it says went wrong."""
        try:
            verdict, *parts = _unpack(_receive_frame(self._peers[0], patience)) or [b""]
            if verdict not in (b"ok", b"error") or (verdict == b"error" and len(parts) != 2):
                raise ConnectionError("it answers what no rank 0 does")
        except TimeoutError:
            raise PeerLost(lost_message(self.rank, timeout_s, [0])) from None
        except OSError as error:
            raise PeerLost(_gone_message(self.rank, 0, error)) from error
        if verdict == b"error":
            # Whoever listens there chose the words: it may have proven nothing yet.
            raise from_core(*(printable(part.decode(errors="replace")) for part in parts))
        return parts

    def _prove(self, role: bytes, claim: bytes) -> bytes:
        return hmac.digest(self._secret, role + claim, hashlib.sha256)


class _Dropped(ConnectionError):
    """Rank 0 closed a connection before it heard who we are."""


class _Door:
    """Hears what callers answer to a nonce each, all at once, so that a silent one holds up nobody.

    Args: is_proven: tells from (our nonce, the JOIN) whether the caller knows the secret.
    """

    def __init__(self, listener: socket.socket, is_proven: Callable[[bytes, bytes], bool]) -> None:
        self._listener = listener
        self._is_proven = is_proven
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, _Caller] = {}  # oldest first
        self._refused: dict[str, int] = {}  # by address, of the first _MOST_ADDRESSES
        listener.setblocking(False)

    def __enter__(self) -> _Door:
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for peer in self._pending:
            peer.close()

    def account(self) -> str:
        """Return who was refused, for the message that says who is missing."""
        if not self._refused:
            return ""
        return f"; refused {sum(self._refused.values())} without the secret, from {', '.join(self._refused)}"

    def serve(self, until: _Deadline) -> list[tuple[socket.socket, bytes, bytes]]:
        """Wait a moment; return those who have proven to know the secret, each with our nonce and its JOIN."""
        joined = []
        for key, _ in self._selector.select(min(until.left_s(), 0.2)):
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            caller = self._pending.get(peer)
            if caller is None or not self._has_all(peer, caller):
                continue
            self._forget(peer)
            if self._is_proven(caller.nonce, bytes(caller.join)):
                joined.append((peer, caller.nonce, bytes(caller.join)))
            else:
                self._turn_away(peer, caller.address)
        now = time.monotonic()
        for peer in [peer for peer, caller in self._pending.items() if now > caller.since + _HELLO_S]:
            self._drop(peer)
        return joined

    def _accept(self) -> None:
        for _ in range(_MOST_PENDING):
            if not self._has_room():
                return
            try:
                peer, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: one who has said nothing makes place
                if self._pending:
                    self._drop(next(iter(self._pending)))
                return
            caller = _Caller(
                secrets.token_bytes(_NONCE_BYTES), str(address[0]), time.monotonic(), bytearray()
            )
            peer.setblocking(False)
            try:
                peer.sendall(_HELLO.pack(_MAGIC, caller.nonce))  # fits a new connection
            except OSError:
                peer.close()
                continue
            self._pending[peer] = caller
            self._selector.register(peer, selectors.EVENT_READ)

    def _has_room(self) -> bool:
        """Return whether one more may come in, for which the oldest goes when there are too many."""
        oldest = next(iter(self._pending.items()), None)
        if oldest is None or len(self._pending) < _MOST_PENDING:
            return True
        if time.monotonic() < oldest[1].since + _YOUNG_S:
            time.sleep(0.001)  # who is already here gets time to answer; the listener keeps the others
            return False
        self._drop(oldest[0])
        return True

    def _has_all(self, peer: socket.socket, caller: _Caller) -> bool:
        try:
            more = peer.recv(_JOIN.size - len(caller.join))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        caller.join += more
        if not more:
            self._drop(peer)
        return bool(more) and len(caller.join) == _JOIN.size

    def _turn_away(self, peer: socket.socket, address: str) -> None:
        is_new = address not in self._refused and len(self._refused) < _MOST_ADDRESSES
        if is_new or address in self._refused:
            self._refused[address] = self._refused.get(address, 0) + 1
        if is_new:
            log.warning(
                "bootstrap: a connection from %s is refused: it does not know this job's secret", address
            )
        _refuse(
            peer,
            "secret: the one given differs from rank 0's, allowed: the same WEFT_JOB_SECRET on all ranks",
        )

    def _forget(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._pending[peer]

    def _drop(self, peer: socket.socket) -> None:
        self._forget(peer)
        peer.close()


@dataclass
class _Caller:
    """A connection that has not proven anything yet."""

    nonce: bytes
    address: str
    since: float
    join: bytearray


def _refuse(peer: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        _send_frame(peer, _pack([b"error", b"invalid", why.encode()]), _Deadline(0.001))
    peer.close()


def lost_message(rank: int, timeout_s: float, missing: list[int], what: str = "") -> str:
    """Return the sentence for ranks that stayed away past the deadline."""
    names = ", ".join(f"rank {peer}" for peer in missing)
    return f"rank {rank}, bootstrap.all_gather, waited {timeout_s:.3g} s for {names} {what}".rstrip()


def _gone_message(rank: int, peer: int, error: OSError) -> str:
    return f"rank {rank}, bootstrap.all_gather: rank {peer} is gone ({error})"


def _claim(nonce: bytes, their_nonce: bytes, rank: int, size: int) -> bytes:
    return nonce + their_nonce + struct.pack("!II", rank, size)


def _send(peer: socket.socket, data: bytes, until: _Deadline) -> None:
    peer.settimeout(until.left_s())
    peer.sendall(data)


def _receive(peer: socket.socket, count: int, until: _Deadline) -> bytes:
    """Return exactly ``count`` bytes. Raises: OSError when the peer closes, TimeoutError at the deadline."""
    data = bytearray()
    while len(data) < count:
        peer.settimeout(until.left_s())
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return bytes(data)


def _send_frame(peer: socket.socket, data: bytes, until: _Deadline) -> None:
    _send(peer, _LENGTH.pack(len(data)) + data, until)


def _receive_frame(peer: socket.socket, until: _Deadline) -> bytes:
    (count,) = _LENGTH.unpack(_receive(peer, _LENGTH.size, until))
    if count > _MOST_BYTES:
        raise ConnectionError(f"a frame of {count} bytes, allowed: at most {_MOST_BYTES}")
    return _receive(peer, count, until)


def _pack(parts: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unpack(data: bytes) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + _LENGTH.size
        count = _LENGTH.unpack_from(data, at)[0] if end <= len(data) else len(data)
        if end + count > len(data):
            raise ConnectionError("a frame that ends too soon")
        parts.append(data[end : end + count])
        at = end + count
    return parts
