# SPDX-License-Identifier: Apache-2.0
"""``weft bench moe``: dispatch and combine of a mixture-of-experts layer, checked, beside their peers in the
same run.

Started by itself it makes its own ranks (``--ranks``); started by torchrun it takes torchrun's. MB are the bytes
of the rows that a rank receives, its own included, mean over ranks (low latency: of its (token, expert)
pairs). How it measures is told in ``weft.bench.moe.setting``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.moe.straggler import straggler_lines
from weft.bench.moe.trace import SPANS_PER_BUFFER, print_phases, write_chrome
from weft.bench.report import Report, Row, add_report_arguments
from weft.errors import invalid
from weft.runtime.tables import integer_from

if TYPE_CHECKING:
    from weft.bench.moe.setting import Measured, Options
    from weft.testing.ranks import Rank

DEADLINE_S = 1800.0
TOKENS = {"ht": 4096, "ll": 128, "p2p": 128}
# Configurations of pplx-garden's own benchmarks: tokens 1 to 4096, FP8 there, bfloat16 back.
PRESETS = {
    f"pplx-ep{ranks}": {"ranks": ranks, "hidden": 7168, "experts": 256, "top_k": 8, "dtype": "fp8"}
    for ranks in (8, 16, 32, 64)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument(
        "--mode", choices=tuple(TOKENS), default="ht", help="high throughput, low latency, or split phases"
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="ranks, hidden, experts, top-k and dtype of pplx-garden's"
    )
    parser.add_argument("--tokens", type=int, help="per rank (default 4096 for ht, else 128)")
    parser.add_argument(
        "--overlap-us",
        type=integer_from(0),
        default=100,
        help="matrix product between the phases of p2p; 0: none",
    )
    parser.add_argument(
        "--no-baselines",
        action="store_true",
        help="p2p on the CPU: no torch.distributed, no memcpy: less memory",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row (default 7168)")
    parser.add_argument("--top-k", type=int, default=8, help="experts per token (default 8)")
    parser.add_argument("--experts", type=int, default=256, help="over all ranks (default 256)")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of the dispatched rows")
    parser.add_argument(
        "--ranks", type=integer_from(1), default=0, help="default: torchrun's, all GPUs, or 4"
    )
    parser.add_argument("--transport", default="auto", help="as WEFT_TRANSPORT")
    parser.add_argument(
        "--ranks-per-node",
        type=integer_from(0),
        default=0,
        help="cut this host into nodes of so many ranks, which reach each other through the network",
    )
    parser.add_argument(
        "--provider",
        default="tcp",
        help="that network: tcp, shm, cuda, or a name of weft.transfer.provider_names()",
    )
    parser.add_argument(
        "--routes",
        default="uniform",
        metavar="KIND",
        help="uniform, zipf or FILE, a .npy of [ranks, tokens, top-k]",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--sms",
        default="",
        help="of ht on GPUs, such as 24, or 20,22,24: rows for each, baselines beside the first "
        "(default: what fills the links)",
    )
    parser.add_argument(
        "--iterations", type=integer_from(1), help="samples (default 10 on the CPU, 50 on GPUs)"
    )
    parser.add_argument("--warmup", type=integer_from(0), default=3, help="samples before those")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="on GPUs: no CUDA graphs")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also note when each warp does what: a table, and FILE for ui.perfetto.dev",
    )
    parser.add_argument("--straggler", action="store_true", help="also look for a rank that keeps the others")
    parser.add_argument(
        "--delay", metavar="RANK:US", help="make a rank start every sample late, to see how that looks"
    )
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and report on rank 0. Returns 0; a wrong result raises before anything is timed."""
    import torch

    from weft import _core
    from weft.testing.ranks import run_job

    for name, value in PRESETS.get(args.preset, {}).items():
        setattr(args, name, value)
    torch.set_num_threads(1)  # one per rank; also, ranks are forked from here and a fork inherits none
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    options = _options(args, gpus)
    if options.trace:
        os.environ.setdefault("WEFT_TRACE_SPANS", str(SPANS_PER_BUFFER))
    if args.transport != "auto":
        os.environ["WEFT_TRANSPORT"] = args.transport
    if options.ranks_per_node:
        os.environ["WEFT_RANKS_PER_NODE"] = str(options.ranks_per_node)
        os.environ["WEFT_PROXY_PROVIDER"] = options.provider
    _core.config_reload()  # ranks that are forked from here have what this process has read

    def num_ranks() -> int:
        ranks = args.ranks or gpus or 4
        if options.ranks_per_node >= ranks:
            raise invalid("ranks-per-node", options.ranks_per_node, f"1 to {ranks - 1}: less than --ranks")
        if gpus and ranks > gpus:
            raise invalid("ranks", ranks, f"1 to {gpus}, one per GPU")
        if options.delayed_rank >= ranks:
            raise invalid("delay", args.delay, f"a rank of 0 to {ranks - 1}")
        return ranks

    measured = run_job(measure, options, num_ranks=num_ranks, deadline_s=DEADLINE_S)
    if measured is not None:
        _report(args, measured, options)
    return 0


def measure(me: Rank, options: Options) -> Measured:
    """Measure on this rank; collective over ``me.group``. The result is for rank 0 to report."""
    from weft.bench.moe import high_throughput, low_latency, p2p
    from weft.bench.moe.setting import Bench, Inputs

    bench = Bench(me, options)
    inputs = Inputs.make(bench)
    if options.mode == "ht":
        return high_throughput.measure_each(bench, inputs)
    if options.mode == "p2p":
        return p2p.measure(bench, inputs)
    return low_latency.measure(bench, inputs)


def _options(args: argparse.Namespace, gpus: int) -> Options:
    from weft.bench.moe.setting import Options

    if args.device == "cuda" and not gpus:
        raise invalid("device", "cuda", "cpu: torch sees no GPU here")
    tokens = TOKENS[args.mode] if args.tokens is None else args.tokens
    iterations = (50 if gpus else 10) if args.iterations is None else args.iterations
    at_least = {"tokens": 0, "hidden": 8, "top_k": 1, "experts": 1, "warmup": 0, "overlap_us": 0}
    given = {"tokens": tokens, **{name: getattr(args, name) for name in list(at_least)[1:]}}
    for name, least in at_least.items():
        if given[name] < least:
            raise invalid(name.replace("_", "-"), given[name], f"{least} or more")
    if args.routes in ("uniform", "zipf") and args.top_k > args.experts:
        raise invalid("top-k", args.top_k, f"at most the number of experts, {args.experts}")
    if args.dtype == "fp8" and args.hidden % 128:
        raise invalid("hidden", args.hidden, "a multiple of 128 for fp8: a scale covers 128 channels")
    sms = [int(number) if number.isdecimal() else 0 for number in args.sms.split(",")] if args.sms else []
    if sms and (args.mode != "ht" or any(number < 2 or number % 2 for number in sms)):
        raise invalid("sms", f"{args.sms} with mode {args.mode}", "even numbers above 0, with mode ht")
    if iterations < 1:
        raise invalid("iterations", iterations, "1 or more")
    return Options(
        mode=args.mode,
        tokens=tokens,
        hidden=args.hidden,
        top_k=args.top_k,
        experts=args.experts,
        dtype=args.dtype,
        routes=args.routes,
        transport=args.transport,
        device="cuda" if gpus else "cpu",
        iterations=iterations,
        warmup=args.warmup,
        seed=args.seed,
        eager=args.eager,
        sms=sms[0] if sms else None,
        more_sms=tuple(sms[1:]),
        trace=bool(args.trace or args.straggler),
        overlap_us=args.overlap_us if args.mode == "p2p" else 0,
        has_baselines=not (args.no_baselines and args.mode == "p2p" and not gpus),
        **_nodes(args, gpus),
        **_delay(args.delay),
    )


def _nodes(args: argparse.Namespace, gpus: int) -> dict[str, Any]:
    from weft.bench.transfer_side import PROVIDERS, choose_nics

    if args.ranks_per_node == 0:
        return {}
    provider = PROVIDERS.get(args.provider, args.provider)
    return {
        "ranks_per_node": args.ranks_per_node,
        "provider": provider,
        # Ranks are forked from here: CUDA is theirs to open.
        "nic": "" if provider == "cuda" else choose_nics(provider, local=True)[0],
    }


def _delay(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    rank, _, us = given.partition(":")
    if not (rank.isdecimal() and us.isdecimal()):
        raise invalid("delay", given, "a rank and microseconds, such as 2:500")
    return {"delayed_rank": int(rank), "delay_us": int(us)}


def _report(args: argparse.Namespace, measured: Measured, options: Options) -> None:
    from weft.bench.eager import time_columns

    columns = (
        "ranks",
        "logical_gbs",
        "egress_gbs",
        *(("network_us", "raw_us", "bound_us", "fan_out") if options.ranks_per_node else ()),
    )
    columns += (
        ("sms", "product", "product_us", "product_few_us", "alone_us", "exposed_us", "hidden_share")
        if options.overlap_us
        else ("sms",)
        if options.more_sms
        else ()
    )
    report = Report("weft bench moe", columns, wide=args.wide, names_rows=[n for n in columns if n == "sms"])
    for row in measured.rows:
        report.add(row)
    kernels = (
        "kernel_us",
        "kernel_warm_us",
        "cached_kernel_us",
        "deep_ep_kernel_us",
        "deep_ep_v2_kernel_us",
        "floor_cold_us",
    )
    report.add_columns([name for name in kernels if any(name in row.extra for row in measured.rows)])
    report.add_columns(time_columns(measured.rows))
    for note in measured.notes:
        report.note(note.line, *note.of)
    if slower := slower_kernels(measured.rows):
        report.note(slower, "kernel us")
    report.note(round_trip(measured.rows))
    if options.trace:
        report.note(
            "kernels were compiled to note what they do: a little slower than without --trace, --straggler"
        )
    if args.straggler:
        for line in straggler_lines(measured.traces):
            report.note(line)
    report.finish(args.json, args.plot)
    if args.trace:
        print_phases(report.console, measured.traces)
        write_chrome(Path(args.trace), measured.traces, clock_is_shared=options.device == "cpu")
        report.console.print(f"wrote {args.trace}: open it at https://ui.perfetto.dev", highlight=False)


def slower_kernels(rows: list[Row]) -> str:
    """Say why the kernels of some calls took longer than the calls; "" where none did."""
    calls = ", ".join(row.call for row in rows if row.extra.get("kernel_us", 0.0) > row.us)
    return calls and (
        f"kernel us is more than us for {calls}: kernels are timed in other calls, of another buffer, and this machine "
        "was busier then; what such a call's kernels take is at most us"
    )


def round_trip(rows: list[Row]) -> str:
    """Say how dispatch plus combine compares with every baseline that has both."""
    calls = {row.call.split("_")[1]: row for row in reversed(rows)}  # the first of each
    dispatch, combine = calls["dispatch"], calls["combine"]
    us = dispatch.us + combine.us
    parts = [f"dispatch + combine: {us:,.0f} us"]
    for name in sorted(dispatch.baselines.keys() & combine.baselines.keys()):
        other_us = dispatch.baselines[name] + combine.baselines[name]
        parts.append(f"{name} {other_us:,.0f} us ({other_us / us:.2f}x Weft's time)")
    return "; ".join(parts)
