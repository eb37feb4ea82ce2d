# SPDX-License-Identifier: Apache-2.0
"""A stranger beside the ranks of ``weft chaos``: a program that attacks every door that they have open.

    with Attacker(program) as attacker:
        with attacker.at(pids):
            ...                     # a round
    attacker.counts["let_in"]       # is to be 0

The program is ``weft_attacker``, which is built with the C++ tests (tests/attacker). It knows no secret. It is told
what any process of this host can find out: which ports listen, the names of sockets and of shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.errors import invalid
from weft.runtime.listeners import open_ports, socket_inodes

_LOOK_S = 0.1  # between two looks at which doors there are
_SPARED = "spared-"  # a file in a round's folder, for each process
_ANSWER_S = 20.0  # for the attack that it is at


class Attacker:
    """Owns the program, which ends with it. ``counts``: how often it did what; "restarts": how often it broke."""

    def __init__(self, program: Path) -> None:
        if not os.access(program, os.X_OK):
            raise invalid("--attacker", program, "weft_attacker, which is built with the C++ tests")
        self._program = program
        self._process = self._start()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def at(self, pids: Sequence[int], folder: Path) -> Iterator[None]:
        """Have it attack these processes for as long as the block runs, each once spare_others() was called there."""
        over = threading.Event()
        looking = threading.Thread(target=self._name_doors, args=(pids, folder, over), daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            self._take_counts()

    def _start(self) -> subprocess.Popen[bytes]:
        variables = {name: value for name, value in os.environ.items() if name != "WEFT_JOB_SECRET"}
        return subprocess.Popen(
            [self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, bufsize=0
        )

    def _name_doors(self, pids: Sequence[int], folder: Path, over: threading.Event) -> None:
        known: set[str] = set()
        while not over.wait(_LOOK_S):
            found: set[str] = set()
            for pid in pids:
                with contextlib.suppress(OSError):  # it has not begun
                    found.update(
                        set(doors_of(pid)) - set((folder / f"{_SPARED}{pid}").read_text().splitlines())
                    )
            if found != known:
                self._say(["clear", *sorted(found)])
                known = found

    def _say(self, lines: list[str]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _take_counts() sees that it has ended
            self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())

    def _take_counts(self) -> None:
        """End the attack; a program that has ended, or does not answer, is started again."""
        self._say(["clear", "report"])
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        said = self._process.stdout.readline() if is_there else b""
        if said:
            self.counts.update(json.loads(said))
            return
        self.counts["restarts"] += 1
        self.__exit__()
        self._process = self._start()


def spare_others(folder: Path) -> None:
    """Note which doors this process has before Weft opens any: torch's keep what strangers leave open."""
    beside = folder / f"beside-{os.getpid()}"
    beside.write_text("\n".join(doors_of(os.getpid())))
    beside.rename(folder / f"{_SPARED}{os.getpid()}")


def doors_of(pid: int) -> list[str]:
    """Return what a process listens on, as lines for the program."""
    process = Path("/proc") / str(pid)
    doors = []
    with contextlib.suppress(OSError):  # it has ended
        sockets = socket_inodes(process)
        doors += [
            f"port {address}:{port}" for inode, address, port in open_ports(process) if inode in sockets
        ]
        for fields in (line.split() for line in (process / "net" / "unix").read_text().splitlines()[1:]):
            if len(fields) > 7 and fields[6] in sockets and fields[7].startswith("@weft"):
                doors.append(f"datagrams {fields[7][1:]}")
    doors += [f"shm {path.name}" for path in Path("/dev/shm").glob(f"weft-*-{pid}-*")]
    return doors
