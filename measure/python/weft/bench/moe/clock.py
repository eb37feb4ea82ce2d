# SPDX-License-Identifier: Apache-2.0
"""The clock of ``weft bench moe``: options, a clock and barrier, and the inputs that measurements start from.

Time is taken around the whole call, as its caller sees it: by the host's clock on the CPU, by CUDA events
around the replay of a captured call on a GPU. Ranks start a sample together; the slowest counts. On a GPU a
buffer larger than the L2 cache is written before each sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from weft.bench.eager import Eager, Times
from weft.bench.exchange_floor import Floor
from weft.bench.moe import check
from weft.bench.moe.floors import Traffic, traffic_of
from weft.bench.moe.routes import make_routes
from weft.bench.moe.trace import TRACED_SAMPLES, CallsOfRanks, Tracer
from weft.bench.report import slowest_rank
from weft.runtime.communicator import Communicator
from weft.runtime.progress import progress
from weft.testing.ranks import Rank

# Writing it takes some 300 us, in which the host gets ahead of the GPU: else ranks start when their hosts get to it.
L2_FLUSH_BYTES = 1 << 30
ROUTE_SETS = 8
_ALTERNATIONS = 5
Timed = Callable[[str, Callable[[], Any]], Any]  # makes a call and keeps its time under a name


@dataclass(frozen=True)
class Options:
    """What to measure; tokens are per rank."""

    mode: str
    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: str
    routes: str
    transport: str
    device: str
    iterations: int
    warmup: int
    seed: int
    eager: bool
    sms: int | None = None  # of high-throughput calls, Weft's and DeepEP's; None: their defaults
    more_sms: tuple[int, ...] = ()  # measured after that, without baselines
    trace: bool = False  # also take samples of which kernels note what they do when
    ranks_per_node: int = 0  # this host is cut into nodes of so many ranks; 0: it is one
    provider: str = ""  # of the network between them
    nic: str = ""
    delayed_rank: int = -1  # this rank starts every sample late, on purpose
    delay_us: int = 0
    overlap_us: int = 0  # of the matrix product between send and receive, mode p2p
    has_baselines: bool = True  # torch.distributed and memcpy

    @property
    def is_captured(self) -> bool:
        """Whether calls are replayed from CUDA graphs."""
        return self.device == "cuda" and not self.eager


class ExchangeFloors(NamedTuple):
    """Microseconds of the kernel of a bare exchange: of launches in a row, and of one after line_up()."""

    us: float | None
    cold_us: float | None


class Bench:
    """One rank's clock, barrier and samples."""

    def __init__(self, me: Rank, options: Options) -> None:
        self.me = me
        self.options = options
        self.device = torch.device("cpu")
        self.group = me.group
        self.on_gpu = options.device == "cuda"
        if self.on_gpu:
            ordinal = torch.distributed.get_node_local_rank(fallback_rank=me.rank)
            torch.cuda.set_device(ordinal)
            self.device = torch.device("cuda", ordinal)
            self.group = torch.distributed.new_group(backend="nccl")
            self._flushed = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
            self._token = torch.zeros(1, device=self.device)
        self._samples: dict[str, list[Any]] = {}
        self._floors: dict[float, ExchangeFloors] = {}
        self.tracer: Tracer | None = None  # then calls of Weft are traced instead of timed

    def line_up(self) -> None:
        """Start together with the other ranks; on a GPU also empty the L2 cache."""
        if self.on_gpu:
            self._flushed.zero_()
            torch.distributed.all_reduce(self._token, group=self.group)
        else:
            torch.distributed.barrier(group=self.group)
        if self.tracer:
            self.tracer.line_up()
        if self.me.rank == self.options.delayed_rank:
            time.sleep(self.options.delay_us / 1e6)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Return ``call()``; keep how long it took as a sample of ``name``."""
        if self.tracer:
            return self.tracer.traced(name, call) if name.startswith("weft ") else call()
        if self.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            self._samples.setdefault(name, []).append((start, end))
        else:
            started = time.perf_counter()
            result = call()
            self._samples.setdefault(name, []).append((time.perf_counter() - started) * 1e6)
        return result

    def sample(self, name: str, call: Callable[[], Any]) -> Any:
        """Line up, then time one call."""
        self.line_up()
        return self.timed(name, call)

    def run(self, take_sample: Callable[[int], None]) -> None:
        """Take the warm-up's samples, which are dropped, and those that count, under a progress bar."""
        o, me = self.options, self.me
        with progress(enabled=me.rank == 0) as bar:
            task = bar.add_task(f"{o.mode}, {me.size} ranks", total=o.warmup + o.iterations)
            for index in range(o.warmup + o.iterations):
                if index == o.warmup:
                    self._samples.clear()
                take_sample(index)
                bar.advance(task)

    def in_a_row(self, turns: Sequence[Callable[[Eager], None]]) -> dict[str, Times]:
        """Return what calls cost that follow one another, outside of graphs: see weft.bench.eager. Collective.

        Args: turns: each makes its calls once by the Eager it is given. They alternate some times, as processors have
            fast and slow seconds.
        """
        o = self.options
        clocks = [Eager(self.on_gpu) for _ in turns]
        times = min(_ALTERNATIONS, o.iterations)
        for _ in range(times):
            for clock, turn in zip(clocks, turns, strict=True):
                self.line_up()
                clock.measure(turn, -(-o.iterations // times), o.warmup)
        found: dict[str, Times] = {}
        for clock in clocks:
            found |= clock.slowest(self.me.group)
        return found

    def traces(self, buffer: Any, take_sample: Callable[[int], None]) -> CallsOfRanks:
        """Take a few more samples, and return what kernels noted of Weft's calls. Collective; [] unless asked for."""
        if not self.options.trace:
            return []
        self.tracer = Tracer(buffer, self.on_gpu)
        for index in range(TRACED_SAMPLES):
            take_sample(index)
        of_ranks: CallsOfRanks = [[] for _ in range(self.me.size)]
        torch.distributed.all_gather_object(of_ranks, self.tracer.calls, group=self.me.group)
        self.tracer = None
        return of_ranks

    def samples_us(self, calls_in_a_row: int = 1) -> dict[str, list[float]]:
        """Return the slowest rank's samples, each the mean of so many calls. Collective."""
        mine = {name: self._means(values, calls_in_a_row) for name, values in self._samples.items()}
        of_ranks: list[Any] = [None] * self.me.size
        torch.distributed.all_gather_object(of_ranks, mine, group=self.me.group)
        return {name: slowest_rank([of_rank[name] for of_rank in of_ranks]) for name in mine}

    def _means(self, values: list[Any], calls: int) -> list[float]:
        if self.on_gpu:
            torch.cuda.synchronize()
            values = [start.elapsed_time(end) * 1e3 for start, end in values]
        return [sum(values[at : at + calls]) / calls for at in range(0, len(values), calls)]

    def captured(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return a replay of ``call`` and the results that each replay fills in anew; it was replayed once."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        graph.replay()  # capturing computes nothing, and the next call to be captured may read these results
        torch.cuda.synchronize()
        return graph.replay, results

    def exchange_floors(self, egress_bytes: float) -> ExchangeFloors:
        """Return the least times of a bare exchange on these GPUs, measured now. Collective; None for one rank."""
        if self.me.size < 2 or egress_bytes < 1:
            return ExchangeFloors(None, None)
        if egress_bytes not in self._floors:
            comm = Communicator(self.me.group, device=self.device)
            floor = Floor(comm, math.ceil(egress_bytes / (self.me.size - 1)) + 16, self.me.group)
            self._floors[egress_bytes] = ExchangeFloors(
                floor.best_us(egress_bytes), floor.best_alone_us(egress_bytes, self.line_up)
            )
        return self._floors[egress_bytes]


@dataclass
class Inputs:
    """Every rank's rows, weights and sets of routes, on the CPU; this rank's also on the device."""

    rows: list[Tensor]
    weights: list[Tensor]
    routes: list[list[Tensor]]
    mine: Tensor
    my_weights: Tensor

    @classmethod
    def make(cls, bench: Bench) -> Inputs:
        """Draw them; the same on every rank."""
        o, me = bench.options, bench.me
        rows = [check.make_rows(rank, o.tokens, o.hidden, o.seed) for rank in range(me.size)]
        weights = [check.make_weights(rank, o.tokens, o.top_k, o.seed) for rank in range(me.size)]
        sets = min(ROUTE_SETS, o.iterations + o.warmup)
        routes = make_routes(o.routes, sets, me.size, o.tokens, o.top_k, o.experts, o.seed)
        mine, my_weights = rows[me.rank].to(bench.device), weights[me.rank].to(bench.device)
        return cls(rows, weights, routes, mine, my_weights)

    def traffic(self, experts: int) -> Traffic:
        """Return the mean traffic over the sets of routes."""
        of_sets = [traffic_of(routes, experts) for routes in self.routes]
        return Traffic(
            sum(traffic.received for traffic in of_sets) / len(of_sets),
            sum(traffic.egress for traffic in of_sets) / len(of_sets),
            sum(traffic.selections for traffic in of_sets) / len(of_sets),
        )
