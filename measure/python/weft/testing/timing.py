# SPDX-License-Identifier: Apache-2.0
"""Timers of test programs: a mean over repeated calls, and the time of named kernels inside them.

On CUDA, times come from events and from torch's profiler; on the CPU from the clock, around whole calls.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_L2_FLUSH_BYTES = 256_000_000
_SPIN_CYCLES = 20_000_000  # 10 ms
# Kernels of DeepEP that programs name, and words of the names of Weft's that do their work. What an epilogue does is a
# part of Weft's kernel, and there is nothing to wait for after a fetch. Counts are exchanged by a kernel of their own,
# which barrier() launches, too: a dispatch's time is that of its rows.
_DISPATCH, _COMBINE = ("dispatch_rows", "two_level_dispatch"), ("combine_rows", "two_level_combine")
_KERNELS = {
    "barrier": ("dispatch_notify", "two_level_notify"),
    "dispatch_impl": _DISPATCH,
    "dispatch_copy_epilogue_impl": _DISPATCH,
    "combine_impl": _COMBINE,
    "combine_reduce_epilogue_impl": _COMBINE,
    "engram_fetch_impl": ("engram_fetch",),
    "engram_fetch_wait_impl": (),
    "send_impl": ("ring_send",),
    "recv_impl": ("ring_receive",),
}


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
    """Return the mean seconds of the kernels that ``kernel_names`` name, DeepEP's or Weft's, as DeepEP's helper does.

    One name gives one result, a tuple of names a tuple. A result is a float, or, with num_kernels_per_period
    n > 1, a list of n floats: the kernel's launches are taken to alternate between n phases. A name means the
    kernels that do the work of DeepEP's of that name (_KERNELS), else those whose names contain it. The mean is
    over launches; means of several kernels are summed. A name without a launch gets 0. On the CPU every name gets
    the mean time of the whole call. With EP_USE_NVIDIA_TOOLS=1 in the environment, for runs under a profiler of
    NVIDIA's, which excludes torch's, the call runs once and every result is 1.

    Args:
        suppress_kineto_output: nothing is printed either way.
        trace_path: where to write a Chrome trace; CUDA only.
        barrier_comm_profiling: keep GPUs in step before each call: spin, then meet. Meanwhile the host launches
            what follows. Not with EP_DISABLE_BARRIER_PROFILING=1.
        barrier: how to meet; None: by an all-reduce, on the CPU not at all.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if _is_set("EP_USE_NVIDIA_TOOLS"):
        fn()
        ones = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
        return ones if isinstance(kernel_names, str) else (ones,) * len(names)
    fn()
    is_in_step = barrier_comm_profiling and not _is_set("EP_DISABLE_BARRIER_PROFILING")
    if torch.cuda.is_available():
        launches = _profile(fn, num_tests, trace_path, flush_l2, (barrier or _meet) if is_in_step else None)
        results = [_kernel_s(launches, name, num_kernels_per_period) for name in names]
    else:
        call_s = bench(fn, 0, num_tests, barrier if is_in_step else None)[0]
        results = [call_s if num_kernels_per_period == 1 else [call_s] * num_kernels_per_period] * len(names)
    return results[0] if isinstance(kernel_names, str) else tuple(results)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _meet() -> None:
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))


def _profile(
    fn: Callable[[], Any],
    num_tests: int,
    trace_path: str | None,
    flush_l2: bool,
    meet: Callable[[], Any] | None,
) -> list[tuple[str, float]]:
    """Return the name and the seconds of all that ran on the device, in the order of their start."""
    with _profiler(trace_path) as profile:
        for _ in range(num_tests):
            if flush_l2:
                torch.empty(_L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()
            if meet is not None:
                torch.cuda._sleep(_SPIN_CYCLES)
                meet()
            fn()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.time_range.elapsed_us()) / 1e6) for event in events]


@contextlib.contextmanager
def _profiler(trace_path: str | None) -> Iterator[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield profile
    if trace_path is not None:
        Path(trace_path).parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(trace_path)


def _kernel_s(launches: Sequence[tuple[str, float]], name: str, num_phases: int) -> float | list[float]:
    """Return the mean seconds of the launches that a name means, in total or per phase."""
    wanted = _KERNELS.get(name, (name,))
    times_s: dict[str, list[float]] = {}
    for kernel, launch_s in launches:
        if any(word in kernel for word in wanted):
            times_s.setdefault(kernel if num_phases == 1 else name, []).append(launch_s)
    if num_phases == 1:
        return float(sum(statistics.mean(of_one) for of_one in times_s.values()))
    phases = [times_s.get(name, [])[phase::num_phases] for phase in range(num_phases)]
    return [statistics.mean(phase_s) if phase_s else 0.0 for phase_s in phases]
