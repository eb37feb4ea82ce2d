# SPDX-License-Identifier: Apache-2.0
"""Pass 8: instances. k replicas of the program, each on 1/k of every chunk, with blocks and channels of its own.

Interleaved: chunks x..x+z of a user buffer become x*k + i*z ..., so that the pieces of a chunk stay together; it needs
one z for every access, and is a must where chunks belong to ranks. Batched: instance i takes its own contiguous part,
i*length + x. Scratch is always batched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from weft.collectives.contract import Buffer
from weft.collectives.ir import MAX_CHANNELS, Algorithm, Block, RankProgram, RotatedRanks, Span, Step
from weft.errors import Error, invalid

_BY_RANK = ("allgather", "reducescatter", "alltoall", "alltoallv", "gather", "scatter")


def replicate(algorithm: Algorithm, instances: int, interleaved: bool | None = None) -> Algorithm:
    """Return the algorithm with ``instances`` replicas; None chooses how they share chunks. Raises: Error."""
    if instances == 1:
        return algorithm
    if algorithm.channels * instances > MAX_CHANNELS:
        allowed = f"at most {MAX_CHANNELS // algorithm.channels} with {algorithm.channels} channels"
        raise invalid("instances", instances, allowed)
    sizes = _user_counts(algorithm)
    owned = algorithm.collective in _BY_RANK
    if interleaved is None:
        interleaved = owned or len(sizes) == 1
    if not interleaved and owned:
        raise Error(
            f"{algorithm.name}: batched instances would move the chunks of {algorithm.collective} between ranks"
        )
    if interleaved and len(sizes) > 1:
        raise Error(
            f"{algorithm.name}: interleaved instances need steps of one size, these have {sorted(sizes)} chunks"
        )
    rotation = algorithm.rotation if interleaved else None
    programs = algorithm.ranks if rotation is None else algorithm.distinct
    ranks: Sequence[RankProgram] = [
        _replicate_rank(program, algorithm, instances, interleaved) for program in programs
    ]
    if rotation is not None:
        ranks = RotatedRanks(ranks[0], rotation.scaled(instances, programs[0].scratch_chunks))
    contract = algorithm.contract.scaled(instances) if algorithm.contract else None
    return dataclasses.replace(algorithm, ranks=ranks, chunks=algorithm.chunks * instances, contract=contract)


def _user_counts(algorithm: Algorithm) -> set[int]:
    counts = set()
    for _, _, block in algorithm.distinct_blocks():
        for step in block.steps:
            slots = [*step.reads(), *step.writes()]
            if any(buffer != Buffer.scratch for buffer, _ in slots):
                counts.add(step.count)
    return counts


def _replicate_rank(program: RankProgram, algorithm: Algorithm, k: int, interleaved: bool) -> RankProgram:
    lengths = {
        Buffer.input: program.input_chunks,
        Buffer.output: program.output_chunks,
        Buffer.scratch: program.scratch_chunks,
    }
    channels = algorithm.channels

    def moved(span: Span, count: int, instance: int) -> Span:
        if span.index < 0:
            return span
        if span.buffer == Buffer.scratch or not interleaved:
            return Span(span.buffer, lengths[span.buffer] * instance + span.index)
        return Span(span.buffer, span.index * k + instance * count)

    blocks = []
    for instance in range(k):
        first = instance * len(program.blocks)
        for block in program.blocks:
            steps = [
                Step(
                    step.op,
                    moved(step.src, step.count, instance),
                    moved(step.dst, step.count, instance),
                    step.count,
                    tuple((number + first, at) for number, at in step.depends),
                    step.where,
                )
                for step in block.steps
            ]
            blocks.append(Block(block.send, block.recv, block.channel + instance * channels, steps))
    return RankProgram(
        program.rank, program.input_chunks * k, program.output_chunks * k, program.scratch_chunks * k, blocks
    )
