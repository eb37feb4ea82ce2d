# SPDX-License-Identifier: Apache-2.0
"""A long run with faults: real peers over tcp that are killed again and again, every byte verified.

A few seconds as part of the tests; ``WEFT_SOAK_S=600 pytest tests/system/test_transfer_soak.py`` for the
real thing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
from multiprocessing.connection import Connection

import pytest

from weft.errors import Error, PeerLost
from weft.transfer import Pages, TransferEngine, nics

SLOTS, SLOT_BYTES = 8, 50000
SECONDS = float(os.environ.get("WEFT_SOAK_S", "8"))  # of this test only, not a setting of the library
TIMEOUT_S = 30.0
GROWTH_KIB_MAX = 64 << 10


def mirror(provider: str, line: Connection) -> None:
    """Receive into a buffer and say what is in it, until killed."""
    engine = TransferEngine(provider, name="mirror", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=2.0)
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
        address, descriptor = self.line.recv()
        self.line.send(engine.address)
        self.peer = engine.connect(address)
        self.remote = engine.attach(descriptor)
        self.counts = [0] * SLOTS


@pytest.mark.timeout(SECONDS + 120)
def test_every_byte_is_accounted_for_while_peers_die() -> None:
    provider = "fabric:tcp"
    if all(nic.unusable_because for nic in nics(provider)):
        pytest.skip("tcp is unusable here")
    chance = random.Random(4)
    engine = TransferEngine(provider, name="soak", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=2.0)
    source = bytearray(SLOTS * SLOT_BYTES)
    memory = engine.register(source)
    mirrors = [Mirror(engine, provider) for _ in range(2)]
    until = time.monotonic() + SECONDS
    next_kill = time.monotonic() + SECONDS / 4
    verified = killed = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() < until:
        one = chance.choice(mirrors)
        slot = chance.randrange(SLOTS)
        at, length = slot * SLOT_BYTES, chance.randrange(1, SLOT_BYTES)
        source[at : at + length] = chance.randbytes(length)
        doomed = time.monotonic() > next_kill
        if doomed:
            one.process.kill()
            next_kill = time.monotonic() + max(SECONDS / 8, 3)
        try:
            if chance.random() < 0.3:
                page = chance.randrange(1, 300)
                length = max(length // page, 1) * page
                pages = Pages(length // page, page, at)
                transfer = engine.write_pages(memory, pages, one.remote, pages, page, imm=slot)
            else:
                transfer = engine.write(memory, one.remote, length, src_offset=at, dst_offset=at, imm=slot)
            transfer.wait()
            one.counts[slot] += 1
            one.line.send((slot, one.counts[slot], length))
            assert one.line.recv() == source[at : at + length]
            verified += length
        except (PeerLost, Error, EOFError, BrokenPipeError, ConnectionResetError):
            one.process.join(TIMEOUT_S)  # nobody fails but the killed
            assert not one.process.is_alive(), "a living peer failed"
            killed += 1
            mirrors[mirrors.index(one)] = Mirror(engine, provider)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for one in mirrors:
        one.process.kill()
    engine.close()
    assert verified > 0 and killed >= 1
    assert after_kib - before_kib < GROWTH_KIB_MAX, f"memory grew by {after_kib - before_kib} KiB"
