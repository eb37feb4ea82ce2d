# SPDX-License-Identifier: Apache-2.0
"""``weft.transfer`` as Python programs use it, over every provider that is usable here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from weft.errors import Error, PeerLost
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import (
    LoopbackNetwork,
    Memory,
    Pages,
    Peer,
    Remote,
    Source,
    Span,
    Target,
    TransferEngine,
    nics,
)

PROVIDERS = ["loopback", "fabric:tcp", "fabric:shm"]
TIMEOUT_S = 30.0


@dataclass
class Pair:
    a: TransferEngine
    b: TransferEngine
    src: bytearray
    dst: bytearray
    src_memory: Memory
    dst_memory: Memory
    b_at_a: Peer
    a_at_b: Peer
    remote: Remote


@pytest.fixture(params=PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    unusable = [nic.unusable_because for nic in nics(request.param)]
    if all(unusable):
        pytest.skip(unusable[0])
    a = TransferEngine(request.param, name="a", timeout_s=TIMEOUT_S)
    b = TransferEngine(request.param, name="b", timeout_s=TIMEOUT_S)
    src, dst = bytearray(range(256)) * 64, bytearray(256 * 64)
    src_memory = a.register(src, remote_read=True)
    dst_memory = b.register(dst, remote_read=True, remote_write=True)
    b_at_a, a_at_b = a.connect(b.address), b.connect(a.address)
    yield Pair(a, b, src, dst, src_memory, dst_memory, b_at_a, a_at_b, a.attach(dst_memory.descriptor))
    a.close()
    b.close()


def test_a_deadline_may_be_beyond_all_numbers(pair: Pair) -> None:
    pair.a.write(pair.src_memory, pair.remote, 8, timeout_s=10**400).wait(10**400)


def test_a_write_arrives_before_its_immediate(pair: Pair) -> None:
    pair.a.write(pair.src_memory, pair.remote, 1000, src_offset=24, dst_offset=8, imm=7)
    pair.b.imm(pair.a_at_b, 7).wait(1)
    assert pair.dst[8:1008] == pair.src[24:1024]
    assert pair.dst[1008:] == bytes(len(pair.dst) - 1008)


def test_pages_go_where_the_lists_say_and_come_back(pair: Pair) -> None:
    there, here = Pages([5, 1, 3], 100, offset=7), Pages([0, 2, 4], 64)
    pair.a.write_pages(pair.src_memory, here, pair.remote, there, 50, imm=1)
    pair.b.imm(pair.a_at_b, 1).wait(1)
    for i, page in ((0, 5), (2, 1), (4, 3)):
        assert pair.dst[7 + 100 * page : 57 + 100 * page] == pair.src[64 * i : 64 * i + 50]
    before = bytes(pair.src)
    pair.src[:] = bytes(len(pair.src))
    pair.a.read_pages(pair.src_memory, here, pair.remote, there, 50).wait()
    for i in (0, 2, 4):
        assert pair.src[64 * i : 64 * i + 50] == before[64 * i : 64 * i + 50]


def test_scatter_and_counter(pair: Pair) -> None:
    counter = pair.a.counter()
    targets = [Target(pair.remote, 10, src_offset=i, dst_offset=100 * i) for i in range(5)]
    pair.a.scatter(pair.src_memory, targets, imm=2, counter=counter)
    pair.b.imm(pair.a_at_b, 2).wait(5)
    counter.wait(1)
    assert (counter.finished, counter.failed) == (1, 0)
    for i in range(5):
        assert pair.dst[100 * i : 100 * i + 10] == pair.src[i : i + 10]


def test_gather_reads_what_scatter_wrote(pair: Pair) -> None:
    pair.dst[:] = bytes(reversed(pair.src))
    pair.src[:] = bytes(len(pair.src))
    sources = [Source(pair.remote, 10, src_offset=100 * i, dst_offset=20 * i) for i in range(5)]
    pair.a.gather(pair.src_memory, sources).wait()
    for i in range(5):
        assert pair.src[20 * i : 20 * i + 10] == pair.dst[100 * i : 100 * i + 10]
        assert pair.src[20 * i + 10 : 20 * i + 20] == bytes(10)


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 16384])
def test_messages_of_any_length(pair: Pair, nbytes: int) -> None:
    sent = pair.a.send(pair.b_at_a, pair.src_memory, nbytes)
    received = pair.b.recv(None, pair.dst_memory).wait()
    sent.wait()
    assert received.nbytes == nbytes
    assert received.peer is not None and received.peer.name == "a"
    assert pair.dst[:nbytes] == pair.src[:nbytes]


def test_transfers_and_immediates_can_be_awaited(pair: Pair) -> None:
    async def main() -> int:
        transfers = [pair.a.write(pair.src_memory, pair.remote, 64, imm=3) for _ in range(10)]
        finished = await asyncio.gather(*transfers)
        await pair.b.imm(pair.a_at_b, 3).reach(10)
        return sum(transfer.is_finished for transfer in finished)

    assert asyncio.run(main()) == 10


def test_a_callback_is_called_once_with_the_outcome(pair: Pair) -> None:
    called = threading.Event()
    outcomes: list[Error | None] = []

    def done(error: Error | None) -> None:
        outcomes.append(error)
        called.set()

    pair.a.write(pair.src_memory, pair.remote, 64, callback=done)
    assert called.wait(TIMEOUT_S)
    assert outcomes == [None]


def test_a_watched_number_starts_a_transfer(pair: Pair) -> None:
    def grown(was: int, now: int) -> bool:
        for layer in range(was, now):
            at = layer * 100
            pair.a.write(pair.src_memory, pair.remote, 100, src_offset=at, dst_offset=at, imm=4)
        return now < 8

    watch = pair.a.watch(grown)
    for layer in range(1, 9):
        watch.store(layer)
    pair.b.imm(pair.a_at_b, 4).wait(8)
    assert pair.dst[:800] == pair.src[:800]
    watch.release()


def test_a_watch_may_be_released_by_its_own_callback(pair: Pair) -> None:
    seen: list[int] = []
    released = threading.Event()

    def once(was: int, now: int) -> bool:
        seen.append(now)
        watch.release()
        released.set()
        return True

    watch = pair.a.watch(once)
    watch.store(1)
    assert released.wait(TIMEOUT_S)
    watch.store(2)
    pair.a.close()
    assert seen == [1]


def test_a_callback_may_close_its_engine(pair: Pair) -> None:
    closed = threading.Event()

    def close(error: Error | None) -> None:
        pair.a.close()
        closed.set()

    pair.a.write(pair.src_memory, pair.remote, 8, callback=close)
    assert closed.wait(TIMEOUT_S)
    with pytest.raises(Error, match="is closed"):
        pair.a.write(pair.src_memory, pair.remote, 8)


def test_registered_memory_lives_until_it_is_taken_back(pair: Pair) -> None:
    class Owner(bytearray):
        pass

    owner = Owner(64)
    gone = weakref.ref(owner)
    memory = pair.b.register(owner, remote_write=True)
    remote = pair.a.attach(memory.descriptor)
    span_id = memory.core.id
    del owner, memory
    gc.collect()
    assert gone() is not None
    pair.a.write(pair.src_memory, remote, 64, imm=9)
    pair.b.imm(pair.a_at_b, 9).wait(1)
    assert bytes(gone() or b"") == bytes(range(64))
    assert span_id in pair.b._held
    pair.b.close()
    gc.collect()
    assert gone() is None


def test_a_write_finishes_though_its_source_was_dropped(pair: Pair) -> None:
    for i in range(50):
        pair.a.write(pair.a.register(bytearray([i]) * 4096), pair.remote, 4096, imm=1)
    pair.b.imm(pair.a_at_b, 1).wait(50)
    assert set(pair.dst[:4096]) <= set(range(50))


def test_memory_taken_back_cannot_be_written(pair: Pair) -> None:
    pair.dst_memory.unregister()
    with pytest.raises(Error, match="peer 'b' has taken back"):
        pair.a.write(pair.src_memory, pair.remote, 10)
    assert pair.remote.is_revoked
    assert not any(pair.dst)


def test_a_closed_peer_is_named(pair: Pair) -> None:
    waiting = pair.a.recv(pair.b_at_a, pair.a.register(bytearray(10)))
    pair.b.close()
    with pytest.raises(PeerLost, match="peer 'b' is lost: it closed its engine"):
        waiting.wait()
    with pytest.raises(Error, match="closed"):
        pair.b.notify(pair.a_at_b, 1)
    with pytest.raises(PeerLost, match="peer 'b' is closed: it closed its engine"):
        pair.a.write(pair.src_memory, pair.remote, 8)


def test_a_wait_for_an_immediate_names_the_peer(pair: Pair) -> None:
    with pytest.raises(PeerLost, match="for peer 'a', immediate 77: expected 1, saw 0"):
        pair.b.imm(pair.a_at_b, 77).wait(1, 0.05)


def test_a_burst_of_small_writes_is_awaited(pair: Pair) -> None:
    writes = [
        pair.a.write(pair.src_memory, pair.remote, 40, src_offset=40 * i, dst_offset=40 * i)
        for i in range(400)
    ]

    async def all_of_them() -> None:
        await asyncio.gather(*writes)
        pair.a.write(pair.src_memory, pair.remote, 8, imm=1)
        await pair.b.imm(pair.a_at_b, 1).reach(1)

    asyncio.run(all_of_them())
    until = time.monotonic() + TIMEOUT_S
    while pair.dst[:16000] != pair.src[:16000] and time.monotonic() < until:
        pair.b.progress()
    assert pair.dst[:16000] == pair.src[:16000]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_scatter_to_very_many_targets_starves_no_heartbeat(provider: str) -> None:
    """Planning it took a time that grew with the square of the targets; peers gave up on each other meanwhile."""
    unusable = [nic.unusable_because for nic in nics(provider)]
    if all(unusable):
        pytest.skip(unusable[0])
    count, limits = 65000, {"timeout_s": 4 * TIMEOUT_S, "peer_dead_s": 3.0}
    with TransferEngine(provider, name="a", **limits) as a, TransferEngine(provider, name="b", **limits) as b:
        b_at_a, a_at_b = a.connect(b.address), b.connect(a.address)
        src, dst = bytearray(os.urandom(count)), bytearray(count)
        remote = a.attach(b.register(dst, remote_write=True).descriptor)
        targets = [Target(remote, 1, at, at) for at in range(count)]
        a.scatter(a.register(src), targets, imm=5)
        b.imm(a_at_b, 5).wait(count)
        assert dst == src
        assert (b_at_a.state, a_at_b.state) == ("connected", "connected")


def _engines_go_while_another_writes(_: Rank, provider: str) -> None:
    limits = {"timeout_s": TIMEOUT_S, "peer_dead_s": 1.0}
    with TransferEngine(provider, name="a", **limits) as a:
        src = a.register(bytearray(20000))
        for round in range(12):  # more than a process keeps of those that are gone
            with TransferEngine(provider, name=f"b{round}", **limits) as b:
                a.connect(b.address)
                a_at_b = b.connect(a.address)
                remote = a.attach(b.register(bytearray(20000), remote_write=True).descriptor)
                written = a.scatter(src, [Target(remote, 1, at, at) for at in range(20000)], imm=5)
                b.imm(a_at_b, 5).wait(2000 * (round % 4))
            with contextlib.suppress(Error):  # the rest has nowhere to go
                written.wait()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_engine_may_go_while_another_of_its_process_writes_to_it(provider: str) -> None:
    """libfabric 1.17 over shm ended the process: there, engines of one process reach each other in place."""
    if unusable := nics(provider)[0].unusable_because:
        pytest.skip(unusable)
    run_ranks(1, _engines_go_while_another_writes, provider, with_gpus=False)


def _peer_dies_in_a_burst(rank: Rank, provider: str, burst: Callable[..., None]) -> None:
    """Rank 1 dies as the first of very many small writes have come."""
    with TransferEngine(provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S, peer_dead_s=5.0) as engine:
        memory = engine.register(bytearray(64), remote_write=True)
        known: list[Any] = [None, None]
        dist.all_gather_object(known, (engine.address, memory.descriptor), group=rank.group)
        address, descriptor = known[1 - rank.rank]
        peer = engine.connect(address)
        remote = engine.attach(descriptor)
        dist.barrier(rank.group)
        if rank.rank == 1:
            engine.imm(peer, 3).wait(1)
            os._exit(1)
        with pytest.raises(Error, match=r"peer 'rank 1' is (lost|closed)"):
            while True:  # on a busy machine the first burst may be over before the peer sees any of it
                burst(engine, peer, memory, remote)
        assert not peer.is_alive


def _small_writes(engine: TransferEngine, peer: Peer, memory: Memory, remote: Remote) -> None:
    engine.scatter(memory, [Target(remote, 1) for _ in range(65000)], imm=3).wait()


def _bare_immediates(engine: TransferEngine, peer: Peer, memory: Memory, remote: Remote) -> None:
    for notice in [engine.notify(peer, 3) for _ in range(2000)]:
        notice.wait()


@pytest.mark.parametrize("burst", [_small_writes, _bare_immediates])
@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
def test_a_peer_that_dies_in_a_burst_is_lost(provider: str, burst: Callable[..., None]) -> None:
    """libfabric 1.17 over tcp ended the process where what it had copied to itself waited for a connection."""
    if unusable := nics(provider)[0].unusable_because:
        pytest.skip(unusable)
    run_ranks(2, _peer_dies_in_a_burst, provider, burst, with_gpus=False, lost=[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.a.write(p.src_memory, p.remote, 99999), "src_offset: got 99999 bytes"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, imm=1 << 20), "imm: got 1048576, allowed: 0 to"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, rail=4), "rail: got 4, allowed: 0 to 0"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, notify="twice"), "notify: got 'twice'"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, timeout_s=-1), "timeout_s: got -1"),
        (lambda p: p.a.write(p.src_memory, p.remote, -1), "nbytes: got -1"),
        (lambda p: p.a.write(p.src_memory, p.remote, 1.5), "nbytes: got 1.5, allowed: a whole number"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, imm=-1), "imm: got -1, allowed: 0 to"),
        (lambda p: p.a.write(p.src, p.remote, 8), "src: got bytearray, allowed: Memory"),
        (lambda p: p.a.write(p.dst_memory, p.remote, 8), "memory: got one of another engine"),
        (lambda p: p.a.notify(p.a_at_b, 1), "peer: got one of another engine"),
        (lambda p: p.a.unregister(p.dst_memory), "memory: got memory of another engine"),
        (lambda p: p.a.imm(p.b_at_a, -1), "imm: got -1"),
        (lambda p: p.a.barrier([p.b_at_a], 1 << 20), "id: got 1048576"),
        (lambda p: p.a.gather(p.src_memory, [Source(p.remote, -5)]), "nbytes: got -5"),
        (lambda p: p.a.connect("text"), "address: got str, allowed: bytes"),
        (
            lambda p: p.a.write_pages(p.src_memory, Pages([-1], 8), p.remote, Pages([0], 8), 8),
            "indices: got -1 to -1",
        ),
        (
            lambda p: p.a.write_pages(p.src_memory, Pages([0.5], 8), p.remote, Pages([0], 8), 8),
            "indices: got something else, allowed: whole numbers",
        ),
        (
            lambda p: p.a.write_pages(p.src_memory, Pages([0], 8), p.remote, Pages([0], 8), 0),
            "page_bytes: got 0",
        ),
        (lambda p: TransferEngine("loopback", timeout_s=-1), "timeout_s: got -1"),
        (lambda p: TransferEngine("loopback", heartbeat_s=5, peer_dead_s=1), "heartbeat_s: got 5"),
        (lambda p: p.a.read(p.src_memory, p.remote, src_offset=-8), "src_offset: got -8"),
        (lambda p: p.a.scatter(p.src_memory, []), "targets: got none"),
        (
            lambda p: p.a.register(b"read-only", remote_write=True),
            "remote_write: got True of read-only memory",
        ),
        (lambda p: p.a.register(bytearray()), "source: got 0 bytes"),
        (lambda p: p.a.register(3), "source: got int"),
        (lambda p: p.a.register(bytearray(5)).descriptor, "registered for remote reads or writes"),
        (lambda p: p.a.attach(b"x"), "not a Weft descriptor"),
        (lambda p: p.a.write_pages(p.src_memory, [0], p.remote, Pages([0], 8), 8), "src_pages: got list"),
        (lambda p: p.a.scatter(p.src_memory, [(p.remote, 8)]), "allowed: a sequence of Target"),
        (lambda p: p.a.gather(p.src_memory, 3), "sources: got 3, allowed: a sequence of Source"),
        (lambda p: p.a.barrier([None], 1), "allowed: a sequence of Peer"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, timeout_s="1"), "timeout_s: got '1'"),
        (lambda p: p.a.connect(p.b.address, -1), "timeout_s: got -1, allowed: seconds, 0 or more"),
        (lambda p: p.a.imm(p.b_at_a, 1).wait(1, "x"), "timeout_s: got 'x'"),
        (lambda p: p.a.write(p.src_memory, p.remote, 8, callback=3), "callback: got 3"),
        (lambda p: p.a.watch("x"), "callback: got 'x'"),
        (lambda p: TransferEngine(3), "provider: got 3, allowed: a LoopbackNetwork"),
        (lambda p: TransferEngine("loopback", "loop0"), "nics: got 'loop0', allowed: a sequence"),
        (lambda p: p.a.connect(p.a.address), "this engine's own"),
        (lambda p: p.a.attach(p.src_memory.descriptor), "memory of this engine"),
        (lambda p: p.a.barrier([p.b_at_a, p.b_at_a], 1), "peers: got 'b' 2 times, allowed: every peer once"),
        (lambda p: p.a.imm(p.b_at_a, 1).on_reach(1, None), "callback: got None"),
        (lambda p: p.a.write(p.src_memory, p.remote, 0).on_done(None), "callback: got None"),
        (lambda p: p.a.register(Span(-8, 8)), "address: got -8"),
        (lambda p: p.a.register(Span(4096, -8)), "bytes: got -8"),
        (lambda p: p.a.register(Span(4096, 8, 0.5)), "device: got 0.5"),
        (lambda p: p.a.watch(print, cpu="x"), "cpu: got 'x'"),
        (
            lambda p: p.a.write_pages(p.src_memory, Pages(1 << 62, 0), p.remote, Pages(1 << 62, 0), 8),
            "indices: got 4611686018427387904, allowed: 0 to 4294967296",
        ),
        (lambda p: TransferEngine("loopback", [3]), r"nics: got \[3\], allowed: a sequence of names"),
        (lambda p: TransferEngine("loopback", name=3), "name: got 3, allowed: text"),
        (lambda p: TransferEngine("loopback", worker="yes"), "worker: got 'yes', allowed: True or False"),
    ],
)
def test_a_mistake_is_named_at_once(pair: Pair, call: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        call(pair)
    assert not any(pair.dst)


def test_an_unknown_provider_or_nic_lists_the_known() -> None:
    with pytest.raises(Error, match="provider: got carrier-pigeon, allowed: auto, fabric:efa"):
        TransferEngine("carrier-pigeon")
    with pytest.raises(Error, match=r"nics: got loop9, allowed with loopback: loop0"):
        TransferEngine("loopback", ["loop9"])


def test_engines_of_different_networks_do_not_meet() -> None:
    with (
        TransferEngine(LoopbackNetwork()) as a,
        TransferEngine(LoopbackNetwork()) as b,
        pytest.raises(Error, match="one of provider fabric:tcp, allowed: loopback"),
    ):
        a.connect(b.address.replace(b"\x08\0\0\0loopback", b"\x0a\0\0\0fabric:tcp"))


def test_a_tensor_is_registered_as_it_lies() -> None:
    torch = pytest.importorskip("torch")
    network = LoopbackNetwork()
    with TransferEngine(network, name="a") as a, TransferEngine(network, name="b") as b:
        src, dst = torch.randn(100, 7), torch.zeros(100, 7)
        memory = b.register(dst, remote_write=True)
        a.connect(b.address)
        a.write(a.register(src), a.attach(memory.descriptor), imm=1)
        b.imm(b.connect(a.address), 1).wait(1)
        assert torch.equal(src, dst)
        with pytest.raises(Error, match="strides"):
            a.register(src.t())


def test_memory_says_how_it_is_reached(pair: Pair) -> None:
    assert (pair.src_memory.path, pair.src_memory.path_reason) == ("host", "host memory")
    assert not pair.src_memory.is_staged


def test_several_rails_of_unequal_number() -> None:
    network = LoopbackNetwork()
    with TransferEngine(network, ["loop0", "loop1", "loop2"]) as a, TransferEngine(network, ["loop0"]) as b:
        src, dst = bytearray(range(250)) * 400, bytearray(100000)
        memory = b.register(dst, remote_write=True)
        a.connect(b.address)
        a.write(a.register(src), a.attach(memory.descriptor), imm=1, notify="each")
        sender = b.connect(a.address)
        b.imm(sender, 1).wait(b.expected_imms(100000, sender=sender))
        assert (sender.rails, b.imm(sender, 1).value) == (3, a.expected_imms(100000))
        assert dst == src
        assert a.expected_imms(100000) == 3
        assert a.expected_imms(4096, pages=10) == 10
