# SPDX-License-Identifier: Apache-2.0
"""``weft bench floor``: the least time of an exchange between ranks that map each other, on the machine at hand.

    weft bench floor                                       all GPUs, or 2 CPU ranks
    weft bench floor --bytes 16,128K,4M --sms 16,64 --ways stores,bulk --json FILE --plot FILE
    torchrun --nproc-per-node 8 -m weft bench floor

``exchange``: every rank sends so many bytes to each of its ``--peers`` successors and waits for those that it gets, one
launch, nothing else. ``copy``: it waits for nobody. Ways: ``stores``, of 16 bytes by each thread; ``bulk``, copies by
way of shared memory (GPUs from sm_90 on); ``lines``, of 128 bytes, that need no flag. A row is the best number of SMs
that was asked for; ``us`` is the kernel's time, from the first SM's start to the last one's end, of the slowest rank;
``launch_us`` what each of ten launches in a graph takes, by events. Bytes are compared before and after (``checked``).
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

from weft.bench.report import Report, Row, add_report_arguments
from weft.errors import invalid
from weft.runtime.tables import integer_from

if TYPE_CHECKING:
    from weft.testing.ranks import Rank

DEADLINE_S = 900.0
CALLS = ("exchange", "copy")
WAYS = ("stores", "bulk", "lines")
SIZES = "16,2K,16K,128K,512K,2M,16M,64M"
_UNITS = {"K": 1 << 10, "M": 1 << 20}
_COLUMNS = ("way", "ranks", "peers", "sms", "launch_us", "egress_gbs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft bench floor``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bytes", default=SIZES, help=f"to each peer, comma-separated (default: {SIZES})")
    parser.add_argument("--calls", default="exchange,copy", help="comma-separated: exchange, copy")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma-separated: {', '.join(WAYS)}")
    parser.add_argument("--peers", default="", help="comma-separated numbers of peers (default: all others)")
    parser.add_argument("--sms", default="", help="comma-separated (default: some; the best one is shown)")
    parser.add_argument("--every-sms", action="store_true", help="a row for every number of SMs")
    parser.add_argument(
        "--ranks", type=integer_from(2), default=0, help="default: torchrun's, all GPUs, or 2"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--samples", type=integer_from(1), default=9, help="of ten launches each (default 9)")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write on rank 0. Returns 0; bytes that arrive wrong raise."""
    import torch

    from weft.testing.ranks import run_job

    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and not gpus:
        raise invalid("device", "cuda", "cpu: torch sees no GPU here")
    plan = {
        "sizes": [_size(text) for text in args.bytes.split(",")],
        "calls": _chosen("calls", args.calls, CALLS),
        "ways": _chosen("ways", args.ways, WAYS),
        "peers": [_count("peers", text) for text in args.peers.split(",") if text],
        "sms": [_count("sms", text) for text in args.sms.split(",") if text],
        "every": args.every_sms,
        "samples": args.samples,
        "on_gpu": gpus > 0,
    }

    def num_ranks() -> int:
        ranks = args.ranks or gpus or 2
        if gpus and not 2 <= ranks <= gpus:
            raise invalid("ranks", ranks, f"2 to {gpus}, one per GPU")
        return ranks

    rows = run_job(measure, plan, num_ranks=num_ranks, deadline_s=DEADLINE_S)
    if rows is None:
        return 0
    report = Report("weft bench floor", _COLUMNS, wide=args.wide, names_rows=_COLUMNS[:4])
    for row in rows:
        report.add(row)
    report.note("us: the kernel, from the first SM's start to the last one's end")
    report.note("launch us: one of ten in a row, between events", "launch us")
    report.note("size: bytes to each peer")
    report.note("egress GB/s: what leaves a rank, over us", "egress GB/s")
    report.finish(args.json, args.plot)
    return 0


def measure(me: Rank, plan: dict[str, Any]) -> list[Row]:
    """Measure on this rank; collective over ``me.group``. Returns the rows, for rank 0 to report."""
    import torch

    from weft.bench.exchange_floor import Floor
    from weft.runtime.communicator import Communicator
    from weft.runtime.progress import progress

    device = torch.device("cpu")
    if plan["on_gpu"]:
        ordinal = torch.distributed.get_node_local_rank(fallback_rank=me.rank)
        torch.cuda.set_device(ordinal)
        device = torch.device("cuda", ordinal)
    floor = Floor(Communicator(me.group, device=device), max(plan["sizes"]), me.group)
    cases = [
        (call, way, peers, nbytes)
        for call in plan["calls"]
        for way in plan["ways"]
        for peers in plan["peers"] or [me.size - 1]
        for nbytes in plan["sizes"]
        if _is_wanted(call, way, device.type)
    ]
    rows: list[Row] = []
    with progress(enabled=me.rank == 0) as bar:
        task = bar.add_task(f"floor, {me.size} ranks", total=len(cases))
        for case in cases:
            rows += _measure_case(floor, case, plan)
            bar.advance(task)
    return rows


def _is_wanted(call: str, way: str, device: str) -> bool:
    """Lines are for exchanges; what is copied in bulk on a GPU the CPU copies as it copies all else."""
    return not (call == "copy" and way == "lines") and not (device == "cpu" and way == "bulk")


def _measure_case(floor: Any, case: tuple[str, str, int, int], plan: dict[str, Any]) -> list[Row]:
    from weft.bench.exchange_floor import Load

    call, way, peers, nbytes = case
    loads = [
        load
        for blocks in plan["sms"] or floor.block_counts(nbytes)
        if floor.holds(load := Load(way, call == "exchange", nbytes, peers, blocks))
    ]
    rows = []
    for load in loads:
        floor.check(load)
        took = floor.exchange(load, plan["samples"])
        floor.check(load)
        row = Row(call, "bytes", None, nbytes, took.kernel_us, checked=True, series=way)
        row.extra = {
            "ranks": floor.size,
            "peers": peers,
            "sms": load.blocks,
            "way": way,
            "launch_us": round(statistics.median(took.us), 3),
            "egress_gbs": round(nbytes * peers / max(row.us, 1e-3) / 1e3, 3),
            "device": floor.device.type,
        }
        rows.append(row)
    return rows if plan["every"] or not rows else [min(rows, key=lambda row: row.us)]


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) == 0 or int(digits) * unit % 16:
        raise invalid("bytes", text, "multiples of 16, such as 16, 128K or 4M")
    return int(digits) * unit


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise invalid(name, text, "numbers from 1 on")
    return int(text)


def _chosen(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(allowed)):
        raise invalid(name, unknown, ", ".join(allowed))
    return names
