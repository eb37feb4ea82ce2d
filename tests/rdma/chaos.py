# SPDX-License-Identifier: Apache-2.0
"""A soak of traffic between two guests, with random faults.

    tools/rdma-test chaos --minutes 60 --json chaos.json    # the file is added to, so that short runs make a long one

Round after round, a writer and an owner (traffic.py) work until a fault, which is drawn: none, a bad network, an
interface or a cable that is down for a while or for good, a guest that stands still, a process or a guest that is
killed. What must come of it is known: the traffic goes on and every byte, immediate and message is right, or each side
that is left names the other. A round that does neither within its time hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from guests import MENDED, Cluster, Guest, GuestError, Image, Job
from traffic import LOST, WRONG

DEAD_S = 30  # where the fault passes
SOON_DEAD_S = 4  # where it does not
ROUND_S = 150.0
NAMES = ("owner", "writer")
GOES_ON = ("none", "bad", "down", "cable", "pause")
KINDS = ("wrong result", "hang", "wrong blame", "wrong error")
FAULTS = (*GOES_ON, "kill", "cut", "stand", "power")
# libfabric keeps its connections to itself: an outage that a NIC notices ends the peer (docs/transfer.md).
FAULTS_OF = {"verbs": FAULTS, "fabric:verbs": ("none", "kill", "power")}
NETWORKS = (
    "loss 2%",
    "delay 10ms 5ms --no-reads",
    "duplicate 5% --no-reads",
    "delay 5ms reorder 25% --no-reads",
)


class Round:
    """What one round draws."""

    def __init__(self, draw: random.Random) -> None:
        """Draw it."""
        self.provider = draw.choices(tuple(FAULTS_OF), (4, 1))[0]
        self.fault = draw.choice(FAULTS_OF[self.provider])
        self.at = draw.randrange(2)  # the guest that it happens to
        self.after_s = draw.uniform(0, 2)
        self.for_s = draw.uniform(0.2, 4)
        self.network, _, self.options = draw.choice(NETWORKS).partition(" --")

    def __str__(self) -> str:
        """Say what happens to whom."""
        more = {"bad": self.network, **dict.fromkeys(("down", "cable", "pause"), f"for {self.for_s:.1f} s")}
        return f"{self.provider}, {self.fault} {more.get(self.fault, '')} at {NAMES[self.at]}"

    def inflict(self, guest: Guest) -> None:
        """Do it."""
        time.sleep(self.after_s)
        if self.fault == "down":
            guest.run(f"ip link set net0 down; sleep {self.for_s:.2f}; ip link set net0 up")
        elif self.fault in ("cable", "pause"):
            off, on = {"cable": ("set_link card0 off", "set_link card0 on"), "pause": ("stop", "cont")}[
                self.fault
            ]
            guest.monitor(off)
            time.sleep(self.for_s)
            guest.monitor(on)
        elif self.fault == "kill":
            guest.run(f"busybox killall -9 {NAMES[self.at]}")
        elif self.fault == "cut":
            guest.run("ip link set net0 down")
        elif self.fault == "stand":
            guest.monitor("stop")
            time.sleep(2.5 * SOON_DEAD_S)
            guest.monitor("cont")
        elif self.fault == "power":
            guest.kill()


Wrong = tuple[str, str]  # one of KINDS, and a sentence


def judge(drawn: Round, jobs: tuple[Job, Job], until: float) -> list[Wrong]:
    """Return what is wrong; wait for both sides that are left."""
    wrong: list[Wrong] = []
    for i, job in enumerate(jobs):
        if drawn.fault in ("kill", "power") and i == drawn.at:
            continue
        try:
            status, said = job.wait_status(max(1, until - time.monotonic()))
        except GuestError as error:
            wrong.append(("hang", f"{NAMES[i]} hangs: {error}"))
            continue
        blames = f"peer '{NAMES[1 - i]}' is lost: " in said
        if status == WRONG:
            wrong.append(("wrong result", f"{NAMES[i]}: {said[-600:]}"))
        elif drawn.fault in GOES_ON and status != 0:
            wrong.append(("wrong error", f"{NAMES[i]} did not go on ({status}): {said[-600:]}"))
        elif drawn.fault not in GOES_ON and not (status == LOST and blames):
            wrong.append(("wrong blame", f"{NAMES[i]} does not name the other ({status}): {said[-600:]}"))
    return wrong


def play(cluster: Cluster, drawn: Round) -> tuple[list[Wrong], int]:
    """Play one round, and return what is wrong and how many calls the writer made."""
    for guest in cluster.guests:
        if not guest.is_up():
            cluster.again(guest.number)
    for guest in cluster.guests:
        guest.warm("traffic")
        guest.run(MENDED)
        if drawn.fault == "bad":
            guest.run(f"modprobe sch_netem; tc qdisc add dev net0 root netem {drawn.network}")
    until = time.monotonic() + ROUND_S
    dead = DEAD_S if drawn.fault in GOES_ON else SOON_DEAD_S
    seconds = drawn.after_s + (drawn.for_s + 2 if drawn.fault in GOES_ON else 600)
    options = f"--seconds {seconds:.1f} --dead {dead}"
    if drawn.fault == "bad" and drawn.options:
        options += f" --{drawn.options}"
    owner = cluster.guests[0].fork("traffic", f"owner {drawn.provider} {options}")
    writer = cluster.guests[1].fork("traffic", f"writer {drawn.provider} 10.9.0.1 {options}")
    try:
        writer.until("block 2 ", ROUND_S / 2)
        drawn.inflict(cluster.guests[drawn.at])
    except GuestError as error:
        return [("wrong error", f"before the fault: {error}")], 0
    wrong = judge(drawn, (owner, writer), until)
    return wrong, 3 * writer.output().count("block ")


class Record:
    """What came of the rounds, of this run and of those that the file has."""

    def __init__(self, file: Path | None, seed: int) -> None:
        """Read the file, if there is one."""
        self.file, self.began = file, time.monotonic()
        kept = json.loads(file.read_text()) if file and file.exists() else {}
        self.seeds = [*kept.get("seeds", []), seed]
        self.minutes = kept.get("minutes", 0.0)
        self.calls = kept.get("calls", 0)
        self.rounds: Counter[str] = Counter(kept.get("rounds", {}))
        self.counts: Counter[str] = Counter({kind: kept.get("counts", {}).get(kind, 0) for kind in KINDS})
        self.wrong: list[str] = kept.get("wrong", [])

    def add(self, number: int, drawn: Round, found: list[Wrong], calls: int) -> None:
        """Take in a round, and write the file: a run may be ended at any time."""
        self.rounds[f"{drawn.provider}: {drawn.fault}"] += 1
        self.calls += calls
        self.counts.update(kind for kind, _ in found)
        self.wrong += [f"round {number} of seed {self.seeds[-1]}, {drawn}: {what}" for _, what in found]
        if self.file:
            self.file.write_text(self.text() + "\n")
        said = "; ".join(what for _, what in found) or "right"
        print(f"{number:4} {self.calls:7} calls  {drawn}: {said}", flush=True)

    def text(self) -> str:
        """Return it as JSON."""
        record: dict[str, Any] = {
            "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seeds": self.seeds,
            "minutes": round(self.minutes + (time.monotonic() - self.began) / 60, 1),
            "rounds": dict(sorted(self.rounds.items())),
            "calls": self.calls,
            "counts": dict(self.counts),
            "wrong": self.wrong,
        }
        return json.dumps(record, indent=2)


def main() -> int:
    """Play rounds until the time is over, and write what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, required=True, help="what tools/rdma-image made")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--json", type=Path, help="where the record goes; what it has is added to")
    options = parser.parse_args()
    draw, record = random.Random(options.seed), Record(options.json, options.seed)
    number = found = 0
    with contextlib.closing(Cluster(Image(options.image.resolve()))) as cluster:
        while time.monotonic() - record.began < 60 * options.minutes:
            drawn, number = Round(draw), number + 1
            wrong, calls = play(cluster, drawn)
            record.add(number, drawn, wrong, calls)
            found += len(wrong)
    print(record.text())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
