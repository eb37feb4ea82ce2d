#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures variants of kernels beside each other on the GPUs of this machine: a table, and JSON.

    tools/moe_variants.py [--kernels DIR] [--only REGEX] [--json FILE]

A variant is the sources in DIR (those of this tree) with macros defined. For each one a copy is compiled, results are
compared with the oracle, and calls are timed by events around graphs, the slowest rank's median. The first variant is
measured again at the end. A variant whose results are wrong, or that does not end, is reported, and the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import weft
from weft import _core
from weft.bench.moe import high_throughput, low_latency, peers
from weft.bench.moe.setting import Bench, Inputs, Options
from weft.runtime import nvrtc
from weft.testing import oracle
from weft.testing.ranks import Rank, RankError, run_job

ROOT = Path(__file__).resolve().parent.parent
PULL = "WEFT_COMBINE_PULL"
BOTH = "WEFT_LL_SEGMENT_WARP WEFT_LL_BARE"
LINES = "CONSTANTS=128 WEFT_LL_LINES_ONLY"
# Macros, and variables of the environment that change plans (X_...).
HT_VARIANTS = {
    "as it is": "",
    "sums by loads": "WEFT_SUM_LOADS",
    "pulled where x is in the window": PULL,
    "2 push warps, 5 pieces": "X_PUSH_WARPS=2 X_SUM_SLOTS=5",
}
LL_VARIANTS = {
    "as it is": "",
    "segments by a warp of their own": "WEFT_LL_SEGMENT_WARP",
    "replies of one row without weights": "WEFT_LL_BARE",
    "segments, replies, combine asks ahead": f"{BOTH} WEFT_LL_ASK_AHEAD",
    "constants": "CONSTANTS=128",
    "constants, lines only": LINES,
    "all of these": f"{BOTH} WEFT_LL_ASK_AHEAD {LINES}",
    "64 SMs send, 68 receive": "WEFT_LL_SENDERS=64",
    "96 SMs send, 36 receive; 96 answer, 36 sum": "WEFT_LL_SENDERS=96 WEFT_LL_ANSWERERS=96",
    "two blocks an SM, one sends, one receives": "WEFT_LL_SENDERS=132 X_DISPATCH_TIMES=2 X_BLOCKS_PER_SM=2 X_RECEIVING=2112",
    "1024 threads, constants, lines only": f"{LINES} WEFT_LL_SEND_VECS=1 WEFT_LL_FEW_VECS=1 X_DISPATCH_THREADS=1024 X_COMBINE_THREADS=1024 X_ANSWERING=4096 PLAN=1024",
    "as it is, again": "",
}
ALL_SIZES = ("", f"{BOTH} WEFT_LL_ASK_AHEAD")
KERNEL_TIMES = (*ALL_SIZES, f"{BOTH} WEFT_LL_ASK_AHEAD {LINES}")
SMS = (16, 20, 24, 32, 48, 64)
FEW_SMS = (16, 24, 32)


def measure_high_throughput(bench: Bench, macros: str) -> dict[str, float]:
    """Return the microseconds of combines by number of SMs. Collective."""
    inputs = Inputs.make(bench)
    o, me = bench.options, bench.me
    pulls = "PULL" in macros
    weft.Buffer.set_num_sms(16)
    calls = peers.HighThroughput(high_throughput.make_buffer(bench, weft.Buffer), o.experts, o.tokens * me.size)
    high_throughput._check(bench, inputs, inputs.mine, calls)
    samples = high_throughput._Samples(bench, inputs, inputs.mine, {"weft": calls}, inputs.traffic(o.experts))
    _, dispatch, _, _, _ = samples.replays["weft"]
    results = samples._kept[0][1]
    rows = results[0] if pulls else samples.y
    replays = {"dispatch": dispatch}
    for sms in SMS if pulls or not macros else FEW_SMS:
        weft.Buffer.set_num_sms(sms)
        replays[f"combine, {sms} SMs"], combined = bench.captured(lambda: calls.combine(rows, results[4]))
        if not pulls:
            continue
        in_rank = oracle.layout(inputs.routes[0][me.rank], o.experts, me.size)[2]
        wanted = (inputs.mine.float() * in_rank.sum(1, keepdim=True).to(bench.device)).bfloat16()
        if not torch.equal(combined, wanted):
            raise AssertionError(f"pulled, {sms} SMs: {int((combined != wanted).sum())} values differ")
    bench.run(lambda index: [bench.sample(name, replay) for name, replay in replays.items()])
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    if not macros:
        us["floor"] = bench.exchange_floor_us(inputs.traffic(o.experts).egress * o.hidden * 2) or 0
    high_throughput._check(bench, inputs, inputs.mine, calls)
    calls.buffer.destroy()
    return {name: round(of, 1) for name, of in us.items()}


def measure_low_latency(bench: Bench, macros: str) -> dict[str, float]:
    """Return the microseconds of a dispatch, a combine and pairs, and of their kernels. Collective."""
    inputs = Inputs.make(bench)
    o = bench.options
    traffic = inputs.traffic(o.experts)
    calls = peers.LowLatency(low_latency.make_buffer(bench, weft.Buffer), o.experts, max(o.tokens, 1), True)
    low_latency.check_calls(bench, inputs, calls)
    samples = low_latency.Samples(bench, inputs, {"weft": calls}, traffic, 1)
    dispatch, combine = samples.replays["weft"]

    def take(index: int) -> None:
        samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][bench.me.rank])
        bench.sample("dispatch", dispatch)
        bench.sample("combine", combine)
        bench.sample("pair of ten", samples.round_trips)

    bench.run(take)
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    us["pair of ten"] /= low_latency.ROUND_TRIPS
    low_latency.check_calls(bench, inputs, calls)
    calls.buffer.destroy()
    if macros in KERNEL_TIMES and "again" not in os.environ["X_VARIANT"]:
        kernels = low_latency._kernel_times(bench, inputs, traffic)
        us |= {f"kernel {name.removeprefix('ll_')}": statistics.median(of) for name, of in kernels.items()}
        if not macros:
            us |= {"dispatch floor": bench.exchange_floor_us(traffic.egress * low_latency.row_bytes("fp8", o.hidden)) or 0}
            us |= {"combine floor": bench.exchange_floor_us(traffic.egress * low_latency.row_bytes("bf16", o.hidden)) or 0}
    return {f"{o.tokens} {name}": round(of, 2) for name, of in us.items()}


def options_of(mode: str, tokens: int, dtype: str, iterations: int) -> Options:
    """Return what is measured: hidden 7168, top-8 of 256 experts."""
    return Options(mode, tokens, 7168, 8, 256, dtype, "uniform", "auto", "cuda", iterations, 3, 0, False)


# What a call of so many tokens on 4 ranks, FP8 out and BF16 back, has for a fixed value: fields of its arguments that become
# constants of the source, as they would be if they were part of the kernel's key.
def constants_of(tokens: int, warps: int = 2112, answering: int = 2048) -> list[tuple[str, str]]:
    """Return patterns of fields, and their values. Of 132 blocks of 16 warps."""
    messages = tokens * 4 * (1 - 0.75**8)
    pieces = min(max(int(answering / messages), 1), 8)
    splits = min(max(warps // (4 * tokens), 1), 8)
    of_piece = min(max(warps // (tokens * pieces), 1), 16)
    call = r"(?:\b[dc]\.)?(?:\ba\.)?\bcall\."
    def divisor(value: int) -> str:
        return f"Divisor::of({value})"
    fields = {
        call + "phases": "3u",
        call + "tokens": f"{tokens}u",
        call + "max_tokens": f"{tokens}u",
        call + "experts": "256u",
        call + "id_bytes": "8u",
        call + "lines": "1u",
        call + "batches": f"Batches{{{tokens}, 1}}",
        call + "batch_tokens": divisor(1),
        r"\b[d]\.a\.receive_splits": divisor(splits),
        r"\b[d]\.a\.source_jobs": divisor(splits * tokens),
        r"(?:\b[dc]\.)?\ba\.line_tokens": f"{tokens}u",
        r"\b[d]\.a\.tiled_scales": "0u",
        r"\b[d]\.a\.expert_rows": f"{4 * tokens}u",
        r"\b[d]\.a\.expert_stats": "static_cast<int32_t*>(nullptr)",
        r"\b[dc]\.a\.wait_cycles": "static_cast<uint64_t*>(nullptr)",
        r"\b[d]\.a\.out_weights": "static_cast<float*>(nullptr)",
        r"\b[d]\.a\.out_source": "static_cast<int32_t*>(nullptr)",
        r"(?:\b[dc]\.)?\ba\.x_row_bytes": "uint64_t{14336}",
        r"\b[c]\.a\.pieces": divisor(pieces),
        r"(?:\b[dc]\.)?\ba\.signals": "static_cast<const uint32_t*>(nullptr)",
        r"\b[c]\.a\.owner_jobs": divisor(pieces * tokens),
        r"\b[c]\.a\.receive_splits": divisor(pieces * of_piece),
        r"\b[c]\.a\.piece_splits": divisor(of_piece),
        r"\btakes_own_weights\(\) const \{ return [^}]*\}": "takes_own_weights() const { return true; }",
        r"return call\.masked && [^;]*;": "return false;",
        r"\bsent_lines\(\) const \{ return [^}]*\}": "sent_lines() const { return true; }",
    }
    return [(pattern if pattern.endswith(("}", ";")) else pattern + r"\b(?!\()", value) for pattern, value in fields.items()]


def with_macros(kernels: Path, macros: str, into: Path) -> Path:
    """Copy the sources of kernels, and define macros in front of everything. CONSTANTS=n: see constants_of()."""
    for folder in ("kernels", "transports"):
        shutil.copytree(kernels / folder, into / folder)
    target = into / "kernels/target/target.h"
    lines = "".join(f"#define {macro.replace('=', ' ')}\n" for macro in macros.split() if macro.startswith("WEFT_"))
    target.write_text(target.read_text().replace("#pragma once\n", f"#pragma once\n{lines}", 1))
    for macro in macros.split():
        if macro.startswith("CONSTANTS="):
            for file in (into / "kernels/moe").glob("low_latency_*.cuh"):
                text = file.read_text()
                many = (4224, 4096) if "PLAN=1024" in macros else (2112, 2048)
                for pattern, value in constants_of(int(macro.removeprefix("CONSTANTS=")), *many):
                    text = re.sub(pattern, value, text)
                file.write_text(text)
    return into


def measure(rank: Rank, kernels: Path, folder: Path, modes: list[str], only: str, iterations: int, budget_s: float) -> Any:
    """Measure all variants in one job, and print each as it ends. Collective."""
    started = time.monotonic()
    tools = nvrtc.find()
    bench = Bench(rank, options_of("ht", 4096, "bf16", iterations))
    found: dict[str, dict[str, Any]] = {}
    for mode, variants in (("ht", HT_VARIANTS), ("ll", LL_VARIANTS)):
        for name, macros in variants.items() if mode in modes else ():
            if only and macros and not re.search(only, name):
                continue
            late = [time.monotonic() - started > budget_s]
            torch.distributed.broadcast_object_list(late, src=0)
            if late[0]:
                break
            for variable in [given for given in os.environ if given.startswith("X_")]:
                del os.environ[variable]
            os.environ.update(dict(f"{macro}".split("=") for macro in macros.split() if macro.startswith("X_")))
            os.environ["X_VARIANT"] = name
            place = folder / mode / str(list(variants).index(name))
            _core.set_toolchain(
                nvrtc=str(tools.nvrtc or ""),
                include_dirs=[str(of) for of in tools.include_dirs],
                device_dir=str(place),
            )
            jobs = [(measure_high_throughput, options_of("ht", 4096, "bf16", iterations))]
            if mode == "ll":
                sizes = (128, 1) if macros in ALL_SIZES and "again" not in name else (128,)
                jobs = [(measure_low_latency, options_of("ll", tokens, "fp8", 2 * iterations)) for tokens in sizes]
            of_variant: dict[str, Any] = {}
            for function, options in jobs:
                bench.options = options
                bench._samples.clear()
                before = time.monotonic()
                try:
                    of_variant |= function(bench, macros)
                except Exception as error:  # reported, and the next variant starts
                    of_variant[f"failed {options.tokens}"] = str(error)[:1500]
                of_variant[f"seconds {options.tokens}"] = round(time.monotonic() - before, 1)
            found.setdefault(mode, {})[name] = of_variant
            if rank.rank == 0:
                print(mode, name, json.dumps(of_variant), flush=True)
    return found


def print_table(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print a column per variant."""
    names = list(found)
    rows = dict.fromkeys(row for of in found.values() for row in of)
    print(f"\n{title}, us:")
    for at, name in enumerate(names):
        print(f"  [{at}] {name}")
    print(" " * 34 + "".join(f"{f'[{at}]':>9}" for at in range(len(names))))
    for row in rows:
        if row.startswith("failed"):
            continue
        cells = (found[name].get(row) for name in names)
        print(f"{row:<34}" + "".join(f"{'-' if cell is None else cell:>9}" for cell in cells), flush=True)
    for name, of in found.items():
        for row, error in of.items():
            if row.startswith("failed"):
                print(f"{name}: {row}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, default=ROOT, help="folder with kernels/ and transports/")
    parser.add_argument("--only", default="", help="variants whose names match, of both modes; the first always")
    parser.add_argument("--mode", choices=("both", "ht", "ll"), default="both")
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--budget", type=float, default=140, help="seconds, after which no variant starts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"--ranks: got {ranks}, allowed: 2 or more GPUs")
    os.environ.setdefault("WEFT_TIMEOUT_S", "10")
    _core.config_reload()
    modes = ["ht", "ll"] if args.mode == "both" else [args.mode]
    with tempfile.TemporaryDirectory() as into:
        for mode, variants in (("ht", HT_VARIANTS), ("ll", LL_VARIANTS)):
            for at, macros in enumerate(variants.values()):
                with_macros(args.kernels, macros, Path(into) / mode / str(at))
        found = run_job(
            measure, args.kernels, Path(into), modes, args.only, args.iterations, args.budget,
            num_ranks=lambda: ranks, deadline_s=args.budget + 60,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for mode, of_mode in found.items():
        print_table(mode, of_mode)


if __name__ == "__main__":
    main()
