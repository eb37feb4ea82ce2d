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
import functools
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.collectives.cost import CPU, NVLINK, Machine, predict_exchange_us, predict_us
from weft.collectives.exchanges import LINES, PLACES, STAGES
from weft.collectives.flow import run_limit
from weft.collectives.ir import Algorithm
from weft.collectives.library import entries
from weft.collectives.verifier import verify
from weft.errors import Error, invalid

log = logging.getLogger("weft.collectives")

TABLE_VERSION = 1
PROGRAM, COMPILED, EXCHANGE, STAGED = MODES = ("program", "compiled", "exchange", "staged")
MACHINES = {"cpu": CPU, "nvlink": NVLINK}
# Calls that a caller can bring into the in-place form by a copy, whatever tensors it was given.
MADE_IN_PLACE = ("allgather", "reducescatter", "alltoall")
_TABLES = Path(__file__).parent / "tuned"
_MAX_LOGGED = 1000


@dataclasses.dataclass(frozen=True)
class Choice:
    """An algorithm with everything that a run needs to know."""

    algorithm: Algorithm
    slice_bytes: int = 0
    num_sms: int = 0
    mode: str = PROGRAM

    @property
    def way(self) -> int | None:
        """How the exchange kernel goes, as in weft.collectives.exchanges; None: a program runs."""
        if self.mode == EXCHANGE:
            return LINES if self.algorithm.protocol == "LL" else PLACES
        return STAGES if self.mode == STAGED else None

    def label(self) -> str:
        """Say what runs, such as "allgather_allpairs LL exchange"."""
        return f"{self.algorithm.name} {self.algorithm.protocol}{_suffix(self.mode, self.num_sms)}"


def _suffix(mode: str, num_sms: int) -> str:
    return (f" {mode}" if mode != PROGRAM else "") + (f" sms={num_sms}" if num_sms else "")


@dataclasses.dataclass(frozen=True)
class Variant:
    """How to build a candidate: a library name or a file, and its parameters. Rows of a table hold the same.

    ``mode``: "program" is interpreted, "compiled" runs in a kernel of its own, "exchange" is done as a whole by the
    exchange kernel (protocol LL: through inboxes; Simple: in place where all buffers lie in windows, else through
    staging areas), "staged" by the same kernel through staging areas wherever the buffers lie.
    """

    name: str
    protocol: str = "Simple"
    instances: int = 1
    slice_bytes: int = 0
    num_sms: int = 0
    options: tuple[tuple[str, int], ...] = ()
    mode: str = PROGRAM

    def label(self) -> str:
        extra = "".join(f" {key}={value}" for key, value in self.options)
        cut = f" slice={self.slice_bytes}" if self.slice_bytes else ""
        return f"{self.name} {self.protocol} x{self.instances}{extra}{cut}{_suffix(self.mode, self.num_sms)}"

    def choice(self, ranks: int, inplace: bool, root: int = 0) -> Choice:
        """Build it. Raises: Error when it does not exist for the ranks or the form."""
        algorithm = build_variant(self, ranks, inplace, root)
        return Choice(algorithm, self.slice_bytes, self.num_sms, self.mode)


def _exchange(name: str, protocol: str) -> Variant:
    return Variant(name, protocol, mode=EXCHANGE)


def parse_variant(text: str) -> Variant:
    """Read a Variant from words such as "allgather_allpairs LL x4 compiled" or "... Simple exchange sms=64".

    Raises: Error.
    """
    name, *words = text.split() or [""]
    if name not in entries():
        raise invalid("algorithm", name, "a name that weft compile --list shows")
    return Variant(name, **_fields(words))


def parse_choice(text: str, ranks: int, inplace: bool) -> Choice:
    """Build what the words of parse_variant() say; the name may be that of a .py, .xml or .json file, too.

    A file's own protocol stands unless the words name another. Raises: Error, OSError.
    """
    name, *words = shlex.split(text) or [""]
    if not name.endswith((".py", ".xml", ".json")):
        return parse_variant(text).choice(ranks, inplace)
    from weft.collectives.compile import read_source

    fields = _fields(words)
    options: dict[str, Any] = {key: fields.pop(key) for key in ("protocol", "instances") if key in fields}
    algorithm = read_source(name, ranks, options)
    verify(algorithm)
    return Choice(algorithm, **fields)


def _fields(words: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if word in ("Simple", "LL", "LL128"):
            fields["protocol"] = word
        elif word in MODES:
            fields["mode"] = word
        elif word[0] == "x" and word[1:].isdigit():
            fields["instances"] = int(word[1:])
        elif key in ("sms", "slice") and value.isdigit():
            fields["num_sms" if key == "sms" else "slice_bytes"] = int(value)
        else:
            raise invalid(
                "algorithm", word, f"Simple, LL, LL128, x<instances>, sms=, slice=, {', '.join(MODES)}"
            )
    return fields


# What is tried where nothing was measured, and what `weft tune` measures. An executor on a GPU begins with eight
# channels, so only calls for large buffers need more.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "allreduce": (
        _exchange("allreduce_1step", "LL"),
        _exchange("allreduce_allpairs", "LL"),
        _exchange("allreduce_allpairs", "Simple"),
        Variant("allreduce_allpairs", "LL", mode=COMPILED),
        Variant("allreduce_1step", "LL"),
        Variant("allreduce_allpairs", "LL"),
        Variant("allreduce_a100_allpairs_v2", "LL"),
        Variant("allreduce_1step", "Simple"),
        Variant("allreduce_allpairs", "Simple"),
        Variant("allreduce_allpairs", "Simple", 2),
        Variant("allreduce_allpairs", "Simple", 4),
        Variant("allreduce_allpairs", "Simple", 8),
        Variant("allreduce_allpairs", "Simple", 16),
        Variant("allreduce_a100_ring", "Simple"),
        Variant("allreduce_recursive_doubling_halving", "LL"),
    ),
    "allgather": (
        _exchange("allgather_allpairs", "LL"),
        _exchange("allgather_allpairs", "Simple"),
        Variant("allgather_allpairs", "LL", mode=COMPILED),
        Variant("allgather_allpairs", "LL"),
        Variant("allgather_allpairs", "Simple"),
        Variant("allgather_allpairs", "Simple", 2),
        Variant("allgather_allpairs", "Simple", 4),
        Variant("allgather_allpairs", "Simple", 8),
        Variant("allgather_allpairs", "Simple", 16),
        Variant("allgather_ring", "Simple"),
    ),
    "reducescatter": (
        _exchange("reducescatter_allpairs", "LL"),
        _exchange("reducescatter_allpairs", "Simple"),
        Variant("reducescatter_allpairs", "LL", mode=COMPILED),
        Variant("reducescatter_allpairs", "LL"),
        Variant("reducescatter_allpairs", "Simple"),
        Variant("reducescatter_allpairs", "Simple", 4),
        Variant("reducescatter_allpairs", "Simple", 8),
        Variant("reducescatter_allpairs", "Simple", 16),
        Variant("reducescatter_allpairs_fused", "LL"),
        Variant("reducescatter_ring", "Simple"),
    ),
    "alltoall": (
        _exchange("alltoall_allpairs", "LL"),
        _exchange("alltoall_allpairs", "Simple"),
        Variant("alltoall_allpairs", "LL", mode=COMPILED),
        Variant("alltoall_allpairs", "LL"),
        Variant("alltoall_allpairs", "Simple"),
        Variant("alltoall_allpairs", "Simple", 2),
        Variant("alltoall_allpairs", "Simple", 4),
        Variant("alltoall_allpairs", "Simple", 8),
        Variant("alltoall_allpairs", "Simple", 16),
    ),
    "alltoallv": tuple(Variant("alltoallv_allpairs", "Simple", instances) for instances in (1, 4, 8)),
    "broadcast": (
        Variant("broadcast_flat", "LL"),
        *(Variant("broadcast_flat", "Simple", instances) for instances in (1, 4, 8)),
        *(Variant("broadcast_scatter_allgather", "Simple", instances) for instances in (1, 4, 16)),
        *(Variant("broadcast_chain", "Simple", instances) for instances in (1, 4, 16)),
    ),
    "reduce": (
        Variant("reduce_flat", "LL"),
        *(Variant("reduce_flat", "Simple", instances) for instances in (1, 4, 8)),
        *(Variant("reduce_chain", "Simple", instances) for instances in (1, 4, 16)),
    ),
    "gather": (
        Variant("gather_flat", "LL"),
        *(Variant("gather_flat", "Simple", instances) for instances in (1, 4, 8)),
    ),
    "scatter": (
        Variant("scatter_flat", "LL"),
        *(Variant("scatter_flat", "Simple", instances) for instances in (1, 4, 8)),
    ),
    "sendrecv": (Variant("sendrecv", "Simple"),),
}


# The same for several nodes with as many ranks each, beside those above; they take ``per_node``.
TWO_LEVEL: dict[str, tuple[Variant, ...]] = {
    "allreduce": tuple(
        Variant(name, "Simple", instances)
        for name in ("allreduce_two_level_once", "allreduce_two_level")
        for instances in (1, 2)
    ),
    "allgather": (Variant("allgather_two_level"),),
    "reducescatter": (Variant("reducescatter_two_level"),),
}


def candidates(collective: str, ranks: int, per_node: int) -> tuple[Variant, ...]:
    """Return what is tried for a collective; ``per_node`` as in Selector.

    Between nodes a ring goes through one rank of each, whose core and NIC carry everything: it is left out.
    """
    flat = VARIANTS.get(collective, ())
    if not 1 < per_node < ranks:
        return flat
    flat = tuple(variant for variant in flat if not variant.name.endswith("_ring"))
    options = (("per_node", per_node),)
    return flat + tuple(dataclasses.replace(v, options=options) for v in TWO_LEVEL.get(collective, ()))


@functools.lru_cache(maxsize=512)
def build_variant(variant: Variant, ranks: int, inplace: bool, root: int = 0) -> Algorithm:
    """Compile and verify a library variant. Raises: Error when it does not exist for the ranks or the form."""
    entry = entries()[variant.name]
    options: dict[str, Any] = dict(variant.options)
    if "root" in entry.options:
        options["root"] = root
    contract = {"root": root} if entry.collective in ("broadcast", "reduce", "gather", "scatter") else {}
    program = entry.program(
        ranks,
        inplace=inplace,
        protocol=variant.protocol,
        instances=variant.instances,
        **{**options, **contract},
    )
    return program.compile()


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
            self._rows = read_table(folder / table_name(machine, key, ranks), key) or self._rows
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
            reason = self._unpredicted(variant)
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

    def _unpredicted(self, variant: Variant) -> str | None:
        if variant.mode not in self._modes:
            return f"mode {variant.mode} is not served here"
        if variant.mode == COMPILED:
            return "compiled programs are used where they were measured"
        if self.machine.per_node and (variant.mode == EXCHANGE or variant.protocol != "Simple"):
            return "messages between nodes are of protocol Simple"
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
    from weft.collectives.load import is_listing, load_file, load_listed

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


def table_name(machine: str, key: str, ranks: int) -> str:
    """Return the file name of a measured table."""
    safe = "".join(c if c.isalnum() else "-" for c in key) or "any"
    return f"collectives-{machine}-{safe}-{ranks}.json"


def read_table(path: Path, key: str) -> list[dict[str, Any]]:
    """Return a table's rows: collective, ranks (0 = any), max_bytes (None = all), variant. Bad: none, and a log."""
    return [row for _, row in _read_rows(path, key)]


def rows_besides(path: Path, key: str, collectives: Iterable[str], ranks: int) -> list[dict[str, Any]]:
    """Return a table's rows but those of ``collectives`` on ``ranks`` ranks, as write_table() takes them."""
    without = {(collective, ranks) for collective in collectives}
    return [
        written for written, row in _read_rows(path, key) if (row["collective"], row["ranks"]) not in without
    ]


def _read_rows(path: Path, key: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the rows of a table, as they are written and as they are used."""
    if not path.is_file():
        return []
    try:
        document = json.loads(path.read_text())
        if document["version"] != TABLE_VERSION or (key and document["key"] != key):
            log.info("table %s is for %s, version %s: not used", path, document["key"], document["version"])
            return []
        return [(row, _row(row)) for row in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.warning("table %s is not used: %s: %s", path, type(error).__name__, error)
        return []


def _row(row: dict[str, Any]) -> dict[str, Any]:
    options = tuple(sorted(row.get("options", {}).items()))
    variant = Variant(
        row["algorithm"],
        row.get("protocol", "Simple"),
        int(row.get("instances", 1)),
        int(row.get("slice_bytes", 0)),
        int(row.get("num_sms", 0)),
        options,
        row.get("mode", PROGRAM),
    )
    if variant.mode not in MODES:
        raise ValueError(f"no mode {variant.mode!r}")
    if variant.name not in entries():
        raise ValueError(f"no algorithm {variant.name!r}")
    hash(variant)  # a list among the options is a TypeError here, not where the variant is looked up
    limit = row.get("max_bytes")
    numbers = (variant.instances, variant.slice_bytes, variant.num_sms, row.get("ranks", 0), limit or 0)
    if not isinstance(row["collective"], str) or any(int(number) < 0 for number in numbers):
        raise ValueError(f"collective {row['collective']!r} with {numbers}")
    return {
        "collective": row["collective"],
        "ranks": int(row.get("ranks", 0)),
        "max_bytes": None if limit is None else int(limit),
        "variant": variant,
        "measured_us": {str(label): float(us) for label, us in row.get("measured_us", {}).items()},
    }


def write_table(path: Path, key: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a table; atomically, so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": TABLE_VERSION, "key": key, "rows": list(rows)}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
