# SPDX-License-Identifier: Apache-2.0
"""Algorithms from files, whatever their form.

algorithm = weft.collectives.load("ring.xml")
comm.all_reduce(tensor, algorithm=algorithm)
"""

from __future__ import annotations

import dataclasses
import inspect
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from io import StringIO
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from weft.collectives import contract, language, topology, values
from weft.collectives.ir import PROTOCOLS, Algorithm
from weft.collectives.language import Program, collect
from weft.collectives.library import build, entries
from weft.collectives.program_lines import ProgramError
from weft.collectives.structure import VerificationError
from weft.collectives.verifier import proven
from weft.collectives.xml import from_xml, is_list, read_list
from weft.errors import Error, invalid, shortened

_FORMS = ".xml (MSCCL), .json (MSCCL++ plan) or .py (a program)"


def load(
    path: str | PathLike[str],
    ranks: int = 0,
    *,
    program: int = 0,
    arguments: Sequence[str] = (),
    **options: Any,
) -> Algorithm:
    """Read a collective algorithm from a file and return it verified, for ``algorithm=`` of a call or for run().

    Args:
        path: MSCCL XML of either dialect, an MSCCL++ JSON plan, or a Python file that writes a program in Weft's or
            MSCCL's language. What ``weft compile``, ``tune`` and ``synthesise`` write is read, too.
        ranks: of a Python file that defines ``program(ranks)``, which is called with it. Of others, 0 or as many as the
            file says.
        program: of a Python file that makes several, the Nth, from 1.
        arguments: of an MSCCL script: what it finds in sys.argv after its own name.
        options: of ``program()``. Of a file: ``protocol``, and ``reschedule=True`` to let the compiler make a plan's
            blocks, channels and order anew.
    Every rank reads the same file, or one with the same content.
    Raises: Error, naming the file, the line or element, what was found and what is allowed: ProgramError for a program
        that is wrong, VerificationError for an algorithm that is.
    """
    if not isinstance(path, (str, PathLike)):
        raise invalid("path", shortened(path), f"a file that ends in {_FORMS}")
    file = Path(fspath(path))
    if not file.is_file():
        raise invalid("path", file, f"an existing file that ends in {_FORMS}")
    found = _from_file(file, ranks, dict(options), arguments, program)
    if isinstance(found, Program):
        return found.compile()
    try:
        proven(found)
    except VerificationError as error:
        if file.name in error.counterexample:  # XML's steps know their lines
            raise
        raise VerificationError(error.kind, f"{file.name}: {error.counterexample}") from None
    return found


def load_file(path: str | Path, reschedule: bool = False) -> Algorithm:
    """Read MSCCL XML or an MSCCL++ JSON plan, by the ending. XML is not verified yet.

    ``reschedule``: of a plan, let our compiler make blocks, channels and order anew.

    Raises: Error, naming file and place; OSError.
    """
    file = Path(path)
    if file.suffix == ".xml":
        text = _text(file)
        if is_list(text):
            names = ", ".join(listed.path for listed in read_list(text, file.name)) or "none"
            raise Error(
                f"{file.name}: got a list of algorithms, allowed: one of the files that it names: {names}"
            )
        return from_xml(text, file.name)
    if file.suffix == ".json":
        from weft.collectives.plan_json import from_plan

        return from_plan(_text(file), file.name, reschedule)
    raise invalid("file", file.name, f"a name that ends in {_FORMS}")


def load_listed(path: str | Path) -> list[Algorithm]:
    """Read the algorithms that a list of microsoft/msccl names, with the sizes and protocols that it gives them.

    Paths are relative to the list. Raises: Error, naming file and place; OSError.
    """
    file = Path(path)
    found = []
    for listed in read_list(_text(file), file.name):
        algorithm = load_file(file.parent / Path(listed.path).expanduser())
        found.append(
            dataclasses.replace(
                algorithm,
                min_bytes=listed.min_bytes,
                max_bytes=listed.max_bytes,
                protocol=listed.protocol or algorithm.protocol,
            )
        )
    return found


def is_listing(path: str | Path) -> bool:
    """Return whether a file is such a list. Raises: Error, OSError."""
    file = Path(path)
    return file.suffix == ".xml" and is_list(_text(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{file.name}: not text: {error}") from None
    except OSError as error:
        raise Error(f"{file.name}: cannot be read: {error.strerror}", "system") from error


def read_source(
    source: str,
    ranks: int = 0,
    options: dict[str, Any] | None = None,
    arguments: Sequence[str] = (),
    number: int = 0,
) -> Algorithm:
    """Return the algorithm that a file or a library name gives.

    ``number``: which program of a Python file that makes several, from 1; 0: it makes one.
    ``options``: of a library algorithm or a file's program(); an XML file or a plan takes a protocol, for which it has
    to be verified again. Raises: Error.
    """
    found = source_of(source, ranks, dict(options or {}), arguments, number)
    return found.compile() if isinstance(found, Program) else found


def source_of(
    source: str, ranks: int, options: dict[str, Any], arguments: Sequence[str], number: int
) -> Program | Algorithm:
    """Return the program or algorithm that read_source() compiles."""
    if source in entries():
        if ranks < 1:
            raise invalid("ranks", ranks, "how many ranks, for a library algorithm")
        return build(source, ranks, **options)
    path = Path(source)
    if not path.is_file():
        near = get_close_matches(source, entries(), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise invalid("source", source, f"an existing file, or a name that weft compile --list shows{meant}")
    return _from_file(path, ranks, options, arguments, number)


def _from_file(
    path: Path, ranks: int, options: dict[str, Any], arguments: Sequence[str], number: int
) -> Program | Algorithm:
    if path.suffix != ".py":
        return _loaded(path, ranks, options)
    programs = programs_of(path, ranks, options, arguments)
    if not 1 <= (number or 1) <= len(programs) or (number == 0 and len(programs) > 1):
        names = ", ".join(f"{at} {program.name!r}" for at, program in enumerate(programs, 1)) or "none"
        raise Error(
            f"{path.name}: got program {number or 'without a number'}, allowed: the number of one: {names}"
        )
    return programs[(number or 1) - 1]


def _loaded(path: Path, ranks: int, options: dict[str, Any]) -> Algorithm:
    algorithm = load_file(path, bool(options.pop("reschedule", False)))
    if ranks not in (0, algorithm.num_ranks):
        raise invalid("ranks", ranks, f"{algorithm.num_ranks}, as {path.name} says")
    protocol = options.pop("protocol", algorithm.protocol)
    if options:
        raise invalid("options", ", ".join(options), f"protocol, for {path.name}")
    if protocol not in PROTOCOLS:
        raise invalid("protocol", protocol, ", ".join(PROTOCOLS))
    return dataclasses.replace(algorithm, protocol=protocol)


def programs_of(path: Path, ranks: int, options: dict[str, Any], arguments: Sequence[str]) -> list[Program]:
    """Run a Python file and return the programs that it makes. Raises: ProgramError, naming the file's line."""
    printed = StringIO()
    with collect() as programs, _msccl_names(), _arguments([str(path), *arguments]), redirect_stdout(printed):
        try:
            _run(path, ranks, options, programs)
        except ProgramError:
            raise
        except Error as error:
            place = _user_place(path, error)
            raise ProgramError(f"{place}: {error}") if ":" in place else error from error
        except Exception as error:  # the user's own mistake
            said = error.msg if isinstance(error, SyntaxError) else error
            raise ProgramError(f"{_user_place(path, error)}: {type(error).__name__}: {said}") from error
    return programs


def _run(path: Path, ranks: int, options: dict[str, Any], programs: list[Program]) -> None:
    # With --ranks a file need not run as a program of its own, which may start ranks.
    maker = runpy.run_path(str(path), run_name="weft_program" if ranks else "__main__").get("program")
    if callable(maker) and (ranks or not programs):
        programs.clear()  # what the file made for itself when it ran
        if ranks < 1:
            raise invalid("ranks", ranks, f"how many ranks, since {path.name} defines program(ranks)")
        known = list(inspect.signature(maker).parameters)[1:]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise invalid(
                "options", ", ".join(unknown), ", ".join(known) or f"none for program() of {path.name}"
            )
        maker(ranks, **options)
    elif ranks or options:
        raise invalid(
            "options",
            ", ".join([*(["ranks"] if ranks else []), *options]),
            f"its own arguments (--args): {path.name} has no program(ranks)",
        )


def _user_place(path: Path, error: Exception) -> str:
    """Return file:line of the last line of the user's file that the error came through."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or path).name}:{error.lineno}"
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path)]
    return f"{path.name}:{lines[-1]}" if lines else path.name


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _msccl_names() -> Iterator[None]:
    """Let ``from msccl.language import *`` and its neighbours find Weft's language."""
    named: dict[str, Any] = {**vars(topology), **vars(contract), **vars(language)}
    package = sys.modules["weft.collectives"]
    for name in package.__all__:
        named[name] = getattr(package, name)
    policy = types.SimpleNamespace(auto="auto", manual="manual")
    named |= {"ThreadblockPolicy": policy, "ReduceChunk": values.Value, "XML": language.print_xml}
    names = (
        *(
            "msccl",
            "msccl.language",
            "msccl.language.collectives",
            "msccl.language.buffer",
            "msccl.language.types",
            "msccl.language.chunk",
            "msccl.language.ir",
        ),
        *("msccl.topologies", "msccl.topologies.distributed", "msccl.topologies.generic"),
        *("msccl.topologies.nvidia", "msccl.topologies.amd", "msccl.collectives"),
    )
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update({key: value for key, value in named.items() if not key.startswith("_")})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
