# SPDX-License-Identifier: Apache-2.0
"""What ``weft chaos`` does to ranks, where it can do so, and what they may then say.

    fault = draw_fault(random.Random(7), "mapped", PORTS, ranks=3, calls=20)
    Adversary(fault, board, pids).start()         # signals, from outside
    suffer(fault, place, at=4)                    # everything else, on the rank itself, before its call number 4

A fault that an environment cannot have is not offered there; ``why_not`` says why.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import _core
from weft.chaos.operations import ENGINE, PORTS

TRANSPORTS = ("mapped", "fabric:tcp", "fabric:shm", "loopback")
_PROCESSES = TRANSPORTS[:3]  # ranks of the loopback are threads of one process
SHIFT_LIBRARY = "clock_shift.so"
_CLONE_NEWNS, _MS_PRIVATE_ALL = 0x20000, 0x44000  # MS_REC | MS_PRIVATE
_NOBODY = 65534
STOP_S = 4.0  # deadline of every wait where a rank is stopped, or its packets are lost


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        what: one line for people.
        ends: "right" (every result is right), "blame" (right, or PeerLost with the right rank), "refusal" (right, or a
            refusal that says what the matter is with the machine).
        where: transports that can have it.
        why_not: the reason for the others.
        needs: PORTS or ENGINE where only one of them can have it.
    """

    what: str
    ends: str
    where: tuple[str, ...] = TRANSPORTS
    why_not: str = ""
    needs: str = ""
    weight: int = 2


_NO_NETWORK = "no packets here: memory is shared, or the network is the system's own"
_ONE_PROCESS = "ranks are threads of one process here"
_MOUNTS = "ranks would share what is mounted: they are threads"
KINDS = {
    "none": Kind("nothing", "right"),
    "late": Kind("a rank sleeps between two calls", "right"),
    "pause": Kind("SIGSTOP, soon SIGCONT", "right", _PROCESSES, _ONE_PROCESS),
    "clock": Kind("a rank's CLOCK_REALTIME is set, by up to 10 years", "right"),
    "delay": Kind("packets are held back", "right", ("loopback",), _NO_NETWORK),
    "reorder": Kind("packets overtake each other", "right", ("loopback",), _NO_NETWORK),
    "duplicate": Kind("packets come twice", "right", ("loopback",), _NO_NETWORK, PORTS),
    "disk": Kind("the cache folder is a full file system", "right", ("mapped",), _MOUNTS, PORTS, 1),
    "disks": Kind("the cache and temporary folders are full", "refusal", ("mapped",), _MOUNTS, PORTS, 1),
    "open cache": Kind("others may write the cache folder", "right", ("mapped",), _MOUNTS, PORTS, 1),
    "no rights": Kind("a rank loses root's rights, and its cache", "refusal", ("mapped",), _MOUNTS, PORTS, 1),
    "kill": Kind("SIGKILL, SIGSEGV or SIGTERM", "blame", _PROCESSES, _ONE_PROCESS, "", 6),
    "exit": Kind("a rank ends with status 3", "blame", _PROCESSES, _ONE_PROCESS),
    "stop": Kind("SIGSTOP past the deadline", "blame", _PROCESSES, _ONE_PROCESS, "", 1),
    "drop": Kind("packets are lost", "blame", ("loopback",), _NO_NETWORK),
    "silence": Kind("the network falls silent", "blame", ("loopback",), _NO_NETWORK),
}
COMPILES = ("disk", "disks", "open cache", "no rights")  # faults of places where kernels are kept


@dataclass(frozen=True)
class Fault:
    """One fault of one round: what happens to rank ``victim``, ``after_s`` seconds into its call ``at``."""

    kind: str
    victim: int
    at: int
    after_s: float = 0.0
    amount: float = 0.0  # seconds, a signal's number or a chance, as the kind has it
    seed: int = 0

    @property
    def ends(self) -> str:
        """See Kind.ends."""
        return KINDS[self.kind].ends

    @property
    def is_deadly(self) -> bool:
        """Whether the victim's process ends."""
        return self.kind in ("kill", "exit")

    @property
    def strikes_all(self) -> bool:
        """Whether any rank may be blamed: the network as a whole suffers."""
        return self.kind in ("drop", "silence")

    @property
    def timeout_s(self) -> float:
        """The deadline of every wait in such a round: short where it must pass, long where no rank may reach it."""
        return STOP_S if self.kind in ("stop", "drop", "silence") else 30.0

    @property
    def peer_dead_s(self) -> float:
        """The silence after which a network takes a peer for lost."""
        return STOP_S if self.ends == "blame" else 30.0


def offers(folder: Path) -> dict[str, str]:
    """Return the kinds that this machine does not allow, each with the reason."""
    missing = {}
    if not os.environ.get("LD_PRELOAD", "").endswith(SHIFT_LIBRARY):
        missing["clock"] = "no C++ compiler here to build the library that shifts it"
    if not _can_mount(folder):
        missing["disk"] = missing["disks"] = "only root may mount a small file system"
    parents = [Path(_core.__file__), *Path(_core.__file__).parents]
    if os.geteuid() != 0 or not all(path.stat().st_mode & 0o005 for path in parents):
        missing["no rights"] = "needs root's rights to lose, and an installation that everybody may read"
    return missing


def draw_fault(
    chance: random.Random, kinds: list[str], ranks: int, calls: int, wanted: str | None = None
) -> Fault:
    """Draw a fault among ``kinds``."""
    kind = wanted or chance.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
    amount = {
        "late": chance.uniform(0.01, 0.5),
        "pause": chance.uniform(0.01, 0.5),
        "clock": chance.choice((-1, 1)) * 10 ** chance.uniform(-1, 8.5),
        "kill": chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)),
        "delay": chance.uniform(0.01, 0.3),
        "reorder": chance.uniform(0.05, 0.8),
        "duplicate": chance.uniform(0.05, 0.5),
        "drop": 10 ** chance.uniform(-3, -1),
    }.get(kind, 0.0)
    after_s = 10 ** chance.uniform(-4, -1)
    seed = chance.randrange(1 << 30)
    return Fault(kind, chance.randrange(ranks), chance.randrange(calls), after_s, float(amount), seed)


class Board:
    """The calls that every rank has begun, in memory that all processes of a round share."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (ranks + 1))
        self._ranks = ranks

    def begin(self, rank: int, call: int) -> None:
        """Note that ``rank`` has begun its call number ``call``."""
        struct.pack_into("q", self._memory, 8 * rank, call + 1)

    def has_begun(self, rank: int, call: int) -> bool:
        """Return whether ``rank`` has begun ``call``."""
        return bool(struct.unpack_from("q", self._memory, 8 * rank)[0] > call)

    @property
    def struck_at(self) -> float:
        """When the fault struck, on the monotonic clock; 0 before."""
        return float(struct.unpack_from("d", self._memory, 8 * self._ranks)[0])

    def strike(self) -> None:
        """Note that the fault strikes now."""
        struct.pack_into("d", self._memory, 8 * self._ranks, time.monotonic())


class Adversary(threading.Thread):
    """Sends the victim its signal, from outside, when it has begun the call that the fault names."""

    def __init__(self, fault: Fault, board: Board, pid: int) -> None:
        super().__init__(daemon=True)
        self._fault, self._board, self._pid = fault, board, pid
        self._over = threading.Event()

    def run(self) -> None:
        fault = self._fault
        while not self._board.has_begun(fault.victim, fault.at):
            if self._over.wait(0.0005):
                return
        time.sleep(fault.after_s)
        try:
            if fault.kind == "kill":
                self._board.strike()
                os.kill(self._pid, int(fault.amount))
            elif fault.kind in ("pause", "stop"):
                self._board.strike()
                os.kill(self._pid, signal.SIGSTOP)
                self._over.wait(fault.amount if fault.kind == "pause" else 3 * STOP_S)
                os.kill(self._pid, signal.SIGCONT)
        except ProcessLookupError:  # it was done before
            pass

    def stop(self) -> None:
        """Wait for the end of what it does."""
        self._over.set()
        self.join()


def suffer(fault: Fault, board: Board, rank: int, folder: Path) -> None:
    """Do to this rank, before its call ``fault.at``, what is done from within."""
    if fault.kind in COMPILES or rank == fault.victim:
        act = _DEEDS.get(fault.kind)
        if act is not None:
            if rank == fault.victim:
                board.strike()
            act(fault, rank, folder)


def settings_of(fault: Fault, folder: Path) -> dict[str, str]:
    """Return the WEFT_ variables of a round with this fault, beside those of its transport."""
    own = folder / "own-cache" if fault.kind in COMPILES else folder.parent / "cache"
    return {
        "WEFT_PEER_DEAD_S": str(fault.peer_dead_s),
        "WEFT_HEARTBEAT_S": "0.2",
        "WEFT_CACHE_DIR": str(own),
        "WEFT_LOG": "error",
    }


# ---- deeds


def _sleep(fault: Fault, rank: int, folder: Path) -> None:
    time.sleep(fault.amount)


def _set_clock(fault: Fault, rank: int, folder: Path) -> None:
    ctypes.c_longlong.in_dll(ctypes.CDLL(None), "weft_chaos_clock_shift_ns").value = int(fault.amount * 1e9)


def _spoil_network(fault: Fault, rank: int, folder: Path) -> None:
    plan: dict[str, Any] = dict.fromkeys(("drop", "duplicate", "reorder", "fail", "delay"), 0.0)
    if fault.kind != "silence":
        plan[fault.kind] = fault.amount
    silent_after = 1 if fault.kind == "silence" else 0
    _core.transfer_find_provider("loopback").set_plan(
        seed=fault.seed, dies_after=silent_after, spare_messages=False, **plan
    )


def _exit(fault: Fault, rank: int, folder: Path) -> None:
    os._exit(3)


def _fill_disk(fault: Fault, rank: int, folder: Path) -> None:
    _mount_full(folder / "own-cache")
    if fault.kind == "disks":
        _mount_full(folder / "own-tmp")
        os.environ["TMPDIR"] = str(folder / "own-tmp")


def _open_cache(fault: Fault, rank: int, folder: Path) -> None:
    (folder / "own-cache").mkdir(exist_ok=True)
    (folder / "own-cache").chmod(0o777)


def _lose_rights(fault: Fault, rank: int, folder: Path) -> None:
    if rank == fault.victim:
        os.environ["TMPDIR"] = "/tmp"  # whose folder everybody may enter
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


_DEEDS = {
    "late": _sleep,
    "clock": _set_clock,
    "delay": _spoil_network,
    "reorder": _spoil_network,
    "duplicate": _spoil_network,
    "drop": _spoil_network,
    "silence": _spoil_network,
    "exit": _exit,
    "disk": _fill_disk,
    "disks": _fill_disk,
    "open cache": _open_cache,
    "no rights": _lose_rights,
}


def _mount_full(folder: Path) -> None:
    """Put a full file system of 64 KiB at ``folder``, which this process alone sees."""
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_ALL), None))
    _check(libc.mount(b"weft", bytes(folder), b"tmpfs", ctypes.c_ulong(0), b"size=64k,mode=0700"))
    try:
        with open(folder / "full", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _can_mount(folder: Path) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _mount_full(folder / "mount-probe")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def why_not(transport: str, needs: str, missing: dict[str, str]) -> dict[str, str]:
    """Return the kinds that a round of this transport and subject cannot have, each with the reason."""
    out = dict(missing)
    for name, kind in KINDS.items():
        if transport not in kind.where:
            out[name] = kind.why_not
        elif kind.needs and kind.needs != (ENGINE if needs == ENGINE else PORTS):
            out[name] = "a network that repeats the bytes of old writes breaks its promise to engines"
    return out
