# SPDX-License-Identifier: Apache-2.0
"""``weft bench transfer-gpu``: the transfer engine between two GPUs of this host, beside copies by the driver.

    weft bench transfer-gpu                                     GPU 0 writes to GPU 1, provider cuda
    weft bench transfer-gpu --provider fabric:shm --json FILE   through pinned memory of the host

Two processes, each with a GPU and an engine. ``write``: 16 writes under way, ``us`` of one. ``write_one``: one at a
time, until the writer knows that it has arrived. ``pages``: 1000 pages of 16 KiB as one operation, in random order on
both sides. Kinds of memory: ``gpu-gpu``, ``host-gpu`` (pinned) and ``gpu-host``. The baseline ``driver`` is
``cuMemcpyAsync``, through torch, of as many bytes between the same kinds of memory, back to back in one process; the
two alternate. Bytes are compared afterwards (``checked``).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from weft.bench.report import Report, Row, add_report_arguments
from weft.errors import invalid

if TYPE_CHECKING:
    from weft.testing.ranks import Rank

DEADLINE_S = 600.0
TIMEOUT_S = 60.0
MIB = 1 << 20
SIZES = (64 << 10, MIB, 16 * MIB, 256 * MIB)
PAGES, PAGE_BYTES = 1000, 16 << 10
WINDOW = 16
WAYS = ("gpu-gpu", "host-gpu", "gpu-host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft bench transfer-gpu``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--provider", default="cuda", help="of the engines (default: cuda)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma-separated (default: {','.join(WAYS)})")
    parser.add_argument("--samples", type=int, default=7, help="of each row (default: 7)")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write on rank 0. Returns 0; bytes that arrive wrong raise."""
    import torch

    from weft.testing.ranks import run_job

    ways = args.ways.split(",")
    if unknown := sorted(set(ways) - set(WAYS)):
        raise invalid("ways", ",".join(unknown), ", ".join(WAYS))
    if args.samples < 1:
        raise invalid("samples", args.samples, "1 or more")
    if torch.cuda.device_count() < 1:
        raise invalid(
            "device", "no GPU that torch sees", "a machine with a GPU; `weft bench transfer` is for hosts"
        )
    plan = {"provider": args.provider, "ways": ways, "samples": args.samples}
    rows = run_job(measure, plan, num_ranks=lambda: 2, deadline_s=DEADLINE_S)
    if rows is None:
        return 0
    columns = ("way", "gb_s", "driver_gb_s")
    report = Report("weft bench transfer-gpu", columns, wide=args.wide, names_rows=columns[:1])
    for row in rows:
        report.add(row)
    report.note(
        f"write: one of {WINDOW} writes in flight, us; driver: one of {WINDOW} copies in a row, in one process"
    )
    report.finish(args.json, args.plot)
    return 0


class Side:
    """One process: its engine, and a buffer of each kind that it registered."""

    def __init__(self, rank: Rank, provider: str) -> None:
        import torch

        from weft.transfer import TransferEngine

        self.rank = rank
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        self.engine = TransferEngine(provider, name=f"rank{rank.rank}", timeout_s=TIMEOUT_S)
        most = max(SIZES)
        self.buffers = {
            "gpu": torch.zeros(most, dtype=torch.uint8, device="cuda"),
            "host": torch.zeros(
                most, dtype=torch.uint8, pin_memory=provider != "cuda"
            ),  # cuda pins it itself
        }
        torch.cuda.synchronize()
        self.memories = {
            kind: self.engine.register(buffer, remote_write=True) for kind, buffer in self.buffers.items()
        }
        mine = (self.engine.address, {kind: memory.descriptor for kind, memory in self.memories.items()})
        reports: list[Any] = [None] * rank.size
        torch.distributed.all_gather_object(reports, mine, group=rank.group)
        address, descriptors = reports[1 - rank.rank]
        self.peer = self.engine.connect(address)
        self.remotes = {kind: self.engine.attach(descriptor) for kind, descriptor in descriptors.items()}

    def meet(self) -> None:
        """Wait for the other process."""
        import torch

        torch.distributed.barrier(group=self.rank.group)


def measure(rank: Rank, plan: dict[str, Any]) -> list[Row]:
    """Measure on rank 0 while rank 1 makes progress. Returns the rows, on rank 0."""
    from weft.runtime.progress import progress

    side = Side(rank, plan["provider"])
    cases = [(way, call, nbytes) for way in plan["ways"] for call, nbytes in _calls()]
    rows: list[Row] = []
    with progress(enabled=rank.rank == 0) as bar:
        task = bar.add_task(f"transfers, {plan['provider']}", total=len(cases))
        for way, call, nbytes in cases:
            src, dst = way.split("-")
            if rank.rank == 0:
                rows.append(_measure_one(side, src, dst, call, nbytes, plan["samples"]))
            side.meet()
            _check(side, src, dst, call, nbytes)
            side.meet()  # the next case writes there
            bar.advance(task)
    side.engine.close()
    return rows


def _calls() -> list[tuple[str, int]]:
    return [("write", n) for n in SIZES] + [("write_one", n) for n in SIZES] + [("pages", PAGES * PAGE_BYTES)]


def _measure_one(side: Side, src: str, dst: str, call: str, nbytes: int, samples: int) -> Row:
    import torch

    side.buffers[src].random_(0, 256)
    torch.cuda.synchronize()
    ours: list[float] = []
    drivers: list[float] = []
    for sample in range(samples + 1):  # the first one warms up
        taken = _engine_us(side, src, dst, call, nbytes), _driver_us(side, src, dst, call, nbytes)
        if sample:
            ours.append(taken[0])
            drivers.append(taken[1])
    row = Row(call, "bytes", None, nbytes, ours, checked=True, series=f"{src}-{dst}")
    driver = statistics.median(drivers)
    row.baselines = {"driver": driver}
    row.extra = {
        "way": f"{src}-{dst}",
        "gb_s": round(nbytes / row.us / 1e3, 2),
        "driver_gb_s": round(nbytes / driver / 1e3, 2),
    }
    return row


def _count(call: str, nbytes: int) -> int:
    return 1 if call == "pages" else max(4, min(64, (1 << 30) // nbytes))


def _page_lists() -> tuple[Any, Any]:
    from weft.transfer import Pages

    order = random.Random(7)
    pool = max(SIZES) // PAGE_BYTES
    here, there = (order.sample(range(pool), PAGES) for _ in range(2))
    return Pages(here, PAGE_BYTES), Pages(there, PAGE_BYTES)


def _engine_us(side: Side, src: str, dst: str, call: str, nbytes: int) -> float:
    engine, memory, remote = side.engine, side.memories[src], side.remotes[dst]
    count = _count(call, nbytes)
    lists = _page_lists()
    started = time.perf_counter()
    if call == "pages":
        engine.write_pages(memory, lists[0], remote, lists[1], PAGE_BYTES).wait()
    elif call == "write_one":
        for _ in range(count):
            engine.write(memory, remote, nbytes).wait()
    else:
        under_way: list[Any] = []
        for _ in range(count):
            if len(under_way) == WINDOW:
                under_way.pop(0).wait()
            under_way.append(engine.write(memory, remote, nbytes))
        for transfer in under_way:
            transfer.wait()
    return (time.perf_counter() - started) * 1e6 / count


def _driver_us(side: Side, src: str, dst: str, call: str, nbytes: int) -> float:
    """Return what the same bytes take by the driver, from this process alone."""
    import torch

    count = 4 if call == "pages" else _count(call, nbytes)
    far = 1 % torch.cuda.device_count()
    source = side.buffers[src][:nbytes]
    if src == "host":
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if dst == "gpu":
        target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{far}")
    else:
        target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.device(source.device if source.is_cuda else target.device):  # whose stream copies
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def _check(side: Side, src: str, dst: str, call: str, nbytes: int) -> None:
    """Compare the bytes that arrived on rank 1 with those of rank 0."""
    import torch

    digest = None
    if side.rank.rank == 0:
        digest = _digest(side.buffers[src], 0, call, nbytes)
    reports: list[Any] = [None] * side.rank.size
    torch.distributed.all_gather_object(reports, digest, group=side.rank.group)
    if side.rank.rank == 1 and _digest(side.buffers[dst], 1, call, nbytes) != reports[0]:
        raise RuntimeError(
            f"{call} of {nbytes} bytes from {src} to {dst}: other bytes arrived than were sent"
        )


def _digest(buffer: Any, end: int, call: str, nbytes: int) -> list[int]:
    """Return what tells bytes and their places apart: sums, plain and by place."""
    import torch

    if call == "pages":
        pages = torch.tensor(_page_lists()[end].indices, device=buffer.device)
        held = buffer.view(-1, PAGE_BYTES)[pages].reshape(-1)
    else:
        held = buffer[:nbytes]
    wide = held.view(torch.int64)
    places = torch.arange(wide.numel(), device=wide.device, dtype=torch.int64)
    return [int(wide.sum()), int((wide * (2 * places + 1)).sum())]
