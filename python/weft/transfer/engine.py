# SPDX-License-Identifier: Apache-2.0
"""The transfer engine for Python programs. All methods may be called from any thread."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from weft import _core
from weft.errors import invalid, quoted
from weft.runtime.bootstrap_secret import settle_job_secret
from weft.runtime.listeners import warn_of_open_engine
from weft.runtime.tensors import index_of
from weft.runtime.watching import engine_made
from weft.transfer.arguments import (
    as_float,
    given_bytes,
    given_flag,
    given_handle,
    given_list,
    given_memory,
    given_name,
    given_names,
    given_pages,
    given_peers,
    given_places,
    given_seconds,
    given_target,
    length_within,
)
from weft.transfer.buffers import HeldSpan, Pages, span_of, whole
from weft.transfer.handles import (
    Completion,
    Counter,
    ImmCounter,
    Memory,
    Peer,
    Remote,
    Source,
    Target,
    Transfer,
    Watch,
    for_core,
)
from weft.transfer.providers import LoopbackNetwork, Nic, provider_names, usable_nics

REMOTE_READ = 1
REMOTE_WRITE = 2
_READ_ONLY = 8
ANY_RAIL = -1
IMM_MAX = (1 << 20) - 1

_open_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine._close_here()


def _core_provider(given: Any) -> Any:
    if isinstance(given, LoopbackNetwork):
        return given.core
    if not isinstance(given, str):
        raise invalid(
            "provider", quoted(given), f"a LoopbackNetwork, or one of {', '.join(provider_names())}"
        )
    return _core.transfer_find_provider(given)


def _nic_of_device(device: int | None, usable: list[str]) -> str:
    """Return the NIC that is the GPU in use, of a provider whose NICs are GPUs; else the first one."""
    torch = sys.modules.get("torch")  # the engine does without it
    if device is None and torch is not None and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    own = f"cuda:{device}"
    return own if own in usable else usable[0]


class TransferEngine:
    """Moves bytes between this process and others.

    Args:
        provider: ``fabric:efa``, ``fabric:cxi``, ``fabric:verbs``, ``verbs``, ``fabric:tcp``, ``fabric:shm``,
            ``cuda`` (GPUs of one host), ``loopback``, a ``LoopbackNetwork``, or ``auto`` for the first of them with a
            usable NIC.
        nics: names of the NICs to use, one rail each, also several times. None: the first usable one; of ``cuda`` that
            of ``device``, or of torch's current device.
        name: what peers' error messages call this engine; empty: host:process.
        device: CUDA device whose kernels write the numbers of ``watch``; None for the host.
        timeout_s: deadline of transfers and waits that give none; None: ``WEFT_TIMEOUT_S``.
        heartbeat_s, peer_dead_s: longest silence towards a peer, and of a peer; None: the configuration's.
        worker: whether a thread makes progress while no call waits; without it call ``progress``.
        worker_cpu: CPU to pin that thread to; None: none.
        secret: what peers must prove to know, the same bytes on all of them; None: ``WEFT_JOB_SECRET``. Empty, or
            None without that setting, accepts every engine that connects: a warning says so, once, where others than
            this host can.
    Raises: weft.Error naming what is wrong and what is allowed.
    """

    def __init__(
        self,
        provider: str | LoopbackNetwork = "auto",
        nics: Sequence[str] | None = None,
        *,
        name: str = "",
        device: int | None = None,
        timeout_s: float | None = None,
        heartbeat_s: float | None = None,
        peer_dead_s: float | None = None,
        worker: bool = True,
        worker_cpu: int | None = None,
        shard_bytes_min: int = 8192,
        secret: bytes | None = None,
    ) -> None:
        self._owner = _core.OwnerProcess()
        core_provider = _core_provider(provider)
        if secret is None:
            settle_job_secret()
        if nics is None:
            usable = usable_nics("provider", core_provider.name, core_provider)
            nics = [_nic_of_device(device, usable)]
        self._device = -1 if device is None else whole("device", device, 1 << 16)
        self._timeout_s = given_seconds("timeout_s", timeout_s) or _core.config().timeout_s
        self._watcher: Any = None
        self._held: dict[int, HeldSpan] = {}  # what is registered, by its id
        beat = given_seconds("heartbeat_s", heartbeat_s) or _core.config().heartbeat_s
        dead = given_seconds("peer_dead_s", peer_dead_s) or _core.config().peer_dead_s
        if heartbeat_s is not None and beat >= dead:
            raise invalid("heartbeat_s", heartbeat_s, f"below peer_dead_s, {dead:g}")
        if peer_dead_s is not None and heartbeat_s is None:
            beat = min(beat, dead / 4)
        self.core = _core.transfer_open(
            core_provider,
            given_names("nics", nics),
            given_name("name", name),
            self._timeout_s,
            beat,
            dead,
            given_flag("worker", worker),
            -1 if worker_cpu is None else whole("worker_cpu", worker_cpu, 1 << 16),
            whole("shard_bytes_min", shard_bytes_min),
            None if secret is None else given_bytes("secret", secret),
        )
        _open_engines.add(self)
        engine_made()
        if not (_core.config().job_secret if secret is None else secret):
            warn_of_open_engine(core_provider.name)

    def timeout(self, timeout_s: float | None) -> float:
        """Return ``timeout_s``, or the engine's where that is None."""
        if timeout_s is None:
            return self._timeout_s
        if not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise invalid("timeout_s", quoted(timeout_s), "seconds, 0 or more")
        return as_float(timeout_s)

    @property
    def name(self) -> str:
        """What error messages call this engine."""
        return str(self.core.name)

    @property
    def address(self) -> bytes:
        """Bytes with which other engines connect."""
        return bytes(self.core.address)

    @property
    def nics(self) -> list[Nic]:
        """The NICs in use, one per rail."""
        return [Nic(**nic) for nic in self.core.nics]

    # ---- memory and peers

    def register(self, source: Any, *, remote_read: bool = False, remote_write: bool = False) -> Memory:
        """Register memory: a contiguous torch tensor, array, buffer, or ``Span``.

        Without remote access it can be the source of writes and the target of reads only. Read-only memory
        (``bytes``, a file that was mapped so) is a source alone: of writes and sends, and, with ``remote_read``, of
        peers' reads. It is kept alive until ``unregister`` or ``close``, and may not be resized before: ``resize_`` of
        a tensor raises weft.Error.
        Raises: weft.Error for memory that cannot be registered.
        """
        span = span_of(source)
        may_read, may_write = given_flag("remote_read", remote_read), given_flag("remote_write", remote_write)
        if may_write and span.is_read_only:
            raise invalid(
                "remote_write", "True of read-only memory", "False: peers may read it, with remote_read=True"
            )
        access = (REMOTE_READ if may_read else 0) | (REMOTE_WRITE if may_write else 0)
        access |= _READ_ONLY if span.is_read_only else 0
        core = self.core.enroll(span.address, span.bytes, span.device, access)
        held = self._held[core.id] = HeldSpan(span)
        return Memory(self, core, held)

    def unregister(self, memory: Memory, timeout_s: float = 10.0) -> None:
        """Take memory back; returns once no peer can touch it any more. The same as ``memory.unregister()``.

        Raises: weft.PeerLost naming peers that did not confirm in time. It is unregistered all the same, but held until
            ``close``, as a network may still have writes from it under way.
        """
        core = given_handle("memory", memory, Memory)
        if memory.engine is not self:
            raise invalid("memory", "memory of another engine", f"memory that {self.name!r} registered")
        self.core.unregister(core, self.timeout(timeout_s))
        if held := self._held.pop(core.id, None):
            held.let_go()

    def connect(self, address: bytes, timeout_s: float | None = None) -> Peer:
        """Connect to the engine with that ``address``; the same Peer until it is lost, a new life afterwards.

        Raises: PeerLost when it does not answer; weft.Error for bytes that are no address of this provider.
        """
        return Peer(self.core.connect(given_bytes("address", address), self.timeout(timeout_s)))

    def disconnect(self, peer: Peer) -> None:
        """End the connection; on both sides everything under way with the other fails."""
        self.core.disconnect(given_handle("peer", peer, Peer))

    @property
    def peers(self) -> list[Peer]:
        """Connected peers, also those that connected to this engine."""
        return [Peer(core) for core in self.core.peers()]

    def attach(self, descriptor: bytes, timeout_s: float | None = None) -> Remote:
        """Attach the memory of a connected peer.

        Raises: weft.Error when its owner refuses (taken back, wrong key); PeerLost when it does not answer.
        """
        return Remote(self.core.attach(given_bytes("descriptor", descriptor), self.timeout(timeout_s)))

    # ---- transfers

    def write(
        self,
        src: Memory,
        dst: Remote,
        nbytes: int | None = None,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: int | None = None,
        notify: str = "once",
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Write ``nbytes`` (default: all from ``src_offset`` on) to a peer's memory.

        Args:
            imm: 0 to 1048575: counted at the peer after all bytes are visible there.
            notify: ``once`` per write, or ``each``: with every write of a rail, ``expected_imms`` says how many.
            rail: pin to one local NIC; default: spread over all.
            counter, callback: told of the end, besides the returned Transfer.
        Raises: weft.Error at once for a wrong argument, and nothing is written.
        """
        core_src, core_dst = given_memory("src", src), given_handle("dst", dst, Remote)
        how = self._how(imm, notify, rail, timeout_s, counter, callback)
        count = length_within(nbytes, src, src_offset=src_offset, dst_offset=dst_offset)
        return Transfer(self, self.core.write(core_src, src_offset, core_dst, dst_offset, count, how))

    def read(
        self,
        dst: Memory,
        src: Remote,
        nbytes: int | None = None,
        *,
        dst_offset: int = 0,
        src_offset: int = 0,
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Read ``nbytes`` (default: all of ``src`` from ``src_offset`` on). The peer is not told of it."""
        core_dst, core_src = given_target("dst", dst), given_handle("src", src, Remote)
        how = self._how(None, "once", rail, timeout_s, counter, callback)
        count = length_within(nbytes, src, src_offset=src_offset, dst_offset=dst_offset)
        return Transfer(self, self.core.read(core_dst, dst_offset, core_src, src_offset, count, how))

    def write_pages(
        self,
        src: Memory,
        src_pages: Pages,
        dst: Remote,
        dst_pages: Pages,
        page_bytes: int,
        *,
        imm: int | None = None,
        notify: str = "once",
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Write page i of ``src_pages`` to page i of ``dst_pages``, ``page_bytes`` each, as one transfer."""
        how = self._how(imm, notify, rail, timeout_s, counter, callback)
        return self._paged(True, src, src_pages, dst, dst_pages, page_bytes, how)

    def read_pages(
        self,
        dst: Memory,
        dst_pages: Pages,
        src: Remote,
        src_pages: Pages,
        page_bytes: int,
        *,
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Read page i of ``src_pages`` into page i of ``dst_pages``, ``page_bytes`` each, as one transfer."""
        how = self._how(None, "once", rail, timeout_s, counter, callback)
        return self._paged(False, dst, dst_pages, src, src_pages, page_bytes, how)

    def scatter(
        self,
        src: Memory,
        targets: Sequence[Target],
        *,
        imm: int | None = None,
        notify: str = "once",
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Write ranges of ``src`` to several targets, of one or many peers, as one transfer.

        ``imm`` is counted once per target.
        """
        how = self._how(imm, notify, rail, timeout_s, counter, callback)
        rows = [
            (given_handle("dst", t.dst, Remote), *given_places(t.dst_offset, t.src_offset, t.nbytes))
            for t in given_list("targets", targets, Target)
        ]
        return Transfer(self, self.core.spread(True, given_memory("src", src), rows, how))

    def gather(
        self,
        dst: Memory,
        sources: Sequence[Source],
        *,
        rail: int = ANY_RAIL,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Read ranges of memory of one or many peers into ``dst``, as one transfer: the opposite of ``scatter``."""
        how = self._how(None, "once", rail, timeout_s, counter, callback)
        rows = [
            (given_handle("src", s.src, Remote), *given_places(s.src_offset, s.dst_offset, s.nbytes))
            for s in given_list("sources", sources, Source)
        ]
        return Transfer(self, self.core.spread(False, given_target("dst", dst), rows, how))

    def notify(self, peer: Peer, imm: int, timeout_s: float | None = None) -> Transfer:
        """Send an immediate alone."""
        how = self._how(whole("imm", imm, IMM_MAX), "once", ANY_RAIL, timeout_s, None, None)
        return Transfer(self, self.core.notify(given_handle("peer", peer, Peer), how))

    def send(
        self,
        peer: Peer,
        src: Memory,
        nbytes: int | None = None,
        *,
        offset: int = 0,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Send a message, of any length; messages of one peer are received in the order they were sent."""
        how = self._how(None, "once", ANY_RAIL, timeout_s, counter, callback)
        core_peer, core_src = given_handle("peer", peer, Peer), given_memory("src", src)
        count = length_within(nbytes, src, offset=offset)
        return Transfer(self, self.core.send(core_peer, core_src, offset, count, how))

    def recv(
        self,
        peer: Peer | None,
        dst: Memory,
        nbytes: int | None = None,
        *,
        offset: int = 0,
        timeout_s: float | None = None,
        counter: Counter | None = None,
        callback: Completion | None = None,
    ) -> Transfer:
        """Receive the next message from ``peer``, or from anyone; fails if it is longer than ``nbytes``."""
        how = self._how(None, "once", ANY_RAIL, timeout_s, counter, callback)
        core_dst = given_target("dst", dst)
        core_peer = None if peer is None else given_handle("peer", peer, Peer)
        count = length_within(nbytes, dst, offset=offset)
        return Transfer(self, self.core.recv(core_peer, core_dst, offset, count, how))

    # ---- immediates, counters, watchers

    def imm(self, peer: Peer, id: int) -> ImmCounter:
        """Return the counter of immediates ``id`` (0 to 1048575) from ``peer``."""
        return ImmCounter(
            self, self.core.imm_counter(given_handle("peer", peer, Peer), whole("imm", id, IMM_MAX))
        )

    def expected_imms(self, nbytes: int, pages: int = 0, sender: Peer | None = None) -> int:
        """Return how many immediates the target of one write with ``notify="each"`` counts.

        Args:
            nbytes: of the write, or of one page when ``pages`` is given.
            sender: whose write it is, if not this engine's own: a peer with the same NICs' limits and
                ``shard_bytes_min``, but its own number of rails.
        """
        rails = 0 if sender is None else given_handle("sender", sender, Peer).rails
        return int(self.core.expected_imms(whole("pages", pages), whole("nbytes", nbytes), rails))

    def barrier(self, peers: Sequence[Peer], id: int, timeout_s: float | None = None) -> None:
        """Wait until each of ``peers`` has called ``barrier`` with this id as often as this engine has.

        Ids are 0 to 1048575 and have nothing to do with those of immediates.
        Raises: PeerLost naming the first peer that did not come in time.
        """
        self.core.barrier(given_peers("peers", peers), whole("id", id, IMM_MAX), self.timeout(timeout_s))

    def counter(self) -> Counter:
        """Return a new counter of finished transfers."""
        return Counter(self)

    def watch(self, callback: Callable[[int, int], bool], cpu: int = -1) -> Watch:
        """Call ``callback(old, new)`` whenever a number changes that a kernel stores at ``Watch.address``.

        Level-triggered: values in between may be skipped. Return False to end it. ``cpu`` pins the watching
        thread and counts for the first watch of an engine.
        """
        if not callable(callback):
            raise invalid("callback", quoted(callback), "something to call")
        if self._watcher is None:
            pinned_to = -1 if index_of(cpu) == -1 else whole("cpu", cpu, 1 << 16)
            self._watcher = _core.TransferWatcher(self._device, pinned_to)
        return Watch(self._watcher, self._watcher.watch(callback))

    # ---- the rest

    def progress(self) -> None:
        """Post and poll once, unless another thread does so."""
        self.core.progress()

    def dump(self) -> str:
        """Return what is under way, one line per peer and transfer."""
        return str(self.core.dump())

    def close(self) -> None:
        """Fail what is under way, tell peers, stop the threads, let go of registered memory. Idempotent.

        Raises: weft.Error in a child that was forked from the process of the engine, which goes on.
        """
        self._owner.check("engine")
        if self._watcher is not None:
            self._watcher.close()
        self.core.close()
        for held in self._held.values():
            held.let_go()
        self._held.clear()
        _open_engines.discard(self)

    def _close_here(self) -> None:
        """Close it, unless another process has it, from which this one was forked."""
        if self._owner.is_this:
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "core"):
            self._close_here()

    def __repr__(self) -> str:
        return (
            f"TransferEngine({self.name!r}, {', '.join(f'{nic.provider} {nic.name}' for nic in self.nics)})"
        )

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_here()

    @staticmethod
    def _how(
        imm: int | None,
        notify: str,
        rail: int,
        timeout_s: float | None,
        counter: Counter | None,
        callback: Completion | None,
    ) -> tuple[Any, ...]:
        if not isinstance(notify, str) or notify not in ("once", "each"):
            raise invalid("notify", quoted(notify), "'once' or 'each'")
        if imm is not None:
            imm = whole("imm", imm, IMM_MAX)
        if index_of(rail) != ANY_RAIL:
            rail = whole("rail", rail, 1 << 16)
        deadline_s = given_seconds("timeout_s", timeout_s) or 0.0
        core_counter = None if counter is None else given_handle("counter", counter, Counter)
        return (imm, notify == "each", rail, float(deadline_s), core_counter, for_core(callback))

    def _paged(
        self,
        is_write: bool,
        local: Memory,
        local_pages: Pages,
        remote: Remote,
        remote_pages: Pages,
        page_bytes: int,
        how: tuple[Any, ...],
    ) -> Transfer:
        names = ("src", "dst") if is_write else ("dst", "src")
        core_local = given_memory("src", local) if is_write else given_target("dst", local)
        core_remote = given_handle(names[1], remote, Remote)
        here, there = (
            given_pages(f"{names[0]}_pages", local_pages),
            given_pages(f"{names[1]}_pages", remote_pages),
        )
        nbytes = whole("page_bytes", page_bytes)
        return Transfer(self, self.core.paged(is_write, core_local, here, core_remote, there, nbytes, how))
