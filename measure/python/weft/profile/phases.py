# SPDX-License-Identifier: Apache-2.0
"""``weft profile phases``: when each phase of the low-latency kernels begins and ends, on the GPUs of this machine.

    weft profile phases --tokens 128 --dtype fp8 [--kernels LABEL=DIR]... [--json FILE]

--kernels compares sources of kernels. DIR holds them as they are installed (weft/device). Without
it the installed ones are taken. Each is checked against the oracle. Then processes of its own time it in three ways:

* events around graphs;
* stamps of whole blocks (kernel us);
* stamps of every phase of each --sample-th block, in microseconds from the kernel's start: number of spans, first
  begin, median begin, median end, last end. These stamps delay a little what they stamp.

Cold: the L2 cache was written over. In a row: kernels of ten pairs in one graph. Times are the slowest rank's, phases
those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from weft import _core
from weft.bench.moe import kernel_time, low_latency
from weft.bench.moe.clock import Bench, Inputs, Options
from weft.errors import invalid
from weft.profile.low_latency_runs import add_shape_arguments, make_samples, options_of
from weft.runtime import nvrtc
from weft.runtime.files import write_file
from weft.runtime.tables import integer_from, output_file
from weft.testing.ranks import Rank, run_job

CALL = "low_latency"  # the span of a block from start to end
ROUNDS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile phases``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=integer_from(1), default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="fp8")
    add_shape_arguments(parser)
    parser.add_argument(
        "--sample", type=int, default=6, help="one of so many blocks notes phases; 0: none, events alone"
    )
    parser.add_argument("--kernels", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--json", type=output_file, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print each set of sources. Returns 0."""
    ranks = args.ranks or torch.cuda.device_count()
    if not 2 <= ranks <= torch.cuda.device_count():
        raise invalid("ranks", ranks, f"2 or more GPUs; torch sees {torch.cuda.device_count()}")
    options = options_of(args, args.tokens, args.dtype, "cuda")
    tools = nvrtc.find()
    sources = dict(given.split("=", 1) for given in args.kernels) or {"installed": str(tools.device_dir)}
    found = {}
    for label, folder in sources.items():
        with tempfile.TemporaryDirectory() as into:
            device = _sampled(Path(folder), args.sample, Path(into)) if args.sample else Path(folder)
            _core.set_toolchain(
                nvrtc=str(tools.nvrtc or ""),
                include_dirs=[str(place) for place in tools.include_dirs],
                device_dir=str(device),
            )
            found[label] = run_job(measure, options, args.sample, num_ranks=lambda: ranks, deadline_s=300.0)
        print(label, json.dumps(found[label], indent=1), flush=True)
    if args.json:
        write_file(Path(args.json), json.dumps(found, indent=1) + "\n")
    return 0


def measure(rank: Rank, options: Options, sample: int) -> dict[str, Any]:
    """Return times and phases. Collective; the same on every rank but for phases."""
    bench = Bench(rank, options)
    inputs = Inputs.make(bench)
    found: dict[str, Any] = {"us": _times(bench, inputs)}
    if sample:
        kernels = low_latency._kernel_times(bench, inputs, inputs.traffic(options.experts))
        found["kernel_us"] = {name: round(statistics.median(us), 2) for name, us in kernels.items()}
        found["phases_us"] = _phases(bench, inputs)
    return found


def _times(bench: Bench, inputs: Inputs) -> dict[str, float]:
    samples = make_samples(bench, inputs)
    replays = dict(zip(("dispatch", "combine"), samples.replays["weft"], strict=True))
    trips = samples.round_trips
    assert trips is not None  # captured: these are GPUs

    def take(index: int) -> None:
        samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][bench.me.rank])
        for name, replay in replays.items():
            bench.sample(name, replay)
        bench.sample("pair of ten", trips)

    bench.run(take)
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    us["pair of ten"] /= low_latency.ROUND_TRIPS
    samples.calls["weft"].buffer.destroy()
    return {name: round(of, 2) for name, of in us.items()}


def _phases(bench: Bench, inputs: Inputs) -> dict[str, dict[str, list[float]]]:
    os.environ["WEFT_TRACE_SPANS"] = "100000"
    _core.config_reload()
    samples = make_samples(bench, inputs)
    buffer = samples.calls["weft"].buffer
    found: dict[str, list[Any]] = defaultdict(list)
    replays = dict(zip(("dispatch", "combine"), samples.replays["weft"], strict=True))
    assert samples.round_trips is not None
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            found[f"{name} cold"].append(kernel_time.spans_of(bench, buffer, replay))
        spans = kernel_time.spans_of(bench, buffer, samples.round_trips)
        windows = kernel_time.launches_of([span for span in spans if span.name == CALL])
        for at, (begin, end) in enumerate(windows[2:]):
            of_kernel = [span for span in spans if begin <= span.begin_ns < end]
            found[("dispatch in a row", "combine in a row")[at % 2]].append(of_kernel)
    buffer.destroy()
    return {name: _summary(kernels) for name, kernels in found.items()}


def _summary(kernels: list[list[Any]]) -> dict[str, list[float]]:
    """Return by name: spans, first begin, median begin, median end, last end; medians over kernels."""
    of_names: dict[str, list[list[float]]] = defaultdict(list)
    for spans in kernels:
        start = min(span.begin_ns for span in spans)
        by_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            name = (
                span.name if span.peer is None else f"{span.name} of {'self' if span.peer == 0 else 'peer'}"
            )
            by_name[name].append(((span.begin_ns - start) / 1e3, (span.end_ns - start) / 1e3))
        for name, times in by_name.items():
            begins, ends = zip(*times, strict=True)
            of_names[name].append(
                [len(times), min(begins), statistics.median(begins), statistics.median(ends), max(ends)]
            )
    return {
        name: [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]
        for name, rows in sorted(of_names.items(), key=lambda of: statistics.median(row[3] for row in of[1]))
    }


def _sampled(device_dir: Path, sample: int, into: Path) -> Path:
    """Return a copy of the sources in which one block of ``sample`` notes phases."""
    copy = into / "device"
    shutil.copytree(device_dir, copy)
    trace = copy / "kernels/core/trace.cuh"
    text = trace.read_text()
    before = "log_ = notes ? log : nullptr;"
    assert text.count(before) == 1, "kernels/core/trace.cuh: its Span has changed"
    is_last = "Block{}.index() + 2 >= Block{}.count()"  # those tell counts
    chosen = f"Block{{}}.index() % {sample} == 0 || {is_last}"
    trace.write_text(text.replace(before, f"log_ = notes && ({chosen}) ? log : nullptr;"))
    return copy
