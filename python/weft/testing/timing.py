# SPDX-License-Identifier: Apache-2.0
"""Timers of test programs: a mean over repeated calls, and the time of named kernels inside them.

On CUDA, times come from events and from torch's profiler; on the CPU from the clock, around whole calls.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_L2_FLUSH_BYTES = 256_000_000


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Return (mean, least, greatest) seconds of ``fn()``; the first timed call is dropped if there are more.

    Args:
        post_fn: called, untimed, after each timed call.
        flush_l2: overwrite 256 MB before the timed calls; CUDA only.
    """
    for _ in range(num_warmups):
        fn()
    times_s = (_cuda_times_s if torch.cuda.is_available() else _cpu_times_s)(fn, num_tests, post_fn, flush_l2)
    times_s = times_s[1:] or times_s
    return sum(times_s) / len(times_s), min(times_s), max(times_s)


def _cpu_times_s(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    times_s = []
    for _ in range(num_tests):
        start = time.perf_counter()
        fn()
        times_s.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return times_s


def _cuda_times_s(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    if flush_l2:
        torch.empty(_L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(num_tests)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(num_tests)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Return the mean seconds of each kernel whose name contains one of ``kernel_names``.

    One name gives one result, a tuple of names a tuple. A result is a float, or, with num_kernels_per_period
    n > 1, a list of n floats: the kernel's launches are taken to alternate between n phases. Several matching
    kernels are summed per call. A name that matches nothing, and any name on the CPU, gets the mean time of
    the whole call instead. With EP_USE_NVIDIA_TOOLS=1 in the environment, for runs under a profiler of NVIDIA's,
    which excludes torch's, the call runs once and every result is 1.

    Args:
        suppress_kineto_output: nothing is printed either way.
        trace_path: where to write a Chrome trace; CUDA only.
        barrier_comm_profiling: keep GPUs in step before each call: spin, then all-reduce.
        barrier: called before each call, in place of that.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if os.environ.get("EP_USE_NVIDIA_TOOLS", "0") not in ("", "0"):
        fn()
        ones = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
        return ones if isinstance(kernel_names, str) else (ones,) * len(names)
    call_s, events = _profile(fn, num_tests, trace_path, flush_l2, barrier_comm_profiling, barrier)
    results = [_kernel_s(events, name, num_tests, num_kernels_per_period, call_s) for name in names]
    return results[0] if isinstance(kernel_names, str) else tuple(results)


def _profile(
    fn: Callable[[], Any],
    num_tests: int,
    trace_path: str | None,
    flush_l2: bool,
    barrier_comm_profiling: bool,
    barrier: Callable[[], Any] | None,
) -> tuple[float, Sequence[Any]]:
    """Return (mean seconds of a call, device events in the order of their start)."""
    fn()
    if not torch.cuda.is_available():
        return bench(fn, 0, num_tests, barrier)[0], []
    with _profiler(trace_path) as profile:
        for _ in range(num_tests):
            if flush_l2:
                torch.empty(_L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()
            if barrier is not None:
                barrier()
            elif barrier_comm_profiling:
                torch.cuda._sleep(20_000_000)
                torch.distributed.all_reduce(torch.ones(1, device="cuda"))
            fn()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    call_s = bench(fn, 0, num_tests, barrier, flush_l2)[0]
    return call_s, sorted(events, key=lambda event: event.time_range.start)


@contextlib.contextmanager
def _profiler(trace_path: str | None) -> Iterator[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield profile
    if trace_path is not None:
        Path(trace_path).parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(trace_path)


def _kernel_s(
    events: Sequence[Any], name: str, num_tests: int, num_phases: int, call_s: float
) -> float | list[float]:
    """Return the mean seconds per call of the events named so, in total or per phase."""
    times_s = [float(event.time_range.elapsed_us()) / 1e6 for event in events if name in event.name]
    if not times_s:
        return call_s if num_phases == 1 else [call_s] * num_phases
    if num_phases == 1:
        return sum(times_s) / num_tests
    phases = [times_s[phase::num_phases] for phase in range(num_phases)]
    return [sum(phase_s) / max(len(phase_s), 1) for phase_s in phases]
