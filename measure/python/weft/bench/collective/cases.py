# SPDX-License-Identifier: Apache-2.0
"""The cases of ``weft bench collective``: each call with its tensors, its baseline and what its result must be."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.bench.collective import CALLS
from weft.collectives.call_checks import chunk_counts
from weft.collectives.calls import Collectives
from weft.collectives.contract import Collective
from weft.collectives.files import read_source
from weft.collectives.ir import Algorithm
from weft.collectives.library import entries
from weft.collectives.variants import Choice, parse_choice
from weft.errors import invalid
from weft.runtime.communicator import Window
from weft.testing.ranks import Rank

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "average": dist.ReduceOp.AVG,
}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    calls: tuple[str, ...]
    min_bytes: int
    max_bytes: int
    factor: int
    dtype: str
    op: str
    place: str  # auto, in or out
    device: str
    iterations: int
    warmup: int
    check: bool
    baseline: bool
    eager: bool
    in_window: bool
    settings: tuple[tuple[str, str], ...] = ()  # WEFT_ variables
    algorithms: tuple[str, ...] = ()  # as for parse_choice, or "auto"; none: Weft chooses


@dataclass(frozen=True)
class Given:
    """The way to serve a call, as the command line names it: "auto" names none, Weft chooses."""

    text: str
    choice: Choice | None


@dataclass
class Tensors:
    """The inputs and outputs of Weft's call and of the baseline's: the same tensors, unless Weft's are in a window."""

    tensor: Tensor
    out: Tensor
    theirs: Tensor
    into: Tensor
    reset: Callable[[], None]


@dataclass
class Case:
    """One call at one size: Weft by a choice (None: its own), the baseline (None where it has none), what to compare,
    and how to start afresh."""

    weft: Callable[[Choice | None], Any]
    baseline: Callable[[], Any] | None
    result: Callable[[], Tensor]
    oracle: Callable[[], Tensor | None]
    reset: Callable[[], None]


def call_of(algorithms: Sequence[str], ranks: int) -> tuple[str, int]:
    """Return the call that the first algorithm is for, and on how many ranks, where it says so. Raises: Error."""
    words = shlex.split(algorithms[0])
    if not words[0].endswith((".py", ".xml", ".json")):
        collective = entries()[words[0]].collective if words[0] in entries() else ""
    else:
        algorithm = read_source(words[0], ranks if words[0].endswith(".py") else 0)
        collective, ranks = algorithm.collective, algorithm.num_ranks
    known = {call.replace("send_recv", "sendrecv").replace("_", ""): call for call in CALLS}
    if collective not in (*known, "custom"):
        raise invalid("calls", None, f"given, for {algorithms[0]!r}: one of {', '.join(CALLS)}")
    return known.get(collective, collective), ranks


class Cases:
    """Makes the tensors and functions of each call."""

    def __init__(
        self,
        me: Rank,
        collectives: Collectives,
        group: Any,
        device: torch.device,
        options: Options,
        window: Window | None,
    ) -> None:
        self.me, self.weft, self.group, self.device, self.window = me, collectives, group, device, window
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        inplace = options.calls[0] in ("all_reduce", "broadcast", "reduce")
        self.given = [
            Given(text, None if text == "auto" else parse_choice(text, me.size, inplace))
            for text in options.algorithms or ("auto",)
        ]

    def algorithm(self, given: Given, call: str, num_bytes: int) -> str:
        """Return what serves the call: what was given, or what Weft chose last."""
        if given.choice is not None:
            return given.text
        name = call.replace("send_recv", "sendrecv").replace("_", "")
        return next((str(key) for key in self.weft.chosen(name, num_bytes)), "")

    def make(self, call: str, part: int) -> Case:
        """Return the case of a call whose ranks have ``part`` elements each."""
        case: Case = getattr(self, f"_{call}")(part)
        return case

    def is_in_place(self, call: str) -> bool:
        """Return whether the call's result lies where its input is, or the other way round."""
        default = "in" if call in ("all_reduce", "broadcast", "reduce") else "out"
        return (self.options.place if self.options.place != "auto" else default) == "in"

    def _values(self, rank: int, elems: int) -> Tensor:
        period = 5 if self.options.op == "product" else 50
        numbers = (torch.arange(elems, dtype=torch.int32) * 7 + rank * 3) % period % 13
        values: Tensor = (numbers if self.options.op != "product" else numbers % 2 + 1).to(self.dtype)
        return values

    def _reduced(self, elems: int) -> Tensor:
        stacked = torch.stack([self._values(rank, elems).to(torch.float64) for rank in range(self.me.size)])
        op = self.options.op
        if op in ("min", "max"):
            out = (stacked.amin if op == "min" else stacked.amax)(0)
        elif op == "product":
            out = stacked.prod(0)
        else:
            out = stacked.sum(0) / (self.me.size if op == "average" else 1)
        return out.to(self.dtype)

    def _tensors(self, given: int, taken: int, in_place: bool = False) -> Tensors:
        """Return tensors of so many elements; in place, the smaller is this rank's part of the larger."""
        own = self._values(self.me.rank, given).to(self.device)
        theirs, into = own.clone(), torch.empty(taken, dtype=self.dtype, device=self.device)
        tensor, out = theirs, into
        if self.window is not None:
            place = -(-given * self.dtype.itemsize // 4096) * 4096
            tensor = self.window.tensor(self.me.rank, (given,), self.dtype)
            out = self.window.tensor(self.me.rank, (taken,), self.dtype, place)

        if in_place:
            part, at = min(given, taken), self.me.rank * min(given, taken)
            if given < taken:
                tensor, theirs = out[at : at + part], into[at : at + part]
            else:
                out, into = tensor[at : at + part], theirs[at : at + part]

        def reset() -> None:
            for held in (out, into):
                held.fill_(0)
            for held in (tensor, theirs):
                held.copy_(own)

        return Tensors(tensor, out, theirs, into, reset)

    def _has_baseline(self, *, average: bool = True) -> bool:
        return self.options.op != "average" or (self.device.type == "cuda" and average)

    def _all_reduce(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, elems)
        op, reduce_op = self.options.op, _OPS[self.options.op]
        target = None if self.is_in_place("all_reduce") else m.out
        baseline = (
            (lambda: dist.all_reduce(m.theirs, reduce_op, group=self.group)) if self._has_baseline() else None
        )
        return Case(
            lambda choice: self.weft.all_reduce(m.tensor, op, out=target, algorithm=choice),
            baseline,
            lambda: m.tensor if target is None else m.out,
            lambda: self._reduced(elems),
            m.reset,
        )

    def _all_gather(self, part: int) -> Case:
        m = self._tensors(part, part * self.me.size, self.is_in_place("all_gather"))
        return Case(
            lambda choice: self.weft.all_gather(m.tensor, out=m.out, algorithm=choice),
            lambda: dist.all_gather_into_tensor(m.into, m.theirs, group=self.group),
            lambda: m.out,
            lambda: torch.cat([self._values(rank, part) for rank in range(self.me.size)]),
            m.reset,
        )

    def _reduce_scatter(self, part: int) -> Case:
        m = self._tensors(part * self.me.size, part, self.is_in_place("reduce_scatter"))
        op, reduce_op = self.options.op, _OPS[self.options.op]
        baseline = None
        if self._has_baseline():
            baseline = lambda: dist.reduce_scatter_tensor(m.into, m.theirs, reduce_op, group=self.group)  # noqa: E731
        return Case(
            lambda choice: self.weft.reduce_scatter(m.tensor, op, out=m.out, algorithm=choice),
            baseline,
            lambda: m.out,
            lambda: self._reduced(part * self.me.size).view(self.me.size, part)[self.me.rank],
            m.reset,
        )

    def _all_to_all(self, part: int) -> Case:
        ranks = self.me.size
        m = self._tensors(part * ranks, part * ranks)
        return Case(
            lambda choice: self.weft.all_to_all(m.tensor, out=m.out, algorithm=choice),
            lambda: dist.all_to_all_single(m.into, m.theirs, group=self.group),
            lambda: m.out,
            lambda: torch.cat(
                [self._values(q, part * ranks).view(ranks, part)[self.me.rank] for q in range(ranks)]
            ),
            m.reset,
        )

    def _broadcast(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, 1)
        return Case(
            lambda choice: self.weft.broadcast(m.tensor, 0, algorithm=choice),
            lambda: dist.broadcast(m.theirs, 0, group=self.group),
            lambda: m.tensor,
            lambda: self._values(0, elems),
            m.reset,
        )

    def _reduce(self, part: int) -> Case:
        elems = part * self.me.size
        m = self._tensors(elems, 1)
        op, reduce_op = self.options.op, _OPS[self.options.op]
        return Case(
            lambda choice: self.weft.reduce(m.tensor, 0, op, algorithm=choice),
            (lambda: dist.reduce(m.theirs, 0, reduce_op, group=self.group)) if self._has_baseline() else None,
            lambda: m.tensor,
            lambda: self._reduced(elems) if self.me.rank == 0 else None,
            m.reset,
        )

    def _gather(self, part: int) -> Case:
        m = self._tensors(part, part * self.me.size)
        target = m.out if self.me.rank == 0 else None
        parts = list(m.into.view(self.me.size, part)) if self.me.rank == 0 else None
        return Case(
            lambda choice: self.weft.gather(m.tensor, 0, out=target, algorithm=choice),
            lambda: dist.gather(m.theirs, parts, 0, group=self.group),
            lambda: m.out,
            lambda: (
                torch.cat([self._values(r, part) for r in range(self.me.size)]) if self.me.rank == 0 else None
            ),
            m.reset,
        )

    def _scatter(self, part: int) -> Case:
        m = self._tensors(part * self.me.size, part)
        given = m.tensor if self.me.rank == 0 else None
        parts = list(m.theirs.view(self.me.size, part)) if self.me.rank == 0 else None
        return Case(
            lambda choice: self.weft.scatter(given, m.out, 0, algorithm=choice),
            lambda: dist.scatter(m.into, parts, 0, group=self.group),
            lambda: m.out,
            lambda: self._values(0, part * self.me.size).view(self.me.size, part)[self.me.rank],
            m.reset,
        )

    def _send_recv(self, part: int) -> Case:
        ranks, rank = self.me.size, self.me.rank
        elems = part * ranks
        m = self._tensors(elems, elems)

        def baseline() -> None:
            sends = dist.P2POp(dist.isend, m.theirs, (rank + 1) % ranks, group=self.group)
            recvs = dist.P2POp(dist.irecv, m.into, (rank - 1) % ranks, group=self.group)
            for work in dist.batch_isend_irecv([sends, recvs]):
                work.wait()

        return Case(
            lambda choice: self.weft.send_recv(m.tensor, out=m.out, algorithm=choice),
            baseline,
            lambda: m.out,
            lambda: self._values((rank - 1) % ranks, elems),
            m.reset,
        )

    def _custom(self, part: int) -> Case:
        """A custom collective of one's own; in place where it serves nothing else."""
        algorithm = next((g.choice.algorithm for g in self.given if g.choice is not None), None)
        if algorithm is None or algorithm.collective != "custom":
            raise invalid("algorithm", self.given[0].text, "one for a custom collective")
        elems = part * self.me.size // algorithm.chunks
        if elems == 0:
            raise invalid("min-bytes", self.options.min_bytes, f"an element for {algorithm.chunks} chunks")
        given, taken = (count * elems for count in chunk_counts(algorithm, self.me.rank))
        m = self._tensors(given, taken)
        result = m.out if algorithm.outofplace else m.tensor

        def weft(choice: Choice | None) -> Any:
            chosen = choice.algorithm if choice else algorithm
            return self.weft.run(chosen, m.tensor if given else None, result, self.options.op)

        return Case(weft, None, lambda: result, lambda: self._promised(algorithm, elems, result), m.reset)

    def _promised(self, algorithm: Algorithm, elems: int, result: Tensor) -> Tensor | None:
        """Return ``result`` with the expected values of its chunks by the contract; None where there are none."""
        contract = algorithm.contract
        if contract is None or type(contract).after is Collective.after or self.options.op != "sum":
            return None
        places = {
            value.parts[0]: (rank, at)
            for rank in range(self.me.size)
            for at, value in enumerate(contract.before(rank))
            if value is not None
        }
        out = result.cpu().clone()
        for at, value in enumerate(contract.after(self.me.rank)):
            if value is not None:
                parts = [places[part] for part in value.parts]
                chunks = [self._values(rank, elems * (c + 1))[elems * c :] for rank, c in parts]
                out[at * elems : (at + 1) * elems] = torch.stack(chunks).sum(0).to(self.dtype)
        return out
