# SPDX-License-Identifier: Apache-2.0
"""One rank's transfer engine in a round of ``weft chaos``: connected to all others, with memory that all reach."""

from __future__ import annotations

import functools
import pickle
import random

from weft.runtime.bootstrap import Bootstrap
from weft.transfer import Pages, Peer, Remote, TransferEngine

SLOT_BYTES = 1 << 18
_ACKNOWLEDGED, _WRITTEN, _BARRIER = 1, 2, 3  # immediates


@functools.lru_cache
def pattern(rank: int) -> bytes:
    """Return what lies in the memory of ``rank`` that others read."""
    return random.Random(rank).randbytes(SLOT_BYTES)


class ConnectedEngine:
    """Making one is collective. Memory: a slot for each writer, one that others read, one to send from.

    An engine is called "rank N", so that its errors name ranks as those of communicators do.
    """

    def __init__(
        self, rank: int, ranks: Bootstrap, provider: str, timeout_s: float, peer_dead_s: float
    ) -> None:
        self.rank, self.size = rank, ranks.size
        self.core = TransferEngine(
            provider, name=f"rank {rank}", timeout_s=timeout_s, heartbeat_s=0.2, peer_dead_s=peer_dead_s
        )
        self._slots, self._local = bytearray(SLOT_BYTES * self.size), bytearray(SLOT_BYTES)
        self._target = self.core.register(self._slots, remote_write=True)
        self._source = self.core.register(self._local)
        shown = self.core.register(bytearray(pattern(rank)), remote_read=True)
        mine = self.core.address, self._target.descriptor, shown.descriptor
        everyone = [pickle.loads(given) for given in ranks.all_gather(pickle.dumps(mine), timeout_s)]
        others = [r for r in range(self.size) if r != rank]
        self._peers: dict[int, Peer] = {r: self.core.connect(everyone[r][0]) for r in others}
        self._targets: dict[int, Remote] = {r: self.core.attach(everyone[r][1]) for r in others}
        self._shown: dict[int, Remote] = {r: self.core.attach(everyone[r][2]) for r in others}
        self._counts: dict[tuple[int, int], int] = {}
        ranks.all_gather(b"", timeout_s)  # nobody leaves before all have attached

    def _next(self, peer: int, imm: int) -> int:
        """Return how often ``peer`` has notified with ``imm`` once it has done so again."""
        self._counts[peer, imm] = self._counts.get((peer, imm), 0) + 1
        return self._counts[peer, imm]

    def write(self, dst: int, offset: int, data: bytes, page_bytes: int = 0) -> None:
        """Write into this rank's slot at ``dst``, by pages in reversed order or as a whole; wait until it was read."""
        self._local[: len(data)] = data
        at = self.rank * SLOT_BYTES + offset
        if page_bytes:
            order = list(reversed(range(len(data) // page_bytes)))
            there = Pages(order, page_bytes, at)
            transfer = self.core.write_pages(
                self._source, Pages(order, page_bytes), self._targets[dst], there, page_bytes, imm=_WRITTEN
            )
        else:
            transfer = self.core.write(
                self._source, self._targets[dst], len(data), dst_offset=at, imm=_WRITTEN
            )
        transfer.wait()
        self.core.imm(self._peers[dst], _ACKNOWLEDGED).wait(self._next(dst, _ACKNOWLEDGED))

    def written_by(self, src: int, offset: int, length: int) -> bytes:
        """Wait for a write of ``src``; return what lies in its slot, and let it write again."""
        self.core.imm(self._peers[src], _WRITTEN).wait(self._next(src, _WRITTEN))
        at = src * SLOT_BYTES + offset
        found = bytes(self._slots[at : at + length])
        self.core.notify(self._peers[src], _ACKNOWLEDGED).wait()
        return found

    def read(self, src: int, offset: int, length: int) -> bytes:
        """Read of the pattern of ``src``."""
        self.core.read(self._source, self._shown[src], length, src_offset=offset).wait()
        return bytes(self._local[:length])

    def send(self, dst: int, data: bytes) -> None:
        """Send a message."""
        self._local[: len(data)] = data
        self.core.send(self._peers[dst], self._source, len(data)).wait()

    def recv(self, src: int, length: int) -> bytes:
        """Receive a message."""
        self.core.recv(self._peers[src], self._source, length).wait()
        return bytes(self._local[:length])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.core.barrier(list(self._peers.values()), _BARRIER)

    def close(self) -> None:
        """Close the engine; peers see it as lost."""
        self.core.close()
