# SPDX-License-Identifier: Apache-2.0
"""``weft chaos``: rounds until the time is over, then what was done and what was wrong."""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import weft
from weft import _core
from weft.chaos.adversary import KINDS, SHIFT_LIBRARY, TRANSPORTS, offers, why_not
from weft.chaos.attacker import Attacker
from weft.chaos.judge import LET_IN, VERDICTS
from weft.chaos.operations import ENGINE, MAPPED, PORTS
from weft.chaos.rounds import Result, draw_round, run_round
from weft.errors import Error, invalid
from weft.runtime.endings import OwnedFolder, end_with_parent
from weft.runtime.shared_record import shared_record
from weft.runtime.tables import Column, Table, add_wide_argument, make_console

_FOLDER = "weft-chaos-"
_MOST_TO_END_S = 5.0
_EPILOG = """\
A round starts 2 to 4 ranks, which make up to 30 calls; one fault strikes one of them. Every result is compared with
an oracle. A rank that is hurt must be blamed by all that miss it, with the right error; where nobody has to fail,
nobody may. A round that takes 100 s is a hang, and prints the stack of every rank. When the ranks are gone, or have let
go of all that they made, nothing may be left: descriptors, windows, threads, memory, files.

  weft chaos --minutes 5                                  every transport by turns
  weft chaos --minutes 60 --transport fabric:tcp --json FILE
  weft chaos --seed 7 --round 12 --transport mapped       one round again, with the same calls and the same fault
  weft chaos --attacker build/dev/weft_attacker           a stranger beside the ranks, who attacks all their doors
  weft chaos --list                                       the faults, and where each can be had here

When exactly a fault strikes is up to the system's scheduler, so a round may need some repeats.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft chaos``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--minutes", type=float, default=1.0, help="begin no round after so many (1)")
    parser.add_argument("--seed", type=int, help="what rounds are drawn from; by default a random one")
    parser.add_argument("--round", type=int, help="run this round alone")
    parser.add_argument("--repeat", type=int, default=1, help="with --round: run it so often (1)")
    parser.add_argument(
        "--transport", action="append", choices=TRANSPORTS, help="these alone; may be given several times"
    )
    parser.add_argument("--fault", choices=sorted(KINDS), help="this one in every round that can have it")
    parser.add_argument(
        "--attacker",
        type=Path,
        metavar="PROGRAM",
        help="weft_attacker of the C++ tests: a stranger who attacks the doors of all ranks meanwhile",
    )
    parser.add_argument("--list", action="store_true", help="print the faults and where they can be had")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="add the counts and all that was wrong to FILE, so that short runs, even at once, make a long one",
    )
    add_wide_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run rounds; return 1 if anything was wrong, else 0."""
    if not args.minutes > 0:
        raise invalid("--minutes", args.minutes, "a number above 0")
    for name in ("seed", "round"):
        if (getattr(args, name) or 0) < 0:
            raise invalid(f"--{name}", getattr(args, name), "0 or more")
    if os.environ.get("CHAOS_IS_SHIFTED") is None:
        return _with_shifted_clock()
    os.environ.pop("CHAOS_IS_SHIFTED")
    torch.set_num_threads(1)  # ranks are forked from this process
    owned = OwnedFolder(_FOLDER)
    tempfile.tempdir = os.environ["TMPDIR"] = str(owned.path)
    try:
        if args.attacker is None or args.list:
            return _run_rounds(args, owned.path, None)
        with Attacker(args.attacker) as attacker:
            return _run_rounds(args, owned.path, attacker)
    finally:
        owned.remove()


@dataclass
class Account:
    """The rounds over one transport, and how they ended."""

    rounds: int = 0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[str] = field(default_factory=Counter)
    slowest_found_s: float = 0.0
    seconds: float = 0.0

    def add(self, result: Result, seconds: float) -> None:
        """Count a round."""
        self.rounds += 1
        self.calls += result.calls
        if result.struck:
            self.faults[result.drawn.fault.kind] += 1
        self.descriptors.update(result.descriptors)
        self.wrong.update(problem.kind for problem in result.problems)
        self.slowest_found_s = max(self.slowest_found_s, result.found_s)
        self.seconds += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return it for the JSON."""
        return {
            "seconds": round(self.seconds, 1),
            "rounds": self.rounds,
            "calls": self.calls,
            "faults": dict(self.faults),
            **{verdict.replace(" ", "_"): self.wrong[verdict] for verdict in VERDICTS},
            "descriptors_before": self.descriptors["before"],
            "descriptors_after": self.descriptors["after"],
            "slowest_found_s": round(self.slowest_found_s, 3),
        }


def _run_rounds(args: argparse.Namespace, folder: Path, attacker: Attacker | None) -> int:
    missing = offers(folder)
    transports = _usable(args.transport or list(TRANSPORTS))
    console = make_console(args.wide)
    if args.list:
        _print_faults(console, transports, missing)
        return 0
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    console.print(f"seed {seed}; faults that this machine cannot have: {', '.join(missing) or 'none'}")
    accounts = {transport: Account() for transport in transports}
    wrong: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * args.minutes
    numbers = [args.round] * args.repeat if args.round is not None else range(1 << 62)
    # Without a thread of its own, as this process forks.
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )
    with bar:
        task = bar.add_task("chaos", total=60 * args.minutes if args.round is None else None)
        for number in numbers:
            for transport in transports:
                if args.round is None and time.monotonic() > until:
                    break
                drawn = draw_round(seed, number, transport, missing, args.fault)
                bar.update(task, description=drawn.title())
                bar.refresh()
                began = time.monotonic()
                result = run_round(drawn, folder, attacker)
                accounts[transport].add(result, time.monotonic() - began)
                bar.update(task, completed=60 * args.minutes - max(until - time.monotonic(), 0))
                wrong += _report(console, result)
            if args.round is None and time.monotonic() > until:
                break
    _print_accounts(console, accounts)
    attacks = dict(attacker.counts) if attacker else {}
    if attacks:
        console.print("attacks: " + ", ".join(f"{count} {kind}" for kind, count in attacks.items()))
    if attacks.get("let_in"):
        text = f"the stranger was let in {attacks['let_in']} times"
        wrong.append(
            {"round": "any", "kind": LET_IN, "text": text, "again": shlex.join(["weft", *sys.argv[1:]])}
        )
    print_wrong(console, wrong)
    if args.json:
        _write(args.json, seed, accounts, missing, wrong, attacks)
    return 1 if wrong else 0


def _usable(transports: list[str]) -> list[str]:
    """Return those transports that exist here. Raises: weft.Error where none does."""
    usable = [
        name
        for name in transports
        if name == "mapped"
        or any(not nic["unusable_because"] for nic in _core.transfer_find_provider(name).probe())
    ]
    if not usable:
        raise invalid("--transport", ", ".join(transports), "one that weft info lists as usable here")
    for name in set(transports) - set(usable):
        print(f"weft chaos: {name} is left out: it cannot be used here (weft info says why)", file=sys.stderr)
    return usable


def _report(console: Any, result: Result) -> list[dict[str, Any]]:
    """Print what is wrong with a round and how to repeat it; return it for the JSON."""
    drawn = result.drawn
    again = f"weft chaos --seed {drawn.seed} --round {drawn.number} --transport {drawn.transport}"
    if result.problems:
        console.print(drawn.title(), markup=False)
        for problem in result.problems:
            console.print(f"  {problem.kind}: {problem.text}", markup=False)
        for words in result.said:
            console.print(f"  {words}", markup=False)
        console.print(f"  again: {again}", markup=False)
    return [{"round": drawn.title(), "kind": p.kind, "text": p.text, "again": again} for p in result.problems]


def _print_accounts(console: Any, accounts: dict[str, Account]) -> None:
    numbers = ["min", "rounds", "calls", "faults", *VERDICTS]
    heads = [Column("transport", is_key=True), *(Column(name, is_number=True) for name in numbers)]
    table = Table("Chaos", heads)
    for transport, account in accounts.items():
        verdicts = [str(account.wrong[verdict]) for verdict in VERDICTS]
        struck = account.faults.total() - account.faults["none"]
        table.add(
            transport,
            f"{account.seconds / 60:.1f}",
            str(account.rounds),
            str(account.calls),
            str(struck),
            *verdicts,
        )
    table.print(console)
    kinds = sorted({kind for account in accounts.values() for kind in account.faults})
    faults = Table("Faults that struck", [Column("fault", is_key=True)])
    faults.columns = [*faults.columns, *(Column(name, is_number=True) for name in accounts)]
    for kind in kinds:
        faults.add(kind, *(str(account.faults[kind] or "-") for account in accounts.values()))
    slowest = (f"{account.slowest_found_s:.2f}" for account in accounts.values())
    faults.add("slowest s from a death to the last who names it", *slowest)
    faults.print(console)
    for name, account in accounts.items():
        before, after = account.descriptors["before"], account.descriptors["after"]
        console.print(
            f"{name}: {before} descriptors open before ranks made anything, {after} once they had let go"
        )


def print_wrong(console: Any, wrong: list[dict[str, Any]]) -> None:
    """Print once more what was wrong: of a long run, people and logs keep the last lines."""
    if wrong:
        console.print(f"Wrong: {len(wrong)}")
    for problem in wrong:
        lines = str(problem["text"]).strip().splitlines() or [""]
        # Of a stack: where, and the error.
        ends = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        console.print(f"  {problem['round']}", markup=False)
        console.print(f"    {problem['kind']}: {ends}", markup=False)
        console.print(f"    again: {problem['again']}", markup=False)


def _print_faults(console: Any, transports: list[str], missing: dict[str, str]) -> None:
    columns = (Column("fault", is_key=True), Column("what"), Column("where"), Column("why not elsewhere"))
    table = Table("Faults", columns)
    for name, kind in KINDS.items():
        where = [
            transport
            for transport in transports
            if any(name not in why_not(transport, needs, missing) for needs in (MAPPED, PORTS, ENGINE))
        ]
        table.add(name, kind.what, ", ".join(where), missing.get(name, kind.why_not))
    table.print(console)


def _write(
    path: Path,
    seed: int,
    accounts: dict[str, Account],
    missing: dict[str, str],
    wrong: list[dict[str, Any]],
    attacks: dict[str, int],
) -> None:
    with shared_record(path) as record:
        before = record.before
        transports = dict(before.get("transports", {}))
        for name, account in accounts.items():
            transports[name] = added(transports.get(name, {}), account.as_dict())
        record.after = {
            **before,  # a person may have noted more
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform()},
            "versions": {
                "weft": weft.__version__,
                "torch": torch.__version__,
                "libfabric": _libfabric_release(),
            },
            "commands": [*before.get("commands", []), shlex.join(["weft", *sys.argv[1:]])],
            "seeds": [*before.get("seeds", []), seed],
            "not_offered": missing,
            "transports": transports,
            "attacks": dict(Counter(before.get("attacks", {})) + Counter(attacks)),
            "problems": [*before.get("problems", []), *wrong],
        }


def _libfabric_release() -> str:
    try:
        return str(_core.libfabric()[1])
    except Error:
        return "none"


def added(before: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of two runs together: sums, and the slowest of both."""
    total = dict(more)
    for name, value in before.items():
        if name == "faults":
            total[name] = dict(Counter(value) + Counter(more[name]))
        elif name.startswith("slowest"):
            total[name] = max(value, more[name])
        else:
            total[name] = round(value + more[name], 1)
    return total


def _with_shifted_clock() -> int:
    """Run the same command with the library that sets clocks, where it can be built; return its status."""
    owned = OwnedFolder("weft-clock-")
    try:
        library = owned.path / SHIFT_LIBRARY
        variables = os.environ | {"CHAOS_IS_SHIFTED": "1"}
        source = str(Path(__file__).with_name("clock_shift.c"))
        compiler = shutil.which("c++")
        if compiler:
            built = subprocess.run(
                [compiler, "-x", "c", "-shared", "-fPIC", "-O1", source, "-o", str(library), "-ldl"],
                capture_output=True,
            )
            if built.returncode == 0:
                variables["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
        return _run_until_ended([sys.executable, "-m", "weft", *sys.argv[1:]], variables)
    finally:
        owned.remove()


def _run_until_ended(command: list[str], variables: dict[str, str]) -> int:
    """Run a command that ends with this one, and in order: it removes what it made. Return its status."""
    parent = os.getpid()

    def begin() -> None:
        os.setpgid(0, 0)  # a terminal's signals reach it through this process alone, once
        end_with_parent(parent)

    inner = subprocess.Popen(command, env=variables, preexec_fn=begin)
    try:
        return inner.wait()
    except BaseException:
        inner.terminate()
        try:
            inner.wait(_MOST_TO_END_S)
        except subprocess.TimeoutExpired:
            inner.kill()
        raise
