# SPDX-License-Identifier: Apache-2.0
"""``weft tune``: measure the candidates of every collective here, and write the table that calls are served from.

    weft tune --ranks 4                     # resumes where an earlier run stopped
    weft tune --calls all_reduce --max-bytes 4M --output table.json
    weft tune --ranks 4 --report            # what was measured, beside the cost model
    weft tune --ranks 4 --report --measured second.measured.json   # a table against what another run measured

Each size of each collective is measured for every variant that exists for the rank count, after its result was compared
with an oracle. Variants take turns; a sample is the slowest rank's, the winner has the least median. A size is a row of
the table until the next one; between two sizes with different winners the crossover is their geometric mean.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import _core
from weft.errors import Error, invalid
from weft.runtime.files import own_file, write_file
from weft.runtime.progress import progress
from weft.runtime.tables import integer_from, size

if TYPE_CHECKING:
    from weft.collectives.book import Part
    from weft.collectives.variants import Variant
    from weft.testing.ranks import Rank

log = logging.getLogger("weft.collectives")

_CALLS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "reduce_scatter": "reducescatter",
}
_DEADLINE_S = 3600.0
_BUDGET_S = 1.0  # of one variant at one size
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 100
_SAMPLE_US = 4000.0  # of calls in a row, on the CPU: ranks that share cores don't leave a barrier together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--calls", default=",".join(_CALLS), help="comma-separated")
    parser.add_argument("--ranks", type=integer_from(2), default=0, help="default: all GPUs, or 4")
    parser.add_argument("-b", "--min-bytes", type=size, default="1K")
    parser.add_argument("-e", "--max-bytes", type=size, default="64M")
    parser.add_argument("-f", "--factor", type=int, default=4)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", metavar="FILE", help="default: the table that this machine's calls read")
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: print what was measured here beside the cost model's times, and how good choices are",
    )
    parser.add_argument("--measured", metavar="FILE", help="of --report: what another run measured")
    parser.add_argument("--restart", action="store_true", help="forget what an earlier run measured")


def run(args: argparse.Namespace) -> int:
    """Measure and write the table. Returns 0."""
    import torch

    from weft.collectives.agreed_selector import machine_key
    from weft.collectives.book import Part
    from weft.collectives.tune_report import keep_measured, report
    from weft.collectives.tuned_tables import other_rows, table_name, write_table
    from weft.testing.ranks import run_ranks

    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    calls = args.calls.split(",")
    unknown = sorted(set(calls) - _CALLS.keys())
    if unknown:
        raise invalid("calls", unknown, ", ".join(_CALLS))
    if args.factor < 2 or args.min_bytes < 1 or args.max_bytes < args.min_bytes:
        given = (args.min_bytes, args.max_bytes, args.factor)
        raise invalid("sizes", given, "min <= max and a factor of 2 or more")
    ranks = args.ranks or gpus or 4
    cores = len(os.sched_getaffinity(0))
    if not gpus and ranks > cores and not args.report:
        log.warning(
            "%d ranks share %d cores: what is measured is mostly how the system shares them", ranks, cores
        )
    machine = "nvlink" if gpus else "cpu"
    key = run_ranks(1, _key, with_group=False)[0] if gpus else machine_key("cpu")
    config = _core.config()
    cache = Path(config.cache_dir).expanduser()
    target = Path(args.output) if args.output else cache / table_name(machine, key, ranks)
    if args.report:
        print("\n".join(report(target, _CALLS, Path(args.measured) if args.measured else None)))
        return 0
    journal = target.with_suffix(f".{machine}-{ranks}.journal")
    target.parent.mkdir(parents=True, exist_ok=True)
    if args.restart:
        journal.unlink(missing_ok=True)
    sizes = []
    at = args.min_bytes
    while at <= args.max_bytes:
        sizes.append(at)
        at *= args.factor
    found = run_ranks(ranks, measure, calls, sizes, bool(gpus), str(journal), deadline_s=_DEADLINE_S)[0]
    others = other_rows(target, key, (_CALLS[call] for call in calls), ranks)
    write_table(target, key, [*others, *table_rows(found, ranks)])
    keep_measured(target, machine, key, ranks, found)
    _write_book(target.with_suffix(".book"), Part(machine, ranks, key, target.parent, config.algorithm_dir))
    for row in found:
        print(f"{row['call']:16} {row['bytes']:>11} bytes  {row['us']:>10.1f} us  {row['label']}")
    print(f"wrote {target}")
    forget(journal, calls, sizes)
    return 0


def _write_book(path: Path, part: Part) -> None:
    """Write what libnccl reads (compat/nccl); without it that library has its built-in choices."""
    from weft.collectives.book import write_book

    try:
        write_book(path, [part])
        print(f"wrote {path}")
    except (Error, OSError) as error:
        log.warning("%s is not written: %s", path, error)


def _key(rank: Rank) -> str:
    from weft.collectives.agreed_selector import machine_key

    return machine_key("cuda:0")


def table_rows(found: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Turn the winners by size into rows with limits: the geometric mean of neighbours whose winners differ."""
    rows: list[dict[str, Any]] = []
    for call in dict.fromkeys(row["call"] for row in found):
        mine = sorted((row for row in found if row["call"] == call), key=lambda row: int(row["bytes"]))
        for row, later in zip(mine, [*mine[1:], None], strict=True):
            if later is not None and later["label"] == row["label"]:
                continue
            limit = None if later is None else int((row["bytes"] * later["bytes"]) ** 0.5)
            about = {"collective": _CALLS[call], "ranks": ranks, "max_bytes": limit}
            rows.append({**about, **row["variant"], "measured_us": row.get("measured_us", {})})
    return rows


def measure(
    me: Rank, calls: list[str], sizes: list[int], is_cuda: bool, journal: str
) -> list[dict[str, Any]]:
    """Return the winner of every call and size; collective over ``me.group``."""
    import torch

    from weft.collectives.calls import Collectives
    from weft.collectives.variants import VARIANTS
    from weft.runtime.communicator import Communicator

    device = torch.device("cuda", me.rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    collectives = Collectives(Communicator(me.group, device=device).core)
    known = _read_journal(Path(journal))
    winners = []
    with progress(enabled=me.rank == 0) as bar:
        task = bar.add_task("tune", total=len(calls) * len(sizes))
        for call in calls:
            for num_bytes in sizes:
                row = known.get((call, num_bytes))
                if row is None:
                    row = _winner(me, collectives, call, num_bytes, VARIANTS[_CALLS[call]], device)
                    if me.rank == 0:
                        with open(journal, "a", opener=own_file) as file:
                            file.write(json.dumps(row) + "\n")
                winners.append(row)
                bar.advance(task)
    return winners


def forget(journal: Path, calls: list[str], sizes: list[int]) -> None:
    """Take out of the journal what a table has now; what a run with other calls or sizes left there stays for it."""
    rest = [
        row for (call, size), row in _read_journal(journal).items() if call not in calls or size not in sizes
    ]
    if rest:
        write_file(journal, "".join(json.dumps(row) + "\n" for row in rest))
    else:
        journal.unlink(missing_ok=True)


def _read_journal(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            rows[row["call"], row["bytes"]] = row
        except (ValueError, KeyError, TypeError):  # the line that an interrupted run was writing
            log.warning("%s: a damaged line is left out: %.60s", path, line)
    return rows


def _winner(
    me: Rank, collectives: Any, call: str, num_bytes: int, variants: tuple[Variant, ...], device: Any
) -> dict[str, Any]:
    """Return the candidate with the least median, and the times of all."""
    import torch

    elems = max(1, num_bytes // 4 // me.size)
    length = elems if call == "all_gather" else elems * me.size
    tensor = torch.full((length,), float(me.rank + 1), device=device)
    function: Callable[..., Any] = getattr(collectives, call)
    found = [(variant, _choice(me, variant, call, device)) for variant in variants]
    candidates = [(variant, choice) for variant, choice in found if choice is not None]
    if not candidates:
        raise Error(f"{call} of {num_bytes} bytes: no variant exists for {me.size} ranks")
    for _, choice in candidates:
        _check(me, call, function(tensor.clone(), algorithm=choice), elems)
    times = _in_turns(
        me, [functools.partial(function, tensor, algorithm=choice) for _, choice in candidates], device
    )
    medians = [own[len(own) // 2] for own in times]
    best = medians.index(min(medians))
    variant = candidates[best][0]
    labels = [candidate.label() for candidate, _ in candidates]
    return {
        "call": call,
        "bytes": num_bytes,
        "us": medians[best],
        "label": variant.label(),
        "variant": {
            "algorithm": variant.name,
            "protocol": variant.protocol,
            "instances": variant.instances,
            "slice_bytes": variant.slice_bytes,
            "num_sms": variant.num_sms,
            "mode": variant.mode,
        },
        "measured_us": {label: round(us, 1) for label, us in zip(labels, medians, strict=True)},
        "low_us": {label: round(_low(own), 1) for label, own in zip(labels, times, strict=True)},
    }


def _choice(me: Rank, variant: Variant, call: str, device: Any) -> Any:
    """Return what a variant runs; None where it does not exist."""
    from weft.collectives.variants import PROGRAM

    if variant.mode != PROGRAM and device.type != "cuda":
        return None  # one thread does an exchange slowly, and compiled programs ask for a C++ compiler
    try:
        return variant.choice(me.size, call == "all_reduce")
    except Error:
        return None


def _in_turns(me: Rank, calls: list[Callable[[], Any]], device: Any) -> list[list[float]]:
    """Return every call's sorted microseconds of the slowest rank; what else this machine does hits all alike."""
    import torch
    import torch.distributed as dist

    def once(call: Callable[[], Any], times: int) -> float:
        dist.barrier(group=me.group)
        start = time.perf_counter()
        for _ in range(times):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / times

    def agree(own: list[float]) -> list[float]:
        all_ranks: list[Any] = [None] * me.size
        dist.all_gather_object(all_ranks, own, group=me.group)
        return [max(repetition) for repetition in zip(*all_ranks, strict=True)]

    # On GPUs a sample is one call: what users wait for there begins with an idle GPU.
    times = [1] * len(calls)
    each_us = agree([min(once(call, 1), once(call, 1)) for call in calls])
    if device.type != "cuda":
        for _ in range(2):  # of few calls a barrier's end is the larger part
            times = [max(1, int(_SAMPLE_US / us)) for us in each_us]
            each_us = agree([once(call, n) for call, n in zip(calls, times, strict=True)])
    turn_us = sum(us * n for us, n in zip(each_us, times, strict=True))
    rounds = int(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, _BUDGET_S * 1e6 * len(calls) / turn_us)))
    order = random.Random(1)  # the same on all ranks; what ran before a call must not be its luck
    mine = []
    for _ in range(rounds):
        turns = order.sample(range(len(calls)), len(calls))
        taken = {at: once(calls[at], times[at]) for at in turns}
        mine.append([taken[at] for at in range(len(calls))])
    rows = [agree(row) for row in mine]
    return [sorted(row[at] for row in rows) for at in range(len(calls))]


def _low(times: list[float]) -> float:
    """Return below what the median of sorted times is in 1 of 40 cases: the end of its 95 % interval."""
    return times[max(0, int(len(times) / 2 - len(times) ** 0.5))]


def _check(me: Rank, call: str, result: Any, elems: int) -> None:
    import torch

    total = me.size * (me.size + 1) / 2
    wanted = torch.full((elems * me.size if call == "all_reduce" else elems,), total)
    if call in ("all_gather", "all_to_all"):
        wanted = torch.arange(1.0, me.size + 1).repeat_interleave(elems)
    if not torch.equal(result.cpu().view(-1), wanted):
        raise Error(f"{call} of {elems} elements: wrong result on rank {me.rank}")
