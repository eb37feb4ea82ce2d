# SPDX-License-Identifier: Apache-2.0
"""What can serve a call: library programs and files with all that a run of them needs, and which are tried.

parse_variant("allgather_allpairs LL x4 compiled").choice(ranks=8, inplace=False)
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from typing import Any

from weft.collectives.exchanges import LINES, PLACES, STAGES
from weft.collectives.ir import Algorithm
from weft.collectives.library import entries
from weft.collectives.verifier import verify
from weft.errors import invalid

PROGRAM, COMPILED, EXCHANGE, STAGED = MODES = ("program", "compiled", "exchange", "staged")


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
    from weft.collectives.files import read_source

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


def _exchange(name: str, protocol: str) -> Variant:
    return Variant(name, protocol, mode=EXCHANGE)


# The candidates where nothing was measured, and for `weft tune`. An executor on a GPU begins with eight channels, so
# only calls for large buffers need more.
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
    "alltoallv": tuple(Variant("alltoallv_allpairs", "Simple", instances) for instances in (1, 4, 8, 16, 32)),
    "broadcast": (
        _exchange("broadcast_flat", "LL"),
        _exchange("broadcast_flat", "Simple"),
        Variant("broadcast_flat", "LL"),
        *(Variant("broadcast_flat", "Simple", instances) for instances in (1, 4, 8)),
        *(Variant("broadcast_scatter_allgather", "Simple", instances) for instances in (1, 4, 16)),
        *(Variant("broadcast_chain", "Simple", instances) for instances in (1, 4, 16, 32)),
    ),
    "reduce": (
        _exchange("reduce_flat", "LL"),
        _exchange("reduce_flat", "Simple"),
        Variant("reduce_flat", "LL"),
        *(Variant("reduce_flat", "Simple", instances) for instances in (1, 4, 8)),
        *(Variant("reduce_chain", "Simple", instances) for instances in (1, 4, 16)),
    ),
    "gather": (
        _exchange("gather_flat", "LL"),
        _exchange("gather_flat", "Simple"),
        Variant("gather_flat", "LL"),
        *(Variant("gather_flat", "Simple", instances) for instances in (1, 4, 8)),
    ),
    "scatter": (
        _exchange("scatter_flat", "LL"),
        _exchange("scatter_flat", "Simple"),
        Variant("scatter_flat", "LL"),
        *(Variant("scatter_flat", "Simple", instances) for instances in (1, 4, 8)),
    ),
    "sendrecv": (Variant("sendrecv", "Simple"),),
}


_MOST_BLOCKS_OF_PAIRS = 64

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
    if collective == "alltoallv":  # every instance has a block for each rank, whatever the sizes
        flat = tuple(v for v in flat if v.instances == 1 or v.instances * ranks <= _MOST_BLOCKS_OF_PAIRS)
    if not 1 < per_node < ranks:
        return flat
    flat = tuple(variant for variant in flat if not variant.name.endswith("_ring"))
    options = (("per_node", per_node),)
    return flat + tuple(dataclasses.replace(v, options=options) for v in TWO_LEVEL.get(collective, ()))
