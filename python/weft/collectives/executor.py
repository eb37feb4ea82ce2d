# SPDX-License-Identifier: Apache-2.0
"""Runs verified algorithms on the ranks of a communicator.

    executor = Executor(communicator)                  # collective
    program = executor.load(algorithm)                 # on every rank, in the same order
    executor.run(program, call)
    planned = executor.plan(program, call)             # for many calls of that form
    planned.run(input_address, output_address, stream)

An algorithm runs on memory of the communicator's device. On CUDA a run is enqueued on a stream and may be captured; on
the CPU it is finished when run() returns. Threads: one caller at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from weft import _core
from weft.collectives.average import ended_sums
from weft.collectives.cached import cached
from weft.collectives.direct import direct_messages
from weft.collectives.exchanges import Exchange
from weft.collectives.flow import run_limit
from weft.collectives.ir import Algorithm
from weft.collectives.rows import ELEMENT_BYTES, REDUCTIONS, chunks_of_part, program_rows, protocol_number
from weft.errors import invalid
from weft.runtime.plain import PlanBook

# Collectives as their callers name them, for messages; those with a root; those with an operation.
CALL_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send_recv",
}
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
_REDUCTIONS = ("allreduce", "reducescatter", "reduce_scatter", "reduce", "custom")
FIRST_CHANNELS = {True: 2, False: 8}  # by "is the CPU"


@cached
def fingerprint(algorithm: Algorithm) -> int:
    """Return a number that says what all ranks do, alike on all of them."""
    steps = [
        (
            rank,
            number,
            at,
            block.send,
            block.recv,
            block.channel,
            step.op.value,
            str(step.src),
            str(step.dst),
            step.count,
            step.depends,
        )
        for rank, number, block in algorithm.blocks()
        for at, step in enumerate(block.steps)
    ]
    return int.from_bytes(hashlib.blake2b(repr(steps).encode(), digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An algorithm that the executor knows; ``number`` is the core's name for it.

    ``has_average``: it can run with reduction "average". ``reduces``: some step combines values.
    """

    algorithm: Algorithm
    number: int
    protocol: int
    per_part: int
    has_average: bool
    reduces: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """One run: addresses of the buffers, and how many elements one rank's part has.

    ``part_elems`` counts the whole buffer where the collective has no parts (all_reduce, broadcast, ...); for a custom
    collective it divides by the chunks.
    ``slice_bytes`` 0 takes what a slot holds; ``num_sms`` 0 one for each block; ``stream`` is a CUDA stream.
    ``reduction`` as in ``weft.collectives.rows``. An average divides each sum where it is finished, rounded to the
    element type as every sum is: the bits of a sum and a division. Integers round towards zero.
    ``compiled``: run the program's own kernel, with its steps as constants, instead of the interpreter; programs of up
    to 48 steps, and on the CPU only where there is a C++ compiler.
    ``tag``: of a message between two ranks, the same at both ends.
    """

    input: int
    output: int
    part_elems: int
    element: int
    reduction: int = 0
    slice_bytes: int = 0
    num_sms: int = 0
    stream: int = 0
    compiled: bool = False
    tag: int = 0


class Executor:
    """The programs of one communicator, and the memory that they share.

    Args:
        core: the core communicator. timeout_s: None takes its own.
        direct_bytes: least message that may bypass its slot (docs/collectives.md); 0 takes what suits the device.
    Raises: PeerLost.
    """

    def __init__(self, core: Any, timeout_s: float | None = None, direct_bytes: int = 0) -> None:
        self.core = core
        self.rank = int(core.rank)
        self.size = int(core.size)
        self._is_cpu = str(core.device) == "cpu"
        self._timeout_s = timeout_s or 0.0
        self._direct_bytes = direct_bytes
        self._loaded: list[Algorithm] = []
        self.plans = PlanBook()  # of plan(), kept by whoever calls it
        self._delays: list[tuple[float, float]] = []
        self._runner = self._new_runner(FIRST_CHANNELS[self._is_cpu])

    def load(self, algorithm: Algorithm) -> Loaded:
        """Load this rank's part. Collective when the algorithm has more channels than any before.

        Raises: Error when it is for another number of ranks.
        """
        if algorithm.num_ranks != self.size:
            raise invalid(
                "algorithm", f"{algorithm.name} for {algorithm.num_ranks} ranks", f"{self.size} ranks"
            )
        if algorithm.channels > self._runner.channels:
            self.plans.clear()
            self._runner = self._new_runner(algorithm.channels)
            for known in self._loaded:
                self._load(known)
        self._loaded.append(algorithm)
        number = self._load(algorithm)
        return Loaded(
            *(algorithm, number, protocol_number(algorithm), chunks_of_part(algorithm)),
            ended_sums(algorithm).has_average,
            any(step.op.reduces for _, _, block in algorithm.blocks() for step in block.steps),
        )

    def run(self, program: Loaded, call: Call) -> None:
        """Run on every rank. Raises: as plan(); PeerLost, naming the rank, block and step that waited and for whom."""
        if call.part_elems:
            self.plan(program, call).run(call.input, call.output, call.stream)

    def plan(self, program: Loaded, call: Call) -> Any:
        """Return what runs calls that differ from this one in buffers and stream only, until load()
        is collective again, which clears ``plans``.

            planned.run(input_address, output_address, stream)

        Raises: Error for an average of a program without one, and for a size at which the program would hang.
        """
        self._check_size(program, call)
        if call.reduction == REDUCTIONS["average"] and not program.has_average:
            allowed = "a program that reduces over all ranks, at the same steps in place and out of place"
            raise invalid("reduction", f"average with {program.algorithm.name}", allowed)
        return self._runner.plan(
            program.number,
            call.element,
            call.reduction,
            program.protocol,
            call.part_elems,
            program.per_part,
            program.algorithm.collective == "custom",
            call.slice_bytes,
            call.num_sms,
            call.compiled,
            call.tag,
        )

    def _check_size(self, program: Loaded, call: Call) -> None:
        limit = run_limit(program.algorithm)
        if limit is None:
            return
        parts = program.algorithm.chunks // program.per_part
        num_bytes = call.part_elems * parts * ELEMENT_BYTES[call.element]
        refusal = limit.refuses(num_bytes, program.algorithm.chunks, call.slice_bytes)
        if refusal:
            raise invalid("part_elems", f"{num_bytes} bytes in all", f"{program.algorithm.name}: {refusal}")

    def plan_exchange(self, kind: Exchange, call: Call, way: int, root: int = 0) -> Any:
        """Return what runs calls of a collective as one kernel, with sums in the order of ranks; otherwise as plan().

        Args:
            call: ``part_elems`` is what goes from one rank to another, the whole buffer of all_reduce, broadcast and
                reduce; not ``compiled``, no ``slice_bytes``.
            way: LINES: values travel beside flags, with the least latency and twice the bytes. PLACES: ranks use each
                other's buffers in place where all lie in windows, else as STAGES: through staging areas, with one more
                local copy, wherever the buffers lie. The same on all ranks, as is ``num_sms``.
            root: of calls that have one. Other ranks' input of broadcast and scatter, and output of reduce and gather,
                is ignored.
        """
        return self._runner.plan_exchange(
            *(kind.number, call.element, call.reduction, call.part_elems),
            *(kind.is_one_shot, way, call.num_sms, root),
        )

    def run_with_sizes(
        self,
        program: Loaded,
        call: Call,
        input_parts: Sequence[tuple[int, int]],
        output_parts: Sequence[tuple[int, int]],
    ) -> None:
        """Run a program without scratch, what goes to each rank having a size of its own: (offset, length) in elements.

        Every rank runs it, with nothing to move, too: calls are counted.
        """
        if run_limit(program.algorithm) is not None:
            raise invalid("program", program.algorithm.name, "one that does not hang with unequal chunks")
        self._runner.run_with_sizes(
            program.number,
            call.element,
            program.protocol,
            call.input,
            call.output,
            program.per_part,
            input_parts,
            output_parts,
            call.stream,
        )

    def wait_for_sender(self, first: int) -> int:
        """Return a rank that has begun to send to this one, the first in circular order from ``first``.

        Raises: PeerLost when none does.
        """
        return int(self._runner.wait_for_sender(first))

    @contextlib.contextmanager
    def within(self, timeout_s: float | None) -> Iterator[None]:
        """Bound every wait of the runs inside by ``timeout_s`` seconds; None leaves the bound as it is."""
        known = self._runner.timeout_s
        self._runner.timeout_s = timeout_s or known
        try:
            yield
        finally:
            self._runner.timeout_s = known

    def _new_runner(self, channels: int) -> Any:
        runner = _core.CollectiveRunner.create(
            self.core, channels=channels, timeout_s=self._timeout_s, direct_bytes=self._direct_bytes
        )
        if self._delays:
            runner.delay_links(self._delays)
        return runner

    def delay_links(self, delays: Sequence[tuple[float, float]]) -> None:
        """Make the links from this rank slow, for tests on the CPU: see weft.testing.links.

        ``delays``: (latency in ns, ns per byte) of the link to each rank; none: as fast as they are.
        """
        self._delays = list(delays)
        self._runner.delay_links(self._delays)

    def _load(self, algorithm: Algorithm) -> int:
        scratch = max(program.scratch_chunks for program in algorithm.ranks)
        sums = ended_sums(algorithm)
        direct = direct_messages(sums.algorithm)
        rows = program_rows(sums, self.rank, direct)
        contract, name = algorithm.contract, algorithm.collective
        root = contract.root if contract is not None and name in _WITH_ROOT else -1
        return int(
            self._runner.load(
                *(algorithm.name, *rows, scratch, direct.refers_only),
                *(CALL_NAMES.get(name, name), root, name in _REDUCTIONS, fingerprint(algorithm)),
                contract is not None and contract.is_of_pairs,
            )
        )
