# SPDX-License-Identifier: Apache-2.0
"""Runs a plan over transfer engines: lists of pages that are prepared once, and one immediate per bucket.

A source writes; a destination waits for immediates. Nothing here says which version of the weights a destination has:
it must not use them between the first write of an update and the last immediate, nor may a source begin the next update
before all destinations have this one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.errors import Error, PeerLost, invalid, quoted
from weft.transfer.buffers import Pages, whole
from weft.transfer.engine import IMM_MAX, TransferEngine
from weft.transfer.handles import Memory, Peer, Remote
from weft.transfer.reshard.layout import DIMS, Ints
from weft.transfer.reshard.plan import Plan

# Where pages that have been written are in place at the peer (docs/transfer.md), so that an immediate may follow.
_IN_PLACE = ("fabric:tcp", "fabric:shm")
_INDEX_MAX = (1 << 32) - 1


@dataclass(frozen=True)
class WriteList:
    """Runs of equal length from one memory of a source to one of a destination, as ``write_pages`` takes them."""

    src_memory: str
    dst_memory: str
    src_pages: Pages
    dst_pages: Pages
    page_bytes: int


@dataclass(frozen=True)
class Bucket:
    """What one source writes to one destination before it sends the immediate ``number``."""

    number: int
    destination: int
    lists: tuple[WriteList, ...]


def write_lists(made: Plan, source: int) -> list[Bucket]:
    """Return what a source writes, by bucket and destination. Runs that continue each other on both sides are one.

    Raises: weft.Error when the source is no rank of the plan's.
    """
    if not 0 <= whole("source", source) < max(made.src.ranks, 1):
        raise invalid("source", source, f"0 to {made.src.ranks - 1}")
    mine = np.flatnonzero(made.src_rank == source)
    keys = np.stack([made.bucket[mine], made.dst_rank[mine]], axis=1)
    found = []
    for bucket, destination in np.unique(keys, axis=0).tolist():
        pieces = mine[(keys == (bucket, destination)).all(axis=1)]
        found.append(Bucket(bucket, destination, tuple(_lists(made, pieces))))
    return found


def _lists(made: Plan, pieces: Ints) -> list[WriteList]:
    src_memory = made.src.boxes.memory[made.src_box[pieces]]
    dst_memory = made.dst.boxes.memory[made.dst_box[pieces]]
    pairs = np.stack([src_memory, dst_memory], axis=1)
    lists = []
    for pair in np.unique(pairs, axis=0):
        src_at, dst_at, length = _runs(made, pieces[(pairs == pair).all(axis=1)])
        for nbytes in np.unique(length).tolist():
            rows = length == nbytes
            names = made.src.memories[pair[0]], made.dst.memories[pair[1]]
            lists.append(WriteList(*names, _pages(src_at[rows]), _pages(dst_at[rows]), nbytes))
    return lists


def _runs(made: Plan, pieces: Ints) -> tuple[Ints, Ints, Ints]:
    """Return where all runs of pieces begin on both sides, and their lengths, by the destination's address."""
    src_at, dst_at, length = [], [], []
    for piece in pieces:
        form = made.form[piece]
        src, dst = made.src_offset[piece : piece + 1], made.dst_offset[piece : piece + 1]
        for level in range(DIMS):
            steps = np.arange(made.forms.count[form, level])
            src = (src[:, None] + steps * made.forms.src_stride[form, level]).reshape(-1)
            dst = (dst[:, None] + steps * made.forms.dst_stride[form, level]).reshape(-1)
        src_at.append(src)
        dst_at.append(dst)
        length.append(np.full(len(src), made.forms.run[form]))
    src, dst, nbytes = (np.concatenate(column) for column in (src_at, dst_at, length))
    order = np.argsort(dst, kind="stable")
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    is_new = np.ones(len(src), bool)
    is_new[1:] = (src[1:] != (src + nbytes)[:-1]) | (dst[1:] != (dst + nbytes)[:-1])
    first = np.flatnonzero(is_new)
    return src[first], dst[first], np.add.reduceat(nbytes, first)


def _pages(begins: Ints) -> Pages:
    """Return begins of runs as page numbers. Raises: weft.Error where they lie too far apart for these."""
    offset = int(begins.min())
    stride = int(np.gcd.reduce(begins - offset)) or 1
    numbers = (begins - offset) // stride
    if int(numbers.max()) > _INDEX_MAX:
        raise invalid(
            "plan",
            f"runs {int(numbers.max()) * stride} bytes apart in one memory",
            "4 GiB, or even distances",
        )
    return Pages(numbers.tolist(), stride, offset)


@dataclass
class Update:
    """One run of a source's part of a plan: wait for it, or look how far it is."""

    source: int
    nbytes: int
    left: list[int]  # destinations, one for each bucket that is not over
    bytes_done: int = 0
    error: Error | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def share(self) -> float:
        """How far it is, from 0.0 to 1.0, by bytes."""
        return self.bytes_done / self.nbytes if self.nbytes else 1.0

    @property
    def is_finished(self) -> bool:
        """Whether all is written and all immediates are sent, or something has failed."""
        return not self.left or self.error is not None

    def wrote(self, nbytes: int) -> None:
        """Take note of ``nbytes`` that are in place."""
        with self._changed:
            self.bytes_done += nbytes

    def ended(self, destination: int, error: Error | None) -> None:
        """Take note of the end of a bucket with its immediate, or of what it failed with."""
        with self._changed:
            self.error = self.error or error
            if error is None:
                self.left.remove(destination)
            self._changed.notify_all()

    def wait(self, timeout_s: float = 60.0) -> Update:
        """Wait for the end and return self. Raises: the first failure; PeerLost when ``timeout_s`` passes first."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_finished, timeout_s):
                raise PeerLost(
                    f"reshard.update: source {self.source} waited {timeout_s:g} s for destinations "
                    f"{sorted(set(self.left))}: expected {self.nbytes} bytes written, saw {self.bytes_done}"
                )
        if self.error is not None:
            raise self.error
        return self


class Push:
    """A source's part of a plan, bound to its engine and to memory on both sides.

    Args:
        made: the plan; prove it first if you did not make it.
        source: this rank among the plan's sources.
        engine: of ``fabric:tcp`` or ``fabric:shm``: there, pages that have been written are in place.
        memories: the source's memories by the layout's names.
        remotes: (destination, name) -> attached memory.
        first_imm: immediates are this number plus the bucket's.
    Raises: weft.Error naming a memory that is missing or too short, and other providers.
    """

    def __init__(
        self,
        made: Plan,
        source: int,
        engine: TransferEngine,
        memories: Mapping[str, Memory],
        remotes: Mapping[tuple[int, str], Remote],
        *,
        first_imm: int = 0,
    ) -> None:
        if (provider := engine.nics[0].provider) not in _IN_PLACE:
            raise invalid("engine", f"one over {provider}", f"one over {' or '.join(_IN_PLACE)}")
        whole("first_imm", first_imm, IMM_MAX - int(made.bucket.max(initial=0)))
        self._engine, self._first_imm, self._source = engine, first_imm, source
        self._buckets = []
        self.nbytes = 0
        for bucket in write_lists(made, source):
            calls = []
            for one in bucket.lists:
                src = _found(memories, one.src_memory, Memory, "memories")
                dst = _found(remotes, (bucket.destination, one.dst_memory), Remote, "remotes")
                _check_fits("memories", one.src_memory, src.nbytes, one.src_pages, one.page_bytes)
                _check_fits("remotes", one.dst_memory, dst.nbytes, one.dst_pages, one.page_bytes)
                calls.append((src, one.src_pages, dst, one.dst_pages, one.page_bytes))
                self.nbytes += one.page_bytes * _length(one.src_pages)
            self._buckets.append((bucket.number, bucket.destination, calls))

    def start(self) -> Update:
        """Write all, and return at once. Each bucket's immediate follows its last byte."""
        update = Update(self._source, self.nbytes, [destination for _, destination, _ in self._buckets])
        for number, destination, calls in self._buckets:
            _Bucket(self._engine, self._first_imm + number, destination, update).write(calls)
        return update


class _Bucket:
    """Writes of one bucket under way; the last one's end sends the immediate."""

    def __init__(self, engine: TransferEngine, imm: int, destination: int, update: Update) -> None:
        self._engine, self._imm, self._destination, self._update = engine, imm, destination, update
        self._left = 0
        self._lock = threading.Lock()

    def write(self, calls: list[tuple[Memory, Pages, Remote, Pages, int]]) -> None:
        self._left = len(calls)
        for src, src_pages, dst, dst_pages, page_bytes in calls:
            nbytes, peer = page_bytes * _length(src_pages), dst.peer

            def ended(error: Error | None, nbytes: int = nbytes, peer: Peer = peer) -> None:
                self._ended(error, nbytes, peer)

            self._engine.write_pages(src, src_pages, dst, dst_pages, page_bytes, callback=ended)

    def _ended(self, error: Error | None, nbytes: int, peer: Peer) -> None:
        if error is not None:
            self._update.ended(self._destination, error)
            return
        self._update.wrote(nbytes)
        with self._lock:
            self._left -= 1
            if self._left > 0:
                return
        try:
            notice = self._engine.notify(peer, self._imm)
        except Error as refused:
            self._update.ended(self._destination, refused)
        else:
            notice.on_done(lambda error: self._update.ended(self._destination, error))


class Arrivals:
    """What a destination waits for: an immediate of each source and bucket that writes to it.

    Make it before the sources start: it counts from then on.

    Args:
        made: the plan.
        destination: this rank among the plan's destinations.
        engine: of the destination.
        peers: source -> its engine, as a peer of this one.
        first_imm: as the sources have it.
    Raises: weft.Error naming a source that is not among the peers.
    """

    def __init__(
        self,
        made: Plan,
        destination: int,
        engine: TransferEngine,
        peers: Mapping[int, Peer],
        *,
        first_imm: int = 0,
    ) -> None:
        mine = made.dst_rank == whole("destination", destination)
        pairs = np.unique(np.stack([made.src_rank[mine], made.bucket[mine]], axis=1), axis=0).tolist()
        counters = [engine.imm(_found(peers, s, Peer, "peers"), first_imm + bucket) for s, bucket in pairs]
        self._counters = [(counter, counter.value) for counter in counters]

    def wait(self, updates: int = 1, timeout_s: float | None = None) -> None:
        """Return when the whole of that many updates is here, counted since this was made. Raises: PeerLost."""
        for counter, before in self._counters:
            counter.wait(before + whole("updates", updates), timeout_s)


def _found(given: Mapping[Any, Any], key: object, wanted: type[Any], argument: str) -> Any:
    if key not in given or not isinstance(given[key], wanted):
        raise invalid(argument, f"{quoted(given.get(key))} as {key!r}", f"a {wanted.__name__}")
    return given[key]


def _length(pages: Pages) -> int:
    return pages.indices if isinstance(pages.indices, int) else len(pages.indices)


def _check_fits(argument: str, name: str, nbytes: int, pages: Pages, page_bytes: int) -> None:
    assert not isinstance(pages.indices, int)
    end = pages.offset + pages.stride * max(pages.indices) + page_bytes
    if end > nbytes:
        raise invalid(argument, f"{nbytes} bytes as {name!r}", f"{end} or more, where the layout's boxes end")
