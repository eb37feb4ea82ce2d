# SPDX-License-Identifier: Apache-2.0
"""``weft profile host``: where the host's time of a call goes, one process per GPU, or on the CPU.

    weft profile host                                              # every call, on all GPUs, or 2 CPU ranks
    weft profile host --ranks 2 --calls barrier,all_reduce --functions 20 --device cpu
    torchrun --nproc-per-node 8 -m weft profile host

It prints first what single steps of a call cost on this machine. Steps of the driver go through ctypes, whose own price
is printed beside them. Then it prints a table of times, and for each call:

* the time until it returns, back to back: median and least of the repeats;
* on GPUs, the goal, and what it comes to on this machine: the goal machine's launches and tensors took less time, so a
  goal grows as the sum of those that the call is made of;
* that time with the GPU's work;
* on GPUs, its time in a CUDA graph if it can be captured;
* from a second run, the part that passes in the core, the driver's included;
* from a third run under cProfile, how often it enters each function, and what that costs.

--json keeps all of it, and the goal of each call (GOALS_US). Calls of the core appear as ``core.Class.method``. The
profiler makes everything slower, small functions most. On the CPU a call runs its kernel before it returns, so the
first time leaves the kernel out. Counts of functions say more there than times. If ranks share a GPU, only the times
until calls return count, as the GPU serves one process at a time.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft import _core
from weft.bench.report import Report, Row
from weft.errors import invalid
from weft.runtime import allocation, plain
from weft.runtime.files import write_file
from weft.runtime.progress import progress
from weft.runtime.tables import integer_from, output_file
from weft.testing.ranks import Rank, run_job

TOKENS, HIDDEN, TOP_K, EXPERTS = 128, 7168, 8, 256
HT_TOKENS = 4096
DEADLINE_S = 1800.0
BATCH = 20  # calls between two waits for the GPU: far fewer than a stream can hold
# Until a call returns, on a machine where a bare launch takes 3 us and torch.empty 2.
GOALS_US = {
    "low_latency pair": 25.0,
    "low_latency pair, hooks": 25.0,
    "layout": 10.0,
    "dispatch, cached": 25.0,
    "dispatch, cached, FP8": 25.0,
    "combine": 20.0,
    "barrier": 8.0,
    "all_reduce 1 KiB": 8.0,
    "all_reduce 32 KiB": 8.0,
    "all_reduce 256 KiB": 8.0,
}
_LAUNCH, _TENSOR = "a launch without a tensor (_sleep)", "torch.empty"
_GOAL_PRICES_US = {_LAUNCH: 3.0, _TENSOR: 2.0}
# What a call is made of at least: launches, a memset among them, and pieces of memory for tensors.
_NEEDS = {
    "low_latency pair": (2, 6),
    "low_latency pair, hooks": (4, 6),
    "layout": (2, 2),
    "dispatch, cached": (1, 1),
    "dispatch, cached, FP8": (1, 2),
    "combine": (1, 1),
    "barrier": (1, 0),
}
# Cached dispatches are not: a graph keeps what each of them receives.
CAPTURED = ("low_latency", "layout", "combine", "barrier", "all_reduce", "all_gather", "broadcast")


@dataclass
class Measured:
    """What one call took, in microseconds."""

    name: str
    enqueue_us: list[float]  # of each call
    eager_us: list[float]  # with the GPU's work, by batches
    graph_us: float | None  # on GPUs, of calls that can be captured
    in_core_us: float = 0.0
    profile: pstats.Stats | None = None
    floor_us: float | None = None  # its launches and tensors, one by one, on this machine

    @property
    def goal_here_us(self) -> float | None:
        """The goal, as slow as this machine is."""
        if self.floor_us is None or self.name not in GOALS_US:
            return None
        return GOALS_US[self.name] * self.floor_us / _needed_us(self.name, _GOAL_PRICES_US)

    def entered(self, args: argparse.Namespace) -> tuple[float, float]:
        """Return how many Python and how many C functions one call enters."""
        entered = [(file, row[1]) for (file, _, _), row in self.functions()]
        in_python = sum(count for file, count in entered if file != "~")
        in_c = sum(count for file, count in entered if file == "~")
        return in_python / (args.batches * BATCH), in_c / (args.batches * BATCH)

    def functions(self) -> Iterable[Any]:
        """Return what the profile has of each function."""
        assert self.profile is not None
        return self.profile.stats.items()  # type: ignore[attr-defined, no-any-return]

    def row(self, args: argparse.Namespace) -> Row:
        """Return the row of a report."""
        python_calls, c_calls = self.entered(args)
        extra: dict[str, float | None] = {
            "enqueue_us": round(statistics.median(self.enqueue_us), 2),
            "goal_us": GOALS_US.get(self.name),
            "goal_here_us": _rounded(self.goal_here_us),
            "host_floor_us": _rounded(self.floor_us),
            "in_core_us": round(self.in_core_us, 2),
            "graph_us": self.graph_us,
            "python_calls": round(python_calls),
            "c_calls": round(c_calls),
        }
        known = {name: value for name, value in extra.items() if value is not None}
        return Row(self.name, "", args.tokens or None, 0, self.eager_us, extra=known)


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 2)


def _needed_us(name: str, prices_us: dict[str, float]) -> float:
    """Return what the launches and tensors of a call take, one by one."""
    launches, tensors = _NEEDS.get(name, (1, 0))
    return launches * prices_us[_LAUNCH] + tensors * prices_us[_TENSOR]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile host``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--calls", default="", help="comma-separated; default: all")
    parser.add_argument(
        "--ranks", type=integer_from(1), default=0, help="default: torchrun's, all GPUs, or 2"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--tokens", type=integer_from(1), default=0, help="of a rank, in all calls (default 128 and 4096)"
    )
    parser.add_argument("--hidden", type=integer_from(1), default=HIDDEN)
    parser.add_argument("--experts", type=integer_from(1), default=EXPERTS)
    parser.add_argument("--batches", type=integer_from(1), default=15, help=f"of {BATCH} calls each")
    parser.add_argument("--functions", type=integer_from(0), default=14, help="lines of a profile")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="for times and counts, in the form of the benchmarks"
    )


def run(args: argparse.Namespace) -> int:
    """Profile the calls that were asked for; rank 0 prints. Returns 0."""
    torch.set_num_threads(1)  # ranks are forked from here and inherit no threads
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and not gpus:
        raise invalid("device", "cuda", "cpu: torch sees no GPU here")
    args.device = "cuda" if gpus else "cpu"
    found = run_job(measure, args, num_ranks=lambda: args.ranks or gpus or 2, deadline_s=DEADLINE_S)
    if found is not None and args.json:
        report = Report("host time")
        rows, notes = found
        for row in rows:
            report.add(row)
        for note in notes:
            report.note(note)
        write_file(Path(args.json), json.dumps(report.to_json(), indent=1) + "\n")
    return 0


def measure(me: Rank, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Profile on this rank; rank 0 prints. Collective. Returns rows and notes of a report."""
    if args.device == "cuda":
        local_rank = dist.get_node_local_rank(fallback_rank=me.rank)
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    calls = _chosen(args)
    steps = _steps_of_machine(args) if me.rank == 0 else {}
    with progress(enabled=me.rank == 0) as bar:
        measured = [
            _measured(name, call, args)
            for name, call in bar.track(calls.items(), description="times of calls")
        ]
        if me.rank == 0:
            if _LAUNCH in steps:
                for one in measured:
                    one.floor_us = _needed_us(one.name, steps)
            _print_times(measured)  # all that is there, should the rest be cut off
        spent = _show_core(args)
        for one in bar.track(measured, description="the core, functions"):
            one.in_core_us = _in_core(calls[one.name], spent, args)
            one.profile = _profiled(calls[one.name], args)
    if me.rank == 0:
        for one in measured:
            _print(one, args)
        sys.stdout.flush()
    dist.barrier()
    step_times = ", ".join(f"{name} {us:.2f} us" for name, us in steps.items())
    return [one.row(args) for one in measured], [f"{me.size} ranks", f"steps: {step_times}"]


def _chosen(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the calls that were asked for; buffers, and kernels to compile, are made for these alone."""
    wanted = args.calls.split(",") if args.calls else [""]
    chosen = {}
    for first_words, make in GROUPS.items():
        if any(word.startswith(start) or start.startswith(word) for start in wanted for word in first_words):
            chosen.update(make(args))
    return {name: call for name, call in chosen.items() if any(name.startswith(start) for start in wanted)}


def _low_latency(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    tokens = args.tokens or TOKENS
    ranks = dist.get_world_size()
    room = weft.Buffer.get_low_latency_rdma_size_hint(tokens, args.hidden, ranks, args.experts)
    buffer = weft.Buffer(dist.group.WORLD, 0, room, low_latency_mode=True, device=args.device)
    x = torch.randn(tokens, args.hidden, device=args.device).bfloat16()
    ids = _ids(tokens, args)
    weights = torch.ones(tokens, TOP_K, device=args.device)
    rows = torch.zeros(
        -(-args.experts // ranks), tokens * ranks, args.hidden, dtype=torch.bfloat16, device=args.device
    )

    def pair(with_hooks: bool) -> Callable[[], object]:
        def call() -> None:
            *_, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, tokens, args.experts, return_recv_hook=with_hooks
            )
            if hook is not None:
                hook()
            *_, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=with_hooks)
            if hook is not None:
                hook()

        return call

    return {"low_latency pair": pair(False), "low_latency pair, hooks": pair(True)}


def _high_throughput(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    tokens, ranks = args.tokens or HT_TOKENS, dist.get_world_size()
    buffer = weft.Buffer(dist.group.WORLD, ranks * tokens * args.hidden * 2 * 8, device=args.device)
    elastic = weft.ElasticBuffer(dist.group.WORLD, 2 << 20, device=args.device)
    x = torch.randn(tokens, args.hidden, device=args.device).bfloat16()
    ids = _ids(tokens, args)
    weights = torch.ones(tokens, TOP_K, device=args.device)

    def dispatch() -> Any:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, args.experts)
        return buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )

    received, *_, handle, _ = dispatch()
    rows = received.clone()
    scales = torch.ones(tokens, args.hidden // 128, device=args.device)
    quantized = (x.to(torch.float8_e4m3fn), scales)
    return {
        "layout": lambda: buffer.get_dispatch_layout(ids, args.experts),
        "dispatch, cached": lambda: buffer.dispatch(x, handle=handle),
        "dispatch, cached, FP8": lambda: buffer.dispatch(quantized, handle=handle),
        "combine": lambda: buffer.combine(rows, handle),
        "layout + dispatch, counts waited": dispatch,
        "barrier": lambda: elastic.barrier(),
    }


def _collectives(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    comm = weft.Communicator(dist.group.WORLD, device=args.device)
    ranks = dist.get_world_size()
    calls: dict[str, Callable[[], object]] = {}
    for kib in (1, 32, 256):
        num_bytes = kib << 10
        plain = torch.zeros(num_bytes // 4, device=args.device)
        mine = weft.Window(comm, num_bytes).tensor(dist.get_rank(), (num_bytes // 4,), torch.float32)
        calls[f"all_reduce {kib} KiB"] = lambda plain=plain: comm.all_reduce(plain)  # type: ignore[misc]
        calls[f"all_reduce {kib} KiB, window"] = lambda mine=mine: comm.all_reduce(mine)  # type: ignore[misc]
    part = torch.zeros(8192, device=args.device)
    all_parts = torch.zeros(ranks * 8192, device=args.device)
    calls["all_gather 32 KiB"] = lambda: comm.all_gather(part, out=all_parts)
    calls["broadcast 32 KiB"] = lambda: comm.broadcast(part)
    return calls


# By how the names of its calls begin.
GROUPS = {
    ("low_latency",): _low_latency,
    ("layout", "dispatch", "combine", "barrier"): _high_throughput,
    ("all_reduce", "all_gather", "broadcast"): _collectives,
}


def _ids(tokens: int, args: argparse.Namespace) -> torch.Tensor:
    scores = torch.rand(tokens, args.experts, generator=torch.Generator().manual_seed(dist.get_rank()))
    return scores.topk(TOP_K, dim=1).indices.to(args.device)


def _measured(name: str, call: Callable[[], object], args: argparse.Namespace) -> Measured:
    enqueue_us, eager_us = _times(call, args)
    if args.device == "cpu":
        return Measured(name, enqueue_us, eager_us, None)
    in_graph = _unless_refused(_in_graph, name, call, args) if name.startswith(CAPTURED) else None
    return Measured(name, enqueue_us, eager_us, in_graph)


def _unless_refused(
    measure: Callable[..., float], name: str, call: Callable[[], object], args: argparse.Namespace
) -> float | None:
    """Return what is measured; None, saying why, where the machine or the call refuses: all else is worth having."""
    try:
        return measure(call, args)
    except RuntimeError as error:
        print(f"{name}, {measure.__name__.strip('_')}: {error}", file=sys.stderr)
        return None


def _in_graph(call: Callable[[], object], args: argparse.Namespace) -> float:
    """Return the microseconds of a call among many in one CUDA graph."""
    _meet(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(BATCH):
            call()
    took_us = []
    for _ in range(args.batches):
        _meet(args)
        began = time.perf_counter_ns()
        graph.replay()
        _finish(args)
        took_us.append((time.perf_counter_ns() - began) / 1e3 / BATCH)
    return round(statistics.median(took_us), 2)


def _times(call: Callable[[], object], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the microseconds of each call until it returns, and of each with the GPU's work, by batches."""
    enqueue_us, eager_us = [], []
    clock = _clock(args)
    for batch in range(args.batches + 2):
        _meet(args)
        began = time.perf_counter_ns()
        for _ in range(BATCH):
            started, kernel_ns = clock(), _core.host_kernel_ns()
            call()
            if batch >= 2:
                enqueue_us.append((clock() - started - (_core.host_kernel_ns() - kernel_ns)) / 1e3)
        _finish(args)
        if batch >= 2:
            eager_us.append((time.perf_counter_ns() - began) / 1e3 / BATCH)
    return enqueue_us, eager_us


def _clock(args: argparse.Namespace) -> Callable[[], int]:
    """Return the clock of weft.bench.eager: on the CPU ranks share cores, and what others do there is no part."""
    return time.perf_counter_ns if args.device != "cpu" else time.thread_time_ns


def _profiled(call: Callable[[], object], args: argparse.Namespace) -> pstats.Stats:
    profile = cProfile.Profile()
    for _ in range(args.batches):
        _meet(args)
        profile.enable()
        for _ in range(BATCH):
            call()
        profile.disable()
    _finish(args)
    return pstats.Stats(profile)


def _meet(args: argparse.Namespace) -> None:
    _finish(args)
    dist.barrier()


def _finish(args: argparse.Namespace) -> None:
    if args.device != "cpu":
        torch.cuda.synchronize()


def _show_core(args: argparse.Namespace) -> list[int]:
    """Let profiles see calls of the core: a Python function in front of each method. Returns the ns spent in them."""
    spent, depth = [0], [0]  # a call of the core may make another one
    clock = _clock(args)

    def shown(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            depth[0] += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1
                spent[0] += clock() - began if depth[0] == 0 else 0

        call.__code__ = call.__code__.replace(co_name=f"core.{name}")
        return call

    for kind in (value for value in vars(_core).values() if isinstance(value, type)):
        for name, method in list(vars(kind).items()):
            if type(method).__name__ == "nb_method" and (name == "__call__" or not name.startswith("__")):
                setattr(kind, name, shown(f"{kind.__name__}.{name}", method))
    return spent


def _in_core(call: Callable[[], object], spent: list[int], args: argparse.Namespace) -> float:
    """Return the microseconds of a call in the core, without those of host kernels; median of the batches."""
    batches: list[float] = []
    for _ in range(args.batches):
        _meet(args)
        began, kernel_ns = spent[0], _core.host_kernel_ns()
        for _ in range(BATCH):
            call()
        batches.append((spent[0] - began - (_core.host_kernel_ns() - kernel_ns)) / 1e3 / BATCH)
    _finish(args)
    return float(statistics.median(batches))


def _steps_of_machine(args: argparse.Namespace) -> dict[str, float]:
    """Print and return the microseconds of steps that calls are made of."""
    one = torch.zeros(256, dtype=torch.int32, device=args.device)
    allocator = allocation.allocator_on(one.device)
    steps: dict[str, Callable[[], object]] = {
        "an empty function": lambda: None,
        "torch.empty": lambda: torch.empty((64, 8), dtype=torch.int32, device=one.device),
        "a part of a tensor": lambda: allocation.part_of(one, 8, (64,)),
        "a signature of three tensors": lambda: plain.signature_of((one, one, one)),
    }
    if args.device == "cpu":
        steps["a tensor, the short way"] = lambda: allocator.empty((64, 8), torch.int32)
    else:
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        ordinal = torch.cuda.current_device()
        steps["a tensor, the short way, and its end"] = lambda: allocator.empty((64, 8), torch.int32)
        steps["torch's smallest launch (zero_)"] = one.zero_
        steps["a launch without a tensor (_sleep)"] = lambda: torch.cuda._sleep(1)
        steps["torch.cuda.current_stream"] = lambda: torch.cuda.current_stream(ordinal)
        steps["its number alone"] = lambda: torch._C._cuda_getCurrentRawStream(ordinal)
        steps["record an event, wait for it"] = lambda: stream.wait_event(
            torch.cuda.current_stream().record_event(event)
        )
        steps |= _driver_steps(torch.cuda.current_stream().cuda_stream, stream.cuda_stream)
    took_us = {}
    for name, step in steps.items():
        enqueue_us = []
        for _ in range(300):
            started = time.perf_counter_ns()
            step()
            enqueue_us.append((time.perf_counter_ns() - started) / 1e3)
        _finish(args)
        took_us[name] = statistics.median(enqueue_us)
        print(f"{name:36} {took_us[name]:8.2f} us")
    return took_us


def _driver_steps(current: int, other: int) -> dict[str, Callable[[], object]]:
    """Return calls of the driver that calls of Weft make beside their launch."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, version, capturing = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    event = ctypes.c_void_p()
    if driver.cuEventCreate(ctypes.byref(event), 2) != 0:  # without times
        return {}
    streams = ctypes.c_void_p(current), ctypes.c_void_p(other)
    driver.cuCtxGetCurrent(ctypes.byref(context))

    def enter_and_leave() -> None:
        driver.cuCtxPushCurrent_v2(context)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))

    return {
        "driver: cuDriverGetVersion": lambda: driver.cuDriverGetVersion(ctypes.byref(version)),
        "driver: cuCtxGetCurrent": lambda: driver.cuCtxGetCurrent(ctypes.byref(context)),
        "driver: cuCtxPushCurrent and Pop": enter_and_leave,
        "driver: cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(
            streams[0], ctypes.byref(capturing)
        ),
        "driver: cuEventRecord": lambda: driver.cuEventRecord(event, streams[0]),
        "driver: cuStreamWaitEvent": lambda: driver.cuStreamWaitEvent(streams[1], event, 0),
    }


def _print_times(measured: list[Measured]) -> None:
    """Print a line for each call. "first" and "last": the median of the first and the last quarter of its batches."""
    print(
        f"\n{'until it returns, us':34} {'median':>8} {'least':>8} {'first':>8} {'last':>8} {'goal':>6} {'here':>6}"
    )
    quarter = BATCH // 4
    for one in measured:
        places = [one.enqueue_us[i::BATCH] for i in range(BATCH)]
        first, last = (
            statistics.median(us for of in part for us in of)
            for part in (places[:quarter], places[-quarter:])
        )
        goals = "".join(
            f" {'' if us is None else format(us, '.0f'):>6}"
            for us in (GOALS_US.get(one.name), one.goal_here_us)
        )
        columns = (statistics.median(one.enqueue_us), min(one.enqueue_us), first, last)
        shown = " ".join(f"{us:8.1f}" for us in columns)
        print(f"{one.name:34} {shown}{goals}", flush=True)


def _print(one: Measured, args: argparse.Namespace) -> None:
    calls = args.batches * BATCH
    python_calls, c_calls = one.entered(args)
    least = min(one.enqueue_us)
    print(f"\n== {one.name}: enqueue {statistics.median(one.enqueue_us):.1f} us (least {least:.1f})", end="")
    if one.name in GOALS_US:
        print(f", goal {GOALS_US[one.name]:.0f}", end="")
    if one.goal_here_us is not None:
        print(f" (here {one.goal_here_us:.0f})", end="")
    print(
        f", in the core {one.in_core_us:.1f}, with its work {statistics.median(one.eager_us):.1f} us", end=""
    )
    known = {"in a graph": one.graph_us}
    print("".join(f", {what} {us:.1f}" for what, us in known.items() if us is not None))
    print(f"   {python_calls:.0f} Python and {c_calls:.0f} C calls;", end="")
    print(" per call, under the profiler: times entered, own us, us with what it calls")
    rows = sorted(one.functions(), key=lambda item: -item[1][2])
    for (file, line, function), (_, count, own_s, total_s, _) in rows[: args.functions]:
        place = "" if file == "~" else f"{os.sep.join(file.split(os.sep)[-2:])}:{line} "
        print(
            f"   {count / calls:6.1f} {own_s / calls * 1e6:8.2f} {total_s / calls * 1e6:8.2f}  {place}{function}"
        )
