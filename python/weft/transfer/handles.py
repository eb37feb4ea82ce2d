# SPDX-License-Identifier: Apache-2.0
"""What users of the transfer engine hold: memory, peers, transfers, counters. ``TransferEngine`` makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft import _core
from weft.errors import Error, from_core, invalid, quoted
from weft.transfer.buffers import HeldSpan, whole

if TYPE_CHECKING:
    from weft.transfer.engine import TransferEngine

Completion = Callable[[Error | None], None]


def _to_error(outcome: tuple[str, str] | None) -> Error | None:
    return None if outcome is None else from_core(*outcome)


def for_core(callback: Completion | None) -> Callable[[tuple[str, str] | None], None] | None:
    return None if callback is None else _told(callback)


def _told(callback: Completion) -> Callable[[tuple[str, str] | None], None]:
    if not callable(callback):
        raise invalid("callback", quoted(callback), "something to call")
    return lambda outcome: callback(_to_error(outcome))


def _settle(future: asyncio.Future[None], error: Error | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _future_of(register: Callable[[Completion], None]) -> asyncio.Future[None]:
    """Return a future of the running loop that ``register``'s callback settles from another thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: Error | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, future, error)

    register(settle)
    return future


class Peer:
    """Another engine that this one is connected to."""

    def __init__(self, core: Any) -> None:
        """Made by ``TransferEngine.connect``."""
        self.core = core

    @property
    def name(self) -> str:
        """What the peer calls itself."""
        return str(self.core.name)

    @property
    def state(self) -> str:
        """``connecting``, ``connected``, ``lost`` or ``closed``."""
        return str(self.core.state)

    @property
    def is_alive(self) -> bool:
        """Whether transfers to it can be started."""
        return bool(self.core.is_alive)

    @property
    def rails(self) -> int:
        """How many NICs it uses."""
        return int(self.core.rails)

    @property
    def why(self) -> str:
        """Why it is lost; empty while it is not."""
        return str(self.core.why)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and self.core is other.core

    def __hash__(self) -> int:
        return id(self.core)

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.state})"


class Memory:
    """Memory of this process that an engine may read and write.

    The engine keeps the tensor or array alive until ``unregister`` or its own ``close``, also when nothing
    else does, and refuses that it is resized: peers may write to it.
    """

    def __init__(self, engine: TransferEngine, core: Any, held: HeldSpan) -> None:
        """Made by ``TransferEngine.register``."""
        self.engine, self.core, self.held, self.span = engine, core, held, held.span

    def __repr__(self) -> str:
        return f"Memory({self.nbytes} bytes, {self.path})"

    @property
    def nbytes(self) -> int:
        """How many bytes are registered."""
        return self.span.bytes

    @property
    def path(self) -> str:
        """How NICs reach it: ``host``, ``dmabuf``, ``peer memory``, or ``staged`` through pinned host memory."""
        return str(self.core.path)

    @property
    def path_reason(self) -> str:
        """Why that way: the NIC that cannot reach it, or what its driver said."""
        return str(self.core.path_reason)

    @property
    def is_staged(self) -> bool:
        """Whether no NIC reaches it, so that transfers go through pinned host memory."""
        return self.path == "staged"

    @property
    def descriptor(self) -> bytes:
        """Bytes with which a connected peer attaches this memory. They hold its key: treat them as a secret.

        Raises: weft.Error when it was registered without remote access.
        """
        return bytes(self.engine.core.describe(self.core))

    def unregister(self, timeout_s: float = 10.0) -> None:
        """Take the memory back; returns once no peer can touch it any more.

        Raises: weft.PeerLost naming peers that did not confirm in time; it is unregistered all the same.
        """
        self.engine.unregister(self, timeout_s)


class Remote:
    """Memory of a peer that this engine may read or write."""

    def __init__(self, core: Any) -> None:
        """Made by ``TransferEngine.attach``."""
        self.core = core

    @property
    def nbytes(self) -> int:
        """How many bytes its owner registered."""
        return int(self.core.bytes)

    @property
    def peer(self) -> Peer:
        """Its owner."""
        return Peer(self.core.peer)

    @property
    def is_revoked(self) -> bool:
        """Whether its owner has taken it back or is lost."""
        return bool(self.core.is_revoked)

    def __repr__(self) -> str:
        return f"Remote({self.nbytes} bytes of {self.peer.name!r}{', revoked' if self.is_revoked else ''})"


@dataclass(frozen=True)
class Target:
    """One destination of a scatter: ``nbytes`` bytes from ``src_offset`` to ``dst_offset`` of ``dst``."""

    dst: Remote
    nbytes: int
    src_offset: int = 0
    dst_offset: int = 0


@dataclass(frozen=True)
class Source:
    """One origin of a gather: ``nbytes`` bytes from ``src_offset`` of ``src`` to ``dst_offset``."""

    src: Remote
    nbytes: int
    src_offset: int = 0
    dst_offset: int = 0


class Counter:
    """Counts transfers that have ended; pass one to any number of transfers."""

    def __init__(self, engine: TransferEngine) -> None:
        """Made by ``TransferEngine.counter``."""
        self.engine, self.core = engine, _core.TransferCounter()

    @property
    def finished(self) -> int:
        """Transfers that have ended, also those that failed."""
        return int(self.core.finished)

    @property
    def failed(self) -> int:
        """Transfers that have failed."""
        return int(self.core.failed)

    def wait(self, finished: int, timeout_s: float | None = None) -> None:
        """Wait until that many have ended. Raises: the first failure, or PeerLost at the deadline."""
        self.engine.core.wait_counter(self.core, whole("finished", finished), self.engine.timeout(timeout_s))


class ImmCounter:
    """Counts the immediates with one id from one peer. The value only grows; early arrivals are kept."""

    def __init__(self, engine: TransferEngine, core: Any) -> None:
        """Made by ``TransferEngine.imm``."""
        self.engine, self.core = engine, core

    @property
    def value(self) -> int:
        """Immediates that have arrived since the connection was made."""
        return int(self.core.value)

    def wait(self, at_least: int, timeout_s: float | None = None) -> None:
        """Wait for a value of at least that. Raises: PeerLost with the peer, what was expected and seen."""
        self.engine.core.wait_imm(self.core, whole("at_least", at_least), self.engine.timeout(timeout_s))

    def on_reach(self, at_least: int, callback: Completion) -> None:
        """Call ``callback(None)`` once the value is that or more, ``callback(error)`` if the peer is lost."""
        self.engine.core.on_imm(self.core, whole("at_least", at_least), _told(callback))

    def reach(self, at_least: int) -> asyncio.Future[None]:
        """Return an asyncio future for the same: ``await counter.reach(3)``."""
        return _future_of(lambda settle: self.on_reach(at_least, settle))


class Transfer:
    """One submitted transfer: wait for it, await it, follow it, cancel it."""

    def __init__(self, engine: TransferEngine, core: Any) -> None:
        """Made by the methods of ``TransferEngine``."""
        self.engine, self.core = engine, core

    def __repr__(self) -> str:
        return f"Transfer({self.nbytes} bytes, {self.phase})"

    @property
    def phase(self) -> str:
        """``queued``, ``posted``, ``draining``, ``done``, ``failed`` or ``cancelled``."""
        return str(self.core.phase)

    @property
    def is_finished(self) -> bool:
        """Whether the engine and the NIC are through with the local memory."""
        return bool(self.core.is_finished)

    @property
    def nbytes(self) -> int:
        """Bytes to move; of a receive, those that arrive, once that is known."""
        return int(self.core.bytes)

    @property
    def bytes_done(self) -> int:
        """Bytes of ``nbytes`` that the engine, and the network, are through with; all of them once it is done.

        A send counts when its message is taken. A cancelled or failed transfer keeps its count.
        """
        return int(self.core.bytes_done)

    @property
    def pieces(self) -> int:
        """How many parts it travels in: pages, ranges, and cuts of long ones."""
        return int(self.core.pieces)

    @property
    def pieces_done(self) -> int:
        """How many of these are through."""
        return int(self.core.pieces_done)

    @property
    def share(self) -> float:
        """How far it is, from 0.0 to 1.0, by bytes."""
        return min(self.bytes_done / self.nbytes, 1.0) if self.nbytes else float(self.phase == "done")

    def follow(self, every_s: float = 0.1) -> Iterator[int]:
        """Yield ``bytes_done`` now, every ``every_s`` seconds, and last at the end; the caller waits in between.

            for done in transfer.follow():
                bar.update(done - bar.n)                     # tqdm(total=transfer.nbytes, unit="B", unit_scale=True)
                progress.update(task, completed=done)        # rich.progress.Progress

        Raises: weft.Error or PeerLost when the transfer fails, as wait() does. The transfer goes on if the caller stops
        early.
        """
        if not isinstance(every_s, int | float) or not every_s > 0:
            raise invalid("every_s", quoted(every_s), "seconds above 0")
        while not self.is_finished:
            yield self.bytes_done
            self.engine.core.ends_within(self.core, float(min(every_s, 3600.0)))
        yield self.bytes_done
        if (error := self.error) is not None:
            raise error

    @property
    def peer(self) -> Peer | None:
        """Of a finished receive: the sender."""
        return None if self.core.peer is None else Peer(self.core.peer)

    @property
    def error(self) -> Error | None:
        """Why it failed; None while it has not."""
        return _to_error(self.core.outcome)

    def wait(self, timeout_s: float | None = None) -> Transfer:
        """Wait for the end and return self. Raises: weft.Error, or PeerLost naming the peer.

        When ``timeout_s`` passes first, the transfer goes on; its own deadline is that of its call.
        """
        self.engine.core.wait(self.core, self.engine.timeout(timeout_s))
        return self

    def cancel(self) -> str:
        """Drop what is not posted; return the phase that was found. Buffers are free once ``is_finished``."""
        return str(self.engine.core.cancel(self.core))

    def on_done(self, callback: Completion) -> None:
        """Call ``callback(None)`` or ``callback(error)`` at its end, on the engine's callback thread."""
        self.engine.core.on_done(self.core, _told(callback))

    # Cancelling the task that awaits does not cancel the transfer: the network may hold its memory.
    def __await__(self) -> Generator[Any, None, Transfer]:
        yield from _future_of(self.on_done).__await__()
        return self


class Watch:
    """A 64-bit number that a kernel (or the host) writes, and a callback that sees it grow."""

    def __init__(self, watcher: Any, core: Any) -> None:
        """Made by ``TransferEngine.watch``."""
        self._watcher, self.core = watcher, core

    @property
    def address(self) -> int:
        """Where to store the number: valid on the host and, on the engine's device, in kernels."""
        return int(self.core.address)

    def store(self, value: int) -> None:
        """Store ``value`` from the host, as a kernel would."""
        self.core.store(value)

    def release(self) -> None:
        """End it; the callback does not run any more afterwards."""
        self._watcher.release(self.core)
