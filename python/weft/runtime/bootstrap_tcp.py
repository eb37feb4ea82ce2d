# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet at a TCP address: rank 0 listens there, the others connect to it.

Needs nothing but the address, which rank 0's machine must own. With a secret, both ends prove that they know
it (HMAC-SHA256 over fresh nonces) before anything else is said; what follows is not encrypted.

On the wire, big-endian: the listener sends HELLO (magic, nonce); a rank answers JOIN (magic, rank, size,
nonce, proof); once everybody is there the listener confirms with its own proof. From then on frames: a length
and that many bytes, which are parts of a length and that many bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time

from weft.errors import Error, PeerLost, from_core, invalid

_MAGIC = b"weft-tcp"
_NONCE_BYTES = 16
_HELLO = struct.Struct(f"!8s{_NONCE_BYTES}s")
_JOIN = struct.Struct(f"!8sII{_NONCE_BYTES}s32s")
_LENGTH = struct.Struct("!Q")
_MOST_BYTES = 64 << 20  # of one frame: what is longer did not come from a bootstrap
_GRACE_S = 2.0  # how much longer a rank waits for rank 0, so that its account of what went wrong arrives
_HELLO_S = 5.0  # a connection that says nothing for so long is not one of our ranks


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
        secret: the same bytes on every rank; None trusts whoever can reach the address.
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
        self._secret = secret or b""
        self._peers: dict[int, socket.socket] = {}  # rank 0: everyone else; others: rank 0
        self._is_closed = False

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
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
        with self._listen() as listener:
            while len(self._peers) < self.size - 1:
                listener.settimeout(until.left_s())
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    missing = [rank for rank in range(1, self.size) if rank not in self._peers]
                    where = f"to connect to {host}:{port}"
                    raise PeerLost(lost_message(0, timeout_s, missing, where)) from None
                self._admit(peer, proofs, until)
        for rank, peer in self._peers.items():
            with contextlib.suppress(OSError):  # _collect() tells who is gone
                _send_frame(peer, _pack([b"ok", proofs[rank]]), until)

    def _listen(self) -> socket.socket:
        host, port = self._address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=self.size)
        except OSError as error:
            raise Error(f"rank 0: cannot listen at {host}:{port}: {error}", "system") from error

    def _admit(self, peer: socket.socket, proofs: dict[int, bytes], until: _Deadline) -> None:
        """Let a connection in if it is one of our ranks; drop it if it isn't."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        patience = _Deadline(min(_HELLO_S, until.left_s()))
        try:
            _send(peer, _HELLO.pack(_MAGIC, nonce), patience)
            magic, rank, size, their_nonce, proof = _JOIN.unpack(_receive(peer, _JOIN.size, patience))
        except OSError:
            peer.close()
            return
        claim = _claim(nonce, their_nonce, rank, size)
        is_proven = magic == _MAGIC and hmac.compare_digest(proof, self._prove(b"join", claim))
        problem = self._objection(is_proven, rank, size)
        if problem:
            with contextlib.suppress(OSError):
                _send_frame(peer, _pack([b"error", b"invalid", problem.encode()]), patience)
            peer.close()
            return
        self._peers[rank] = peer
        proofs[rank] = self._prove(b"welcome", claim)

    def _objection(self, is_proven: bool, rank: int, size: int) -> str:
        if not is_proven:
            return "secret: the one given differs from rank 0's"
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
            self._peers[0] = self._knock(until, timeout_s)
            self._introduce(self._peers[0], until, timeout_s)
        patience = _Deadline(until.left_s() + _GRACE_S)
        try:
            _send_frame(self._peers[0], data, patience)
        except OSError as error:
            raise PeerLost(_gone_message(self.rank, 0, error)) from error
        return self._answer(patience, timeout_s)

    def _knock(self, until: _Deadline, timeout_s: float) -> socket.socket:
        """Connect to rank 0, which may not be listening yet."""
        host, port = self._address
        why = ""
        while not until.passed():
            try:
                return socket.create_connection(self._address, timeout=until.left_s())
            except socket.gaierror as error:
                raise invalid("address", f"'{host}'", f"a host that can be resolved ({error})") from error
            except OSError as error:
                why = str(error)
                time.sleep(0.02)
        raise PeerLost(lost_message(self.rank, timeout_s, [0], f"at {host}:{port} ({why})"))

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
            raise PeerLost(_gone_message(self.rank, 0, error)) from error
        welcome = self._answer(_Deadline(until.left_s() + _GRACE_S), timeout_s)
        if len(welcome) != 1 or not hmac.compare_digest(welcome[0], self._prove(b"welcome", claim)):
            raise Error("secret: the one given differs from rank 0's")

    def _answer(self, patience: _Deadline, timeout_s: float) -> list[bytes]:
        """Return the parts of rank 0's next frame; raise what it says went wrong."""
        try:
            verdict, *parts = _unpack(_receive_frame(self._peers[0], patience))
        except TimeoutError:
            raise PeerLost(lost_message(self.rank, timeout_s, [0])) from None
        except OSError as error:
            raise PeerLost(_gone_message(self.rank, 0, error)) from error
        if verdict == b"error":
            raise from_core(parts[0].decode(), parts[1].decode())
        return parts

    def _prove(self, role: bytes, claim: bytes) -> bytes:
        return hmac.digest(self._secret, role + claim, hashlib.sha256)


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
