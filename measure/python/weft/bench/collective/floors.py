# SPDX-License-Identifier: Apache-2.0
"""The least time that this machine needs for the bytes of a collective, measured in the run beside it.

    floors = floors_of(me, comm, options)      # collective
    floors.us("all_reduce", 1 << 20)           # collective; None where no floor is known

On GPUs it is a bare exchange. Between CPU ranks of one node it is a copy of the bytes that a rank must move. Between
CPU ranks of several nodes it is raw TCP sockets and copies, with no protocol: a rank sends and receives what must go
between nodes, and copies what must move inside its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft.bench.collective import CALLS
from weft.bench.collective.cases import Options
from weft.bench.exchange_floor import Floor
from weft.bench.transfer_side import PROVIDERS
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank

_SAMPLES = 5
_TIMEOUT_S = 60.0


class Floors(Protocol):
    """Says how long the bytes of a call take at least."""

    def us(self, call: str, num_bytes: int) -> float | None:
        """Return the least time of a call whose full buffer has ``num_bytes``; None where none is known. Collective."""


def floors_of(me: Rank, comm: Communicator, options: Options) -> Floors:
    """Return what measures floors between these ranks. Collective."""
    if options.device == "cuda":
        return _ExchangeFloors(me, comm, options)
    settings = dict(options.settings)
    per_node = int(settings.get("WEFT_RANKS_PER_NODE", me.size))
    is_tcp = settings.get("WEFT_PROXY_PROVIDER") == PROVIDERS["tcp"]
    if is_tcp and per_node < me.size and me.size % per_node == 0:
        return _SocketFloors(me, comm, per_node)
    return _CopyFloors(me, comm)


@dataclass(frozen=True)
class Bytes:
    """The bytes that a rank must move in one call.

    ``sent`` goes to other nodes, and as much comes from there. ``copied`` is half of what it reads and writes inside
    its node: both are taken to cost alike.
    """

    sent: int
    copied: int


def least_bytes(call: str, num_bytes: int, nodes: int, per_node: int) -> Bytes | None:
    """Return what a rank must move where every node of ``per_node`` ranks sends nothing twice.

    Sums are made inside a node first, then between nodes; a rank has a part of its node's result in between.
    """
    share = num_bytes / per_node  # of the node's result
    abroad = share * (nodes - 1) / nodes
    sums = (num_bytes + share) / 2 + ((share + share / nodes) / 2 if nodes > 1 else 0)
    moved = {
        "all_gather": (abroad, num_bytes - abroad),
        "all_to_all": (num_bytes * (nodes - 1) / nodes, num_bytes / nodes),
        "reduce_scatter": (abroad, sums),
        "all_reduce": (2 * abroad, sums + num_bytes - share),
    }.get(call)
    return moved and Bytes(int(moved[0]), max(1, int(moved[1])))


class _Measured:
    """Times work that all ranks do at the same time: the median of some samples, of the slowest rank."""

    def __init__(self, me: Rank, comm: Communicator) -> None:
        self._me, self._comm = me, comm

    def slowest_us(self, work: Callable[[], None], repeats: int) -> float:
        took = []
        for _ in range(_SAMPLES):
            self._comm.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            took.append((time.perf_counter() - start) / repeats * 1e6)
        gathered: list[Any] = [None] * self._me.size
        dist.all_gather_object(gathered, statistics.median(took), group=self._me.group)
        return float(max(gathered))


def _repeats(num_bytes: int) -> int:
    return max(1, min(1000, (1 << 24) // max(1, num_bytes)))


class _Copy:
    """A copy from memory to memory."""

    def __init__(self, num_bytes: int) -> None:
        self._own = torch.ones(num_bytes, dtype=torch.uint8)
        self._into = torch.zeros_like(self._own)

    def __call__(self) -> None:
        ctypes.memmove(self._into.data_ptr(), self._own.data_ptr(), self._own.numel())


class _CopyFloors:
    """All ranks copy, at the same time, the bytes that the call makes each of them move."""

    def __init__(self, me: Rank, comm: Communicator) -> None:
        self._ranks, self._measured = me.size, _Measured(me, comm)

    def us(self, call: str, num_bytes: int) -> float | None:
        """Return the time of those copies."""
        moved = least_bytes(call, num_bytes, 1, self._ranks)
        if moved is None:
            return None
        return self._measured.slowest_us(_Copy(moved.copied), _repeats(moved.copied))


class _SocketFloors:
    """Rings of raw sockets between the ranks of the same place in every node, and copies inside the nodes."""

    def __init__(self, me: Rank, comm: Communicator, per_node: int) -> None:
        self._nodes, self._per_node = me.size // per_node, per_node
        self._measured = _Measured(me, comm)
        self._to, self._from = _ring(me, (me.rank + per_node) % me.size)
        self._sender = ThreadPoolExecutor(1)

    def us(self, call: str, num_bytes: int) -> float | None:
        """Return the time of the better way: one thread for all of it, or another one that sends."""
        moved = least_bytes(call, num_bytes, self._nodes, self._per_node)
        if moved is None:
            return None
        copy = _Copy(moved.copied)
        out, into = (memoryview(bytearray(b"1") * moved.sent) for _ in range(2))

        def by_one_thread() -> None:
            self._exchange(out, into)
            copy()

        def by_two_threads() -> None:
            sending = self._sender.submit(self._exchange, out, b"")
            self._exchange(b"", into)
            copy()
            sending.result()

        repeats = _repeats(moved.sent + moved.copied)
        return min(self._measured.slowest_us(way, repeats) for way in (by_one_thread, by_two_threads))

    def _exchange(self, out: memoryview | bytes, into: memoryview | bytes) -> None:
        """Send all of ``out`` to the next node and receive all of ``into`` from the one before.

        Raises: weft.Error when nothing has moved for a minute, or the rank before has closed its end.
        """
        while out or into:
            is_idle = True
            with contextlib.suppress(BlockingIOError):
                sent = self._to.send(out) if out else 0
                out, is_idle = out[sent:], is_idle and not sent
            with contextlib.suppress(BlockingIOError):
                came = self._from.recv_into(into) if into else 0
                if into and not came:
                    raise Error(
                        "bench collective: a rank closed the floor's socket in the middle of an exchange"
                    )
                into, is_idle = into[came:], is_idle and not came
            if not is_idle:
                continue
            ready = select.select([self._from] if into else [], [self._to] if out else [], [], _TIMEOUT_S)
            if not any(ready):
                raise Error(f"bench collective: the floor's sockets moved nothing for {_TIMEOUT_S:g} s")


class _ExchangeFloors:
    """Bare exchanges between the GPUs of this run, each measured once; None where ranks share a GPU."""

    def __init__(self, me: Rank, comm: Communicator, options: Options) -> None:
        self._known: dict[int, float] = {}
        self._ranks = me.size
        self._floor: Floor | None = None
        if 1 < me.size <= torch.cuda.device_count():
            self._floor = Floor(comm, options.max_bytes // me.size + 16, me.group)

    def us(self, call: str, num_bytes: int) -> float | None:
        """Return the least time of one exchange, of two for all_reduce."""
        if self._floor is None or call not in CALLS[:4]:
            return None
        if num_bytes not in self._known:
            self._known[num_bytes] = self._floor.best_us(num_bytes / self._ranks * (self._ranks - 1))
        return self._known[num_bytes] * (2 if call == "all_reduce" else 1)


def _ring(me: Rank, following: int) -> tuple[socket.socket, socket.socket]:
    """Return a socket to rank ``following``, and one from the rank that this rank follows. Collective."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        ports: list[Any] = [None] * me.size
        dist.all_gather_object(ports, listener.getsockname()[1], group=me.group)
        to = socket.create_connection(("127.0.0.1", ports[following]), timeout=_TIMEOUT_S)
        coming = listener.accept()[0]
    for each in (to, coming):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    return to, coming
