# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in each of 40 places, call by phase, again and again; prints who found it, and how soon.

    python tests/fault/kills.py --times 25 [--json FILE] [--ranks-per-node 1]

In every try three processes make the call in a loop, and one of them is killed with signal 9. Both others must
raise ``PeerLost`` with its rank, its process and the signal; on other nodes perhaps that its connection ended. The
time counts from its death, or from the beginning of the call that raised where that came later. A FILE that is
there already is added to, so that many short runs make one long one; ``--jobs 4`` runs four at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import weft
from weft import _core
from weft.runtime.bootstrap import TorchGroup
from weft.runtime.shared_record import shared_record
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

RANKS, LOST = 3, 1
TIMEOUT_S = 120.0  # nobody may need it
MOST_TOKENS = 16
CASE = MoeCase((6, 9, 4), 128, 3, 6, empty_share=0)
ELEMENTS = 3 << 14


class World:
    """What a rank needs for every call. Making one is collective."""

    def __init__(self, rank: Rank, call: str = "") -> None:
        self.rank = rank.rank
        self.comm = weft.Communicator(rank.group, timeout_s=TIMEOUT_S)
        self.data = torch.ones(ELEMENTS)
        if call in OVER_NODES:
            return
        num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(
            MOST_TOKENS, CASE.hidden, rank.size, CASE.num_experts
        )
        self.buffer = weft.Buffer(rank.group, 8 << 20, num_bytes, low_latency_mode=True, timeout_s=TIMEOUT_S)

    def dispatch(self) -> Any:
        topk_idx = CASE.topk_idx(self.rank)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, CASE.num_experts)
        weights = CASE.topk_weights(self.rank)
        return self.buffer.dispatch(
            CASE.x(self.rank), None, per_rank, None, in_rank, per_expert, topk_idx, weights
        )

    def combine(self) -> None:
        received = self.dispatch()
        self.buffer.combine(received[0], received[4])

    def low_latency_dispatch(self) -> Any:
        return self.buffer.low_latency_dispatch(
            CASE.x(self.rank), CASE.topk_idx(self.rank), MOST_TOKENS, CASE.num_experts, use_fp8=False
        )

    def low_latency_combine(self) -> None:
        received = self.low_latency_dispatch()
        weights = CASE.topk_weights(self.rank)
        self.buffer.low_latency_combine(received[0], CASE.topk_idx(self.rank), weights, received[2])

    def barrier(self) -> None:
        self.comm.barrier()

    def all_reduce(self) -> None:
        self.comm.all_reduce(self.data.clone())

    def all_gather(self) -> None:
        self.comm.all_gather(self.data)

    def reduce_scatter(self) -> None:
        self.comm.reduce_scatter(self.data)

    def all_to_all(self) -> None:
        self.comm.all_to_all(self.data)

    def broadcast(self) -> None:
        self.comm.broadcast(self.data, LOST)


CALLS = (
    "dispatch",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
    "barrier",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)
OVER_NODES = CALLS[4:]  # these need no buffer, and run over several nodes
# The victim dies: instead of the call; when the others have waited for it; anywhere in a loop of calls; while
# the others run code of their own, before their next call.
PHASES = ("instead", "waited for", "inside", "between")


@dataclass
class Found:
    """What one survivor raised, and how many seconds after the death or the beginning of the call."""

    message: str
    seconds: float


def until(is_true: Callable[[], bool]) -> None:
    late = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < late
        time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pid_of(rank: Rank, other: int) -> int:
    return int(TorchGroup(rank.group).all_gather(str(os.getpid()).encode(), 30)[other])


def die(folder: Path) -> None:
    (folder / "dying").write_text(f"{os.getpid()} {time.monotonic()}")
    (folder / "dying").rename(folder / "died")
    os.kill(os.getpid(), signal.SIGKILL)


def loop_until_lost(call: Callable[[], Any], folder: Path) -> Found:
    """Make the call until it raises; return what it raised."""
    while True:
        began = time.monotonic()
        try:
            call()
        except weft.PeerLost as error:
            raised = time.monotonic()
            died = float((folder / "died").read_text().split()[1])
            return Found(str(error), raised - max(began, died))


def lose_one(rank: Rank, call_name: str, phase: str, delay_s: float) -> Found | None:
    """One try, on one rank."""
    world = World(rank, call_name)
    call: Callable[[], Any] = getattr(world, call_name)
    call()
    call()
    rank.meet()  # what follows is a death in or before the third call
    if rank.rank == LOST:
        if phase == "waited for":
            time.sleep(0.1)
        if phase == "inside":
            threading.Timer(delay_s, die, (rank.folder,)).start()
            while True:
                call()
        die(rank.folder)
    if phase == "between":
        while not (rank.folder / "died").exists():
            time.sleep(0.01)
        time.sleep(0.1)
    return loop_until_lost(call, rank.folder)


@dataclass
class Place:
    """The tries in one place. ``wrong`` are survivors that raised something else, or blamed somebody else."""

    call: str
    phase: str
    tries: int = 0
    found: int = 0
    wrong: int = 0
    slowest_s: float = 0.0
    later_than_1_s: int = 0
    is_elsewhere: bool = False  # the victim has a node to itself

    def run(self, delay_s: float) -> None:
        """Make one try. Raises: RankError when a survivor raises something else."""
        results = run_ranks(
            RANKS, lose_one, self.call, self.phase, delay_s, lost={LOST}, deadline_s=90, with_gpus=False
        )
        self.tries += 1
        for rank, result in enumerate(results):
            if rank == LOST:
                continue
            known = "was killed by signal 9" in result.message
            if self.is_elsewhere:
                known |= "closed its connection" in result.message
            named = f"rank {LOST} (pid " in result.message and known
            self.found += named
            self.wrong += not named
            self.slowest_s = max(self.slowest_s, result.seconds)
            self.later_than_1_s += result.seconds > 1
            if not named:
                print(f"{self.call}, {self.phase}: rank {rank}: {result.message}", flush=True)


def all_places(ranks_per_node: int = 0) -> list[Place]:
    """Return the 40 places; of nodes of one rank, the 24 whose calls run over several nodes."""
    calls = OVER_NODES if ranks_per_node else CALLS
    return [Place(call, phase, is_elsewhere=ranks_per_node == 1) for call in calls for phase in PHASES]


def table(places: list[Place]) -> str:
    lines = ["| call | " + " | ".join(PHASES) + " |", "|---" * (1 + len(PHASES)) + "|"]
    for call in dict.fromkeys(place.call for place in places):
        cells = [f"{p.found} of {p.found + p.wrong}, {p.slowest_s:.2f} s" for p in places if p.call == call]
        lines.append(f"| {call} | " + " | ".join(cells) + " |")
    tries, late = sum(p.tries for p in places), sum(p.later_than_1_s for p in places)
    wrong, slowest = sum(p.wrong for p in places), max(p.slowest_s for p in places)
    lines.append(f"\n{tries} kills; wrong {wrong}; later than 1 s {late}; slowest {slowest:.2f} s")
    return "\n".join(lines)


def write(file: Path, places: list[Place]) -> None:
    """Add the places to those of the file. Runs may do so at once."""
    with shared_record(file) as record:
        places = added([Place(**place) for place in record.before.get("places", [])], places)
        record.after = {
            "date": date.today().isoformat(),
            "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform()},
            "commands": [*record.before.get("commands", []), " ".join(sys.argv)],
            "weft": weft.__version__,
            "ranks": RANKS,
            "kills": sum(place.tries for place in places),
            "places": [asdict(place) for place in places],
        }


def added(before: list[Place], more: list[Place]) -> list[Place]:
    """Return the places of both, those of one call and phase together."""
    total = {(place.call, place.phase, place.is_elsewhere): place for place in before}
    for place in more:
        so_far = total.setdefault(
            (place.call, place.phase, place.is_elsewhere),
            Place(place.call, place.phase, is_elsewhere=place.is_elsewhere),
        )
        for count in ("tries", "found", "wrong", "later_than_1_s"):
            setattr(so_far, count, getattr(so_far, count) + getattr(place, count))
        so_far.slowest_s = max(so_far.slowest_s, place.slowest_s)
    return list(total.values())


def run_jobs(options: argparse.Namespace, file: Path) -> list[Place]:
    """Share the tries out over processes of this program; return what they found together."""
    jobs = []
    for job in range(options.jobs):
        times = options.times // options.jobs + (job < options.times % options.jobs)
        jobs.append(
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--times", str(times), "--seed", str(options.seed + job)),
                    *("--seconds", str(options.seconds), "--json", str(file)),
                    *("--ranks-per-node", str(options.ranks_per_node)),
                ],
                stdout=subprocess.DEVNULL,
            )
        )
    for job in jobs:
        job.wait()
    return [Place(**place) for place in json.loads(file.read_text())["places"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1, help="tries in each place")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no try after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share out the tries, each with 3 ranks"
    )
    parser.add_argument("--json", type=Path, help="write the places there too, added to what is there")
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, choices=[0, 1], help="1: each rank is a node"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    choose = random.Random(options.seed)
    if options.ranks_per_node:
        os.environ |= {
            "WEFT_RANKS_PER_NODE": "1",
            "WEFT_PROXY_PROVIDER": "fabric:tcp",
            "WEFT_PEER_DEAD_S": "100",
        }
        _core.config_reload()
    if options.jobs > 1:
        with tempfile.TemporaryDirectory() as folder:
            places = run_jobs(options, options.json or Path(folder) / "places.json")
    else:
        places = []
        until = time.monotonic() + options.seconds
        for _ in range(options.times):
            of_this_round = all_places(options.ranks_per_node)
            for place in of_this_round:
                if time.monotonic() < until:
                    place.run(choose.uniform(0, 0.03))
            places = added(places, of_this_round)
            if options.json:
                write(options.json, of_this_round)
    print(table(places))
    return 1 if any(place.wrong for place in places) else 0


if __name__ == "__main__":
    raise SystemExit(main())
