# SPDX-License-Identifier: Apache-2.0
"""One round of ``weft chaos``: drawn from a seed and a number alone, run on ranks of its own, judged.

drawn = draw_round(seed=1, number=7, transport="fabric:tcp", missing={})
result = run_round(drawn, folder)
assert not result.problems
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft import _core
from weft.chaos import judge
from weft.chaos.adversary import (
    COMPILES,
    KINDS,
    Adversary,
    Board,
    Fault,
    draw_fault,
    settings_of,
    suffer,
    why_not,
)
from weft.chaos.attacker import Attacker, spare_others
from weft.chaos.judge import Footprint, Outcome, Problem
from weft.chaos.operations import ENGINE, MAPPED, OPERATIONS, PORTS, Place, compile_kernel
from weft.errors import Error, PeerLost
from weft.testing.ranks import Rank, RankError, RankPool

DEADLINE_S = 100.0  # of a round; a rank that is not done by then hangs
COMPILE_S = 300.0  # more, where ranks compile without a cache, which takes a busy machine minutes
_COMPILE = "compile_kernel"
_HEAD_CHARS, _END_CHARS = 4000, 1000  # of a rank's standard error that are kept


@dataclass(frozen=True)
class Round:
    """What is to happen. ``ranks_per_node``: how one host is cut into nodes; 0: it is not."""

    seed: int
    number: int
    transport: str
    ranks: int
    ranks_per_node: int
    needs: str
    calls: tuple[str, ...]
    fault: Fault

    def title(self) -> str:
        """Return it on one line."""
        nodes = f", {self.ranks_per_node} to a node" if self.ranks_per_node else ""
        engines = ", engines" if self.needs == ENGINE else ""
        strike = f"{self.fault.kind} of rank {self.fault.victim} in call {self.fault.at}"
        return f"round {self.number}: {self.transport}, {self.ranks} ranks{nodes}{engines}; {strike}"


@dataclass
class Result:
    """What happened.

    found_s: from a death to the error of the last rank that missed it.
    descriptors: that ranks had open before they made anything and after they let go of all ("before", "after").
    said: what the ranks of a wrong round wrote to standard error.
    """

    drawn: Round
    problems: list[Problem] = field(default_factory=list)
    calls: int = 0
    struck: bool = False
    found_s: float = 0.0
    descriptors: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)


def draw_round(
    seed: int, number: int, transport: str, missing: dict[str, str], wanted: str | None = None
) -> Round:
    """Draw a round. ``missing``: the faults that the machine does not allow; ``wanted``: the fault to have."""
    chance = random.Random(f"{seed}/{number}/{transport}")
    ranks = chance.choice((2, 2, 3, 3, 4))
    is_engine = transport != "mapped" and chance.random() < 0.4
    needs = ENGINE if is_engine else MAPPED if transport == "mapped" else PORTS
    ranks_per_node = chance.choice((1, 1, 2)) if needs == PORTS and ranks > 2 else int(needs == PORTS)
    known = [o for o in OPERATIONS.values() if o.needs == needs or (needs == MAPPED and o.needs == PORTS)]
    weights = [operation.weight for operation in known]
    calls = [o.name for o in chance.choices(known, weights, k=chance.randint(6, 30))]
    refused = why_not(transport, needs, missing)
    kinds = [kind for kind in KINDS if kind not in refused]
    fault = draw_fault(chance, kinds, ranks, len(calls), wanted if wanted in kinds else None)
    if fault.kind in COMPILES:
        calls.insert(fault.at, _COMPILE)
    calls.append("engine_barrier" if is_engine else "barrier")
    return Round(seed, number, transport, ranks, ranks_per_node, needs, tuple(calls), fault)


def run_round(drawn: Round, folder: Path, attacker: Attacker | None = None) -> Result:
    """Run a round on ranks that live as long as it does, with a stranger at their doors if one is given; judge it."""
    folder = folder / f"round-{drawn.transport.replace(':', '-')}-{drawn.number}"
    folder.mkdir()
    board, result = Board(drawn.ranks), Result(drawn)
    fault, is_threads = drawn.fault, drawn.transport == "loopback"
    body = run_threads if is_threads else take_part
    pids: list[int] = []
    outcomes: list[Outcome] = []
    older = judge.files_of_weft()
    processes = 1 if is_threads else drawn.ranks
    lost = [fault.victim] if fault.is_deadly else []
    deadline_s = DEADLINE_S + (COMPILE_S if fault.kind in COMPILES else 0)
    with _environment(_settings(drawn, folder)):
        pool = RankPool(
            processes, with_gpus=False, deadline_s=deadline_s, first=(body, (drawn, board, folder))
        )
    with pool:
        pids = [pool.pid(rank) for rank in range(processes)]
        adversary = Adversary(fault, board, pids[0 if is_threads else fault.victim])
        adversary.start()
        try:
            with attacker.at(pids, folder) if attacker else nullcontext():
                found = pool.results(lost)
            outcomes = found[0] if is_threads else [one for one in found if one is not None]
        except RankError as error:
            kind = judge.HANG if "no answer; it was at" in str(error) else judge.WRONG_ERROR
            result.problems.append(Problem(kind, str(error)))
        finally:
            adversary.stop()
    result.struck = board.struck_at > 0
    result.calls = sum(outcome.calls for outcome in outcomes)
    result.descriptors.update(
        before=sum(o.descriptors[0] for o in outcomes), after=sum(o.descriptors[1] for o in outcomes)
    )
    result.found_s = max((o.found_s for o in outcomes if fault.is_deadly and o.ended != "done"), default=0.0)
    result.problems += judge.judge(fault, {outcome.rank: outcome for outcome in outcomes})
    result.problems += [Problem(judge.LEAK, f"left: {path}") for path in _left(drawn, pids, older)]
    if result.problems:
        files = sorted(folder.glob("stderr-*"))
        result.said = [f"{path.name}: {_both_ends(path.read_text(errors='replace'))}" for path in files]
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _both_ends(words: str) -> str:
    """Return the text without its middle if it is long: a stack begins with its important lines."""
    if len(words) <= _HEAD_CHARS + _END_CHARS:
        return words
    left_out = len(words) - _HEAD_CHARS - _END_CHARS
    return f"{words[:_HEAD_CHARS]}\n... {left_out} characters left out ...\n{words[-_END_CHARS:]}"


def _settings(drawn: Round, folder: Path) -> dict[str, str]:
    settings = settings_of(drawn.fault, folder)
    if drawn.transport != "mapped":
        settings["WEFT_PROXY_PROVIDER"] = drawn.transport
    if drawn.ranks_per_node:
        settings["WEFT_RANKS_PER_NODE"] = str(drawn.ranks_per_node)
    return settings


@contextmanager
def _environment(settings: dict[str, str]) -> Any:
    """Set variables for the ranks that are forked inside."""
    before = dict(os.environ)
    os.environ.update(settings)
    _core.config_reload()
    yield
    os.environ.clear()
    os.environ.update(before)
    _core.config_reload()


def _left(drawn: Round, pids: Sequence[int], older: set[Path]) -> list[str]:
    """Return what is left of ranks that are gone, once the next engine has looked."""
    if judge.left_on_the_machine(pids, older) and drawn.transport == "fabric:shm":
        from weft.testing.ranks import run_ranks

        run_ranks(1, _open_engine, with_group=False)
    return judge.left_on_the_machine(pids, older)


def _open_engine(rank: Rank) -> None:
    from weft.transfer import TransferEngine

    TransferEngine("fabric:shm").close()


# ---- on the ranks


def take_part(rank: Rank, drawn: Round, board: Board, folder: Path) -> Outcome:
    """Be one rank, in a process of its own; raise nothing."""
    _write_to(folder / f"stderr-{rank.rank}")
    before = Footprint.first()
    spare_others(folder)
    outcome = make_calls(drawn, board, folder, rank.rank, lambda: rank.group)
    if drawn.fault.kind != "no rights":  # who has lost root's rights may not look
        outcome.look_back(before, 1)
    return outcome


def run_threads(rank: Rank, drawn: Round, board: Board, folder: Path) -> list[Outcome]:
    """Be all ranks, as threads of one process: for the network that is inside one."""
    _write_to(folder / "stderr-0")
    before = Footprint.first()
    spare_others(folder)
    meeting = _Meeting(drawn.ranks)
    outcomes: list[Outcome] = [Outcome(number) for number in range(drawn.ranks)]

    def one(number: int) -> None:
        outcomes[number] = make_calls(drawn, board, folder, number, lambda: _InThread(number, meeting))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(drawn.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes[0].look_back(before, drawn.ranks)
    return outcomes


def make_calls(drawn: Round, board: Board, folder: Path, rank: int, meet: Any) -> Outcome:
    """Make every call of the round, and let go of all; raise nothing."""
    fault, outcome = drawn.fault, Outcome(rank)
    place = Place(rank, drawn.ranks, drawn.transport, fault.timeout_s, fault.peer_dead_s, meet)
    began = time.monotonic()
    try:
        for number, name in enumerate(drawn.calls):
            board.begin(rank, number)
            if number == fault.at:
                suffer(fault, board, rank, folder)
            outcome.call, began = f"call {number} {name}", time.monotonic()
            call = compile_kernel if name == _COMPILE else OPERATIONS[name].run
            call(place, random.Random(f"{drawn.seed}/{drawn.number}/{drawn.transport}/{number}"))
            outcome.calls += 1
    except PeerLost as error:
        outcome.ended, outcome.message = "peer_lost", str(error)
    except Error as error:
        outcome.ended, outcome.message = "refused", f"{error.code}: {error}"
    except AssertionError as error:
        outcome.ended, outcome.message = "wrong", str(error) or traceback.format_exc(limit=-2)
    except BaseException:
        outcome.ended, outcome.message = "crashed", traceback.format_exc()
    outcome.found_s = time.monotonic() - max(began, board.struck_at)
    try:
        place.close()
    except BaseException:
        outcome.ended, outcome.message = "crashed", "closing: " + traceback.format_exc()
    return outcome


def _write_to(path: Path) -> None:
    """Let what this process writes to standard error go to a file, which is shown where a round is wrong.

    Its folder becomes the current one: libpsm2, which libfabric may load, writes a file there when a signal ends it.
    """
    os.chdir(path.parent)
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)


class _Meeting:
    """Where threads exchange a few bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given = [b""] * size
        self.barrier = threading.Barrier(size)


class _InThread:
    """A Bootstrap of threads."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather."""
        try:
            self._meeting.given[self.rank] = data
            self._meeting.barrier.wait(timeout_s)
            everyone = list(self._meeting.given)
            self._meeting.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            others = [r for r in range(self.size) if r != self.rank]
            raise PeerLost(f"rank {self.rank}, bootstrap: rank {others[0]} stayed away") from None
        return everyone
