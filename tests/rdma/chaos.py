# SPDX-License-Identifier: Apache-2.0
"""A soak of traffic between two guests, with random faults.

    .venv/bin/python tests/rdma/chaos.py --image build/rdma --minutes 30 --json chaos.json

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
from traffic import LOST

DEAD_S = 30  # where the fault passes
SOON_DEAD_S = 4  # where it does not
ROUND_S = 150.0
NAMES = ("owner", "writer")
GOES_ON = ("none", "bad", "down", "cable", "pause")
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


def judge(drawn: Round, jobs: tuple[Job, Job], until: float) -> list[str]:
    """Return what is wrong, a sentence each; wait for both sides that are left."""
    wrong = []
    for i, job in enumerate(jobs):
        if drawn.fault in ("kill", "power") and i == drawn.at:
            continue
        try:
            status, said = job.wait_status(max(1, until - time.monotonic()))
        except GuestError as error:
            wrong.append(f"{NAMES[i]} hangs: {error}")
            continue
        blames = f"peer '{NAMES[1 - i]}' is lost: " in said
        if drawn.fault in GOES_ON and status != 0:
            wrong.append(f"{NAMES[i]} did not go on ({status}): {said[-600:]}")
        elif drawn.fault not in GOES_ON and not (status == LOST and blames):
            wrong.append(f"{NAMES[i]} does not name the other ({status}): {said[-600:]}")
    return wrong


def play(cluster: Cluster, drawn: Round) -> tuple[list[str], int]:
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
        return [f"before the fault: {error}"], 0
    wrong = judge(drawn, (owner, writer), until)
    return wrong, 3 * writer.output().count("block ")


def main() -> int:
    """Play rounds until the time is over, and write what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", type=Path, required=True, help="what tools/rdma-image made")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    draw, began = random.Random(options.seed), time.monotonic()
    rounds: Counter[str] = Counter()
    wrong: list[str] = []
    calls = 0
    with contextlib.closing(Cluster(Image(options.image.resolve()))) as cluster:
        while time.monotonic() - began < 60 * options.minutes:
            drawn = Round(draw)
            found, made = play(cluster, drawn)
            rounds[f"{drawn.provider}: {drawn.fault}"] += 1
            calls += made
            wrong += [f"round {rounds.total()} of seed {options.seed}, {drawn}: {what}" for what in found]
            print(f"{rounds.total():4} {calls:7} calls  {drawn}: {'; '.join(found) or 'right'}", flush=True)
    record: dict[str, Any] = {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": options.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rounds": dict(sorted(rounds.items())),
        "calls": calls,
        "wrong": wrong,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
