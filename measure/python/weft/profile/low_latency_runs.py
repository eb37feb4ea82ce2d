# SPDX-License-Identifier: Apache-2.0
"""What the profiles of low-latency kernels share: their options, and the calls that they time."""

from __future__ import annotations

import argparse

import weft
from weft.bench.moe import low_latency, peers
from weft.bench.moe.clock import Bench, Inputs, Options
from weft.runtime.tables import integer_from


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the calls, the ranks and how often each is timed."""
    parser.add_argument("--hidden", type=integer_from(1), default=7168)
    parser.add_argument("--top-k", type=integer_from(1), default=8)
    parser.add_argument("--experts", type=integer_from(1), default=256)
    parser.add_argument("--ranks", type=integer_from(2), default=0, help="default: all GPUs, or 2 on the CPU")
    parser.add_argument("--iterations", type=integer_from(1), default=40)


def options_of(args: argparse.Namespace, tokens: int, dtype: str, device: str) -> Options:
    """Return what the benchmark of low latency is asked for."""
    return Options(
        mode="ll",
        tokens=tokens,
        hidden=args.hidden,
        top_k=args.top_k,
        experts=args.experts,
        dtype=dtype,
        routes="uniform",
        transport="auto",
        device=device,
        iterations=args.iterations,
        warmup=3,
        seed=0,
        eager=False,
        has_baselines=False,
    )


def make_samples(bench: Bench, inputs: Inputs) -> low_latency.Samples:
    """Return calls on a buffer of their own, which the oracle has checked."""
    o = bench.options
    calls = peers.LowLatency(
        low_latency.make_buffer(bench, weft.Buffer), o.experts, max(o.tokens, 1), o.dtype == "fp8"
    )
    low_latency.check_calls(bench, inputs, calls)
    return low_latency.Samples(bench, inputs, {"weft": calls}, inputs.traffic(o.experts), 1)
