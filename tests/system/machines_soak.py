# SPDX-License-Identifier: Apache-2.0
"""A soak of collectives over machines out of one, with random faults.

    python tests/system/machines_soak.py --minutes 30 --json bench/results/cpu-2core-machines-soak.json

Round after round, ranks of two machines run collectives whose results they check, until a fault: a rank is killed or
stopped, a cable is pulled for good, or for a moment, or all cables are bad from the start: they lose, double, delay
and reorder frames. Each call has to end with the right result, or with an error that names a rank that the fault took
away; after a moment's cut, and over bad cables, every rank goes on. Ranks also tell whether their memory, files or
threads grew. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

from weft.runtime.machine import machine, versions
from weft.testing.bad_link import BadLink
from weft.testing.machines import Machines, why_not

FAULTS = ("kill", "stop", "cut", "blink", "bad", "none")
GOES_ON = ("blink", "bad", "none")
SETTINGS = {"WEFT_PEER_DEAD_S": "4", "WEFT_HEARTBEAT_S": "0.5", "OMP_NUM_THREADS": "1"}
MOST_GROWTH_KIB = 64 << 10
END_S = 60.0

RANK = """
import os, random, sys, torch, weft
folder, seed = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
comm = weft.Communicator(timeout_s=40)
n, me, draw = comm.size, comm.rank, random.Random(seed)

def held():
    status = open("/proc/self/status").read()
    kib = int(status.split("VmRSS:")[1].split()[0])
    return kib, len(os.listdir("/proc/self/fd")), int(status.split("Threads:")[1].split()[0])

def call():
    elems = draw.choice((1, 17, 1000, 4099, 70_001, 400_000))
    every = torch.stack([(torch.arange(elems * n) % 13 + r).float() for r in range(n)])
    own, parts = every[me].clone(), every.view(n, n, elems)
    which = draw.randrange(5)
    if which == 0: return torch.equal(comm.all_reduce(own), every.sum(0))
    if which == 1: return torch.equal(comm.all_gather(own), every)
    if which == 2: return torch.equal(comm.reduce_scatter(own.view(n, elems)).flatten(), parts.sum(0)[me])
    if which == 3: return torch.equal(comm.all_to_all(own.view(n, elems)), parts[:, me])
    return torch.equal(comm.broadcast(own, 1), every[1])

calls, first = 0, None
try:
    while True:
        if not call():
            print("WRONG after", calls, "calls", flush=True)
            os._exit(1)
        calls += 1
        if calls == 10:
            open(f"{folder}/going{me}", "w").close()
        if calls == 100:
            first = held()
        ends = torch.tensor([float(os.path.exists(f"{folder}/end"))])
        if calls % 10 == 0 and comm.all_reduce(ends, "max")[0]:
            break
    last = held()
    print("done", calls, *(first or last), *last, flush=True)
except weft.PeerLost as error:
    print("lost", calls, error, flush=True)
os._exit(0)
"""


def start(made: Machines, ranks: int, folder: Path, seed: int) -> list[subprocess.Popen[str]]:
    """Start the ranks of both machines, in order."""
    size = made.count * ranks
    meet = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29600", "WORLD_SIZE": str(size)}
    if counts_memory(seed):
        meet["WEFT_HUGE_PAGES"] = "0"
    return [
        made.start(
            rank // ranks,
            [sys.executable, "-c", RANK, str(folder), str(seed)],
            env={**os.environ, **SETTINGS, **meet, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]


def inflict(made: Machines, workers: list[subprocess.Popen[str]], fault: str, at: int) -> None:
    """Do it to rank ``at``, or to the cable of its machine."""
    ranks = len(workers) // made.count
    if fault in ("kill", "stop"):
        os.killpg(workers[at].pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault in ("cut", "blink"):
        made.unplug(at // ranks)
        if fault == "blink":
            time.sleep(1.0)
            made.plug(at // ranks)


def judge(printed: list[str], fault: str, at: int, ranks: int) -> list[str]:
    """Return what is wrong with what the ranks printed, one sentence each."""
    wrong = []
    for rank, text in enumerate(printed):
        is_gone = fault in ("kill", "stop") and rank == at
        if is_gone:
            continue
        if fault in GOES_ON:
            if not text.startswith("done"):
                wrong.append(f"rank {rank} did not go on after {fault}: {text!r}")
            continue
        behind = {
            other
            for other in range(len(printed))
            if (other // ranks == at // ranks) != (rank // ranks == at // ranks)
        }
        guilty = {at} if fault in ("kill", "stop") else behind
        named = {int(number) for number in re.findall(r"rank (\d+)", text)} - {rank}
        if not text.startswith("lost") or not named & guilty:
            wrong.append(f"rank {rank} did not name one of {sorted(guilty)} after {fault} of {at}: {text!r}")
    return wrong


def counts_memory(seed: int) -> bool:
    """Return whether a round looks for growth of memory: every other one, without huge pages.

    These come in, 2 MiB at a time, whenever a buffer or a part of a window is used again, until all are there.
    """
    return seed % 2 == 0


def growth(printed: list[str], seed: int) -> list[str]:
    """Return which ranks held more at the end than after 100 calls."""
    grown = []
    for rank, text in enumerate(printed):
        if not text.startswith("done"):
            continue
        calls, *numbers = map(int, text.split()[1:8])
        kib, files, threads = (last - first for first, last in zip(numbers[:3], numbers[3:], strict=True))
        has_grown = counts_memory(seed) and kib > MOST_GROWTH_KIB
        if has_grown or files > 2 or threads > 2:
            grown.append(f"rank {rank}: {kib} KiB, {files} files, {threads} threads more after {calls} calls")
    return grown


def bad_cables(seed: int, draw: random.Random) -> BadLink:
    """Return cables that are bad in some of all ways."""
    return BadLink(
        seed=seed,
        delay_ms=draw.choice((0.0, 0.2, 2.0)),
        jitter_ms=draw.choice((0.0, 1.0)),
        reorder=draw.choice((0.0, 0.02)),
        duplicate=draw.choice((0.0, 0.02)),
        loss=draw.choice((0.001, 0.005)),
        rate_mbit=draw.choice((0.0, 500.0)),
    )


def play(seed: int, folder: Path, only: str = "") -> tuple[str, list[str], int]:
    """Play one round; return its fault, what went wrong, and the calls that rank 0 finished."""
    draw = random.Random(seed)
    fault, ranks = only or draw.choice(FAULTS), draw.choice((1, 2))
    at = draw.randrange(2 * ranks)
    with Machines(2, bad_cables(seed, draw) if fault == "bad" else None) as made:
        workers = start(made, ranks, folder, seed)
        until = time.monotonic() + END_S
        while not all((folder / f"going{rank}").exists() for rank in range(2 * ranks)):
            if time.monotonic() > until:
                return fault, [f"seed {seed}: the ranks did not start"], 0
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 3))
        inflict(made, workers, fault, at)
        if fault in GOES_ON:
            time.sleep(draw.uniform(1, 4))
            (folder / "end").touch()
        printed = []
        for rank, worker in enumerate(workers):
            if fault == "stop" and rank == at:
                printed.append("")
                continue
            try:
                printed.append(worker.communicate(timeout=END_S)[0].strip())
            except subprocess.TimeoutExpired:
                printed.append("no end")
        wrong = judge(printed, fault, at, ranks) + growth(printed, seed)
        calls = next((int(text.split()[1]) for text in printed if text[:4] in ("done", "lost")), 0)
        return fault, [f"seed {seed}, {ranks} ranks a machine: {what}" for what in wrong], calls


def main() -> int:
    """Play rounds for so long; print and write what happened. Returns 1 where anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each has the next")
    parser.add_argument("--fault", default="", choices=FAULTS, help="this one alone (default: drawn)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if reason := why_not() or why_not(BadLink()):
        print(f"no machines: {reason}")
        return 1
    began, seed = time.monotonic(), args.seed
    faults: Counter[str] = Counter()
    wrong: list[str] = []
    calls = 0
    while time.monotonic() - began < 60 * args.minutes:
        with tempfile.TemporaryDirectory() as folder:
            fault, found, finished = play(seed, Path(folder), args.fault)
        faults[fault] += 1
        wrong += found
        calls += finished
        seed += 1
        print(f"round {faults.total()}: {fault}{': ' + '; '.join(found) if found else ''}", flush=True)
    document = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "command": f"python tests/system/machines_soak.py --minutes {args.minutes:g} --seed {args.seed}"
        + (f" --fault {args.fault}" if args.fault else ""),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rounds": dict(faults),
        "calls": calls,
        "wrong": wrong,
    }
    print(json.dumps(document, indent=1))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
