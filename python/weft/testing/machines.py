# SPDX-License-Identifier: Apache-2.0
"""Machines out of one: Linux network namespaces, each with an Ethernet cable to one switch.

    with Machines(2) as machines:
        workers = [machines.start(at, [*torchrun_of(machines, at, 2), "train.py"]) for at in range(2)]
        machines.unplug(1)

    Machines(2, BadLink(loss=0.01))    # every cable loses frames: weft.testing.bad_link

    python -m weft.testing.machines --machines 2 --ranks 2 -- train.py

starts torchrun with what follows ``--`` on each. Processes of different namespaces have no network in common but the
cables, and Weft takes them for different hosts. Needs root and ``ip`` (iproute2); why_not() says what is missing. The
command falls back to one host that is cut into nodes (WEFT_RANKS_PER_NODE), and says so.
Threads: one at a time per Machines.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from weft.errors import Error, invalid
from weft.runtime.tables import integer_from
from weft.testing import bad_link
from weft.testing.bad_link import BadLink, Report

_PORT = 29610  # of torchrun's rendezvous, in a namespace that nobody else uses
_END_S = 5.0  # for processes to end once they are asked to


class Machines:
    """``count`` namespaces on one switch, which is a namespace of its own. Gone, with their processes, on exit.

    Addresses are 10.77.0.1 and so on, on an interface ``eth0`` of each. ``link``: what the cables do to frames, each by
    a seed of its own; None: nothing. ``link_reports`` is there on exit. Raises: Error where the system refuses.
    """

    def __init__(self, count: int, link: BadLink | None = None) -> None:
        if not 1 <= count <= 200:
            raise invalid("count", count, "1 to 200")
        self.count = count
        self._prefix = f"weft{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._processes: list[subprocess.Popen[str]] = []
        self._link = link
        self._cables: list[subprocess.Popen[str]] = []
        self.link_reports: list[Report] = []

    def address(self, at: int) -> str:
        """Return a machine's address."""
        return f"10.77.0.{at + 1}"

    def start(self, at: int, command: Sequence[str], **named: Any) -> subprocess.Popen[str]:
        """Start a command on machine ``at``, in a session of its own; ``named`` is for subprocess.Popen."""
        inside = ["ip", "netns", "exec", self._name(at), *command]
        process = subprocess.Popen(inside, start_new_session=True, text=True, **named)
        self._processes.append(process)
        return process

    def unplug(self, at: int) -> None:
        """Pull a machine's cable out of the switch."""
        _ip("-n", self._switch, "link", "set", f"port{at}", "down")

    def plug(self, at: int) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", f"port{at}", "up")

    def __enter__(self) -> Machines:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for at in range(self.count):
                self._add(at)
        except Error:
            self._end_cables()
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_processes()
        self._end_cables()
        self._remove()

    def _name(self, at: int) -> str:
        return f"{self._prefix}m{at}"

    def _add(self, at: int) -> None:
        name = self._name(at)
        _ip("netns", "add", name)
        if self._link:
            self._cables.append(_start_cable(name, self._switch, f"port{at}", self._link, at))
        else:
            cable = ("type", "veth", "peer", "name", f"port{at}", "netns", self._switch)
            _ip("-n", name, "link", "add", "eth0", *cable)
        _ip("-n", self._switch, "link", "set", f"port{at}", "master", "switch", "up")
        _ip("-n", name, "addr", "add", f"{self.address(at)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", name, "link", "set", link, "up")

    def _end_processes(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _END_S
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, sign)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(until - time.monotonic(), 0.1))

    def _end_cables(self) -> None:
        for cable in self._cables:
            cable.terminate()
        for cable in self._cables:
            try:
                output = cable.communicate(timeout=_END_S)[0]
                self.link_reports.append(Report(**json.loads(output.splitlines()[-1])))
            except (subprocess.TimeoutExpired, ValueError, IndexError):
                cable.kill()
                cable.wait()
        self._cables = []

    def _remove(self) -> None:
        for name in [*map(self._name, range(self.count)), self._switch]:
            with contextlib.suppress(Error):
                _ip("netns", "delete", name)


def _start_cable(machine: str, switch: str, port: str, link: BadLink, at: int) -> subprocess.Popen[str]:
    """Start cable number ``at`` and wait for its ends. Raises: Error with what the system says."""
    own = dataclasses.replace(link, seed=link.seed * 1000 + at)
    settings = json.dumps({"ends": [[machine, "eth0"], [switch, port]], "link": dataclasses.asdict(own)})
    command = [sys.executable, "-I", "-S", bad_link.__file__, settings]
    cable = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert cable.stdout and cable.stderr
    if cable.stdout.readline().strip() != "ready":
        why = (cable.stderr.read().strip().splitlines() or ["it ended"])[-1]
        cable.wait()
        raise Error(f"a bad link of {machine}: {why}", "system")
    return cable


def _ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Error(f"ip {' '.join(words)}: {ran.stderr.strip()}", "system")


@functools.cache
def why_not(link: BadLink | None = None) -> str:
    """Return why this process cannot make machines with such cables; empty where it can."""
    if not shutil.which("ip"):
        return "the command ip is missing: apt install iproute2"
    if os.geteuid():
        return "namespaces are made by root"
    try:
        with Machines(1, link):
            return ""
    except Error as error:
        return str(error)


def torchrun_of(machines: Machines, at: int, ranks: int) -> list[str]:
    """Return torchrun's command on machine ``at``, with ``ranks`` ranks on each."""
    meet = f"{machines.address(0)}:{_PORT}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines.count)),
        *("--nproc-per-node", str(ranks), "--node-rank", str(at)),
        *("--rdzv-backend", "static", "--rdzv-endpoint", meet, "--local-addr", machines.address(at)),
    ]


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return this process' environment with what torch needs on such machines."""
    return {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **extra}


def run_everywhere(machines: int, ranks: int, command: Sequence[str]) -> int:
    """Run torchrun with ``command`` on so many machines, or nodes of this host; return the worst exit status."""
    reason = why_not()
    if reason:
        print(f"{machines} nodes of this host instead of machines: {reason}", flush=True)
        total = str(machines * ranks)
        cut = environment({"WEFT_RANKS_PER_NODE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"})
        standalone = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            total,
        ]
        return subprocess.run([*standalone, *command], env=cut, check=False).returncode
    with Machines(machines) as made:
        print(f"{machines} machines, {made.address(0)} to {made.address(machines - 1)}", flush=True)
        workers = [
            made.start(at, [*torchrun_of(made, at, ranks), *command], env=environment())
            for at in range(machines)
        ]
        return max(abs(worker.wait()) for worker in workers)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.testing.machines", description="torchrun on machines out of one"
    )
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=integer_from(1), default=2, help="on each machine")
    parser.add_argument("command", nargs="+", help="what torchrun is to run, after --")
    args = parser.parse_args()
    return run_everywhere(args.machines, args.ranks, args.command)


if __name__ == "__main__":
    sys.exit(main())
