# SPDX-License-Identifier: Apache-2.0
"""How far a transfer is, over every provider that is usable here; no call copies much before it returns."""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from weft.errors import Error
from weft.transfer import Memory, Pages, Peer, Remote, Source, Span, Target, Transfer, TransferEngine, nics

PROVIDERS = ["loopback", "fabric:tcp", "fabric:shm"]
MIB = 1 << 20
MUCH = 24 * MIB
MOST_IN_A_CALL = 8 * MIB


@dataclass
class Pair:
    """Two engines; where ``a`` has no thread of its own, what it does happens in a call."""

    a: TransferEngine
    b: TransferEngine
    src: bytearray
    dst: bytearray
    here: Memory
    there: Remote
    b_at_a: Peer
    a_at_b: Peer
    kept: list[Any]

    def finish(self, transfer: Transfer) -> list[int]:
        """Make progress until the end; return how far the transfer was after each step."""
        seen = [transfer.bytes_done]
        for _ in range(1_000_000):
            if transfer.is_finished:
                return [*seen, transfer.bytes_done]
            self.b.progress()
            self.a.progress()
            seen.append(transfer.bytes_done)
        raise AssertionError(f"{transfer} does not end: {self.a.dump()}")


@pytest.fixture(params=PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from _connected(request.param, has_worker=False)


@pytest.fixture(params=PROVIDERS)
def working_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from _connected(request.param, has_worker=True)


def _connected(provider: str, has_worker: bool) -> Iterator[Pair]:
    unusable = [nic.unusable_because for nic in nics(provider)]
    if all(unusable):
        pytest.skip(unusable[0])
    a = TransferEngine(provider, name="a", worker=has_worker, timeout_s=60)
    b = TransferEngine(provider, name="b", timeout_s=60)
    src, dst = bytearray(np.random.default_rng(1).bytes(MUCH)), bytearray(MUCH)
    here = a.register(src, remote_read=True)
    there_memory = b.register(dst, remote_read=True, remote_write=True)
    b_at_a, a_at_b = a.connect(b.address), b.connect(a.address)
    yield Pair(a, b, src, dst, here, a.attach(there_memory.descriptor), b_at_a, a_at_b, [there_memory])
    a.close()
    b.close()


def _pages(count: int) -> Pages:
    return Pages(count, MUCH // count)


def _sixths() -> list[tuple[int, int]]:
    return [(MUCH // 6, i * MUCH // 6) for i in range(6)]


# Writes with an immediate: only that says that their bytes are there.
CALLS: dict[str, Callable[[Pair], Transfer]] = {
    "write": lambda p: p.a.write(p.here, p.there, imm=3),
    "read": lambda p: p.a.read(p.here, p.there),
    "write_pages": lambda p: p.a.write_pages(p.here, _pages(96), p.there, _pages(96), MUCH // 96, imm=3),
    "read_pages": lambda p: p.a.read_pages(p.here, _pages(96), p.there, _pages(96), MUCH // 96),
    "scatter": lambda p: p.a.scatter(
        p.here, [Target(p.there, count, at, at) for count, at in _sixths()], imm=3
    ),
    "gather": lambda p: p.a.gather(p.here, [Source(p.there, count, at, at) for count, at in _sixths()]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_returns_before_much_is_copied_and_tells_how_far_it_is(pair: Pair, call: str) -> None:
    transfer = CALLS[call](pair)
    assert transfer.bytes_done <= MOST_IN_A_CALL and transfer.share <= MOST_IN_A_CALL / MUCH
    assert not transfer.is_finished
    seen = pair.finish(transfer)
    assert transfer.error is None
    assert seen == sorted(seen) and seen[-1] == transfer.nbytes == MUCH
    assert transfer.pieces_done == transfer.pieces >= 1 and transfer.share == 1.0
    if not call.startswith(("read", "gather")):
        pair.b.imm(pair.a_at_b, 3).wait(6 if call == "scatter" else 1)
    assert pair.dst == pair.src


def test_pages_that_lie_apart_are_copied_in_bounded_steps(pair: Pair) -> None:
    table = list(range(0, 96, 2))
    transfer = pair.a.write_pages(
        pair.here, Pages(table, MUCH // 96), pair.there, Pages(table[::-1], MUCH // 96), MUCH // 96, imm=5
    )
    assert transfer.bytes_done <= MOST_IN_A_CALL and transfer.pieces == len(table)
    pair.finish(transfer)
    pair.b.imm(pair.a_at_b, 5).wait(1)
    for source, target in zip(table, table[::-1], strict=True):
        page = MUCH // 96
        assert pair.dst[target * page : (target + 1) * page] == pair.src[source * page : (source + 1) * page]


# Where a post is a copy. Elsewhere the peer's thread moves the bytes, and a poll finds whatever it has done by then.
@pytest.mark.parametrize("pair", ["fabric:shm"], indirect=True)
def test_many_transfers_share_a_turn(pair: Pair) -> None:
    transfers = [pair.a.write(pair.here, pair.there) for _ in range(40)]  # every 32nd submission polls, too
    assert sum(transfer.bytes_done for transfer in transfers) <= 40 * MOST_IN_A_CALL
    assert transfers[-1].bytes_done == 0 or transfers[-1].bytes_done <= MOST_IN_A_CALL
    for transfer in transfers:
        transfer.cancel()
    for transfer in transfers:
        pair.finish(transfer)


def test_a_long_message_tells_how_far_it_is(pair: Pair) -> None:
    into = bytearray(MUCH)
    sent = pair.b.send(pair.a_at_b, pair.b.register(pair.src), MUCH)
    received = pair.a.recv(pair.b_at_a, pair.a.register(into))
    seen = pair.finish(received)
    assert seen == sorted(seen) and seen[-1] == received.nbytes == MUCH and received.share == 1.0
    assert into == pair.src
    for _ in range(1_000_000):
        if sent.is_finished:
            break
        pair.a.progress()
    assert sent.wait().bytes_done == MUCH


def test_small_ones_are_done_at_their_end(pair: Pair) -> None:
    transfer = pair.a.write(pair.here, pair.there, 10)
    pair.finish(transfer)
    assert (transfer.bytes_done, transfer.pieces_done, transfer.pieces, transfer.share) == (10, 1, 1, 1.0)
    alone = pair.a.notify(pair.b_at_a, 5)
    pair.finish(alone)
    assert (alone.nbytes, alone.bytes_done, alone.share) == (0, 0, 1.0)


def test_what_is_cancelled_keeps_what_it_had(pair: Pair) -> None:
    transfer = pair.a.write(pair.here, pair.there)
    transfer.cancel()
    pair.finish(transfer)
    assert transfer.phase == "cancelled" and transfer.share == transfer.bytes_done / MUCH
    if transfer.pieces > 1:  # what the network held of it has gone
        assert transfer.bytes_done < MUCH and transfer.pieces_done < transfer.pieces
    with pytest.raises(Error, match="cancelled"):
        list(transfer.follow())


def test_a_bar_follows_a_transfer(pair: Pair) -> None:
    said = io.StringIO()
    with Progress(console=Console(file=said, width=80)) as bars:
        transfer = pair.a.write(pair.here, pair.there)
        task = bars.add_task("weights", total=transfer.nbytes)
        seen = []
        for done in transfer.follow(every_s=0.001):
            bars.update(task, completed=done)
            seen.append(done)
    assert seen == sorted(seen) and seen[-1] == MUCH
    assert "weights" in said.getvalue() and "100%" in said.getvalue()
    with pytest.raises(Error, match=r"every_s: got 0, allowed: seconds above 0"):
        next(transfer.follow(0))


def _mapped(tmp_path: Path) -> mmap.mmap:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 16)
    with open(tmp_path / "weights", "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _frozen() -> np.ndarray[Any, Any]:
    array = np.arange(1024, dtype=np.int32).reshape(32, 32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("kind", ["bytes", "memoryview", "mmap", "numpy", "Span"])
def test_read_only_memory_is_a_source_alone(working_pair: Pair, kind: str, tmp_path: Path) -> None:
    pair, frozen = working_pair, _frozen()
    source: Any = {
        "bytes": lambda: bytes(range(256)) * 16,
        "memoryview": lambda: memoryview(bytes(range(256)) * 16).cast("i", [32, 32]),
        "mmap": lambda: _mapped(tmp_path),
        "numpy": lambda: frozen,
        "Span": lambda: Span(frozen.ctypes.data, frozen.nbytes, owner=frozen, is_read_only=True),
    }[kind]()
    content = frozen.tobytes() if kind in ("numpy", "Span") else bytes(range(256)) * 16
    memory = pair.a.register(source, remote_read=True)
    pair.a.write(memory, pair.there, imm=2).wait()
    pair.b.imm(pair.a_at_b, 2).wait(1)
    assert pair.dst[: len(content)] == content
    back = bytearray(len(content))
    target = pair.b.register(back)
    at_b = pair.b.attach(memory.descriptor)
    pair.b.read(target, at_b).wait()
    assert back == content
    back[:] = bytes(len(back))
    sent = pair.a.send(pair.b_at_a, memory)
    assert pair.b.recv(pair.a_at_b, target).wait().nbytes == len(content) and back == content
    sent.wait()
    whole = Pages(1, len(content))
    refused: list[Callable[[], Any]] = [
        lambda: pair.a.read(memory, pair.there),
        lambda: pair.a.recv(pair.b_at_a, memory),
        lambda: pair.a.read_pages(memory, whole, pair.there, whole, len(content)),
        lambda: pair.a.gather(memory, [Source(pair.there, 16)]),
    ]
    for call in refused:
        with pytest.raises(Error, match="dst: got read-only memory, allowed: memory that may be written to"):
            call()
    with pytest.raises(Error, match="remote_write: got True of read-only memory, allowed: False"):
        pair.a.register(source, remote_write=True)
    with pytest.raises(Error, match="without remote write access"):
        pair.b.write(target, at_b)
    memory.unregister()
