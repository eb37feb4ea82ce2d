# SPDX-License-Identifier: Apache-2.0
"""How ``weft bench collective`` measures.

Every sample is the slowest rank's. Weft and the baseline take turns, sample by sample, so that whatever else the
machine does disturbs both. On the CPU a sample is the mean of some calls in a row, after two that bring the ranks into
step; on GPUs it is the mean of 20 calls in a CUDA graph, by events (eager: 20 calls on the stream). Before timing, the
result is compared with an oracle. Calls outside of graphs are measured afterwards (weft.bench.eager).
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import _core
from weft.bench.collective.cases import Case, Cases, Given, Options
from weft.bench.collective.floors import Floors, floors_of
from weft.bench.eager import Eager, Times, add_times
from weft.bench.report import Row, slowest_rank
from weft.collectives.calls import Collectives
from weft.errors import Error
from weft.runtime.communicator import Communicator, Window
from weft.runtime.progress import progress
from weft.testing.ranks import Rank

_GRAPH_CALLS = 20
_SAMPLE_S = 0.03
_EAGER_CALLS, _EAGER_WARMUP = 100, 5


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
    floors = floors_of(me, comm, options)
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
                rows += _measure_one(me, cases, comm, floors, call, num_bytes, name, options)
                bar.advance(task)
    return rows


def _measure_one(
    me: Rank,
    cases: Cases,
    comm: Communicator,
    floors: Floors,
    call: str,
    num_bytes: int,
    baseline: str,
    options: Options,
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
    floor_us = floors.us(call, num_bytes)
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
        clock.measure(functools.partial(Eager.call, name="", function=function), rounds, _EAGER_WARMUP)
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


def _bus_factor(call: str, ranks: int) -> float:
    if call == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if call in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
