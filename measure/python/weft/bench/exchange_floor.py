# SPDX-License-Identifier: Apache-2.0
"""The least time of an exchange on the machine at hand: a bare one, measured in the same run.

    floor = Floor(comm, most_bytes=1 << 20)                   # all ranks of a Communicator that map each other
    took = floor.exchange(Load("bulk", True, 1 << 20, peers=3, blocks=32))
    took.kernel_us, took.us                                   # samples, each of the slowest rank
    floor.best_us(egress_bytes=3 << 20)                       # the best way and number of SMs
    floor.best_alone_us(3 << 20, empty_caches)                # the same of single launches, each after such a call

Every rank sends the bytes to each of its successors and waits for those of its predecessors, in kernels of their own
(measure/kernels/exchange_floor.cuh) that do nothing else. Ways: ``stores``, 16 bytes by each thread, and a flag;
``bulk``, copies through shared memory, and a flag; ``lines``, lines of 128 bytes with a tag instead of a flag. A copy
(``waits`` False) has no flags and ends when its own stores have arrived.
``kernel_us``: in one launch, from the first block's start to the last one's end, by the device's own clock. ``us``: a
launch of ten, around which events are taken, in a graph on GPUs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import _core
from weft.bench.report import slowest_rank
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.runtime.streams import current_stream

LAUNCHES = 10  # of a sample
_SAMPLES, _QUICK_SAMPLES = 9, 3
_ALONE_SAMPLES = 9
WAYS = ("stores", "bulk", "lines")
_LINE = 128
_LINE_PAYLOAD = 112


@dataclass(frozen=True)
class Load:
    """One exchange: ``nbytes`` to each of ``peers``, from so many SMs (on the CPU: threads)."""

    way: str
    waits: bool
    nbytes: int
    peers: int
    blocks: int


@dataclass(frozen=True)
class Took:
    """Samples in microseconds, of the slowest rank each: of a kernel, and of a launch of ten in a row."""

    kernel_us: list[float]
    us: list[float]

    @property
    def median_us(self) -> float:
        """The median of kernels."""
        return statistics.median(self.kernel_us)


class Floor:
    """Exchanges of the ranks of a communicator. All methods are collective, and called alike by all ranks.

    Args:
        comm: two ranks or more that map each other.
        most_bytes: that a rank sends to one peer.
        group: the ranks' group of torch.distributed, on the CPU (gloo).
    Raises: weft.Error where ranks are not mapped, or memory is short.
    """

    def __init__(self, comm: Communicator, most_bytes: int, group: Any) -> None:
        from torch.utils.dlpack import from_dlpack

        self.comm, self.group = comm, group
        self.rank, self.size = comm.rank, comm.size
        self.core = _core.measure.ExchangeFloor.create(comm.core, -(-most_bytes // 16) * 16)
        self.most_blocks: int = self.core.most_blocks
        self.most_bytes: int = self.core.most_bytes
        self.most_line_bytes: int = self.core.most_line_bytes
        parts = ("launches", "stamps", "sources", "received", "lines")
        tensors: dict[str, Tensor] = {name: from_dlpack(self.core.part(name)) for name in parts}
        self._launches = tensors["launches"].view(torch.int64)
        self._stamps = (
            tensors["stamps"].view(torch.int64).view(_core.measure.FLOOR_KEPT, _core.measure.FLOOR_BLOCKS, 2)
        )
        self._sources = tensors["sources"].view(self.size - 1, -1)
        self._received = tensors["received"].view(self.size, -1)
        self._lines = tensors["lines"].view(2, self.size, -1)
        self.device = self._sources.device

    def holds(self, load: Load) -> bool:
        """Return whether there is room for a load, and as many SMs and peers as it asks for."""
        is_lines = load.way == "lines"
        most = self.most_line_bytes if is_lines else self.most_bytes
        return (
            load.nbytes <= most
            and load.blocks <= self.most_blocks
            and (load.peers == self.size - 1 if is_lines else 1 <= load.peers < self.size)
        )

    def exchange(self, load: Load, samples: int = _SAMPLES) -> Took:
        """Measure one exchange. Raises: weft.Error as the core does for one that does not fit; PeerLost."""
        replay = self._replay(load)
        kernel_us: list[float] = []
        us: list[float] = []
        for sample in range(samples + 1):
            self._line_up()
            took_us = self._timed(replay)
            self.core.check()
            if sample == 0:  # a warm-up
                continue
            us.append(took_us / LAUNCHES)
            kernel_us += self._kernel_us(load.blocks)
        mine = (kernel_us, us)
        of_ranks: list[Any] = [None] * self.size
        dist.all_gather_object(of_ranks, mine, group=self.group)
        return Took(slowest_rank([of[0] for of in of_ranks]), slowest_rank([of[1] for of in of_ranks]))

    def check(self, load: Load) -> None:
        """Compare what one exchange brings, byte by byte. Raises: weft.Error for what is wrong."""
        size, rank = self.size, self.rank
        for distance in range(load.peers):
            peer = (rank + 1 + distance) % size
            self._sources[distance, : load.nbytes] = _pattern(rank, peer, load.nbytes, self.device)
        self._received.zero_()
        self._lines.zero_()
        self._line_up()
        self._launch(load)
        self._finish()
        self.core.check()
        self._line_up()  # a copy does not wait for what comes here
        parity = int(self._launches[0].item()) & 1
        senders = [(rank - 1 - distance) % size for distance in range(load.peers)]
        wrong = []
        for source in range(size):
            came = self._came(load, parity, source)
            is_sender = source in senders
            if not torch.equal(
                came, _pattern(source, rank, load.nbytes, self.device) if is_sender else came * 0
            ):
                wrong.append(source)
        answers: list[Any] = [None] * size
        dist.all_gather_object(answers, wrong, group=self.group)
        if any(answers):
            at = next(at for at, sources in enumerate(answers) if sources)
            raise Error(f"bench floor: {load}: rank {at} got other bytes than ranks {answers[at]} sent")

    def best_us(self, egress_bytes: float, samples: int = _QUICK_SAMPLES) -> float:
        """Return the least time of a kernel in which every rank sends so many bytes in all, as many to each peer."""
        return min(self.exchange(load, samples).median_us for load in self._loads(egress_bytes))

    def best_alone_us(
        self, egress_bytes: float, before: Callable[[], None], samples: int = _ALONE_SAMPLES
    ) -> float:
        """Return the same of launches that stand alone, each after a collective ``before()`` that may empty caches."""
        return min(
            statistics.median(self._alone_us(load, before, samples)) for load in self._loads(egress_bytes)
        )

    def _loads(self, egress_bytes: float) -> list[Load]:
        nbytes = max(16, -(-int(egress_bytes) // (self.size - 1) // 16) * 16)
        return [
            load
            for way in WAYS
            for blocks in self.block_counts(nbytes)
            if self.holds(load := Load(way, True, nbytes, self.size - 1, blocks))
        ]

    def _alone_us(self, load: Load, before: Callable[[], None], samples: int) -> list[float]:
        self._launch(load)  # compiles
        mine: list[float] = []
        for _ in range(samples):
            before()
            self._launch(load)
            self._finish()
            self.core.check()
            mine.append(self._kernel_us(load.blocks, launches=1)[0])
        of_ranks: list[Any] = [None] * self.size
        dist.all_gather_object(of_ranks, mine, group=self.group)
        return slowest_rank(of_ranks)

    def block_counts(self, nbytes: int) -> list[int]:
        """Return numbers of SMs, or threads on the CPU, that are worth a look for an exchange of so many bytes."""
        if self.device.type == "cpu":
            return [1]
        counts = (
            (1, 4, 16, 32, 64, self.most_blocks) if nbytes < 64 << 10 else (16, 24, 32, 64, self.most_blocks)
        )
        return sorted({min(count, self.most_blocks) for count in counts})

    def _came(self, load: Load, parity: int, source: int) -> Tensor:
        if load.way != "lines":
            return self._received[source, : load.nbytes]
        count = -(-load.nbytes // _LINE_PAYLOAD)
        lines = self._lines[parity, source, : count * _LINE].view(count, _LINE)
        return lines[:, :_LINE_PAYLOAD].reshape(-1)[: load.nbytes]

    def _launch(self, load: Load) -> None:
        stream = current_stream(self.device.index) if self.device.type == "cuda" else 0
        self.core.run(load.way, load.waits, load.nbytes, load.peers, load.blocks, stream)

    def _replay(self, load: Load) -> Callable[[], None]:
        def launches() -> None:
            for _ in range(LAUNCHES):
                self._launch(load)

        if self.device.type == "cpu":
            return launches
        self._launch(load)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        return graph.replay

    def _timed(self, replay: Callable[[], None]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            replay()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _kernel_us(self, blocks: int, launches: int = LAUNCHES - 1) -> list[float]:
        """Return the times of the last launches: of a replay all but the first, which waits for ranks that are late."""
        last = int(self._launches[0].item())
        rows = [launch % _core.measure.FLOOR_KEPT for launch in range(last - launches + 1, last + 1)]
        stamps = self._stamps[rows, :blocks].cpu()
        ns = stamps[:, :, 1].amax(1) - stamps[:, :, 0].amin(1)
        return [value / 1e3 for value in ns.tolist()]

    def _line_up(self) -> None:
        self._finish()
        dist.barrier(group=self.group)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@functools.lru_cache(maxsize=16)  # of one size after the other
def _pattern(source: int, peer: int, nbytes: int, device: torch.device) -> Tensor:
    """Return bytes that no other pair of ranks sends, and that differ from place to place."""
    generator = torch.Generator().manual_seed(source * 4096 + peer)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)
