# SPDX-License-Identifier: Apache-2.0
"""Which algorithm serves a call: from a table measured on such a machine, or from the cost model where there is none.

    selector = Selector(ranks=8, machine="nvlink", key="NVIDIA H200 x8")
    choice = selector.choose("allreduce", num_bytes=65536)

The decision uses only what all ranks of a call agree on (collective, bytes, ranks, machine, the tables and files that
were read), so all choose alike; fingerprint() tells whether they read alike. Every candidate that lost is logged with
its reason, once per call shape. Missing and bad files are never fatal: each is named in one warning and left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.collectives.cost import MACHINES, Machine, predict_exchange_us, predict_us
from weft.collectives.flow import run_limit
from weft.collectives.ir import Algorithm
from weft.collectives.tuned_tables import read_table, table_name
from weft.collectives.variants import COMPILED, EXCHANGE, MODES, Choice, Variant, candidates
from weft.collectives.verifier import verify
from weft.errors import Error

log = logging.getLogger("weft.collectives")

# Calls that a caller can bring into the in-place form by a copy, whatever tensors it was given.
MADE_IN_PLACE = ("allgather", "reducescatter", "alltoall")
_TABLES = Path(__file__).parent / "tuned"
_MAX_LOGGED = 1000


class Selector:
    """Chooses algorithms for one number of ranks on one machine.

    Args:
        ranks: of the communicator.
        machine: "cpu" or "nvlink": the cost model's constants, and the shipped table.
        key: names the machine in measured tables; a table with another key is not used.
        folder: where `weft tune` keeps its tables; None for no measured tables.
        algorithm_dir: XML or JSON algorithms that join the candidates, as for read_algorithms.
        modes: what the caller can run.
        may_copy: the caller copies where an algorithm is for calls of the other form, as misfit() says.
        every_size: leave out files' algorithms that run up to some size only (weft.collectives.flow).
        tells: warn of files that cannot be used; one of a communicator's ranks does.
        per_node: ranks that map each other where others are reached through ports; 0: all map all, or nodes differ.
            Shipped tables are of one node and are not used then.
    """

    def __init__(
        self,
        ranks: int,
        machine: str,
        key: str = "",
        folder: Path | None = None,
        algorithm_dir: str = "",
        modes: Sequence[str] = MODES,
        may_copy: bool = False,
        every_size: bool = False,
        tells: bool = True,
        per_node: int = 0,
    ) -> None:
        self.ranks, self._per_node = ranks, per_node
        self._may_copy = may_copy
        self._modes = modes
        self.machine: Machine = dataclasses.replace(MACHINES[machine], per_node=per_node)
        self._rows = [] if per_node else read_table(_TABLES / f"{machine}.json", "")
        if folder is not None:
            self._rows = (
                read_table(folder / table_name(machine, key, ranks), key, is_private=True) or self._rows
            )
        files = read_algorithms(algorithm_dir, ranks, tells)
        self._files = [file for file in files if not (every_size and run_limit(file))]
        self._logged: set[tuple[str, int]] = set()

    def use_rows(self, rows: list[dict[str, Any]]) -> None:
        """Choose by these rows of a table from now on; without any, by the cost model as where nothing was measured."""
        self._rows = rows

    def fingerprint(self) -> str:
        """Return what is alike exactly where the same tables and files were read."""
        read = repr((self._rows, self._files, self._per_node))
        return hashlib.sha256(read.encode()).hexdigest()

    def choose(self, collective: str, num_bytes: int, inplace: bool = False, root: int = 0) -> Choice:
        """Return what serves a call whose algorithm buffer has ``num_bytes``. Raises: Error when nothing does."""
        reasons: list[str] = []
        choice = (
            self._from_files(collective, num_bytes, inplace, root, reasons)
            or self._from_table(collective, num_bytes, inplace, root, reasons)
            or self._from_model(collective, num_bytes, inplace, root, reasons)
        )
        if choice is None:
            raise Error(
                f"{collective} of {num_bytes} bytes on {self.ranks} ranks: no algorithm; {'; '.join(reasons)}"
            )
        self._tell(collective, num_bytes, choice, reasons)
        return choice

    def _from_files(
        self, collective: str, num_bytes: int, inplace: bool, root: int, reasons: list[str]
    ) -> Choice | None:
        for algorithm in self._files:
            reason = misfit(algorithm, collective, inplace, root, self._may_copy)
            reason = reason or _unfit(algorithm, num_bytes)
            if reason is None:
                return Choice(algorithm)
            reasons.append(f"{algorithm.name}: {reason}")
        return None

    def _from_table(
        self, collective: str, num_bytes: int, inplace: bool, root: int, reasons: list[str]
    ) -> Choice | None:
        rows = [
            row
            for row in self._rows
            if row["collective"] == collective
            and row["ranks"] in (self.ranks, 0)
            and row["variant"].mode in self._modes
        ]
        for row in sorted(rows, key=lambda r: (r["ranks"] == 0, r["max_bytes"] is None, r["max_bytes"] or 0)):
            if row["max_bytes"] is not None and num_bytes > row["max_bytes"]:
                continue
            try:
                variant = row["variant"]
                choice: Choice = variant.choice(self.ranks, inplace, root)
                reasons += [
                    f"{label}: slower, measured {us:.1f} us"
                    for label, us in sorted(row["measured_us"].items(), key=lambda item: item[1])
                    if label != variant.label()
                ] or ["all others: the table has no times of them"]
                return choice
            except Error as error:
                reasons.append(f"{row['variant'].label()}: {error}")
        return None

    def _from_model(
        self, collective: str, num_bytes: int, inplace: bool, root: int, reasons: list[str]
    ) -> Choice | None:
        best: tuple[float, Choice] | None = None
        predicted: list[tuple[float, str]] = []
        for variant in candidates(collective, self.ranks, self._per_node):
            reason = self._unpredicted(variant, collective == "alltoall")
            if reason is not None:
                reasons.append(f"{variant.label()}: {reason}")
                continue
            try:
                choice = variant.choice(self.ranks, inplace, root)
            except Error as error:
                reasons.append(f"{variant.label()}: {error}")
                continue
            if choice.way is not None:
                us = predict_exchange_us(choice.algorithm, choice.way, num_bytes)
            else:
                us = predict_us(choice.algorithm, num_bytes, self.machine)
            predicted.append((us, variant.label()))
            if best is None or us < best[0]:
                best = us, choice
        reasons += [f"{label}: slower, predicted {us:.1f} us" for us, label in sorted(predicted)[1:]]
        return best[1] if best else None

    def _unpredicted(self, variant: Variant, is_all_to_all: bool) -> str | None:
        if variant.mode not in self._modes:
            return f"mode {variant.mode} is not served here"
        if variant.mode == COMPILED:
            return "compiled programs are used where they were measured"
        if self.machine.per_node and (variant.mode == EXCHANGE or variant.protocol != "Simple"):
            return "messages between nodes are of protocol Simple"
        if self.machine.per_node and self.machine.one_thread and is_all_to_all and variant.instances > 1:
            return "a CPU rank has one thread, and instances only make messages between nodes shorter"
        if variant.mode == EXCHANGE and self.machine.one_thread:
            return "many threads share an exchange, and a CPU rank has one"
        return None

    def _tell(self, collective: str, num_bytes: int, choice: Choice, reasons: Sequence[str]) -> None:
        shape = (collective, num_bytes)
        if shape in self._logged or len(self._logged) > _MAX_LOGGED:
            return
        self._logged.add(shape)
        log.debug(
            "%s of %d bytes on %d ranks: %s; lost: %s",
            *(collective, num_bytes, self.ranks, choice.label()),
            "; ".join(reasons) or "nothing else was tried",
        )


def misfit(
    algorithm: Algorithm, collective: str, inplace: bool, root: int, may_copy: bool = False
) -> str | None:
    """Return why an algorithm cannot do a call at any size, or None.

    ``may_copy``: the caller copies to serve in-place calls by out-of-place algorithms, and calls of MADE_IN_PLACE by
    in-place ones.
    """
    if algorithm.collective != collective:
        return f"is for {algorithm.collective}"
    if algorithm.contract is not None and algorithm.contract.root != root:
        return f"is for root {algorithm.contract.root}, not {root}"
    serves, other = algorithm.outofplace, algorithm.inplace and collective in MADE_IN_PLACE
    if inplace:
        serves, other = algorithm.inplace, algorithm.outofplace
    if not (serves or (may_copy and other)):
        return f"does not serve {'in-place' if inplace else 'out-of-place'} calls"
    return None


def _unfit(algorithm: Algorithm, num_bytes: int) -> str | None:
    if num_bytes < algorithm.min_bytes:
        return f"from {algorithm.min_bytes} bytes"
    if algorithm.max_bytes is not None and num_bytes > algorithm.max_bytes:
        return f"up to {algorithm.max_bytes} bytes"
    limit = run_limit(algorithm)
    return limit.refuses(num_bytes, algorithm.chunks) if limit else None


def read_algorithms(places: str, ranks: int, tells: bool = True) -> list[Algorithm]:
    """Return the verified algorithms for ``ranks``, by file name within each place; the others are logged.

    Args: places: folders and files, with colons between; "" for none. A file may be a list of others (MSCCL_CONFIG).
        tells: with warnings; else for WEFT_LOG=debug alone.
    """
    found = []
    level = logging.WARNING if tells else logging.DEBUG
    for place in filter(None, places.split(":")):
        path = Path(place).expanduser()
        if not path.exists():
            log.log(level, "algorithms: %s does not exist; the built-in ones are used", path)
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        for file in files:
            if file.suffix in (".xml", ".json"):
                found += _read_algorithm(file, ranks, level)
    return found


def _read_algorithm(file: Path, ranks: int, level: int) -> list[Algorithm]:
    from weft.collectives.files import is_listing, load_file, load_listed

    try:
        algorithms = load_listed(file) if is_listing(file) else [load_file(file)]
        for algorithm in algorithms:
            verify(algorithm)
    except (Error, OSError) as error:
        log.log(level, "%s is not used: %s", file.name, error)
        return []
    for algorithm in algorithms:
        if algorithm.num_ranks != ranks:
            log.info("%s is not used: it is for %d ranks, not %d", file.name, algorithm.num_ranks, ranks)
    return [algorithm for algorithm in algorithms if algorithm.num_ranks == ranks]
