# SPDX-License-Identifier: Apache-2.0
"""``weft top``: what the processes of this host that use Weft are doing, job by job, and who waits for whom.

It looks at the counters that each process keeps in its own memory, from outside: a job needs no setting for it, is not
slowed, and may hang. It sees processes of the same user, in the same PID namespace; those of others if root asks for
them. Counters of other users are then not to be trusted: they cannot hide other users' processes, and control
characters in them are escaped.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
import sys
import time
from collections import defaultdict
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from weft import _core
from weft.errors import Error
from weft.runtime import call_record
from weft.runtime.logs import printable
from weft.runtime.tables import Column, Table, add_wide_argument, make_console

_LATE_S = 1.0  # a call that lasts so long is worth a line
_MOST_MISSING = 8  # ranks of other hosts that a line names
_MOST_PAGES = 64  # of one process: its own, and those of the processes that it was forked from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft top``."""
    parser.add_argument(
        "--pid", type=int, action="append", help="only this process; may be given several times"
    )
    parser.add_argument(
        "--all-users", action="store_true", help="also processes of other users; only root may look at those"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time between two looks (default 2)")
    parser.add_argument("--once", action="store_true", help="look twice, print and end")
    parser.add_argument("--json", action="store_true", help="one JSON object of one look, and end")
    parser.add_argument(
        "--record", metavar="PREFIX", help="write the last calls of each process for torchfrtrace, and end"
    )
    add_wide_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Show what was asked for until interrupted; return 0, or 1 where no process uses Weft."""
    looks = look(args.pid, args.all_users)
    if not looks:
        print(_nothing_found(args), file=sys.stderr)
        return 1
    if args.record:
        for one in looks:
            print(printable(call_record.write(args.record, one.counted)))
        return 0
    if args.json:
        numbered = [(number, one) for number, job in enumerate(jobs(looks), 1) for one in job]
        json.dump(
            [
                {"job": number, "pid": one.pid, "command": one.command, **one.counted}
                for number, one in numbered
            ],
            sys.stdout,
        )
        print()
        return 0
    console = make_console(args.wide)
    is_live = sys.stdout.isatty() and not args.once
    with Live(console=console, auto_refresh=False, transient=False) if is_live else nullcontext() as live:
        while True:
            time.sleep(args.seconds)
            before, looks = looks, look(args.pid, args.all_users)
            shown = Group(*_screen(before, looks, console))
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            if args.once or not looks:
                return 0


def _nothing_found(args: argparse.Namespace) -> str:
    others = " (those of others: --all-users)" if os.geteuid() == 0 and not args.all_users else ""
    whose = "" if args.all_users else " of this user"
    return f"weft top: no process{whose} on this host has made a communicator or engine{others}"


@dataclass(frozen=True)
class Look:
    """The counters of one process, at one time by the host's monotonic clock. Its words are that process's."""

    pid: int
    user: int
    command: str
    counted: dict[str, Any]
    at_ns: int


def _open_groups(one: Look) -> list[dict[str, Any]]:
    return [group for group in one.counted["groups"] if group["is_open"]]


def look(pids: list[int] | None = None, all_users: bool = False) -> list[Look]:
    """Return a look at each process of this user (or of all) that uses Weft, by rank."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or (pids and int(folder.name) not in pids):
            continue
        with suppress(OSError):  # it has gone, or is somebody else's
            user = folder.stat().st_uid
            if user != os.geteuid() and not all_users:
                continue
            page = _page_of(folder, user)
            if page is not None:
                found.append(Look(int(folder.name), user, _command(folder), page, time.monotonic_ns()))
    return sorted(found, key=lambda one: (_main_group(one).get("rank", 0), one.pid))


def waits(looks: list[Look], before: list[Look] | None = None) -> list[str]:
    """Return which rank waits for which, a line for each. Pure function of the looks.

    A rank is behind where another one of its group has begun more calls; on a GPU, where hosts only enqueue, only if
    it has begun none since ``before``.
    """
    moved = {
        (one.pid, group["key"]): group["calls"] for one in before or [] for group in one.counted["groups"]
    }
    groups: dict[tuple[int, int], list[tuple[Look, dict[str, Any]]]] = defaultdict(list)
    for one in looks:
        for group in _open_groups(one):
            groups[one.user, group["key"]].append((one, group))  # no user takes part in another's job
    lines = []
    for members in groups.values():
        most = max(group["calls"] for _, group in members)
        behind = [
            (one, group)
            for one, group in members
            if group["calls"] < most and moved.get((one.pid, group["key"]), group["calls"]) == group["calls"]
        ]
        for one, group in members:
            under_way_s = (one.at_ns - group["began_ns"]) / 1e9
            is_in_call = group["began_ns"] > group["ended_ns"] and group["calls"] > 0
            if is_in_call and under_way_s >= _LATE_S:
                lines.append(_wait_line(group, under_way_s, _behind(group, behind), members))
        on_gpu = [group for _, group in members if group["device"] != "cpu"]
        lines += [_gpu_line(one, group, most) for one, group in behind if on_gpu]
    return lines


def _behind(
    waiting: dict[str, Any], behind: list[tuple[Look, dict[str, Any]]]
) -> list[tuple[Look, dict[str, Any]]]:
    return [(one, group) for one, group in behind if group["calls"] < waiting["calls"]]


def _wait_line(
    group: dict[str, Any],
    seconds: float,
    behind: list[tuple[Look, dict[str, Any]]],
    members: list[tuple[Look, dict[str, Any]]],
) -> str:
    line = f"rank {group['rank']} is in {group['operation']}, call {group['calls']}, for {seconds:.1f} s"
    seen = {other["rank"] for _, other in members}
    missing = (rank for rank in range(group["size"]) if rank not in seen)
    whom = [_position(one, other) for one, other in behind] + [
        f"rank {rank}, which is not on this host" for rank in islice(missing, _MOST_MISSING)
    ]
    if more := group["size"] - len(seen) - _MOST_MISSING:
        whom += [f"{more} more"] if more > 0 else []
    return f"{line}; waits for {'; '.join(whom)}" if whom else line


def _position(one: Look, group: dict[str, Any]) -> str:
    where = f"rank {group['rank']} (process {one.pid}), which"
    if group["calls"] == 0:
        return f"{where} has made no call"
    if group["began_ns"] > group["ended_ns"]:
        return f"{where} is in {group['operation']}, call {group['calls']}"
    idle_s = (one.at_ns - group["ended_ns"]) / 1e9
    return f"{where} left {group['operation']}, call {group['calls']}, {idle_s:.1f} s ago"


def _gpu_line(one: Look, group: dict[str, Any], most: int) -> str:
    return f"{most - group['calls']} calls of others wait for {_position(one, group)}"


def jobs(looks: list[Look]) -> list[list[Look]]:
    """Return the processes of each job: those that make calls together, directly or through others.

    A process without calls that all ranks make is with the others of its command.
    """
    found: list[tuple[set[Any], list[Look]]] = []
    for one in looks:
        marks = {group["key"] for group in one.counted["groups"] if group["size"] > 0} or {one.command}
        same = [job for job in found if job[0] & marks]
        found = [job for job in found if not job[0] & marks]
        found.append((marks.union(*(job[0] for job in same)), [*(o for job in same for o in job[1]), one]))
    ordered = ([one for one in looks if one in members] for _, members in found)
    return sorted(ordered, key=lambda members: min(one.pid for one in members))


def _screen(before: list[Look], looks: list[Look], console: Any) -> list[Any]:
    return [part for job in jobs(looks) for part in _job(before, job, console)]


def _job(before: list[Look], looks: list[Look], console: Any) -> list[Any]:
    """Return the text for one job: its processes, what they do, and which ranks wait."""
    earlier = {one.pid: one for one in before}
    tables = [_process_table(looks), _rate_table(earlier, looks), _peer_table(earlier, looks)]
    parts: list[Any] = [part for table in tables if len(table) for part in table.parts(console.width)]
    waiting_lines = waits(looks, before)
    said = [Text(printable(line), "bold red") for line in waiting_lines] or [Text("Nobody waits for long.")]
    return [*parts, *said, Text()]


def _process_table(looks: list[Look]) -> Table:
    names = ("device", "what it does", "process", "command")
    size = max((_main_group(one).get("size", 0) for one in looks), default=0)
    alone = "1 process" if len(looks) == 1 else f"{len(looks)} processes"
    here = f"{len(looks)} of {size} ranks on this host" if size else alone
    table = Table(
        f"Job: {looks[0].command}, {here}",
        [Column("rank", is_key=True, is_number=True), *(Column(name) for name in names)],
    )
    for one in looks:
        group = _main_group(one)
        if not group:
            table.add("-", "-", "transfers", str(one.pid), one.command)
            continue
        now = one.at_ns
        is_in_call = group["began_ns"] > group["ended_ns"]
        since_s = (now - (group["began_ns"] if is_in_call else group["ended_ns"])) / 1e9
        doing = (
            f"{'in' if is_in_call else 'after'} {group['operation']}, call {group['calls']}, {since_s:.1f} s"
        )
        doing = doing if group["calls"] else "no call yet"
        table.add(f"{group['rank']}/{group['size']}", group["device"], doing, str(one.pid), one.command)
    return table


def _rate_table(earlier: dict[int, Look], looks: list[Look]) -> Table:
    keys = [Column("operation", is_key=True, never_folds=True), Column("transport", is_key=True)]
    heads = ("calls / s", "MB / s", "mean us", "of it waiting us", "errors")
    table = Table("Operations of all its ranks", [*keys, *(Column(head, is_number=True) for head in heads)])
    fields = ("calls", "bytes", "seconds", "wait_seconds", "errors")
    for (operation, transport), (calls, num_bytes, *seconds, errors) in _rates(
        earlier, looks, "operations", ("operation", "transport"), fields
    ):
        if calls or errors:
            mean_us = [f"{part / calls * 1e6:,.1f}" if calls else "-" for part in seconds]
            table.add(
                operation, transport, f"{calls:,.0f}", f"{num_bytes / 1e6:,.1f}", *mean_us, f"{errors:,.0f}"
            )
    return table


def _peer_table(earlier: dict[int, Look], looks: list[Look]) -> Table:
    keys = [Column("to peer", is_key=True), Column("transport", is_key=True)]
    heads = ("messages / s", "MB / s", "retries / s", "faults / s")
    table = Table("Peers, from all its ranks", [*keys, *(Column(head, is_number=True) for head in heads)])
    for (peer, transport), values in _rates(
        earlier, looks, "peers", ("peer", "transport"), ("messages", "bytes", "retries", "faults")
    ):
        messages, num_bytes, retries, faults = values
        if any(values):
            table.add(
                peer, transport, f"{messages:,.0f}", f"{num_bytes / 1e6:,.1f}", f"{retries:g}", f"{faults:g}"
            )
    return table


def _rates(
    earlier: dict[int, Look], looks: list[Look], kind: str, keys: tuple[str, ...], fields: tuple[str, ...]
) -> list[tuple[tuple[str, ...], list[float]]]:
    """Return, by key, what was added per second to each field, over all processes."""
    sums: dict[tuple[str, ...], list[float]] = {}
    for one in looks:
        old = earlier.get(one.pid)
        known = {tuple(row[key] for key in keys): row for row in old.counted[kind]} if old else {}
        past_s = (one.at_ns - old.at_ns) / 1e9 if old else 0
        for row in one.counted[kind]:
            key = tuple(row[name] for name in keys)
            into = sums.setdefault(key, [0.0] * len(fields))
            if past_s > 0:
                for place, field in enumerate(fields):
                    into[place] += (row[field] - known.get(key, {}).get(field, 0)) / past_s
    return sorted(sums.items())


def _main_group(one: Look) -> dict[str, Any]:
    """Return the group that was called last; {} of a process without one."""
    return max(_open_groups(one), key=lambda group: group["began_ns"], default={})


def _page_of(process: Path, user: int) -> dict[str, Any] | None:
    """Return the counters of a process; None where it has none. Raises: OSError where it may not be looked at."""
    pages: list[bytes] = []
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # one that was closed meanwhile
            if len(pages) < _MOST_PAGES and os.readlink(descriptor).startswith(f"/memfd:{_core.TALLY_NAME}"):
                pages.append(_read_page(descriptor, user))
    found = []
    for page in pages:
        try:
            found.append(dict(_core.tally_from(page)))
        except Error as error:
            print(f"weft top: process {process.name}: {error}", file=sys.stderr)
    return max(found, key=lambda page: page["made_ns"], default=None)  # a fork has its parent's, too


def _read_page(descriptor: Path, user: int) -> bytes:
    """Return the bytes of a page of counters. The file is checked before it is opened, since it may change.

    Raises: OSError, also for a file that is not memory of that user.
    """
    place = os.open(descriptor, os.O_PATH | os.O_CLOEXEC)
    try:
        facts = os.fstat(place)
        if facts.st_dev != _memory_device() or not stat.S_ISREG(facts.st_mode) or facts.st_uid != user:
            raise OSError(errno.EPERM, "not memory of that user", str(descriptor))
        page = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(page, _core.TALLY_BYTES, 0)
        finally:
            os.close(page)
    finally:
        os.close(place)


@cache
def _memory_device() -> int:
    """Return the device that memory without a name lies on: no other file system is asked for anything."""
    memory = os.memfd_create("weft-top", os.MFD_CLOEXEC)
    try:
        return os.fstat(memory).st_dev
    finally:
        os.close(memory)


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return " ".join(os.path.basename(word.decode(errors="replace")) for word in words[:4]).strip()


__all__ = ["Look", "jobs", "look", "waits"]
