# SPDX-License-Identifier: Apache-2.0
"""``weft bench transfer``: the transfer engine between two processes, beside the same loops without it.

    weft bench transfer --local --provider tcp --json FILE      both sides on this machine
    weft bench transfer server                                   prints the client's command, serves one client
    weft bench transfer client ADDRESS --provider tcp

The client measures and the server only makes progress. Each row is one size of one call: ``write``, ``read``,
``scatter`` (8 targets per operation), ``paged_write`` (1000 pages of 4 KiB as one operation, in shuffled
order on both sides; ``pool`` says out of how many times as many; its baseline ``one_write`` is one write of
the same bytes), ``write_rate`` (8 B to 4 KiB, a window of 64) and ``write_imm_latency`` (half a round trip of a write
with an immediate). ``us`` is per operation. The baseline ``raw`` is plain ``fi_writemsg`` / ``fi_readmsg`` on
one endpoint in the same two processes; the two alternate, so that a busy machine disturbs both. The bytes of one
operation of each call are compared afterwards (``checked``). NIXL and Mooncake, where both sides have them installed,
do ``write``, ``read`` and ``paged_write`` at the end of the same run (their threads would disturb the others):
baselines ``nixl`` and ``mooncake``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from weft import _core
from weft.bench.report import Report, Row, add_report_arguments, plain_text
from weft.bench.transfer_dial import dialled, free_port, own_address, serving
from weft.bench.transfer_line import TIMEOUT_S, Line
from weft.bench.transfer_loads import BUFFER_BYTES, MIB, PAGE_BYTES, PAGES, Load, pairs_of, plan_loads
from weft.bench.transfer_side import describe_nics, open_side, pin, serve
from weft.errors import Error, PeerLost, invalid
from weft.runtime.bootstrap import TcpAddress
from weft.runtime.endings import end_with_parent
from weft.runtime.progress import progress
from weft.transfer import Pages
from weft.transfer.engine import ANY_RAIL

_LOCAL = "127.0.0.1"
REPEATS = 3  # of the engine and of each baseline, before the other has its turn


class Client:
    """The measuring side."""

    def __init__(self, line: Line, args: argparse.Namespace) -> None:
        self.line, self.args = line, args
        self.side = open_side(args, "client")  # first: what is wrong with the provider is said here
        theirs = line.recv()
        line.send(self.side.descriptor())
        self.side.meet(theirs)
        self.side.buffer[:] = os.urandom(MIB) * (BUFFER_BYTES // MIB)

    @contextlib.contextmanager
    def served(self, who: str) -> Iterator[None]:
        """Have the server answer the engine's or the raw endpoint's echoes inside the block."""
        self.line.send({"do": f"serve {who}"})
        self.line.recv()
        yield
        if who == "raw":
            self.side.raw.stop_serving(TIMEOUT_S)
        else:
            _core.measure.transfer_stop_serving(self.side.engine.core, self.side.peer.core, TIMEOUT_S)

    def raw_seconds(self, load: Load, repeats: int) -> list[float]:
        with self.served("raw"):
            return list(self.side.raw.measure(*load.to_core(repeats), self.side.peer.core, TIMEOUT_S))

    def engine_seconds(self, load: Load, repeats: int) -> list[float]:
        with self.served("engine"):
            return list(
                _core.measure.transfer_measure(
                    self.side.engine.core,
                    self.side.memory.core,
                    self.side.remote.core,
                    *load.to_core(repeats),
                    load.rail,
                    TIMEOUT_S,
                )
            )

    def check(self, load: Load) -> bool:
        """Run one operation of the load by itself and compare what arrived, byte for byte."""
        side = self.side
        engine, n = side.engine, min(load.moved_bytes, BUFFER_BYTES)
        if load.call == "read":
            self.order({"do": "fill", "with": 0x5A})
            before = bytes(side.buffer[:n])
            engine.read(side.memory, side.remote, n).wait()
            arrived = side.buffer[:n] == b"\x5a" * n
            side.buffer[:n] = before
            return arrived
        self.order({"do": "fill", "with": 0x11})
        sent = bytes(side.buffer[:n])  # the server's echoes write into the first bytes of this side's buffer
        if load.call == "paged_write":
            src = Pages([(7 * i + 3) % PAGES for i in range(PAGES)], PAGE_BYTES)
            dst = Pages([(13 * i + 5) % PAGES for i in range(PAGES)], PAGE_BYTES)
            engine.write_pages(side.memory, src, side.remote, dst, PAGE_BYTES, imm=1).wait()
            shown = self.after_flush(n)
            return all(
                shown[d * PAGE_BYTES : (d + 1) * PAGE_BYTES] == sent[s * PAGE_BYTES : (s + 1) * PAGE_BYTES]
                for s, d in zip(src.indices, dst.indices, strict=True)  # type: ignore[arg-type]
            )
        engine.write(side.memory, side.remote, n, imm=1).wait()
        return self.after_flush(n) == sent

    def after_flush(self, count: int) -> bytes:
        """Return the first bytes of the server's buffer, after all that this side wrote is there."""
        with self.served("engine"):
            _core.measure.transfer_measure(
                self.side.engine.core,
                self.side.memory.core,
                self.side.remote.core,
                "write_imm_latency",
                0,
                1,
                1,
                1,
                1,
                ANY_RAIL,
                TIMEOUT_S,
            )
        return bytes(self.order({"do": "show", "at": 0, "count": count})["bytes"])

    def order(self, message: dict[str, Any]) -> Any:
        self.line.send(message)
        return self.line.recv()


def ratio_by_round(baseline_us: list[float], engine_us: list[float]) -> float:
    """Return the median over rounds of baseline time over engine time: neighbours in time share their luck."""
    rounds = range(0, len(engine_us), REPEATS)
    return statistics.median(
        statistics.median(baseline_us[at : at + REPEATS]) / statistics.median(engine_us[at : at + REPEATS])
        for at in rounds
    )


def measure_load(client: Client, load: Load, rounds: int) -> Row:
    """Measure one row: engine and raw alternate, so that both see the same disturbances."""
    engine_us: list[float] = []
    raw_us: list[float] = []
    one_write_us: list[float] = []
    one_write = Load("write", load.moved_bytes, 1, 1)
    for _ in range(rounds):
        engine_us += [s / load.operations * 1e6 for s in client.engine_seconds(load, REPEATS)]
        if client.side.raw is not None:
            raw_us += [s / load.operations * 1e6 for s in client.raw_seconds(load, REPEATS)]
        if load.call == "paged_write":
            one_write_us += [s * 1e6 for s in client.engine_seconds(one_write, REPEATS)]
    baselines = {}
    if raw_us:
        baselines["raw"] = statistics.median(raw_us)
    if one_write_us:
        baselines["one_write"] = statistics.median(one_write_us)
    median = statistics.median(engine_us)
    extra: dict[str, Any] = {
        "gbit_per_s": round(load.moved_bytes * 8 / median / 1e3, 3),
        "mops": round(1 / median, 4),
    }
    link_gbit_per_s = sum(nic.gbit_per_s for nic in client.side.engine.nics)
    if link_gbit_per_s:
        extra["of_link"] = round(extra["gbit_per_s"] / link_gbit_per_s, 3)
    if raw_us:
        extra["of_raw"] = round(ratio_by_round(raw_us, engine_us), 3)
        extra["of_raw_best"] = round(min(raw_us) / min(engine_us), 3)
    if load.call == "write_imm_latency" and raw_us:
        extra["added_us"] = round(median - statistics.median(raw_us), 3)
        extra["added_us_best"] = round(min(engine_us) - min(raw_us), 3)
    if load.rail != ANY_RAIL:
        extra["rail"] = load.rail
    if one_write_us:
        extra["pool"] = load.pool
        extra["of_one_write"] = round(ratio_by_round(one_write_us, engine_us), 3)
        extra["of_one_write_best"] = round(min(one_write_us) / min(engine_us), 3)
    return Row(
        load.call, "bytes", None, load.moved_bytes, engine_us, None, client.check(load), baselines, extra
    )


def measure_others(client: Client, loads: Sequence[Load], rows: Sequence[Row], rounds: int) -> list[str]:
    """Add what other engines need for the same work to the rows; return notes about them."""
    side = client.side
    opened = side.open_others(client.line.host)
    theirs = client.order({"do": "open others", "descriptors": opened["descriptors"]})
    absent: dict[str, str] = {**theirs["absent"], **opened["absent"]}
    for name, other in side.others.items():
        if name in absent:
            continue
        try:
            other.meet(theirs["descriptors"][name])
            for load, row in zip(loads, rows, strict=True):
                if load.call not in ("write", "read", "paged_write"):
                    continue
                pairs, kind = pairs_of(load), "read" if load.call == "read" else "write"
                taken = other.seconds(kind, pairs, load.nbytes, 1 + rounds * REPEATS)[
                    1:
                ]  # the first connects
                operations = 1 if load.call == "paged_write" else len(pairs)
                row.baselines[name] = statistics.median(taken) / operations * 1e6
        except Exception as error:  # a foreign package's; what was measured without it stays
            absent[name] = f"gave up: {error}"
    notes = [f"{name}: {why}." for name, why in sorted(absent.items())]
    if set(side.others) - set(absent):
        notes.append(
            "nixl, mooncake: their Python interfaces, all operations of a repetition as one request."
        )
    return notes


def run_client(line: Line, args: argparse.Namespace) -> int:
    """Measure everything, print and write it. Returns 0 when all that arrived was right."""
    calls = args.calls.split(",") if args.calls else None
    loads = plan_loads(calls, args.quick, len(args.nics.split(",")) if args.nics else 1)
    client = Client(line, args)
    nic = client.side.engine.nics[0]
    of_link = ("of_link",) if nic.gbit_per_s else ()
    rail = ("rail",) if len(client.side.engine.nics) > 1 else ()
    report = Report(
        f"weft bench transfer, {nic.provider} on {nic.name}",
        (*rail, "gbit_per_s", *of_link, "mops", "of_raw", "of_raw_best", "added_us", "pool", "of_one_write"),
        wide=args.wide,
        names_rows=(*rail, "pool"),
    )
    with progress() as bar:
        task = bar.add_task("transfer", total=len(loads))
        for load in loads:
            bar.update(task, description=f"{load.call} {load.nbytes} B")
            report.add(measure_load(client, load, args.rounds))
            bar.advance(task)
    notes = measure_others(client, loads, report.rows, args.rounds)
    in_use = describe_nics(client.side.engine)
    line.send({"do": "quit"})
    client.side.engine.close()
    report.note(in_use)
    raw = ("of raw", "of raw best", "raw us (ratio)")
    report.note(
        "raw: plain fi_writemsg / fi_readmsg in the same processes, alternating with the engine", *raw
    )
    report.note(
        "of raw: raw's time over the engine's (1 is equal, more is faster), median over rounds; best: of the minima",
        *raw[:2],
    )
    report.note("us: per operation; latency: half a round trip")
    for note in notes:
        report.note(note)
    if cpus := getattr(args, "cpus", None):
        os.sched_setaffinity(0, cpus)  # the report tells how many the machine has
    report.finish(args.json, args.plot)
    return 0 if all(row.checked for row in report.rows) else 1


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft bench transfer``."""
    parser.description = plain_text(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "command", nargs="?", choices=["server", "client"], help="one side of a run over a network"
    )
    parser.add_argument("address", nargs="?", help="client: HOST:PORT that the server printed")
    parser.add_argument("--local", action="store_true", help="start both sides on this machine")
    parser.add_argument(
        "--provider", default="tcp", help="tcp, shm, or any name of weft.transfer.provider_names()"
    )
    parser.add_argument("--nics", help="comma-separated NICs, one rail each (default: the first usable one)")
    parser.add_argument("--host", help="server: address to listen on (default: the one that leads elsewhere)")
    parser.add_argument("--port", type=int, default=0, help="server: port to listen on (default: any)")
    parser.add_argument("--calls", help="comma-separated calls to measure (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="how often engine and raw take turns (default: 9)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer operations per repetition")
    parser.add_argument("--no-pin", action="store_true", help="do not pin the two processes to CPUs")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run one side, or both."""
    if args.rounds < 1:
        raise invalid("--rounds", args.rounds, "1 or more")
    if not 0 <= args.port < 1 << 16:
        raise invalid("--port", args.port, "0 (any) to 65535")
    if args.local == bool(args.command):
        raise invalid("command", args.command or "nothing", "server, client ADDRESS, or --local")
    if args.command == "server":
        return run_server(args)
    if args.command == "client":
        with dialled(args.address) as (ranks, own):
            return run_client(Line(ranks, own), args)
    return run_local(args)


def run_server(args: argparse.Namespace) -> int:
    """Serve one client, which knows the job's secret."""
    host, port = args.host or own_address(), args.port or free_port(args.host or own_address())
    with serving(host, port) as ranks:
        serve(Line(ranks, host), args)
    return 0


def run_local(args: argparse.Namespace) -> int:
    """Start a server process, be its client, and see it off."""
    context = multiprocessing.get_context("spawn")
    place, secret = f"{_LOCAL}:{free_port(_LOCAL)}", secrets.token_bytes(32)
    server = context.Process(target=_local_server, args=(place, secret, args, os.getpid()), daemon=True)
    server.start()
    if not args.no_pin:
        args.cpus = pin(0)
    try:
        return run_client(Line(TcpAddress(place, 0, 2, secret), _LOCAL), args)
    except BaseException:  # a signal, too: nobody waits for a server without a client
        server.kill()
        raise
    finally:
        server.join(10)
        if server.is_alive():
            server.kill()


def _local_server(place: str, secret: bytes, args: argparse.Namespace, parent: int) -> None:
    end_with_parent(parent)
    if not args.no_pin:
        pin(1)
    with contextlib.suppress(PeerLost, Error, OSError):
        serve(Line(TcpAddress(place, 1, 2, secret), _LOCAL), args)
