# SPDX-License-Identifier: Apache-2.0
"""Compiles the algorithms that programs without Python run (compat/nccl) into one file, a program book.

    write_book(Path("programs.weft"), [Part("nvlink", 8), Part("cpu", 4)])

Every program in it was verified here. src/collective/program_book.h reads it; docs/decisions/0007 has the reasons.
Which algorithm serves which size is the selector's choice: from a table that `weft tune` measured, else
from the cost model; an exchange is a row without a program. A gather or scatter that no exchange serves has no row:
its caller sends messages. Programs with a root are for root 0: the reader renumbers
ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.collectives.average import ended_sums
from weft.collectives.contract import AllToOthers
from weft.collectives.direct import direct_messages
from weft.collectives.exchanges import EXCHANGES
from weft.collectives.ir import Algorithm
from weft.collectives.rows import chunks_of_part, program_rows, protocol_number
from weft.collectives.selector import Selector
from weft.collectives.variants import EXCHANGE, PROGRAM, Choice
from weft.collectives.verifier import verify
from weft.errors import Error
from weft.runtime.files import write_file

MAGIC = b"weftbook"
VERSION = 5
_MACHINES = {"cpu": 0, "nvlink": 1}
# Collective, its number in src/collective/program_book.h, and whether its programs work in place.
_SERVED = (
    ("allreduce", 0, True),
    ("allgather", 1, True),
    ("reducescatter", 2, False),
    ("alltoall", 3, False),
    ("broadcast", 4, True),
    ("reduce", 5, True),
    ("alltoallv", 6, False),
    ("gather", 7, False),
    ("scatter", 8, False),
)
_ONLY_BY_EXCHANGE = ("gather", "scatter")
_REDUCED = ("allreduce", "reducescatter", "reduce")
_MAY_ALIAS = ("reducescatter",)  # whose in-place calls the out-of-place programs serve, too
_SIZES = tuple(1 << exponent for exponent in range(10, 29, 2))
_HALVINGS = 6  # of the span between two sizes with different choices, until its middle is the limit
_NO_PROGRAM = (1 << 32) - 1  # an exchange needs none
_NO_LIMIT = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Part:
    """What a book holds for one number of ranks on "cpu" or "nvlink". The other fields: as for Selector."""

    machine: str
    ranks: int
    key: str = ""
    folder: Path | None = None
    algorithm_dir: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Which choice serves a collective up to a size of the whole buffer, in bytes; gather and scatter: of one part."""

    machine: int
    ranks: int
    collective: int
    max_bytes: int
    choice: Choice


def write_book(path: Path, parts: Iterable[Part]) -> int:
    """Compile and write, atomically; return the number of programs. Raises: Error, OSError."""
    rows = [row for part in parts for row in _rows(part)]
    algorithms = (row.choice.algorithm for row in rows if row.choice.mode == PROGRAM)
    programs = list({id(algorithm): algorithm for algorithm in algorithms}.values())
    numbers = {id(algorithm): number for number, algorithm in enumerate(programs)}
    tables = [_tables(algorithm) for algorithm in programs]
    texts = [
        _program_words(algorithm, of_ranks) for algorithm, of_ranks in zip(programs, tables, strict=True)
    ]
    words = [VERSION, *_widths(tables), len(programs), len(rows)]
    for text in texts:
        words += [len(text), *text]
    for row in rows:
        number = numbers.get(id(row.choice.algorithm), _NO_PROGRAM)
        words += [row.machine, row.ranks, row.collective, _mode(row.choice), number]
        words += [row.choice.slice_bytes, row.choice.num_sms, row.max_bytes & 0xFFFFFFFF, row.max_bytes >> 32]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, MAGIC + struct.pack(f"={len(words)}I", *(word & 0xFFFFFFFF for word in words)))
    return len(programs)


def _mode(choice: Choice) -> int:
    """Return the number of BookMode in src/collective/program_book.h."""
    if choice.mode != EXCHANGE:
        return 0
    if choice.algorithm.protocol != "LL":
        return 3
    return 1 if EXCHANGES[choice.algorithm.name].is_one_shot else 2


def _rows(part: Part) -> Iterator[Row]:
    selector = Selector(
        *(part.ranks, part.machine, part.key, part.folder, part.algorithm_dir),
        modes=(PROGRAM, EXCHANGE),
        every_size=True,
    )
    machine = _MACHINES[part.machine]
    for collective, number, inplace in _SERVED:
        sizes = _SIZES if collective != "alltoallv" else _SIZES[-1:]
        chosen = [(size, selector.choose(collective, size, inplace)) for size in sizes]
        for (size, choice), (later, next_choice) in zip(chosen, [*chosen[1:], (0, None)], strict=True):
            if next_choice == choice:
                continue
            if choice.mode == PROGRAM and collective in _ONLY_BY_EXCHANGE:
                continue
            if choice.mode == PROGRAM:
                _check(collective, choice.algorithm)
            if collective == "alltoallv":
                choice = dataclasses.replace(choice, algorithm=_between_ranks(choice.algorithm))
            limit = _limit(selector, collective, inplace, size, later) if later else _NO_LIMIT
            yield Row(machine, part.ranks, number, limit, choice)


def _between_ranks(algorithm: Algorithm) -> Algorithm:
    """Leave out what a rank copies for itself, which the caller of sends and receives does."""
    ranks = [
        dataclasses.replace(
            rank, blocks=[block for block in rank.blocks if block.send >= 0 or block.recv >= 0]
        )
        for rank in algorithm.ranks
    ]
    contract = AllToOthers(algorithm.num_ranks, algorithm.chunks // algorithm.num_ranks)
    return dataclasses.replace(algorithm, ranks=ranks, contract=contract)


def _limit(selector: Selector, collective: str, inplace: bool, size: int, later: int) -> int:
    """Return about where what serves ``size`` ceases to be chosen, before ``later``."""
    choice = selector.choose(collective, size, inplace)
    for _ in range(_HALVINGS):
        middle = (size + later) // 2
        if selector.choose(collective, middle, inplace) == choice:
            size = middle
        else:
            later = middle
    return size


def _check(collective: str, algorithm: Algorithm) -> None:
    """Prove what the caller relies on beyond the algorithm's own claims. Raises: Error."""
    served = algorithm
    if collective in _MAY_ALIAS and not algorithm.inplace:
        verify(dataclasses.replace(algorithm, inplace=True, outofplace=False))
        served = dataclasses.replace(algorithm, inplace=True)
    sums = ended_sums(algorithm)
    if collective in _REDUCED and (not sums.has_average or ended_sums(served).ends != sums.ends):
        raise Error(
            f"{algorithm.name}: sums end at other steps in place than out of place, so nothing can average"
        )


Tables = tuple[list[list[int]], list[list[int]], list[list[int]]]  # blocks, steps, waits


def _tables(algorithm: Algorithm) -> tuple[list[Tables], bool]:
    """Return every rank's rows, and whether no message needs to fit a slot."""
    sums = ended_sums(algorithm)
    direct = direct_messages(sums.algorithm)
    of_ranks = []
    for rank in range(algorithm.num_ranks):
        blocks, steps, waits = program_rows(sums, rank, direct)
        of_ranks.append((blocks, steps, [[*wait, 0] for wait in waits]))  # the runner fills in the last word
    return of_ranks, direct.refers_only


def _program_words(algorithm: Algorithm, tables: tuple[list[Tables], bool]) -> list[int]:
    of_ranks, refers_only = tables
    name = algorithm.name.encode()
    scratch = max(program.scratch_chunks for program in algorithm.ranks)
    words = [algorithm.num_ranks, protocol_number(algorithm), chunks_of_part(algorithm)]
    words += [algorithm.channels, scratch, int(refers_only), len(name)]
    padded = name + bytes(-len(name) % 4)
    words += struct.unpack(f"={len(padded) // 4}I", padded)
    for of_rank in of_ranks:
        words += [len(table) for table in of_rank]
        words += [number for table in of_rank for row in table for number in row]
    return words


def _widths(programs: Iterable[tuple[list[Tables], bool]]) -> list[int]:
    """Return the words of a block, a step and a wait."""
    widths = [0, 0, 3]
    for of_ranks, _ in programs:
        for of_rank in of_ranks:
            for at, table in enumerate(of_rank):
                widths[at] = max([widths[at], *(len(row) for row in table)])
    return widths


def main() -> None:
    """python -m weft.collectives.book FILE [--ranks 2-16]: what the build runs."""
    parser = argparse.ArgumentParser(description="compile the built-in algorithms into a program book")
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", default="2-16", help="FIRST-LAST")
    args = parser.parse_args()
    first, last = (int(number) for number in args.ranks.split("-"))
    parts = [Part(machine, ranks) for ranks in range(first, last + 1) for machine in _MACHINES]
    write_book(args.file, parts)


if __name__ == "__main__":
    main()
