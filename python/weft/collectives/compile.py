# SPDX-License-Identifier: Apache-2.0
"""``weft compile``: compile and verify a collective program.

    weft compile algo.py --ranks 8 -o algo.xml          # a Python program
    weft compile allreduce_allpairs --ranks 8           # a library algorithm
    weft compile algo.xml                               # check a file, and write it again

A Python file either defines ``program(ranks, ...)``, which enters a Program and is called with ``--ranks``, or enters
one when it runs, as MSCCL's scripts do; those see the names of MSCCL's modules and get ``--args`` as their arguments.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.collectives.compiler import collector_paused, compile_proven
from weft.collectives.files import programs_of, source_of
from weft.collectives.ir import PROTOCOLS, Algorithm
from weft.collectives.language import Program
from weft.collectives.library import entries
from weft.collectives.plan_write import to_plan
from weft.collectives.verifier import Report, verify
from weft.collectives.xml import DIALECTS
from weft.collectives.xml_write import to_xml
from weft.errors import Error, invalid
from weft.runtime.files import write_file
from weft.runtime.tables import Column, Table, integer_from, make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--list", action="store_true", help="list the library and return")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write XML there, or an MSCCL++ plan where it ends in .json; default: print XML",
    )
    parser.add_argument(
        "--dialect",
        choices=DIALECTS,
        default="azure",
        help="whose readers the XML is for; they differ in maxBytes",
    )
    add_source_arguments(parser)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which algorithm is meant, for read_arguments()."""
    parser.add_argument(
        "source", nargs="?", help="a .py, .xml or .json file, or the name of a library algorithm"
    )
    parser.add_argument(
        "--ranks", type=integer_from(1), default=0, help="of what a program or the library makes"
    )
    parser.add_argument("--protocol", choices=PROTOCOLS)
    parser.add_argument("--instances", type=integer_from(1))
    parser.add_argument("--in-place", action="store_true", help="of a library algorithm: the in-place form")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="an option of the algorithm's own",
    )
    parser.add_argument(
        "--program", type=int, default=0, metavar="N", help="of a script that makes several: the Nth, from 1"
    )
    parser.add_argument(
        "--reschedule",
        action="store_true",
        help="of an MSCCL++ plan: keep what it moves, and make blocks, channels and order anew",
    )
    parser.add_argument(
        "--args", default="", metavar="TEXT", help="the arguments of an MSCCL script, as one text"
    )


def run(args: argparse.Namespace) -> int:
    """Compile; print XML or a summary. Raises: ProgramError, VerificationError, XmlError."""
    if args.list:
        _print_library()
        return 0
    with collector_paused():
        proven = [
            compile_proven(found) if isinstance(found, Program) else (found, verify(found))
            for found in _read_all(args)
        ]
        for number, (algorithm, report) in enumerate(proven, 1):
            _write(algorithm, report, args, number)
    return 0


def _write(algorithm: Algorithm, report: Report, args: argparse.Namespace, number: int) -> None:
    """Write the Nth algorithm of a source; the second to FILE-2.xml, and so on."""
    is_plan = str(args.output or "").endswith(".json")
    text = to_plan(algorithm) if is_plan else to_xml(algorithm, args.dialect)
    if args.output:
        path = Path(args.output)
        write_file(path if number == 1 else path.with_stem(f"{path.stem}-{number}"), text)
    else:
        sys.stdout.write(text)
    blocks = max(len(program.blocks) for program in algorithm.ranks)
    print(
        f"{algorithm.name}: {algorithm.collective}, {algorithm.num_ranks} ranks, {algorithm.chunks} chunks, "
        f"{report.steps} steps in up to {blocks} blocks, {algorithm.channels} channels; {' and '.join(report.forms)}; "
        f"verified: {report.proven}",
        file=sys.stderr,
    )
    for line in (*_chosen_ranks(args, algorithm), *report.warnings, *algorithm.notes):
        print(f"note: {line}", file=sys.stderr)


def _chosen_ranks(args: argparse.Namespace, algorithm: Algorithm) -> list[str]:
    """Say how many ranks a script has chosen, where --ranks does not."""
    if args.ranks or Path(args.source).suffix != ".py":
        return []
    ranks = f"{algorithm.num_ranks} rank{'s' if algorithm.num_ranks > 1 else ''}"
    return [f"made for {ranks}, as {Path(args.source).name} runs without --ranks"]


def _read_all(args: argparse.Namespace) -> Sequence[Program | Algorithm]:
    """Return all programs of a source, or the one that --program names."""
    if args.program or Path(args.source or "").suffix != ".py" or not Path(args.source).is_file():
        return [_find(args)]
    programs = programs_of(Path(args.source), args.ranks, _options(args), shlex.split(args.args))
    if not programs:
        raise Error(f"{args.source}: no program; define program(ranks) or enter a Program")
    return programs


def read_arguments(args: argparse.Namespace) -> Algorithm:
    """Return the algorithm that the command line names. Raises: Error, also for an option that would have no effect."""
    found = _find(args)
    return found.compile() if isinstance(found, Program) else found


def _find(args: argparse.Namespace) -> Program | Algorithm:
    if not args.source:
        raise invalid("source", "nothing", "a file or the name of a library algorithm (weft compile --list)")
    return source_of(args.source, args.ranks, _options(args), shlex.split(args.args), args.program)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for given in args.option:
        name, _, value = given.partition("=")
        if not value.lstrip("-").isdigit():
            raise invalid("option", given, "NAME=NUMBER")
        options[name] = int(value)
    for name in ("protocol", "instances"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.in_place:
        options["inplace"] = True
    if args.reschedule:
        options["reschedule"] = True
    return options


def _print_library() -> None:
    columns = (Column("name", is_key=True, never_folds=True), Column("what it does"), Column("options"))
    known = entries().items()
    for collective in dict.fromkeys(entry.collective for _, entry in known):
        table = Table(collective, columns)
        for name, entry in known:
            if entry.collective == collective:
                table.add(name, entry.summary.replace("``", ""), ", ".join(entry.options))
        table.print(make_console())
