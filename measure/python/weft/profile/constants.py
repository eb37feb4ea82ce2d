# SPDX-License-Identifier: Apache-2.0
"""``weft profile constants``: what low-latency calls take with each value of WEFT_LOW_LATENCY_CONSTANTS, in one run.

    weft profile constants --tokens 128,1 --dtype fp8,bf16 [--ranks N] [--json FILE]

For each number of tokens and each dtype every value has a buffer of its own, all in one process group. Their results
are compared bit for bit. Then they take turns in each sample: a dispatch, a combine and ten pairs in one graph (us),
each after the L2 cache was written over. Then buffers whose kernels note when their blocks began and ended say what
these take (kernel us; in a graph of ten pairs kernel warm us). Times are the slowest rank's. Without a GPU ranks run
on the CPU, without graphs of pairs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft import _core
from weft.bench.moe import check, kernel_time, low_latency, peers
from weft.bench.moe.clock import Bench, Inputs, Options
from weft.bench.report import Report, Row, add_report_arguments
from weft.errors import Error, invalid
from weft.profile.low_latency_runs import add_shape_arguments, make_samples, options_of
from weft.testing.ranks import Rank, run_job

NAME = "WEFT_LOW_LATENCY_CONSTANTS"
SETTINGS = ("never", "sizes", "calls")
DEADLINE_S = 900.0
COMPARED_ROUTES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile constants``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=_numbers, default=[128, 1], help="per rank (default: 128,1)")
    parser.add_argument("--dtype", type=_dtypes, default=["fp8", "bf16"], help="(default: fp8,bf16)")
    add_shape_arguments(parser)
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write on rank 0. Returns 0; results that differ raise."""
    torch.set_num_threads(1)  # ranks are forked from here and inherit no threads
    gpus = torch.cuda.device_count()
    ranks = args.ranks or gpus or 2
    if gpus and not 2 <= ranks <= gpus:
        raise invalid("ranks", ranks, f"2 to {gpus}, one for each GPU")
    device = "cuda" if gpus else "cpu"
    options = [options_of(args, tokens, dtype, device) for tokens in args.tokens for dtype in args.dtype]
    rows = run_job(measure, options, num_ranks=lambda: ranks, deadline_s=DEADLINE_S)
    if rows is not None:
        _report(args, rows)
    return 0


@contextmanager
def constants(setting: str) -> Iterator[None]:
    """Let buffers whose first calls are made inside have kernels of a setting."""
    before = os.environ.get(NAME)
    os.environ[NAME] = setting
    _core.config_reload()
    try:
        yield
    finally:
        if before is None:
            del os.environ[NAME]
        else:
            os.environ[NAME] = before
        _core.config_reload()


def measure(rank: Rank, options: list[Options]) -> list[Row]:
    """Return the rows of every setting. Collective; for rank 0 to report."""
    return [row for of_shape in options for row in _measure_shape(Bench(rank, of_shape))]


def _measure_shape(bench: Bench) -> list[Row]:
    o = bench.options
    inputs = Inputs.make(bench)
    traffic = inputs.traffic(o.experts)
    made = {setting: _samples(bench, inputs, setting) for setting in SETTINGS}
    for routes in inputs.routes[:COMPARED_ROUTES]:
        _compare(bench, inputs, routes[bench.me.rank].to(bench.device), made)
    calls = {setting: samples.calls_by_row() for setting, samples in made.items()}

    def take(index: int) -> None:
        for setting, samples in made.items():
            samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][bench.me.rank])
            for name, call in calls[setting].items():
                bench.sample(f"{setting} {name}", call)
            if samples.round_trips:
                bench.sample(f"{setting} ll_round_trip", samples.round_trips)

    bench.run(take)
    us = bench.samples_us()
    rows = []
    for setting, samples in made.items():
        of_steps = {f"weft {step}": us[f"{setting} ll_{step}"] for step in ("dispatch", "combine")}
        of_setting = samples.rows("ll", traffic, of_steps, {})
        if samples.round_trips:
            pairs = us[f"{setting} ll_round_trip"]
            of_setting.append(low_latency.round_trip_row(bench, of_setting, pairs))
        samples.calls["weft"].buffer.destroy()
        with constants(setting):
            times = low_latency._kernel_times(bench, inputs, traffic)
        kernel_time.add_kernel_times(of_setting, times, others={})
        for row in of_setting:
            row.series = row.extra["constants"] = setting
            row.extra["pair"] = o.dtype
        rows += of_setting
    return rows


def _samples(bench: Bench, inputs: Inputs, setting: str) -> low_latency.Samples:
    with constants(setting):
        return make_samples(bench, inputs)


def _compare(
    bench: Bench, inputs: Inputs, topk_idx: torch.Tensor, made: dict[str, low_latency.Samples]
) -> None:
    """Raise an Error on the rank where a setting gives another bit than the first does."""
    results = {
        setting: _results(samples.calls["weft"], inputs, topk_idx) for setting, samples in made.items()
    }
    first, wanted = next(iter(results.items()))
    for setting, got in results.items():
        for name, value in got.items():
            if not torch.equal(value, wanted[name]):
                raise Error(
                    f"rank {bench.me.rank}: {name} of {NAME}={setting} is not that of {first}, "
                    f"{bench.options.tokens} tokens of {bench.options.dtype}"
                )


def _results(calls: peers.LowLatency, inputs: Inputs, topk_idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a pair of calls gives, rows that were not written left out."""
    rows, counts, handle = calls.dispatch(inputs.mine, topk_idx)
    parts = dict(zip(("rows", "scales"), rows if isinstance(rows, tuple) else (rows,), strict=False))
    y = check.dequantized(rows).bfloat16()
    is_row = torch.arange(y.shape[1], device=y.device)[None, :] < counts[:, None]
    y.masked_fill_(~is_row[:, :, None], 0.0)
    combined = calls.combine(y, topk_idx, inputs.my_weights, handle)
    found = {name: part.contiguous().view(torch.uint8)[is_row] for name, part in parts.items()}
    return {**found, "counts": counts.clone(), "combined_x": combined.view(torch.int16).clone()}


def _report(args: argparse.Namespace, rows: list[Row]) -> None:
    columns = ("pair", "constants", "kernel_us", "kernel_warm_us")
    report = Report("low-latency constants", extra_columns=columns, wide=args.wide)
    for row in rows:
        report.add(row)
    general = {_call(row): row for row in rows if row.series == SETTINGS[0]}
    for row in rows:
        if row.series != SETTINGS[0]:
            report.note(_against(row, general[_call(row)]))
    report.note("results of all settings are the same, bit for bit")
    report.finish(args.json, args.plot)


def _call(row: Row) -> tuple[object, ...]:
    return row.call, row.tokens, row.extra["pair"]


def _against(row: Row, general: Row) -> str:
    names = ("kernel_us", "kernel_warm_us")
    pairs = {"us": (row.us, general.us)} | {
        name.replace("_", " "): (row.extra[name], general.extra[name]) for name in names if name in row.extra
    }
    changes = ", ".join(f"{name} {100 * (us / before - 1):+.1f} %" for name, (us, before) in pairs.items())
    return f"{row.call}, {row.tokens} tokens, {row.extra['pair']} pair, {row.series}: {changes}"


def _numbers(given: str) -> list[int]:
    words = given.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"got {given}, allowed: 1 or more, with commas between")
    return [int(word) for word in words]


def _dtypes(given: str) -> list[str]:
    words = given.split(",")
    if not set(words) <= {"fp8", "bf16"}:
        raise argparse.ArgumentTypeError(f"got {given}, allowed: fp8, bf16 or both, with a comma between")
    return words
