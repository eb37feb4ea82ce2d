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
from pathlib import Path
from typing import Any

import torch

import weft
from weft import _core
from weft.bench.moe import high_throughput, low_latency, p2p, peers
from weft.bench.moe.setting import Bench, Inputs, Options
from weft.runtime import nvrtc
from weft.testing import oracle
from weft.testing.ranks import Rank, RankError, run_job

ROOT = Path(__file__).resolve().parent.parent
STREAM, PULL, OWN = "WEFT_COMBINE_STREAM", "WEFT_COMBINE_STREAM WEFT_COMBINE_PULL", "WEFT_LL_OWN=2"
HT_VARIANTS = {
    "as it is": "",
    "two rows, 7 vectors": "WEFT_SUM_PAIRS=7",
    "ids ahead": "WEFT_META_AHEAD",
    "sums by bulk copies": STREAM,
    "sums by bulk copies, pieces of 1 KiB": f"{STREAM} WEFT_QUEUE_PIECE=1024",
    "pulled where x is in the window": PULL,
    "pulled, pieces of 1 KiB": f"{PULL} WEFT_QUEUE_PIECE=1024",
    "as it is, again": "",
}
LL_VARIANTS = {
    "as it is": "",
    "counts at once": "WEFT_LL_COUNTS",
    "own rows first": "WEFT_LL_OWN=1",
    "own rows from the image": OWN,
    "the same, counts at once": f"{OWN} WEFT_LL_COUNTS",
    "own rows from the image, in half of the blocks before lines": "WEFT_LL_OWN=3 WEFT_LL_COUNTS",
    "combine: groups of 4 warps, 0.25 us apart": "WEFT_LL_COMBINE_GROUP=4 WEFT_LL_COMBINE_STEP=250",
    "combine: groups of 4 warps, 0.5 us apart": "WEFT_LL_COMBINE_GROUP=4 WEFT_LL_COMBINE_STEP=500",
    "combine: groups of 8 warps, 1 us apart": "WEFT_LL_COMBINE_GROUP=8 WEFT_LL_COMBINE_STEP=1000",
    "combine: groups of 2 warps, 0.3 us apart": "WEFT_LL_COMBINE_GROUP=2 WEFT_LL_COMBINE_STEP=300",
    "two waves, 1.2 us": "WEFT_LL_WAVES=2 WEFT_LL_STAGGER=1200",
    "four waves, 0.6 us": "WEFT_LL_WAVES=4 WEFT_LL_STAGGER=600",
    "own rows from the image, counts at once, two waves, 0.8 us": f"{OWN} WEFT_LL_COUNTS WEFT_LL_WAVES=2 WEFT_LL_STAGGER=800",
    "as it is, again": "",
}
SMS = (8, 24, 64)


def measure_high_throughput(rank: Rank, options: Options) -> dict[str, float]:
    """Return the microseconds of dispatches and combines. Collective."""
    bench = Bench(rank, options)
    inputs = Inputs.make(bench)
    o, me = options, rank
    payload: peers.Payload = inputs.mine
    if o.dtype == "fp8":
        quantized, scales = oracle.quantize_fp8(inputs.rows[me.rank])
        payload = (quantized.to(bench.device), scales.to(bench.device))
    calls = peers.HighThroughput(
        high_throughput._make_buffer(bench, weft.Buffer), o.experts, o.tokens * me.size
    )
    high_throughput._check(bench, inputs, payload, calls)
    samples = high_throughput._Samples(
        bench, inputs, payload, {"weft": calls}, inputs.traffic(o.experts)
    )
    _, dispatch, combine, cached, both = samples.replays["weft"]
    results = samples._kept[0][1]
    replays = {"dispatch": dispatch, "cached": cached, "layout + dispatch": both}
    if o.dtype == "bf16":
        replays["combine"] = combine
        from_window, combined = bench.captured(lambda: calls.combine(results[0], results[4]))
        for sms in SMS:
            weft.Buffer.set_num_sms(sms)
            replays[f"combine, {sms} SMs"] = bench.captured(lambda: calls.combine(samples.y, results[4]))[0]
        dispatch()
        from_window()
        in_rank = oracle.layout(inputs.routes[0][me.rank], o.experts, me.size)[2]
        wanted = (inputs.mine.float() * in_rank.sum(1, keepdim=True).to(bench.device)).bfloat16()
        if not torch.equal(combined, wanted):
            raise AssertionError(f"combine of x in the window: {int((combined != wanted).sum())} values differ")
        replays["combine, x in the window"] = from_window
        for sms in SMS:
            weft.Buffer.set_num_sms(sms)
            replays[f"x in the window, {sms} SMs"] = bench.captured(
                lambda: calls.combine(results[0], results[4])
            )[0]

    def take(index: int) -> None:
        samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][me.rank])
        for name, replay in replays.items():
            bench.sample(name, replay)

    bench.run(take)
    floor = bench.exchange_floor_us(inputs.traffic(o.experts).egress * (o.hidden * (2 if o.dtype == "bf16" else 1)))
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    high_throughput._check(bench, inputs, payload, calls)
    calls.buffer.destroy()
    return {f"{o.dtype} {name}": round(of, 1) for name, of in us.items()} | {f"{o.dtype} floor": round(floor or 0, 1)}


def measure_low_latency(rank: Rank, options: Options) -> dict[str, float]:
    """Return the microseconds of a dispatch, a combine and pairs, and of their kernels. Collective."""
    bench = Bench(rank, options)
    inputs = Inputs.make(bench)
    o = options
    traffic = inputs.traffic(o.experts)
    buffer = low_latency.make_buffer(bench, weft.Buffer)
    calls = peers.LowLatency(buffer, o.experts, max(o.tokens, 1), o.dtype == "fp8")
    low_latency.check_calls(bench, inputs, calls)
    samples = low_latency.Samples(bench, inputs, {"weft": calls}, traffic, 1)
    dispatch, combine = samples.replays["weft"]

    def take(index: int) -> None:
        samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][rank.rank])
        bench.sample("dispatch", dispatch)
        bench.sample("combine", combine)
        bench.sample("pair of ten", samples.round_trips)

    bench.run(take)
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    us["pair of ten"] /= low_latency.ROUND_TRIPS
    low_latency.check_calls(bench, inputs, calls)
    buffer.destroy()
    if o.tokens == 128:
        kernels = low_latency._kernel_times(bench, inputs, traffic)
        us |= {f"kernel {name.removeprefix('ll_')}": statistics.median(of) for name, of in kernels.items()}
    return {f"{o.dtype} {o.tokens} {name}": round(of, 2) for name, of in us.items()}


def measure_p2p(rank: Rank, options: Options) -> dict[str, float]:
    """Return the microseconds of the split all-to-all's pairs of phases. Collective."""
    bench = Bench(rank, options)
    inputs = Inputs.make(bench)
    o = options
    x = oracle.quantize_fp8(inputs.mine) if o.dtype == "fp8" else inputs.mine
    split = peers.P2P(p2p._make(bench), x, inputs.my_weights)
    p2p._check(bench, inputs, split)
    samples = low_latency.Samples(bench, inputs, {"weft": split}, inputs.traffic(o.experts), 1)
    dispatch, combine = samples.replays["weft"]

    def take(index: int) -> None:
        samples.topk_idx.copy_(inputs.routes[index % len(inputs.routes)][rank.rank])
        bench.sample("dispatch", dispatch)
        bench.sample("combine", combine)
        bench.sample("pair of ten", samples.round_trips)

    bench.run(take)
    us = {name: statistics.median(of) for name, of in bench.samples_us().items()}
    us["pair of ten"] /= low_latency.ROUND_TRIPS
    p2p._check(bench, inputs, split)
    split.buffer.destroy()
    return {f"p2p {o.dtype} {o.tokens} {name}": round(of, 2) for name, of in us.items()}


def options_of(mode: str, tokens: int, dtype: str, iterations: int) -> Options:
    """Return what is measured: hidden 7168, top-8 of 256 experts."""
    return Options(mode, tokens, 7168, 8, 256, dtype, "uniform", "auto", "cuda", iterations, 3, 0, False)


# What a call of so many tokens on 4 ranks, FP8 out and BF16 back, has for a fixed value: fields of its arguments that become
# constants of the source, as they would be if they were part of the kernel's key.
def constants_of(tokens: int) -> list[tuple[str, str]]:
    """Return patterns of fields, and their values. Of 132 blocks of 16 warps."""
    messages = tokens * 4 * (1 - 0.75**8)
    pieces = min(max(int(2048 / messages), 1), 8)
    splits = min(max(2112 // (4 * tokens), 1), 8)
    of_piece = min(max(2112 // (tokens * pieces), 1), 16)
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
    lines = "".join(f"#define {macro.replace('=', ' ')}\n" for macro in macros.split())
    target.write_text(target.read_text().replace("#pragma once\n", f"#pragma once\n{lines}", 1))
    for macro in macros.split():
        if macro.startswith("CONSTANTS="):
            for file in (into / "kernels/moe").glob("low_latency_*.cuh"):
                text = file.read_text()
                for pattern, value in constants_of(int(macro.removeprefix("CONSTANTS="))):
                    text = re.sub(pattern, value, text)
                file.write_text(text)
    return into


def measure_variant(kernels: Path, macros: str, jobs: list[tuple[Any, Options]], ranks: int) -> dict[str, Any]:
    """Return the times of a variant, or what went wrong."""
    tools = nvrtc.find()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as into:
        device = with_macros(kernels, macros, Path(into))
        _core.set_toolchain(
            nvrtc=str(tools.nvrtc or ""),
            include_dirs=[str(place) for place in tools.include_dirs],
            device_dir=str(device),
        )
        for function, options in jobs:
            try:
                found |= run_job(function, options, num_ranks=lambda: ranks, deadline_s=100.0)
            except RankError as error:
                found[f"failed, {options.mode} {options.dtype} {options.tokens}"] = str(error)[-1500:]
    return found


def has_all(name: str) -> bool:
    """Return whether everything is measured of a variant, not only the calls that it is about first of all."""
    return not any(word in name for word in ("wave", "first", "groups", "half", "vectors", "bulk copies", "pulled"))


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
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"--ranks: got {ranks}, allowed: 2 or more GPUs")
    os.environ.setdefault("WEFT_TIMEOUT_S", "10")
    _core.config_reload()
    jobs = {
        "ht": [
            (measure_high_throughput, options_of("ht", 4096, "bf16", args.iterations)),
            (measure_high_throughput, options_of("ht", 4096, "fp8", args.iterations)),
        ],
        "ll": [
            (measure_low_latency, options_of("ll", 128, "fp8", 2 * args.iterations)),
            (measure_low_latency, options_of("ll", 1, "fp8", args.iterations)),
            (measure_p2p, options_of("p2p", 128, "fp8", args.iterations)),
        ],
    }
    found: dict[str, dict[str, Any]] = {}
    for mode, variants in (("ht", HT_VARIANTS), ("ll", LL_VARIANTS)):
        if args.mode not in ("both", mode):
            continue
        for name, macros in variants.items():
            if args.only and macros and not re.search(args.only, name):
                continue
            of_variant = jobs[mode] if has_all(name) else jobs[mode][:1]
            found.setdefault(mode, {})[name] = measure_variant(args.kernels, macros, of_variant, ranks)
            print(mode, name, json.dumps(found[mode][name]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
        print_table(mode, found[mode])


if __name__ == "__main__":
    main()
