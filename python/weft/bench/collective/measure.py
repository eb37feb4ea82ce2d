# SPDX-License-Identifier: Apache-2.0
"""How ``weft bench collective`` measures.

Every sample is the slowest rank's. Weft and the baseline take turns, sample by sample, so that whatever else the
machine does disturbs both. On the CPU a sample is the mean of some calls in a row, after two that bring the ranks into
step; on GPUs it is the mean of 20 calls in a CUDA graph, by events (eager: 20 calls on the stream). Before timing, the
result is compared with an oracle. What calls outside of graphs cost is measured afterwards (weft.bench.eager).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import _core
from weft.bench.collective import CALLS
from weft.bench.eager import Eager, Times, add_times
from weft.bench.exchange_floor import h200_exchange_us
from weft.bench.report import Row, progress, slowest_rank
from weft.collectives.calls import Collectives, chunk_counts
from weft.collectives.compile import read_source
from weft.collectives.contract import Collective
from weft.collectives.ir import Algorithm
from weft.collectives.library import entries
from weft.collectives.selector import Choice, parse_choice
from weft.errors import Error, invalid
from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank

_GRAPH_CALLS = 20
_SAMPLE_S = 0.03
_EAGER_CALLS, _EAGER_WARMUP = 100, 5
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "average": dist.ReduceOp.AVG,
}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    calls: tuple[str, ...]
    min_bytes: int
    max_bytes: int
    factor: int
    dtype: str
    op: str
    place: str  # auto, in or out
    device: str
    iterations: int
    warmup: int
    check: bool
    baseline: bool
    eager: bool
    in_window: bool
    settings: tuple[tuple[str, str], ...] = ()  # WEFT_ variables
    algorithms: tuple[str, ...] = ()  # as for parse_choice, or "auto"; none: Weft chooses


@dataclass(frozen=True)
class Given:
    """What is to serve a call, as the command line says it: "auto" has no choice, Weft makes one."""

    text: str
    choice: Choice | None


@dataclass
class Tensors:
    """What Weft's call is given and fills, and what the baseline's is: the same, unless Weft's are in a window."""

    tensor: Tensor
    out: Tensor
    theirs: Tensor
    into: Tensor
    reset: Callable[[], None]


@dataclass
class Case:
    """One call at one size: Weft by a choice (None: its own), the baseline (None where it has none), what to compare,
    and how to start afresh."""

    weft: Callable[[Choice | None], Any]
    baseline: Callable[[], Any] | None
    result: Callable[[], Tensor]
    oracle: Callable[[], Tensor | None]
    reset: Callable[[], None]


def call_of(algorithms: Sequence[str], ranks: int) -> tuple[str, int]:
    """Return the call that the first algorithm is for, and on how many ranks, where it says so. Raises: Error."""
    words = shlex.split(algorithms[0])
    if not words[0].endswith((".py", ".xml", ".json")):
        collective = entries()[words[0]].collective if words[0] in entries() else ""
    else:
        algorithm = read_source(words[0], ranks if words[0].endswith(".py") else 0)
        collective, ranks = algorithm.collective, algorithm.num_ranks
    known = {call.replace("send_recv", "sendrecv").replace("_", ""): call for call in CALLS}
    if collective not in (*known, "custom"):
        raise invalid("calls", None, f"given, for {algorithms[0]!r}: one of {', '.join(CALLS)}")
    return known.get(collective, collective), ranks


def measure(me: Rank, options: Options) -> list[Row]:
    """Measure on this rank; collective over ``me.group``. Returns all rows, for rank 0 to report."""
    if options.settings:
        os.environ.update(options.settings)
        _core.config_reload()
    device = torch.device("cpu")
    baseline_group, name = me.group, "gloo"
    if options.device == "cuda":
        device = torch.device("cuda", me.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        baseline_group, name = dist.new_group(backend="nccl"), "nccl"
    comm = Communicator(me.group, device=device)
    collectives = Collectives(comm.core)
    window = Window(comm, 4 * options.max_bytes + (1 << 20)) if options.in_window else None
    cases = Cases(me, collectives, baseline_group, device, options, window)
    sizes = []
    size = options.min_bytes
    while size <= options.max_bytes:
        sizes.append(size)
        size *= options.factor
    rows = []
    with progress(enabled=me.rank == 0) as bar:
        task = bar.add_task("collectives", total=len(sizes) * len(options.calls))
        for call in options.calls:
            for num_bytes in sizes:
                rows += _measure_one(me, cases, comm, call, num_bytes, name, options)
                bar.advance(task)
    return rows


def _measure_one(
    me: Rank, cases: Cases, comm: Communicator, call: str, num_bytes: int, baseline: str, options: Options
) -> list[Row]:
    """Return a row for every algorithm; none where a rank's part has no element."""
    part = num_bytes // getattr(torch, options.dtype).itemsize // me.size
    if part == 0:
        return []
    case = cases.make(call, part)
    checked = [options.check and _agrees(me, case, given, call, num_bytes) for given in cases.given]
    functions: list[Callable[[], Any]] = [functools.partial(case.weft, given.choice) for given in cases.given]
    if options.baseline and case.baseline is not None:
        functions.append(case.baseline)
    if options.device == "cuda":
        samples = _time_cuda(functions, options)
    else:
        samples = _time_cpu(functions, me, comm, options)
    gathered: list[Any] = [None] * me.size
    dist.all_gather_object(gathered, samples, group=me.group)
    times = [slowest_rank([of_rank[i] for of_rank in gathered]) for i in range(len(functions))]
    eager = _time_in_a_row(functions, me, comm, options)
    baselines, baseline_times = {}, {}
    if len(times) > len(cases.given):
        baselines[baseline] = statistics.median(times.pop())
        baseline_times[baseline] = eager.pop()
    is_cuda = options.device == "cuda"
    floor_us = (
        _exchange_floor_us(call, num_bytes, me.size, cases.device)
        if is_cuda
        else _copy_floor_us(call, num_bytes, me, comm)
    )
    rows = []
    for given, samples_us, is_checked, in_a_row in zip(cases.given, times, checked, eager, strict=True):
        row = Row(
            *(call, options.dtype, None, num_bytes, samples_us, floor_us, is_checked, baselines),
            series=given.text if options.algorithms else "",
        )
        gbs = num_bytes / row.us / 1e3
        row.extra = {
            "ranks": me.size,
            "algorithm": cases.algorithm(given, call, num_bytes),
            "algbw_gbs": round(gbs, 3),
            "busbw_gbs": round(gbs * _bus_factor(call, me.size), 3),
            "in_place": cases.is_in_place(call),
        }
        add_times(row, in_a_row, baseline_times)
        rows.append(row)
    return rows


def _agrees(me: Rank, case: Case, given: Given, call: str, num_bytes: int) -> bool:
    case.reset()
    case.weft(given.choice)
    wanted = case.oracle()
    ok = wanted is None or torch.equal(case.result().cpu(), wanted.cpu())
    answers: list[Any] = [None] * me.size
    dist.all_gather_object(answers, ok, group=me.group)
    if not all(answers):
        wrong = [rank for rank, answer in enumerate(answers) if not answer]
        raise Error(f"{call} of {num_bytes} bytes by {given.text}: wrong result on ranks {wrong}")
    case.reset()
    return True


def _time_cpu(
    functions: Sequence[Callable[[], Any]], me: Rank, comm: Communicator, options: Options
) -> list[list[float]]:
    inner = [_calls_per_sample(function, me, comm) for function in functions]
    count = options.iterations or (15 if min(inner) > 1 else 7)
    samples: list[list[float]] = [[] for _ in functions]
    gc.disable()
    try:
        for at in range(-options.warmup, count):
            for function, calls, kept in zip(functions, inner, samples, strict=True):
                _meet(function, comm)
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                us = (time.perf_counter() - start) / calls * 1e6
                if at >= 0:
                    kept.append(us)
    finally:
        gc.enable()
    return samples


def _time_in_a_row(
    functions: Sequence[Callable[[], Any]], me: Rank, comm: Communicator, options: Options
) -> list[Times]:
    """Return what each call costs outside of graphs, one after another."""
    on_gpu = options.device == "cuda"
    found = []
    for function in functions:
        rounds = _EAGER_CALLS if on_gpu else max(5, _calls_per_sample(function, me, comm))
        comm.barrier()
        clock = Eager(on_gpu)
        for at in range(-_EAGER_WARMUP, rounds):
            if at == 0:
                clock.start(rounds, 1)
            clock.call("", function)
        found.append(clock.slowest(me.group)[""])
    return found


def _calls_per_sample(function: Callable[[], Any], me: Rank, comm: Communicator) -> int:
    """Return how many calls make a sample of some hundredths of a second, the same on all ranks."""
    _meet(function, comm)
    start = time.perf_counter()
    for _ in range(3):
        function()
    took: list[Any] = [None] * me.size
    dist.all_gather_object(took, (time.perf_counter() - start) / 3, group=me.group)
    return max(1, min(200, int(_SAMPLE_S / max(took))))


def _meet(function: Callable[[], Any], comm: Communicator) -> None:
    """Bring the ranks together: they leave a barrier milliseconds apart, a call or two later they are in step."""
    comm.barrier()
    function()
    function()


def _time_cuda(functions: Sequence[Callable[[], Any]], options: Options) -> list[list[float]]:
    count = options.iterations or 20
    runs = [_repeated(function, options.eager) for function in functions]
    samples: list[list[float]] = [[] for _ in functions]
    for at in range(-options.warmup, count):
        for run, kept in zip(runs, samples, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()  # brings the GPUs in step, which leave the barrier tens of microseconds apart
            start.record()
            run()
            end.record()
            end.synchronize()
            if at >= 0:
                kept.append(start.elapsed_time(end) * 1e3 / _GRAPH_CALLS)
    return samples


def _repeated(function: Callable[[], Any], eager: bool) -> Callable[[], Any]:
    def many() -> None:
        for _ in range(_GRAPH_CALLS):
            function()

    for _ in range(3):
        function()
    torch.cuda.synchronize()
    if eager:
        return many
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    return graph.replay


class Cases:
    """Makes the tensors and functions of each call."""

    def __init__(
        self,
        me: Rank,
        collectives: Collectives,
        group: Any,
        device: torch.device,
        options: Options,
        window: Window | None,
    ) -> None:
        self.me, self.weft, self.group, self.device, self.window = me, collectives, group, device, window
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        inplace = options.calls[0] in ("all_reduce", "broadcast", "reduce")
        self.given = [
            Given(text, None if text == "auto" else parse_choice(text, me.size, inplace))
            for text in options.algorithms or ("auto",)
        ]

    def algorithm(self, given: Given, call: str, num_bytes: int) -> str:
        """Return what serves the call: what was given, or what Weft chose last."""
        if given.choice is not None:
            return given.text
        name = call.replace("send_recv", "sendrecv").replace("_", "")
        return next((str(key) for key in self.weft.chosen(name, num_bytes)), "")

    def make(self, call: str, part: int) -> Case:
        """Return the case of a call whose ranks have ``part`` elements each."""
        case: Case = getattr(self, f"_{call}")(part)
        return case

    def is_in_place(self, call: str) -> bool:
        """Return whether the call's result lies where its input is, or the other way round."""
        default = "in" if call in ("all_reduce", "broadcast", "reduce") else "out"
        return (self.options.place if self.options.place != "auto" else default) == "in"

    def _values(self, rank: int, elems: int) -> Tensor:
        period = 5 if self.options.op == "product" else 50
        numbers = (torch.arange(elems, dtype=torch.int32) * 7 + rank * 3) % period % 13
        values: Tensor = (numbers if self.options.op != "product" else numbers % 2 + 1).to(self.dtype)
        return values

    def _reduced(self, elems: int) -> Tensor:
        stacked = torch.stack([self._values(rank, elems).to(torch.float64) for rank in range(self.me.size)])
        op = self.options.op
        if op in ("min", "max"):
            out = (stacked.amin if op == "min" else stacked.amax)(0)
        elif op == "product":
            out = stacked.prod(0)
        else:
            out = stacked.sum(0) / (self.me.size if op == "average" else 1)
        return out.to(self.dtype)

    def _tensors(self, given: int, taken: int, in_place: bool = False) -> Tensors:
        """Return tensors of so many elements; in place, the smaller is this rank's part of the larger."""
        own = self._values(self.me.rank, given).to(self.device)
        theirs, into = own.clone(), torch.empty(taken, dtype=self.dtype, device=self.device)
        tensor, out = theirs, into
        if self.window is not None:
            place = -(-given * self.dtype.itemsize // 4096) * 4096
            tensor = self.window.tensor(self.me.rank, (given,), self.dtype)
            out = self.window.tensor(self.me.rank, (taken,), self.dtype, place)

        if in_place:
            part, at = min(given, taken), self.me.rank * min(given, taken)
            if given < taken:
                tensor, theirs = out[at : at + part], into[at : at + part]
            else:
                out, into = tensor[at : at + part], theirs[at : at + part]

        def reset() -> None:
            for held in (out, into):
                held.fill_(0)
            for held in (tensor, theirs):
                held.copy_(own)

        return Tensors(tensor, out, theirs, into, reset)

    def _has_baseline(self, *, average: bool = True) -> bool:
        return self.options.op != "average" or (self.device.type == "cuda" and average)

    def _all_reduce(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, elems)
        op, reduce_op = self.options.op, _OPS[self.options.op]
        target = None if self.is_in_place("all_reduce") else m.out
        baseline = (
            (lambda: dist.all_reduce(m.theirs, reduce_op, group=self.group)) if self._has_baseline() else None
        )
        return Case(
            lambda choice: self.weft.all_reduce(m.tensor, op, out=target, algorithm=choice),
            baseline,
            lambda: m.tensor if target is None else m.out,
            lambda: self._reduced(elems),
            m.reset,
        )

    def _all_gather(self, part: int) -> Case:
        m = self._tensors(part, part * self.me.size, self.is_in_place("all_gather"))
        return Case(
            lambda choice: self.weft.all_gather(m.tensor, out=m.out, algorithm=choice),
            lambda: dist.all_gather_into_tensor(m.into, m.theirs, group=self.group),
            lambda: m.out,
            lambda: torch.cat([self._values(rank, part) for rank in range(self.me.size)]),
            m.reset,
        )

    def _reduce_scatter(self, part: int) -> Case:
        m = self._tensors(part * self.me.size, part, self.is_in_place("reduce_scatter"))
        op, reduce_op = self.options.op, _OPS[self.options.op]
        baseline = None
        if self._has_baseline():
            baseline = lambda: dist.reduce_scatter_tensor(m.into, m.theirs, reduce_op, group=self.group)  # noqa: E731
        return Case(
            lambda choice: self.weft.reduce_scatter(m.tensor, op, out=m.out, algorithm=choice),
            baseline,
            lambda: m.out,
            lambda: self._reduced(part * self.me.size).view(self.me.size, part)[self.me.rank],
            m.reset,
        )

    def _all_to_all(self, part: int) -> Case:
        ranks = self.me.size
        m = self._tensors(part * ranks, part * ranks)
        return Case(
            lambda choice: self.weft.all_to_all(m.tensor, out=m.out, algorithm=choice),
            lambda: dist.all_to_all_single(m.into, m.theirs, group=self.group),
            lambda: m.out,
            lambda: torch.cat(
                [self._values(q, part * ranks).view(ranks, part)[self.me.rank] for q in range(ranks)]
            ),
            m.reset,
        )

    def _broadcast(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, 1)
        return Case(
            lambda choice: self.weft.broadcast(m.tensor, 0, algorithm=choice),
            lambda: dist.broadcast(m.theirs, 0, group=self.group),
            lambda: m.tensor,
            lambda: self._values(0, elems),
            m.reset,
        )

    def _reduce(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, 1)
        op, reduce_op = self.options.op, _OPS[self.options.op]
        return Case(
            lambda choice: self.weft.reduce(m.tensor, 0, op, algorithm=choice),
            (lambda: dist.reduce(m.theirs, 0, reduce_op, group=self.group)) if self._has_baseline() else None,
            lambda: m.tensor,
            lambda: self._reduced(elems) if self.me.rank == 0 else None,
            m.reset,
        )

    def _gather(self, part: int) -> Case:
        m = self._tensors(part, part * self.me.size)
        target = m.out if self.me.rank == 0 else None
        parts = list(m.into.view(self.me.size, part)) if self.me.rank == 0 else None
        return Case(
            lambda choice: self.weft.gather(m.tensor, 0, out=target, algorithm=choice),
            lambda: dist.gather(m.theirs, parts, 0, group=self.group),
            lambda: m.out,
            lambda: (
                torch.cat([self._values(r, part) for r in range(self.me.size)]) if self.me.rank == 0 else None
            ),
            m.reset,
        )

    def _scatter(self, part: int) -> Case:
        m = self._tensors(part * self.me.size, part)
        given = m.tensor if self.me.rank == 0 else None
        parts = list(m.theirs.view(self.me.size, part)) if self.me.rank == 0 else None
        return Case(
            lambda choice: self.weft.scatter(given, m.out, 0, algorithm=choice),
            lambda: dist.scatter(m.into, parts, 0, group=self.group),
            lambda: m.out,
            lambda: self._values(0, part * self.me.size).view(self.me.size, part)[self.me.rank],
            m.reset,
        )

    def _send_recv(self, part: int) -> Case:
        ranks, rank = self.me.size, self.me.rank
        elems = part * ranks
        m = self._tensors(elems, elems)

        def baseline() -> None:
            sends = dist.P2POp(dist.isend, m.theirs, (rank + 1) % ranks, group=self.group)
            recvs = dist.P2POp(dist.irecv, m.into, (rank - 1) % ranks, group=self.group)
            for work in dist.batch_isend_irecv([sends, recvs]):
                work.wait()

        return Case(
            lambda choice: self.weft.send_recv(m.tensor, out=m.out, algorithm=choice),
            baseline,
            lambda: m.out,
            lambda: self._values((rank - 1) % ranks, elems),
            m.reset,
        )

    def _custom(self, part: int) -> Case:
        """A custom collective of one's own; in place where it serves nothing else."""
        algorithm = next((g.choice.algorithm for g in self.given if g.choice is not None), None)
        if algorithm is None or algorithm.collective != "custom":
            raise invalid("algorithm", self.given[0].text, "one for a custom collective")
        elems = part * self.me.size // algorithm.chunks
        if elems == 0:
            raise invalid("min-bytes", self.options.min_bytes, f"an element for {algorithm.chunks} chunks")
        given, taken = (count * elems for count in chunk_counts(algorithm, self.me.rank))
        m = self._tensors(given, taken)
        result = m.out if algorithm.outofplace else m.tensor

        def weft(choice: Choice | None) -> Any:
            chosen = choice.algorithm if choice else algorithm
            return self.weft.run(chosen, m.tensor if given else None, result, self.options.op)

        return Case(weft, None, lambda: result, lambda: self._promised(algorithm, elems, result), m.reset)

    def _promised(self, algorithm: Algorithm, elems: int, result: Tensor) -> Tensor | None:
        """Return ``result`` with what the contract says of its chunks; None where nothing says it."""
        contract = algorithm.contract
        if contract is None or type(contract).after is Collective.after or self.options.op != "sum":
            return None
        places = {
            value.parts[0]: (rank, at)
            for rank in range(self.me.size)
            for at, value in enumerate(contract.before(rank))
            if value is not None
        }
        out = result.cpu().clone()
        for at, value in enumerate(contract.after(self.me.rank)):
            if value is not None:
                parts = [places[part] for part in value.parts]
                chunks = [self._values(rank, elems * (c + 1))[elems * c :] for rank, c in parts]
                out[at * elems : (at + 1) * elems] = torch.stack(chunks).sum(0).to(self.dtype)
        return out


def _bus_factor(call: str, ranks: int) -> float:
    if call == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if call in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def _copy_floor_us(call: str, num_bytes: int, me: Rank, comm: Communicator) -> float | None:
    """Return how long all ranks take, at the same time, to copy the bytes that the call makes each of them move.

    A rank must read and write every byte of its result once; of all_reduce it reads its share of every rank's
    input, and everyone's sums; reads and writes of memory are taken to cost alike.
    """
    n = me.size
    copies = {"all_gather": 1.0, "all_to_all": 1.0, "all_reduce": ((2 * n - 1) / n + 1) / 2}.get(call)
    copies = (1 + 1 / n) / 2 if call == "reduce_scatter" else copies
    if copies is None:
        return None
    own = torch.ones(max(1, int(num_bytes * copies)), dtype=torch.uint8)
    into = torch.zeros_like(own)
    repeats = max(1, min(1000, (1 << 24) // own.numel()))
    took = []
    for _ in range(5):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            ctypes.memmove(into.data_ptr(), own.data_ptr(), own.numel())
        took.append((time.perf_counter() - start) / repeats * 1e6)
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, sorted(took)[2], group=me.group)
    return float(max(gathered))


def _exchange_floor_us(call: str, num_bytes: int, ranks: int, device: torch.device) -> float | None:
    """Return the floor of one exchange between H200s, of two for all_reduce; None elsewhere."""
    if call not in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        return None
    egress = num_bytes / ranks * (ranks - 1)
    exchange = h200_exchange_us(egress, [torch.cuda.get_device_name(device)] * ranks)
    return None if exchange is None else exchange * (2 if call == "all_reduce" else 1)
