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
one endpoint in the same two processes; the two alternate, so that a busy machine disturbs both. What one
operation of each call moved is compared byte for byte afterwards (``checked``). NIXL and Mooncake, where both sides
have them installed, do ``write``, ``read`` and ``paged_write`` at the end of the same run (their threads would disturb
the others): baselines ``nixl`` and ``mooncake``.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import socket
import statistics
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft import _core
from weft.bench.report import Report, Row, add_report_arguments, plain_text, progress
from weft.bench.transfer_dial import dialled, free_port, own_address, serving
from weft.bench.transfer_others import Other, open_others
from weft.errors import Error, PeerLost, invalid
from weft.runtime.endings import end_with_parent
from weft.transfer import Pages, Span, TransferEngine
from weft.transfer.engine import ANY_RAIL

MIB = 1 << 20
BUFFER_BYTES = 64 * MIB
TIMEOUT_S = 120.0
DIAL_S = 20.0
PAGE_BYTES, PAGES = 4096, 1000
REPEATS = 3  # of the engine and of each baseline, before the other has its turn
RATE_BYTES = (8, 64, 512, 4096)
RAIL_BYTES = 16 * MIB
LARGE_BYTES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PROVIDERS = {"tcp": "fabric:tcp", "shm": "fabric:shm"}


@dataclass(frozen=True)
class Load:
    """One row to measure: ``count`` operations of ``nbytes`` per repetition, ``window`` of them under way."""

    call: str
    nbytes: int
    count: int
    window: int
    pool: int = 1  # paged_write: pages are picked out of so many times as many
    rail: int = ANY_RAIL  # of the engine; the raw loop has but one

    @property
    def kind(self) -> str:
        """What the loops in C++ call it."""
        return "write" if self.call == "write_rate" else self.call

    def to_core(self, repeats: int) -> tuple[str, int, int, int, int, int]:
        """Return what both loops in C++ take, in their order."""
        return (self.kind, self.nbytes, self.count, self.window, self.pool, repeats)

    @property
    def moved_bytes(self) -> int:
        """Bytes of one operation."""
        return PAGE_BYTES * PAGES if self.call == "paged_write" else self.nbytes

    @property
    def operations(self) -> int:
        """Operations per repetition, for the time of one."""
        if self.call == "paged_write":
            return 1
        return 2 * self.count if self.call == "write_imm_latency" else self.count


def plan_loads(calls: Sequence[str] | None, quick: bool, rails: int) -> list[Load]:
    """Return the rows to measure, in order. Raises: weft.Error for calls that there are none of.

    With several rails there is a row for each alone, too.
    """
    volume = (8 if quick else 64) * MIB
    large = [Load(call, n, max(volume // n, 1), 16) for call in ("write", "read") for n in LARGE_BYTES]
    loads = [Load("write_imm_latency", n, 200 if quick else 2000, 1) for n in (8, 4096)]
    # Over tcp the speed depends on how the two processes fall into step: long repetitions see all of it.
    loads += [Load("write_rate", n, 1000 if quick else 20000, 64) for n in RATE_BYTES]
    loads += [Load("paged_write", PAGE_BYTES, PAGES, 64, pool) for pool in (1, 4)]
    loads += large
    if rails > 1:
        loads += [Load("write", RAIL_BYTES, max(volume // RAIL_BYTES, 1), 16, rail=i) for i in range(rails)]
    loads += [Load("scatter", n, max(volume // n // 4, 1), 16) for n in (64 << 10, MIB)]
    known = list(dict.fromkeys(load.call for load in loads))
    for call in calls or ():
        if call not in known:
            raise invalid("--calls", call, ", ".join(known))
    return [load for load in loads if not calls or load.call in calls]


# ---- two sides and the line between them


MESSAGE_BYTES_MAX = 4 * BUFFER_BYTES


def to_json(value: object) -> object:
    """Return bytes as JSON can carry them."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(type(value).__name__)


def from_json(value: dict[str, Any]) -> Any:
    """Undo ``to_json``."""
    return base64.b64decode(value["base64"]) if set(value) == {"base64"} else value


@contextlib.contextmanager
def naming_the_loss() -> Iterator[None]:
    """Raise what breaks a connection inside the block as PeerLost."""
    try:
        yield
    except TimeoutError:
        raise PeerLost(f"bench transfer: the other side is lost: no word for {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise PeerLost(f"bench transfer: the other side is lost: {error}") from None


class Line:
    """JSON messages over a connection, each with its length in front. A lost other side raises PeerLost."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(TIMEOUT_S)

    @property
    def host(self) -> str:
        """This side's address as the other side knows it."""
        name = self._connection.getsockname()
        return str(name[0]) if self._connection.family == socket.AF_INET else "127.0.0.1"

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, default=to_json).encode()
        with naming_the_loss():
            self._connection.sendall(struct.pack("<I", len(body)) + body)

    def recv(self) -> Any:
        (count,) = struct.unpack("<I", self._exactly(4))
        if count > MESSAGE_BYTES_MAX:
            raise invalid("message", f"{count} bytes", f"up to {MESSAGE_BYTES_MAX}")
        return json.loads(self._exactly(count), object_hook=from_json)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            with naming_the_loss():
                part = self._connection.recv(count - len(parts))
            if not part:
                raise PeerLost("bench transfer: the other side closed its connection")
            parts += part
        return bytes(parts)


@dataclass
class Side:
    """One process's buffer, engine and raw endpoint."""

    buffer: mmap.mmap
    span: Span
    engine: TransferEngine
    raw: Any
    memory: Any = field(init=False)
    peer: Any = field(init=False, default=None)
    remote: Any = field(init=False, default=None)
    others: dict[str, Other] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.engine.register(self.span, remote_read=True, remote_write=True)

    def card(self) -> dict[str, Any]:
        """Return what the other side needs."""
        return {
            "address": self.engine.address,
            "descriptor": self.memory.descriptor,
            "raw": None if self.raw is None else self.raw.address,
        }

    def meet(self, card: dict[str, Any]) -> None:
        """Connect to the side with that card."""
        self.peer = self.engine.connect(card["address"], DIAL_S)
        self.remote = self.engine.attach(card["descriptor"], DIAL_S)
        if self.raw is not None and card["raw"] is not None:
            self.raw.connect(card["raw"])

    def open_others(self, host: str) -> dict[str, Any]:
        """Open other engines on the same buffer; return their cards, or why they are absent."""
        self.others, absent = open_others(self.span.address, BUFFER_BYTES, host)
        return {"cards": {name: other.card() for name, other in self.others.items()}, "absent": absent}


def pin(cpu: int) -> set[int]:
    """Keep this process on one CPU; unpinned runs swing by hundreds of microseconds. Return those it had."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(available)[cpu % len(available)]})
    return available


def open_side(args: argparse.Namespace, name: str) -> Side:
    """Open engine, raw endpoint and a buffer that both use."""
    provider = PROVIDERS.get(args.provider, args.provider)
    nic_names = (
        args.nics.split(",") if args.nics else choose_nics(provider, args.command != "server" and args.local)
    )
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    buffer[:] = bytes(BUFFER_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    span = Span(address, BUFFER_BYTES, owner=buffer)
    engine = TransferEngine(provider, nic_names, name=name, timeout_s=TIMEOUT_S)
    raw = None
    if provider.startswith("fabric:"):
        raw = _core.transfer_raw_loop(
            _core.transfer_find_provider(provider), nic_names[0], address, BUFFER_BYTES
        )
    return Side(buffer, span, engine, raw)


def choose_nics(provider: str, local: bool) -> list[str]:
    """Return the NIC to use: on one machine the loopback interface, where there is a choice."""
    nics = _core.transfer_find_provider(provider).probe()
    usable = [nic["name"] for nic in nics if not nic["unusable_because"]]
    if not usable:
        whys = "; ".join(nic["unusable_because"] for nic in nics)
        raise invalid("--provider", f"{provider} (unusable here: {whys})", "another one")
    local_ones = [name for name in usable if name.endswith("@127.0.0.1")]
    return local_ones[:1] if local and local_ones else usable[:1]


def serve(line: Line, args: argparse.Namespace) -> None:
    """Be the passive side of one run: do what the client says until it says goodbye."""
    side = open_side(args, "server")
    if args.command == "server":
        print(describe_nics(side.engine), flush=True)
    line.send(side.card())
    side.meet(line.recv())
    answered = _core.TransferAnswered()
    while (order := line.recv())["do"] != "quit":
        if order["do"] == "serve raw":
            line.send({"ready": True})
            side.raw.serve(TIMEOUT_S)
        elif order["do"] == "serve engine":
            line.send({"ready": True})
            _core.transfer_serve(
                side.engine.core,
                side.peer.core,
                side.memory.core,
                side.remote.core,
                answered,
                TIMEOUT_S,
            )
        elif order["do"] == "fill":
            side.buffer[:] = bytes([order["with"]]) * BUFFER_BYTES
            line.send({"filled": True})
        elif order["do"] == "open others":
            opened = side.open_others(line.host)
            line.send(opened)
            for name, card in order["cards"].items():
                if name in side.others:
                    side.others[name].meet(card)
        elif order["do"] == "show":
            line.send({"bytes": side.buffer[order["at"] : order["at"] + order["count"]]})
    side.engine.close()


class Client:
    """The measuring side."""

    def __init__(self, line: Line, args: argparse.Namespace) -> None:
        self.line, self.args = line, args
        self.side = open_side(args, "client")  # first: what is wrong with the provider is said here
        theirs = line.recv()
        line.send(self.side.card())
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
            _core.transfer_stop_serving(self.side.engine.core, self.side.peer.core, TIMEOUT_S)

    def raw_seconds(self, load: Load, repeats: int) -> list[float]:
        with self.served("raw"):
            return list(self.side.raw.measure(*load.to_core(repeats), self.side.peer.core, TIMEOUT_S))

    def engine_seconds(self, load: Load, repeats: int) -> list[float]:
        with self.served("engine"):
            return list(
                _core.transfer_measure(
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
            _core.transfer_measure(
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


def pairs_of(load: Load) -> list[tuple[int, int]]:
    """Return the offsets, here and there, of what one request of another engine moves."""
    if load.call == "paged_write":
        chance = random.Random(1)
        here, there = (chance.sample(range(load.count * load.pool), load.count) for _ in range(2))
        return [(a * load.nbytes, b * load.nbytes) for a, b in zip(here, there, strict=True)]
    places = max(BUFFER_BYTES // load.nbytes, 1)
    return [(i % places * load.nbytes,) * 2 for i in range(load.count)]


def measure_others(client: Client, loads: Sequence[Load], rows: Sequence[Row], rounds: int) -> list[str]:
    """Add what other engines need for the same work to the rows; return notes about them."""
    side = client.side
    opened = side.open_others(client.line.host)
    theirs = client.order({"do": "open others", "cards": opened["cards"]})
    absent: dict[str, str] = {**theirs["absent"], **opened["absent"]}
    for name, other in side.others.items():
        if name in absent:
            continue
        try:
            other.meet(theirs["cards"][name])
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


def describe_nics(engine: TransferEngine) -> str:
    """Return one line: the NICs in use, what they say of themselves, and what they carry together."""
    nics = engine.nics
    each = (
        f"{nic.name} (NUMA node {nic.numa_node if nic.numa_node >= 0 else '-'}, {nic.gbit_per_s or '?'} Gbit/s)"
        for nic in nics
    )
    total = sum(nic.gbit_per_s for nic in nics)
    return f"{nics[0].provider}, {len(nics)} rails: {', '.join(each)}; {total or '?'} Gbit/s in all"


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
    report.note("raw: plain fi_writemsg / fi_readmsg in the same processes, alternating with the engine.")
    report.note(
        "of_raw: raw's time over the engine's (1 is equal, more is faster), median over rounds; _best: of the minima."
    )
    report.note("us is per operation; latency is half a round trip.")
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
        with dialled(args.address) as connection:
            return run_client(Line(connection), args)
    return run_local(args)


def run_server(args: argparse.Namespace) -> int:
    """Serve one client, which knows the job's secret."""
    host, port = args.host or own_address(), args.port or free_port(args.host or own_address())
    with serving(host, port) as connection:
        serve(Line(connection), args)
    return 0


def run_local(args: argparse.Namespace) -> int:
    """Start a server process, be its client, and see it off."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    server = context.Process(target=_local_server, args=(theirs, args, os.getpid()), daemon=True)
    server.start()
    theirs.close()
    if not args.no_pin:
        args.cpus = pin(0)
    try:
        return run_client(Line(ours), args)
    except BaseException:  # a signal, too: nobody waits for a server without a client
        server.kill()
        raise
    finally:
        server.join(10)
        if server.is_alive():
            server.kill()


def _local_server(connection: socket.socket, args: argparse.Namespace, parent: int) -> None:
    end_with_parent(parent)
    if not args.no_pin:
        pin(1)
    with contextlib.suppress(PeerLost, Error, OSError):
        serve(Line(connection), args)
