# SPDX-License-Identifier: Apache-2.0
"""A long run with faults, every byte accounted for. The tests run some seconds of it; the real thing:

    PYTHONPATH=python python tests/system/transfer_soak.py --seconds 600 --json FILE

Half of the time goes to real peers over tcp that are killed again and again, half to a loopback network that
reorders, delays, refuses and drops. Whatever an operation reported as done is compared byte for byte at the
peer, whatever failed must have had a reason (a killed peer, a fault of the plan), nothing may stay under way,
and the process may not grow after its first quarter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path

from weft.errors import Error, PeerLost
from weft.transfer import FaultPlan, LoopbackNetwork, Memory, Pages, Remote, Transfer, TransferEngine

SLOTS, SLOT_BYTES = 8, 50000
TIMEOUT_S = 30.0
PEER_DEAD_S = 4.0  # who waits for a turn on a busy machine is not dead
KILLS_MIN = 2  # however long a new process takes to start
LOST_AFTER_S = 0.5  # the deadline of one operation on the loopback, where some are dropped
GROWTH_KIB_MAX = 16 << 10
# libfabric's completion queue over tcp is a ring of so many entries of 48 bytes, whose pages become resident in
# its first lap (seen with 1.17): a long run goes around once before it looks at what the process occupies.
FIRST_LAP = 1 << 18
GROWTH_KIB_MAX_OF_LONG = 2 << 10
LONG_S = 120.0


@dataclass
class Account:
    """What one run did, and what became of it."""

    provider: str
    seconds: float = 0.0
    operations: int = 0
    verified_bytes: int = 0
    failed_operations: int = 0
    peers_killed: int = 0
    stuck_operations: int = 0
    rss_kib_at_quarter: int = 0
    rss_kib_at_end: int = 0
    growth_kib_max: int = GROWTH_KIB_MAX

    def check(self) -> None:
        """Raise AssertionError unless all is accounted for."""
        assert self.verified_bytes > 0, self
        assert self.stuck_operations == 0, self
        grown = self.rss_kib_at_end - self.rss_kib_at_quarter
        assert grown < self.growth_kib_max, f"memory grew by {grown} KiB: {self}"


class Clock:
    """Tells when a run is over, and notes how large the process is."""

    def __init__(self, account: Account, seconds: float) -> None:
        self.account, self.seconds, self.began = account, seconds, time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def goes_on(self) -> bool:
        """Return whether time is left; called once per operation."""
        if not self.account.rss_kib_at_quarter and self.now > self.seconds / 4:
            self.account.rss_kib_at_quarter = rss_kib()
        return self.now < self.seconds

    def stop(self, engine: TransferEngine) -> None:
        """Write down what is left at the end."""
        self.account.seconds = round(self.now, 1)
        self.account.rss_kib_at_end = rss_kib()
        self.account.stuck_operations = sum(" bytes: " in line for line in engine.dump().splitlines())


def rss_kib() -> int:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def some_write(
    chance: random.Random, engine: TransferEngine, memory: Memory, remote: Remote, slot: int, imm: int
) -> tuple[Transfer, int]:
    """Write a random part of a slot, as a range or page by page; return the transfer and its bytes."""
    at, length = slot * SLOT_BYTES, chance.randrange(1, SLOT_BYTES)
    if chance.random() < 0.7:
        return engine.write(memory, remote, length, src_offset=at, dst_offset=at, imm=imm), length
    page = chance.randrange(1, 300)
    length = max(length // page, 1) * page
    pages = Pages(length // page, page, at)
    return engine.write_pages(memory, pages, remote, pages, page, imm=imm), length


def burst(
    chance: random.Random, engine: TransferEngine, memory: Memory, remote: Remote, slot: int, imm: int
) -> tuple[Transfer, int]:
    """Write a slot by many small writes, which a busy path sends together; return the last one and all bytes."""
    at, size = slot * SLOT_BYTES, chance.randrange(1, 1000)
    *first, last = range(at, at + size * chance.randrange(2, SLOT_BYTES // 1000), size)
    under_way = [engine.write(memory, remote, size, src_offset=place, dst_offset=place) for place in first]
    for transfer in under_way:
        transfer.wait()
    return engine.write(memory, remote, size, src_offset=last, dst_offset=last, imm=imm), last + size - at


# ---- real peers over a fabric, killed


def mirror(provider: str, line: Connection) -> None:
    """Receive into a buffer and say what is in it, until killed."""
    engine = TransferEngine(
        provider, name="mirror", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
    )
    buffer = bytearray(SLOTS * SLOT_BYTES)
    line.send((engine.address, engine.register(buffer, remote_read=True, remote_write=True).descriptor))
    peer = engine.connect(line.recv())
    while True:
        slot, count, length = line.recv()
        engine.imm(peer, slot).wait(count)
        at = slot * SLOT_BYTES
        line.send(bytes(buffer[at : at + length]))


class Mirror:
    """One peer process and what was written to it."""

    def __init__(self, engine: TransferEngine, provider: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=mirror, args=(provider, theirs), daemon=True)
        self.process.start()
        theirs.close()
        address, descriptor = self.line.recv()
        self.line.send(engine.address)
        self.peer = engine.connect(address)
        self.remote = engine.attach(descriptor)
        self.counts = [0] * SLOTS

    def end(self) -> None:
        """Kill it, if it lives, and let go of it."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
        self.line.close()


def go_around_once(engine: TransferEngine, memory: Memory, remote: Remote) -> None:
    """Fill the completion queue's ring for the first time; writes small enough to be injected leave no entry."""
    for _ in range(FIRST_LAP):
        engine.write(memory, remote, 1024).wait()


def soak_killed_peers(provider: str, seconds: float) -> Account:
    """Write to two processes that are killed now and then and replaced."""
    account = Account(provider)
    chance = random.Random(4)
    engine = TransferEngine(
        provider, name="soak", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
    )
    source = bytearray(SLOTS * SLOT_BYTES)
    memory = engine.register(source)
    mirrors = [Mirror(engine, provider) for _ in range(2)]
    if seconds >= LONG_S:
        go_around_once(engine, memory, mirrors[0].remote)
        account.growth_kib_max = GROWTH_KIB_MAX_OF_LONG
    clock = Clock(account, seconds)
    kill_every = max(seconds / 40, 2.0)
    next_kill = kill_every
    while clock.goes_on() or account.peers_killed < KILLS_MIN:
        one = chance.choice(mirrors)
        slot = chance.randrange(SLOTS)
        at = slot * SLOT_BYTES
        source[at : at + SLOT_BYTES] = chance.randbytes(SLOT_BYTES)
        doomed = clock.now > next_kill
        if doomed:
            next_kill += kill_every
            one.process.kill()
        try:
            write = burst if chance.random() < 0.3 else some_write
            transfer, length = write(chance, engine, memory, one.remote, slot, slot)
            account.operations += 1
            transfer.wait()
            one.counts[slot] += 1
            one.line.send((slot, one.counts[slot], length))
            assert one.line.recv() == source[at : at + length], "arrived damaged"
            account.verified_bytes += length
        except (Error, EOFError, BrokenPipeError, ConnectionResetError):
            assert doomed, "a living peer failed"
            account.failed_operations += 1
        if doomed:
            one.end()
            account.peers_killed += 1
            mirrors[mirrors.index(one)] = Mirror(engine, provider)
    clock.stop(engine)
    for one in mirrors:
        one.end()
    engine.close()
    return account


# ---- a network inside this process, with a plan of faults


def soak_loopback(seconds: float) -> Account:
    """Write over a network that reorders and delays everything, and now and then refuses or drops."""
    account = Account("loopback")
    chance = random.Random(5)
    network = LoopbackNetwork()
    a = TransferEngine(network, ["loop0", "loop1"], name="a", timeout_s=LOST_AFTER_S, peer_dead_s=TIMEOUT_S)
    b = TransferEngine(network, ["loop0"], name="b", timeout_s=TIMEOUT_S, peer_dead_s=TIMEOUT_S)
    source, target = bytearray(SLOTS * SLOT_BYTES), bytearray(SLOTS * SLOT_BYTES)
    memory, goal = a.register(source), b.register(target, remote_write=True)
    a.connect(b.address, TIMEOUT_S)
    remote, sender = a.attach(goal.descriptor, TIMEOUT_S), b.connect(a.address, TIMEOUT_S)
    network.set_plan(FaultPlan(seed=6, drop=1e-4, fail=1e-3, reorder=0.3, delay=0.05, spare_messages=True))
    if seconds >= LONG_S:
        account.growth_kib_max = GROWTH_KIB_MAX_OF_LONG
    counts: dict[int, int] = {}
    fresh = 0  # a failed write may still be counted: its slot goes on with another immediate
    imms = list(range(SLOTS))
    clock = Clock(account, seconds)
    while clock.goes_on():
        slot = chance.randrange(SLOTS)
        at, imm = slot * SLOT_BYTES, imms[slot]
        source[at : at + SLOT_BYTES] = chance.randbytes(SLOT_BYTES)
        transfer, length = some_write(chance, a, memory, remote, slot, imm)
        account.operations += 1
        try:
            transfer.wait(TIMEOUT_S)
            counts[imm] = counts.get(imm, 0) + 1
            b.imm(sender, imm).wait(counts[imm], LOST_AFTER_S)
        except Error as error:
            assert isinstance(error, PeerLost) or "loopback: damaged" in str(error), error
            account.failed_operations += 1
            fresh += 1
            imms[slot] = SLOTS + fresh
            continue
        assert target[at : at + length] == source[at : at + length], "arrived damaged"
        account.verified_bytes += length
    clock.stop(a)
    a.close()
    b.close()
    return account


def main() -> None:
    """Run both halves and write down how they ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    accounts = [soak_killed_peers("fabric:tcp", args.seconds / 2), soak_loopback(args.seconds / 2)]
    document = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform()},
        "command": "tests/system/transfer_soak.py",
        "runs": [asdict(account) for account in accounts],
    }
    print(json.dumps(document, indent=1))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    for account in accounts:
        account.check()


if __name__ == "__main__":
    main()
