# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""The ``weft`` command.

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> int``; only the chosen one is
imported, so ``weft info`` needs no torch. A module of ``GROUPS`` has ``COMMANDS`` of its own.
To add one, write the module and its line in ``COMMANDS``, here or there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import weft
from weft.errors import Error, NotInstalled
from weft.runtime.endings import Ended, ended_by_signals
from weft.runtime.logs import printable

# Command name -> (module, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "weft.demo",
        "train a small mixture-of-experts model over several ranks, beside the same on one",
    ),
    "info": (
        "weft.runtime.info",
        "what this machine has and which transports it can use; --config: settings; --plan: ways to peers",
    ),
    "plan": (
        "weft.runtime.plan",
        "what dispatch and combine do over nodes, and how long that takes on paper",
    ),
    "doctor": (
        "weft.runtime.doctor",
        "what is missing on this machine, for what, and the command that helps",
    ),
    "top": ("weft.runtime.top", "what the processes of this host do, and who waits for whom"),
    "warm": ("weft.runtime.warm", "compile a model's kernels ahead, with or without a GPU"),
    "compile": ("weft.collectives.compile", "compile and verify a collective program"),
    "synthesise": (
        "weft.collectives.synthesis",
        "search for a collective algorithm on a machine whose links are unequal",
    ),
    "show": ("weft.collectives.show", "show a compiled collective program"),
    "tune": (
        "weft.collectives.tune",
        "measure collective algorithms here and write the table they are chosen from",
    ),
    "chaos": (
        "weft.chaos",
        "every call in random order while ranks are killed, stopped and starved; all is checked",
    ),
}

GROUPS: dict[str, tuple[str, str]] = {
    "bench": ("weft.bench", "measure one part of Weft beside its peers"),
    "profile": ("weft.profile", "where the time of a call goes: on the host, at first use, in a kernel"),
}
# What a build without measure/ (WEFT_MEASURE=OFF) has not.
_HOUSE = ("bench", "chaos", "profile", "testing")
_WHY_ABSENT = "is no part of this build (WEFT_MEASURE=OFF; in a checkout: run tools/dev-build)"


def add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, tuple[str, str]], argv: Sequence[str]
) -> Any:
    """Offer every command; import and fill in only the one that ``argv`` starts with.

    Without a command, the parser's help is what runs. Returns: what takes further commands.
    """
    parser.set_defaults(refuse=parser.error, run=lambda args: parser.print_help())
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, (module, help_line) in commands.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line)
        if argv[:1] == [name]:
            command = importlib.import_module(module)
            command.add_arguments(sub)
            sub.set_defaults(run=command.run, refuse=sub.error)
    return subparsers


def make_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for ``argv`` (without the program's name)."""
    parser = argparse.ArgumentParser(prog="weft", description=weft.__doc__)
    parser.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    subparsers = add_commands(parser, COMMANDS, argv)
    for name, (module, purpose) in GROUPS.items():
        group = subparsers.add_parser(name, help=purpose, description=purpose)
        if argv[:1] == [name]:
            add_commands(group, importlib.import_module(module).COMMANDS, argv[1:])
    return parser


def complete() -> None:
    """Tell a shell, by argcomplete, what may come next on its line, and end the process (docs/install.md)."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ModuleNotFoundError:
        sys.exit(1)
    line = os.environ.get("COMP_LINE", "")
    words = split_line(line, int(os.environ.get("COMP_POINT", len(line))))[3]
    argcomplete.autocomplete(make_parser(words[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a refusal prints one line and returns 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        complete()
    try:
        parsed, unknown = make_parser(arguments).parse_known_args(arguments)
        refuse = parsed.refuse
        del parsed.refuse  # commands hand their arguments to other processes, which take no parser
        if unknown:  # said by the command, with its own usage
            refuse(f"unrecognized arguments: {' '.join(unknown)}")
        with ended_by_signals():
            status = int(parsed.run(parsed) or 0)
        sys.stdout.flush()
        return status
    except Ended as end:
        return 128 + end.number  # as a shell reports it
    except Error as error:
        print(f"weft: {printable(error.one_line())}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package, _, rest = (error.name or "weft").partition(".")
        if package != "weft":
            print(f"weft: {NotInstalled('this command', package)}", file=sys.stderr)
        elif rest in _HOUSE:
            print(f"weft: {error.name}, which this command needs, {_WHY_ABSENT}", file=sys.stderr)
        else:
            raise
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what is left would be flushed at the end
        return 141  # as of a program that SIGPIPE ends
    except OSError as error:  # a file that cannot be read or written
        print(f"weft: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
