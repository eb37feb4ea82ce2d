# SPDX-License-Identifier: Apache-2.0
"""Whether a round of ``weft chaos`` ended as it had to: right results, right errors, the right rank blamed, no leak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft import _core
from weft.chaos.adversary import Fault
from weft.errors import Error

WRONG_RESULT, HANG, WRONG_BLAME, WRONG_ERROR, LATE, LEAK = VERDICTS = (
    "wrong result",
    "hang",
    "wrong blame",
    "wrong error",
    "late",
    "leak",
)
LET_IN = "let in"  # of a stranger
# What a refusal must say.
_SAYS = {"disks": re.compile(r"No space left"), "no rights": re.compile(r"not permitted|denied")}
_HEAP_KIB = 64 << 10  # for each rank of the process: what torch and Python keep
# Threads that live as long as the process: those of torch and Python, and the workers that host kernels run on.
_KEPT_THREADS = 64
_LET_GO_S = 20.0  # longer than any rank stands still
_KEPT_FILE = "memfd:weft-tally"  # counters, made at the first call of a process


@dataclass
class Outcome:
    """The end of one rank. ``ended``: done, peer_lost, refused (a weft.Error), wrong (a result), crashed."""

    rank: int
    ended: str = "done"
    calls: int = 0
    call: str = ""
    message: str = ""
    found_s: float = 0.0  # from the strike, or the beginning of the call, to the error
    leaks: list[str] = field(default_factory=list)
    descriptors: tuple[int, int] = (
        0,
        0,
    )  # of /proc/self/fd, before it made anything and after it let go of all

    def look_back(self, before: Footprint, ranks: int) -> None:
        """Note what this process, which was so many ranks, still holds."""
        now, self.leaks = before.leaks(ranks)
        self.descriptors = before.descriptors.total(), now.descriptors.total()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a round; ``kind`` is one of VERDICTS."""

    kind: str
    text: str


_GIVEN_UP = "(this rank) was given up by the others"  # what a rank is told that was missed


def judge(fault: Fault, outcomes: Mapping[int, Outcome]) -> list[Problem]:
    """Return what is wrong with the outcomes of the ranks that live."""
    problems: list[Problem] = []
    for rank, outcome in sorted(outcomes.items()):
        where = f"rank {rank}, {outcome.call}: {outcome.message}"
        problems += [Problem(LEAK, f"rank {rank}: {leak}") for leak in outcome.leaks]
        if outcome.ended == "wrong":
            problems.append(Problem(WRONG_RESULT, where))
        elif outcome.ended == "crashed" or (outcome.ended == "refused" and not _may_refuse(fault, outcome)):
            problems.append(Problem(WRONG_ERROR, where))
        elif outcome.ended == "peer_lost" and not _may_lose(fault, rank, outcomes):
            kind = WRONG_BLAME if fault.ends == "blame" else WRONG_ERROR
            problems.append(Problem(kind, f"{where} (blames {sorted(blamed(outcome))})"))
        elif fault.is_deadly and outcome.found_s >= fault.timeout_s and not _had_not_come(outcome):
            problems.append(Problem(LATE, f"{where} (a death is to be noticed before the deadline)"))
    return problems


def _had_not_come(outcome: Outcome) -> bool:
    """Return whether the lost rank had not begun to meet: other ranks can watch it only once it has named its
    process."""
    return "has not come" in outcome.message


def _may_refuse(fault: Fault, outcome: Outcome) -> bool:
    return fault.kind in _SAYS and bool(_SAYS[fault.kind].search(outcome.message))


def _may_lose(fault: Fault, rank: int, outcomes: Mapping[int, Outcome]) -> bool:
    """Return whether this rank may have lost whom it blames.

    Every rank must name a rank that died. A rank that only stands still is named by those that wait for it, and these
    by others: the chain of blames must lead to the victim. If a whole network suffers, every blame is right.
    """
    if fault.ends == "refusal":  # whoever was refused leaves, and the others miss it
        return any(other.ended == "refused" for other in outcomes.values())
    if fault.ends != "blame":
        return False
    if rank == fault.victim and _GIVEN_UP in outcomes[rank].message:
        return True
    if fault.strikes_all or rank == fault.victim:  # the victim wakes up among ranks that have left
        return bool(blamed(outcomes[rank]))
    if fault.is_deadly:
        return fault.victim in blamed(outcomes[rank])
    seen, rest = set(), [rank]
    while rest:
        one = rest.pop()
        if one == fault.victim:
            return True
        if one not in seen and one in outcomes:
            seen.add(one)
            rest += blamed(outcomes[one])
    return False


def blamed(outcome: Outcome) -> set[int]:
    """Return the ranks that a message names besides its own."""
    return {int(number) for number in re.findall(r"\brank (\d+)", outcome.message)} - {outcome.rank}


# ---- leaks


@dataclass
class Footprint:
    """What a process holds. Compare one from before it made anything with one from after it let go of all."""

    descriptors: Counter[str]
    threads: int
    windows: int
    heap_kib: int

    @classmethod
    def now(cls) -> Footprint:
        """Return this process's."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        descriptors: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                what = os.readlink(f"/proc/self/fd/{name}")
                if _KEPT_FILE not in what:
                    descriptors[re.sub(r"\d+", "N", what)] += 1
        maps = Path("/proc/self/maps").read_text()
        status = Path("/proc/self/status").read_text()
        heap = int(status.partition("RssAnon:")[2].split()[0])
        windows = maps.count("memfd:weft") - maps.count(_KEPT_FILE)
        return cls(descriptors, len(os.listdir("/proc/self/task")), windows, heap)

    @classmethod
    def first(cls) -> Footprint:
        """Return this process's before it makes anything.

        A CUDA driver opens pipes and events that it keeps as long as the process, so it is asked first.
        """
        with contextlib.suppress(Error):  # where there is no driver or no GPU
            _core.gpus()
        return cls.now()

    def leaks(self, ranks: int) -> tuple[Footprint, list[str]]:
        """Return what the process holds now, and as sentences what this one did not; so many ranks were in it.

        The meeting of the ranks, in rank 0, ends after the last of them has left. So a difference counts only when it
        lasts.
        """
        until = time.monotonic() + _LET_GO_S
        while (leaks := (now := Footprint.now())._more_than(self, ranks)) and time.monotonic() < until:
            time.sleep(0.2)
        return now, leaks

    def _more_than(self, before: Footprint, ranks: int) -> list[str]:
        leaks = [f"{count} x {what}" for what, count in (self.descriptors - before.descriptors).items()]
        if self.threads > before.threads + _KEPT_THREADS:
            leaks.append(f"{self.threads - before.threads} threads")
        if self.windows > before.windows:
            leaks.append(f"{self.windows - before.windows} mappings of windows")
        if self.heap_kib > before.heap_kib + _HEAP_KIB * ranks:
            leaks.append(f"{(self.heap_kib - before.heap_kib) >> 10} MiB of memory")
        return leaks


def files_of_weft() -> set[Path]:
    """Return the shared memory and the temporary files of this machine that are named after Weft."""
    folders = Path("/dev/shm").glob("*"), Path(tempfile.gettempdir()).glob("weft-*")
    return {path for files in folders for path in files if "weft" in path.name}


def left_on_the_machine(pids: Sequence[int], older: set[Path]) -> list[str]:
    """Return the files that processes which are gone have left; ``older``: those that were there before them.

    A process of another day may have had the same number.
    """
    numbers = {str(pid) for pid in pids}
    left = files_of_weft() - older
    return sorted(str(path) for path in left if numbers & set(re.findall(r"\d+", path.name)))
