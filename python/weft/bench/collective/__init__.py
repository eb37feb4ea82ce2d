# SPDX-License-Identifier: Apache-2.0
"""``weft bench collective``: collectives over sizes, in the manner of nccl-tests, beside gloo or NCCL in the same run.

Started by itself it makes its own ranks (``--ranks``); started by torchrun it takes torchrun's. ``bytes`` is the full
buffer: all ranks' parts of all_gather, reduce_scatter, all_to_all, gather and scatter. How it measures is told in
``weft.bench.collective.measure``.
"""

from __future__ import annotations

import argparse

from weft.bench.report import Report, add_report_arguments
from weft.errors import invalid
from weft.runtime.tables import integer_from, size

CALLS = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter"),
    *("broadcast", "reduce", "gather", "scatter", "send_recv"),
)
# Calls that have one form only; send_recv into the same tensor is no benchmark of it.
FIXED_PLACES = {
    **dict.fromkeys(("broadcast", "reduce"), "in"),
    **dict.fromkeys(("all_to_all", "gather", "scatter", "send_recv"), "out"),
}
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "int8")
DEADLINE_S = 3000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument(
        "--calls",
        default="",
        help=f"comma-separated, or all: {', '.join(CALLS)}; default: the first four, or what --algorithm is for, "
        "custom collectives included",
    )
    parser.add_argument("-b", "--min-bytes", type=size, default="1K")
    parser.add_argument("-e", "--max-bytes", type=size, default="64M")
    parser.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("-d", "--dtype", choices=DTYPES, default="float32")
    parser.add_argument("-o", "--op", choices=("sum", "product", "min", "max", "average"), default="sum")
    parser.add_argument(
        "--place",
        choices=("auto", "in", "out"),
        default="auto",
        help="in or out of place, as in nccl-tests: a part of all_gather's output is the input, a part of "
        "reduce_scatter's input the output (auto: all_reduce in place, those two out of place)",
    )
    parser.add_argument(
        "--memory",
        choices=("auto", "ordinary", "window"),
        default="auto",
        help="where Weft's tensors lie: torch's memory, or a window, which peers reach directly "
        "(auto: ordinary on the CPU, a window on GPUs); the baseline's are torch's",
    )
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME|FILE [LL|LL128] [xN] [compiled|exchange|staged] [sms=N] [slice=BYTES]",
        help="what serves the one call, instead of Weft's choice: a library algorithm or a .py, .xml or "
        ".json file, in one text; given several times, they take turns in one run (auto: Weft's choice)",
    )
    parser.add_argument(
        "--ranks", type=integer_from(1), default=0, help="default: torchrun's, all GPUs, or 4"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--ranks-per-node",
        type=integer_from(0),
        default=0,
        help="cut this host into nodes of so many ranks, which reach each other through the network",
    )
    parser.add_argument(
        "--provider", default="", help="that network: tcp, shm, or a name of weft.transfer.provider_names()"
    )
    parser.add_argument(
        "-n", "--iterations", type=integer_from(1), default=0, help="samples (default by size)"
    )
    parser.add_argument("-w", "--warmup", type=integer_from(0), default=3, help="samples before those")
    parser.add_argument("--no-check", action="store_true", help="leave out the comparison with the oracle")
    parser.add_argument("--no-baseline", action="store_true", help="leave out gloo or NCCL")
    parser.add_argument("--eager", action="store_true", help="on GPUs: no CUDA graphs")
    add_report_arguments(parser)


def _settings(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return the settings that the ranks make for the options, as (name, value)."""
    from weft.bench.transfer_side import PROVIDERS

    given = {
        "WEFT_RANKS_PER_NODE": str(args.ranks_per_node or ""),
        "WEFT_PROXY_PROVIDER": PROVIDERS.get(args.provider, args.provider),
    }
    return tuple((name, value) for name, value in given.items() if value)


def run(args: argparse.Namespace) -> int:
    """Measure, and report on rank 0. Returns 0; a wrong result raises before it is timed."""
    import torch

    from weft.bench.collective.cases import Options, call_of
    from weft.bench.collective.measure import measure
    from weft.bench.eager import time_columns
    from weft.testing.ranks import run_job

    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and not gpus:
        raise invalid("device", "cuda", "cpu: torch sees no GPU here")
    if args.algorithm and not args.calls:
        args.calls, args.ranks = call_of(args.algorithm, args.ranks)
    calls = CALLS if args.calls == "all" else tuple((args.calls or ",".join(CALLS[:4])).split(","))
    unknown = sorted(set(calls) - {*CALLS, *(["custom"] if args.algorithm else [])})
    if unknown:
        raise invalid("calls", unknown, ", ".join(CALLS))
    if args.factor < 2 or args.min_bytes < 1 or args.max_bytes < args.min_bytes:
        raise invalid(
            "sizes", (args.min_bytes, args.max_bytes, args.factor), "min <= max and a factor of 2 or more"
        )
    fixed = {call: where for call, where in FIXED_PLACES.items() if call in calls}
    if args.place != "auto" and set(fixed.values()) - {args.place}:
        raise invalid("place", args.place, ", ".join(f"{where} for {call}" for call, where in fixed.items()))
    if args.algorithm and len(calls) != 1:
        raise invalid("calls", args.calls, "one call, where --algorithm says what serves it")
    options = Options(
        calls=calls,
        min_bytes=args.min_bytes,
        max_bytes=args.max_bytes,
        factor=args.factor,
        dtype=args.dtype,
        op=args.op,
        place=args.place,
        device="cuda" if gpus else "cpu",
        iterations=args.iterations,
        warmup=args.warmup,
        check=not args.no_check,
        baseline=not args.no_baseline,
        eager=args.eager,
        algorithms=tuple(args.algorithm),
        settings=_settings(args),
        in_window=args.memory == "window" or (args.memory == "auto" and bool(gpus)),
    )
    rows = run_job(measure, options, num_ranks=lambda: args.ranks or gpus or 4, deadline_s=DEADLINE_S)
    if rows is None:
        return 0
    columns = ("algbw_gbs", "busbw_gbs", "ranks", "algorithm")
    report = Report("weft bench collective", extra_columns=columns, wide=args.wide)
    for row in rows:
        report.add(row)
    report.add_columns(time_columns(rows))
    report.note("enqueue us: the host's part of an eager call, on the CPU without its kernel", "enqueue us")
    report.note("eager us: such calls one after another, kernels included", "eager us")
    report.note("size: the full buffer")
    report.note("algbw = size / time; busbw as nccl-tests defines it", "algbw GB/s", "busbw GB/s")
    if options.device == "cpu":
        floor = (
            "floor: all ranks copying the bytes that the call makes each of them move, those between nodes over raw "
            "sockets with --provider tcp"
        )
    else:
        floor = "floor: a bare exchange of this run, two for all_reduce (weft bench floor)"
    report.note(floor, "floor us", "over floor")
    report.finish(args.json, args.plot)
    return 0
