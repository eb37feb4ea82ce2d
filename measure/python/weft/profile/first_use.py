# SPDX-License-Identifier: Apache-2.0
"""``weft profile first-use``: what the first calls of a process cost, with an empty kernel cache and with a full one.

    weft profile first-use --device cuda --ranks 2 --transport mapped --json first-use.json

Two processes, one after the other, share a cache that is empty at first. Both make a buffer and run low-latency
dispatch and combine twice, then the high-throughput ones twice.
Times are the slowest rank's, in milliseconds, with the device's work. ``load``: a first call less the one after it, all
calls together, in the second process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.report import Report
from weft.errors import Error
from weft.runtime.files import write_file
from weft.runtime.tables import integer_from, output_file
from weft.testing.ranks import Rank, run_ranks

TOKENS, HIDDEN, TOP_K, EXPERTS = 128, 7168, 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft profile first-use``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=integer_from(1), default=2)
    parser.add_argument("--transport", default="auto", metavar="LIST", help="as WEFT_TRANSPORT; several: a+b")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write what was measured. Returns 0."""
    if args.here:
        torch.set_num_threads(1)
        print(json.dumps(in_this_process(args.ranks, args.device)))
        return 0
    rows = [_row(args, transport) for transport in args.transport.split("+")]
    if args.json:
        document = Report("first use").to_json() | {"rows": rows}
        write_file(Path(args.json), json.dumps(document, indent=1) + "\n")
    return 0


def _row(args: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Measure and print what first calls over a transport take."""
    with tempfile.TemporaryDirectory() as cache:
        options = ["--device", args.device, "--ranks", str(args.ranks)]
        empty, full = (in_a_process(options, cache, transport) for _ in range(2))
    load = sum(full[f"{pair}_first"] - full[f"{pair}_second"] for pair in ("low_latency", "high_throughput"))
    print(f"{transport}:")
    for name in empty:
        print(f"  {name:24} empty cache {empty[name]:9.1f} ms   full cache {full[name]:9.1f} ms")
    print(f"  load of kernels from a full cache: {load:.1f} ms")
    return {"transport": transport, "empty_ms": empty, "full_ms": full, "load_ms": load}


def timed(device: str, call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds that a call takes, its kernels included, and its result."""
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, result


def first_calls(rank: Rank, device: str) -> dict[str, float]:
    """Return the milliseconds of each call of a rank."""
    if device == "cuda":
        torch.cuda.set_device(rank.rank)
        torch.zeros(1, device="cuda")  # the context is torch's cost
    x = torch.randn(TOKENS, HIDDEN).bfloat16().to(device)
    idx = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices.to(device)
    weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device=device)
    nbytes = weft.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, rank.group.size(), EXPERTS)
    times = {}
    times["buffer"], buffer = timed(
        device, lambda: weft.Buffer(rank.group, 64 << 20, nbytes, low_latency_mode=True, device=device)
    )

    def low_latency() -> None:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(rows, idx, weights, handle)

    def high_throughput() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        buffer.combine(rows, handle)

    for name, pair in (("low_latency", low_latency), ("high_throughput", high_throughput)):
        torch.distributed.barrier(rank.group)
        times[f"{name}_first"], _ = timed(device, pair)
        times[f"{name}_second"], _ = timed(device, pair)
    return times


def in_this_process(ranks: int, device: str) -> dict[str, float]:
    """Return the slowest rank's milliseconds."""
    found = run_ranks(ranks, first_calls, device, deadline_s=240.0)
    return {name: max(times[name] for times in found) for name in found[0]}


def in_a_process(arguments: list[str], cache: str, transport: str) -> dict[str, float]:
    """Run this profile in a process of its own, with a cache and a transport. Raises: Error when it fails."""
    environment = {**os.environ, "WEFT_CACHE_DIR": cache, "WEFT_TRANSPORT": transport}
    ran = subprocess.run(
        [sys.executable, "-m", "weft", "profile", "first-use", "--here", *arguments],
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    if ran.returncode != 0:
        raise Error(f"first-use: the run failed:\n{ran.stdout}{ran.stderr}", "system")
    times: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return times
