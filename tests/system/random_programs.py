# SPDX-License-Identifier: Apache-2.0
"""Random collective programs, their mutations, and running any program against its own contract."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable

import torch

from weft.collectives import AllReduce, Buffer, Collective, Program, Reduce
from weft.collectives.executor import Call, Executor, Loaded
from weft.collectives.interpreter import Interpreter
from weft.collectives.ir import Algorithm, Op, Span
from weft.collectives.language import Ref
from weft.collectives.structure import check_structure
from weft.collectives.values import Chunk, Value

Empty = Callable[[int], torch.Tensor]  # makes a float32 tensor of so many elements


def run_against_contract(
    executor: Executor, algorithm: Algorithm, rank: int, chunk_elems: int, empty: Empty = torch.empty
) -> None:
    """Fill every chunk with what its symbol says, run in every form, and compare what the contract fixes."""
    program = executor.load(algorithm)
    for inplace in algorithm.forms():
        assert algorithm.contract is not None
        contract = algorithm.contract.in_form(inplace)
        is_one = inplace and algorithm.collective == "custom"  # the others' forms are those of their calls
        _run_once(executor, program, contract, rank, chunk_elems, is_one, empty)


def run_as_computed(executor: Executor, algorithm: Algorithm, rank: int, chunk_elems: int) -> None:
    """Run a program without a contract in every form, and compare with what the verifier says that it computes."""
    program = executor.load(algorithm)
    for inplace in algorithm.forms():
        _run_once(executor, program, computed(algorithm, inplace), rank, chunk_elems, inplace, torch.empty)


def computed(algorithm: Algorithm, inplace: bool) -> Whatever:
    """Return what a program without a contract computes from its inputs, as a contract."""
    interpreter = Interpreter(algorithm, inplace, check_structure(algorithm))
    interpreter.run()

    def known(value: Value | None) -> Value | None:
        return value if value and all(index >= 0 for _, index in value.parts) else None

    chunks = algorithm.chunks
    return Whatever(
        algorithm.num_ranks,
        chunks,
        [[known(interpreter.output(r, c)) for c in range(chunks)] for r in range(algorithm.num_ranks)],
    )


def _run_once(
    executor: Executor,
    program: Loaded,
    contract: Collective,
    rank: int,
    chunk_elems: int,
    is_one: bool,
    empty: Empty,
) -> None:
    """Run once; ``is_one``: the input is the output."""
    algorithm = program.algorithm

    def number(value: Value) -> float:
        return float(sum(1 + r * 31 % 17 + c * 7 % 11 for r, c in value.parts))

    inputs = [0.0 if v is None else number(v) for v in contract.before(rank)]
    wanted = contract.after(rank)
    tensor = empty(max(len(inputs) * chunk_elems, 1))
    tensor[: len(inputs) * chunk_elems] = torch.tensor(inputs).repeat_interleave(chunk_elems)
    out = tensor if is_one else empty(max(len(wanted) * chunk_elems, 1)).fill_(-1.0)
    part = chunk_elems * program.per_part
    executor.run(program, Call(tensor.data_ptr(), out.data_ptr(), part, 0))
    for index, value in enumerate(wanted):
        if value is not None:
            found = out[index * chunk_elems : (index + 1) * chunk_elems]
            assert (found == number(value)).all(), (
                algorithm.name,
                algorithm.protocol,
                rank,
                index,
                found,
                value,
            )


class Whatever(Collective):
    """The contract of a random program: what it happens to compute."""

    def __init__(
        self,
        ranks: int,
        chunks: int,
        result: list[list[Value | None]] | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__(ranks, chunks, inplace)
        self.result = result

    def before(self, rank: int) -> list[Value | None]:
        return [Chunk(rank, c) for c in range(self.chunk_factor)]

    def after(self, rank: int) -> list[Value | None]:
        return self.result[rank] if self.result else [None] * self.chunk_factor


def random_algorithm(seed: int, ranks: int) -> Algorithm:
    """Return the compiled form of random copies and reductions whose result is its own contract."""
    generator = random.Random(seed)
    chunks = generator.choice([1, 2, 4])
    contract = Whatever(ranks, chunks, inplace=seed % 3 == 0)
    protocol = generator.choice(["Simple", "LL"])
    with Program(f"random {seed}", contract, protocol=protocol) as program:
        for _ in range(generator.randrange(4, 24)):
            size = generator.randrange(1, chunks + 1)
            src = program.chunk(
                generator.randrange(ranks),
                generator.choice([Buffer.input, Buffer.output, "x"]),
                generator.randrange(chunks - size + 1),
                size,
            )
            if src is None:
                continue
            dst_rank, buffer = generator.randrange(ranks), generator.choice([Buffer.output, "x", "y"])
            at = generator.randrange(chunks - size + 1)
            held = Buffer.input if contract.inplace and buffer == Buffer.output else buffer
            if (dst_rank, held) == (src.rank, src.buffer):
                continue
            old = program.chunk(dst_rank, buffer, at, size)
            small = old is not None and sum(len(v.parts) for v in program._contents(old._place, size)) < 40
            if old is not None and small and generator.random() < 0.6:
                old.reduce(src)
            else:
                src.copy(dst_rank, buffer, at)
    held = Buffer.input if contract.inplace else Buffer.output
    contract.result = [list(program.buffers[rank][held]) for rank in range(ranks)]
    return program.compile()


def uneven_sums() -> Algorithm:
    """Return an all-reduce on 3 ranks, in place, one of whose steps ends the sum of one of its two chunks."""
    with Program("uneven", AllReduce(3, 2, inplace=True)) as program:

        def part(rank: int, first: int, size: int = 1) -> Ref:
            ref = program.chunk(rank, Buffer.input, first, size)
            assert ref is not None
            return ref

        part(1, 1).reduce(part(2, 1))
        part(1, 0, 2).reduce(part(0, 0, 2))
        part(1, 0).reduce(part(2, 0))
        for rank in (0, 2):
            part(1, 0, 2).copy(rank)
    return program.compile()


def reduce_chain_in_inputs(ranks: int, inplace: bool) -> Algorithm:
    """Return a reduce to rank 0 that adds up in the inputs of the ranks on its way."""
    with Program("chain in inputs", Reduce(ranks, 1, inplace=inplace)) as program:
        ref = program.chunk(ranks - 1, Buffer.input, 0)
        for rank in reversed(range(ranks - 1)):
            own = program.chunk(rank, Buffer.input, 0)
            assert own is not None and ref is not None
            ref = own.reduce(ref)
            # Kept in memory, so that what is sent on is not all that is left of it.
            ref = ref.copy(rank, "kept", 0).copy(rank, Buffer.input, 0)
        ref.copy(0, Buffer.output, 0)
    return program.compile()


def mutated(algorithm: Algorithm, generator: random.Random) -> Algorithm:
    """Return a copy with one random change of a step: other waits, place, count or order."""
    changed = copy.deepcopy(algorithm)
    blocks = [block for _, _, block in changed.blocks() if block.steps]
    block = generator.choice(blocks)
    at = generator.randrange(len(block.steps))
    step = block.steps[at]
    kind = generator.randrange(5)
    if kind == 0:
        block.steps[at] = dataclasses.replace(step, depends=step.depends[1:])
    elif kind == 1:
        block.steps[at] = dataclasses.replace(step, src=Span(step.src.buffer, generator.randrange(4)))
    elif kind == 2:
        block.steps[at] = dataclasses.replace(step, dst=Span(step.dst.buffer, generator.randrange(4)))
    elif kind == 3:
        other = generator.randrange(len(block.steps))
        block.steps[at], block.steps[other] = block.steps[other], block.steps[at]
    else:
        twin = {Op.RECV_REDUCE_COPY: Op.RECV, Op.COPY: Op.REDUCE, Op.REDUCE: Op.COPY}.get(step.op, step.op)
        block.steps[at] = dataclasses.replace(step, op=twin)
    return changed
