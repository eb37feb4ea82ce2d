# SPDX-License-Identifier: Apache-2.0
"""``weft bench channel``: the calls that kernels make on the channel to a peer, beside the network's own loop.

    weft bench channel --provider tcp,shm --json FILE       two CPU ranks of this machine, by proxies over both
    weft bench channel --provider mapped                     the same calls on memory that both map

Rows: ``put_with_signal``, ``signal`` and ``add`` are half a round trip; ``put`` is one of many in a row, until the last
is known to be there; ``put_flush`` is a put whose source is free again. ``floor_us`` is the provider's own loop without
engine, proxy or kernel (``fi_writemsg``), in the same two processes, taking turns: a write with an immediate for half a
round trip, writes with 64 under way for the rest. ``fifo`` is the queue between kernels and proxies by itself, with so
many threads that push and nothing behind it; ``fifo_push_to_pop`` one command at a time, until it is taken; its
``round_trip_us`` until the kernel has seen the answer. Arrived bytes are compared (``checked``). ``--device cuda`` has
kernels of GPUs make the calls; two ranks that share one GPU take turns on it, and time little else.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft import _core
from weft.bench.report import Report, Row, add_report_arguments
from weft.bench.transfer_side import PROVIDERS, choose_nics, pin
from weft.errors import Error, invalid
from weft.runtime.progress import progress

if TYPE_CHECKING:
    from weft.testing.ranks import Rank

MIB = 1 << 20
ROOM_BYTES = 16 * MIB
TIMEOUT_S = 60.0
REPEATS = 3  # of the channel and of the raw loop, before the other has its turn
RAW_WINDOW = 64
FIFO_CAPACITY = 2048
MAPPED = "mapped"
CUDA = "cuda"
CALLS = ("put_with_signal", "signal", "add", "put", "put_flush", "fifo")


@dataclass(frozen=True)
class Load:
    """One row: ``count`` calls of ``nbytes`` per repetition, to and fro or all one way."""

    call: str
    nbytes: int
    count: int
    is_round_trip: bool

    @property
    def operations(self) -> int:
        """Calls one after the other in the time of a repetition."""
        return 2 * self.count if self.is_round_trip else self.count


def plan_loads(calls: Sequence[str], quick: bool) -> list[Load]:
    """Return the rows of the calls over a network, in order."""
    trips, volume = (100, 2 * MIB) if quick else (2000, 64 * MIB)
    loads = [
        Load(
            "put_with_signal", n, trips, True
        )  # the raw loop answers with 8 bytes: large ones would not compare
        for n in (16, 256, 4096)
    ]
    loads += [Load(call, 8, trips, True) for call in ("signal", "add")]
    loads += [Load("put", n, min(max(volume // n, 8), 10 * trips), False) for n in (16, 4096, 65536, MIB)]
    loads += [Load("put_flush", n, max(trips * 4096 // max(n, 4096), 10), False) for n in (16, MIB)]
    return [load for load in loads if load.call in calls]


class Pair:
    """This rank's side: the channel's loop, and the provider's own where there is one."""

    def __init__(self, me: Rank, provider: str, nic: str, device: str = "cpu") -> None:
        import torch
        from torch.utils.dlpack import from_dlpack

        from weft.runtime.communicator import Communicator

        self.me, self.adds = me, 0
        transport = MAPPED if provider == MAPPED else "proxy"
        if device == CUDA:
            torch.cuda.set_device(me.rank % torch.cuda.device_count())
        self.comm = Communicator(me.group, timeout_s=TIMEOUT_S, transport=transport, device=device)
        self.loop = _core.measure.ChannelLoop.create(self.comm.core, ROOM_BYTES)
        self.sent = from_dlpack(self.loop.sent(ROOM_BYTES))
        self.received = from_dlpack(self.loop.received(ROOM_BYTES))
        self.raw: Any = None
        if provider.startswith("fabric:"):
            self._buffer = torch.zeros(ROOM_BYTES, dtype=torch.uint8)
            found = _core.transfer_find_provider(provider)
            self.raw = _core.measure.transfer_raw_loop(found, nic, self._buffer.data_ptr(), ROOM_BYTES)
            self.raw.connect(self._of_other(self.raw.address))

    def _of_other(self, mine: Any) -> Any:
        import torch.distributed as dist

        values: list[Any] = [None, None]
        dist.all_gather_object(values, mine, group=self.me.group)
        return values[1 - self.me.rank]

    def channel_seconds(self, load: Load, repeats: int) -> list[float]:
        nbytes = max(load.nbytes // 16 * 16, 16)
        seconds = self.loop.run(load.call, load.is_round_trip, nbytes, load.count, repeats)
        self.adds += load.count * repeats if load.call == "add" else 0
        return list(seconds)

    def raw_seconds(self, load: Load, repeats: int) -> list[float]:
        """Measure the provider's loop on rank 0, while rank 1 answers; [] where there is none."""
        if self.raw is None:
            return []
        if self.me.rank == 1:
            self.raw.serve(TIMEOUT_S)
            self.comm.barrier()
            return []
        kind = "write_imm_latency" if load.is_round_trip else "write"
        window = 1 if load.call == "put_flush" else RAW_WINDOW
        seconds = self.raw.measure(kind, load.nbytes, load.count, window, 1, repeats, None, TIMEOUT_S)
        self.raw.stop_serving(TIMEOUT_S)
        self.comm.barrier()
        return list(seconds)

    def check(self, load: Load) -> None:
        """Compare what arrives by one more call on rank 1. Collective. Raises: Error."""
        import torch

        if load.call in ("signal", "add"):  # signals are what the loop waits for
            if load.call == "add" and self.loop.added != self.adds:
                raise Error(f"bench channel: expected {self.adds} additions, saw {self.loop.added}")
            return
        nbytes = max(load.nbytes // 16 * 16, 16)
        what = torch.randint(
            256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
        )
        self.sent[:nbytes] = what
        self.received[:nbytes] = 0
        if self.sent.is_cuda:
            torch.cuda.synchronize()
        self.comm.barrier()
        self.loop.run(load.call, load.is_round_trip, nbytes, 1, 1)
        if self.me.rank == 1 and not torch.equal(self.received[:nbytes].cpu(), what):
            raise Error(f"bench channel: {load.call} of {nbytes} bytes: what arrived is not what was sent")
        self.comm.barrier()


def measure(
    me: Rank, provider: str, nic: str, device: str, loads: Sequence[Load], rounds: int, is_pinned: bool
) -> list[Row]:
    """Measure on this rank; collective over two. Returns the rows, for rank 0 to report."""
    cpus = pin(me.rank) if is_pinned else None
    if provider != MAPPED:
        nic = nic or choose_nics(provider, local=True)[0]
        os.environ.update(WEFT_PROXY_PROVIDER=provider, WEFT_PROXY_NICS=nic)
        _core.config_reload()
    pair = Pair(me, provider, nic, device)
    rows = []
    with progress(enabled=me.rank == 0) as bar:
        task = bar.add_task(f"channel, {provider}", total=len(loads))
        for load in loads:
            pair.check(load)
            rows.append(_measure_load(pair, load, rounds, provider))
            rows[-1].extra["device"] = device
            pair.check(load)
            rows[-1].checked = True
            bar.advance(task)
    if cpus:
        os.sched_setaffinity(0, cpus)
    return rows


def _measure_load(pair: Pair, load: Load, rounds: int, provider: str) -> Row:
    channel_us: list[float] = []
    raw_us: list[float] = []
    for _ in range(rounds):
        channel_us += [s / load.operations * 1e6 for s in pair.channel_seconds(load, REPEATS)]
        raw_us += [s / load.operations * 1e6 for s in pair.raw_seconds(load, REPEATS)]
    us = max(statistics.median(channel_us), 1e-6)  # rank 1 measures nothing
    extra: dict[str, Any] = {"provider": provider, "mops": round(1 / us, 4)}
    if load.call.startswith("put"):
        extra["gb_s"] = round(load.nbytes / us / 1e3, 3)
    if raw_us:
        floor = statistics.median(raw_us)
        extra |= {"added_us": round(us - floor, 3), "of_raw": round(floor / us, 3)}
    floor_us = statistics.median(raw_us) if raw_us else None
    return Row(load.call, "bytes", None, load.nbytes, channel_us, floor_us, False, {}, extra, series=provider)


def measure_fifo(device: str, quick: bool, rounds: int) -> list[Row]:
    """Return the rows of the queue by itself; order and number of commands are checked in the core."""
    count = 1 << (16 if quick else 21)
    where = "cuda:0" if device == CUDA else device
    rows = []
    for producers in (1, 4, 64) if device == CUDA else (1, 4):
        each = count // producers
        samples = [
            _core.measure.fifo_seconds(where, producers, each, FIFO_CAPACITY) / (each * producers) * 1e6
            for _ in range(rounds)
        ]
        extra = {"producers": producers, "mops": round(1 / statistics.median(samples), 3), "device": device}
        rows.append(
            Row("fifo", "command", None, 16, samples, None, True, {}, extra, f"{producers} producers")
        )
    trips, pops, look_us = _core.measure.fifo_trips(where, min(count // 64, 20_000), FIFO_CAPACITY)
    extra = {"producers": 1, "device": device, "round_trip_us": round(statistics.median(trips), 3)}
    extra["look_us"] = round(look_us, 3)
    rows.append(Row("fifo_push_to_pop", "command", None, 16, pops, None, True, {}, extra))
    return rows


def _networks(names: str, device: str) -> list[tuple[str, str]]:
    """Return (provider, NIC) of each name. Raises: weft.Error for one that is not usable here.

    With GPUs the ranks look for NICs themselves, which may start CUDA, and a process that has must not fork.
    """
    providers = [PROVIDERS.get(name, name) for name in names.split(",") if name]
    if device == CUDA and MAPPED in providers:
        raise invalid("--provider", MAPPED, "networks with --device cuda")
    is_late = device == CUDA
    return [
        (name, "" if is_late or name == MAPPED else choose_nics(name, local=True)[0]) for name in providers
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft bench channel``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--provider",
        default="tcp,shm",
        help="comma-separated: tcp, shm, mapped, or any name of weft.transfer.provider_names()",
    )
    parser.add_argument("--calls", default="all", help=f"comma-separated: {', '.join(CALLS)} (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", CUDA), help="whose kernels (default: cpu)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of channel and raw loop (default: 7)")
    parser.add_argument("--quick", action="store_true", help="fewer calls per repetition")
    parser.add_argument("--no-pin", action="store_true", help="do not pin the two ranks to CPUs")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Returns 0; what arrives wrong raises."""
    calls = CALLS if args.calls == "all" else tuple(args.calls.split(","))
    if unknown := sorted(set(calls) - set(CALLS)):
        raise invalid("--calls", unknown, ", ".join(CALLS))
    if args.rounds < 1:
        raise invalid("--rounds", args.rounds, "1 or more")
    networks = _networks(args.provider, args.device)
    loads = plan_loads(calls, args.quick)
    rows: list[Row] = []
    for provider, nic in networks if loads else []:
        rows += _on_two_ranks(
            args.device, measure, provider, nic, args.device, loads, args.rounds, not args.no_pin
        )
    if "fifo" in calls:
        rows += measure_fifo(args.device, args.quick, args.rounds)
    columns = ("device", "provider", "producers", "mops", "gb_s", "added_us", "of_raw")
    report = Report("weft bench channel", columns, wide=args.wide, names_rows=columns[:3])
    for row in rows:
        report.add(row)
    report.note("us: half a round trip; of put, fifo and put_flush: one of many")
    report.note("floor: fi_writemsg alone", "floor us", "over floor")
    report.note("added us: what the channel adds to the floor", "added us")
    report.note("of raw: the floor over the channel (1 is equal)", "of raw")
    report.finish(args.json, args.plot)
    return 0


def _on_two_ranks(device: str, function: Callable[..., list[Row]], *args: Any) -> list[Row]:
    from weft.testing.ranks import run_ranks

    rows: list[Row] = run_ranks(2, function, *args, with_gpus=device == CUDA, deadline_s=900.0)[0]
    return rows
