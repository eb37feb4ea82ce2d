# SPDX-License-Identifier: Apache-2.0
"""Passes 6 and 7: waits between the blocks of a rank, and the IR.

A step waits for earlier steps of other blocks that touched its slots: one wait per block, on the latest step, and none
that another wait or the order inside a block already implies.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.compiler.blocks import OpenBlock
from weft.collectives.compiler.graph import Graph, Node
from weft.collectives.ir import Algorithm, Block, RankProgram, RotatedRanks, Step
from weft.collectives.rotation import Rotation

_FEW_STEPS = (
    1 << 15
)  # of all ranks that are alike: so many are verified rank by rank, like any other program's


def lower(graph: Graph, order: list[Node], blocks: list[list[OpenBlock]]) -> Algorithm:
    """Return the IR of one instance."""
    program = graph.program
    collective = program.collective
    depends = _waits(order, blocks)
    ranks = []
    for rank in graph.ranks:
        lowered = [_lower_block(block, depends) for block in blocks[rank]]
        sizes = collective.input_chunks(rank), collective.output_chunks(rank)
        ranks.append(RankProgram(rank, *sizes, graph.scratch_chunks(rank), lowered))
    return Algorithm(
        name=program.name,
        collective=collective.name,
        protocol=program.protocol,
        chunks=collective.chunks,
        inplace=collective.inplace,
        outofplace=not collective.inplace,
        ranks=ranks if graph.rotation is None else _all_ranks(ranks[0], graph.rotation),
        contract=collective,
        min_bytes=program.min_bytes,
        max_bytes=program.max_bytes,
        notes=list(program.notes),
    )


def _all_ranks(first: RankProgram, rotation: Rotation) -> Sequence[RankProgram]:
    """Return what all ranks run: as programs of their own unless that takes long."""
    ranks = RotatedRanks(first, rotation)
    steps = sum(len(block.steps) for block in first.blocks)
    return list(ranks) if steps * rotation.ranks <= _FEW_STEPS else ranks


def _lower_block(block: OpenBlock, depends: dict[Node, tuple[tuple[int, int], ...]]) -> Block:
    steps = [Step(n.op, n.src, n.dst, n.count, depends[n], n.where) for n in block.nodes]
    return Block(block.send, block.recv, max(block.channel, 0), steps)


def _waits(order: list[Node], blocks: list[list[OpenBlock]]) -> dict[Node, tuple[tuple[int, int], ...]]:
    position = {
        node: (number, at)
        for own in blocks
        for number, block in enumerate(own)
        for at, node in enumerate(block.nodes)
    }
    known: dict[Node, dict[int, int]] = {}  # per block, the latest step that is finished before the node runs
    last_in_block: dict[tuple[int, int], Node] = {}
    depends: dict[Node, tuple[tuple[int, int], ...]] = {}
    for node in order:
        number, at = position[node]
        before = last_in_block.get((node.rank, number))
        seen = dict(known[before]) if before else {}
        if before:
            seen[number] = at - 1
        latest: dict[int, Node] = {}
        for earlier in node.before:
            block, step = position[earlier]
            if block != number and (block not in latest or position[latest[block]][1] < step):
                latest[block] = earlier
        waits = []
        # Newest first, so that what a later wait implies is dropped; then by place, so that all ranks, which compile
        # for themselves, agree on every rank's program.
        for earlier in sorted(
            latest.values(), key=lambda n: (-sum(known[n].values()) - position[n][1], position[n])
        ):
            block, step = position[earlier]
            if seen.get(block, -1) >= step:
                continue
            waits.append((block, step))
            seen[block] = step
            for other, done in known[earlier].items():
                seen[other] = max(seen.get(other, -1), done)
        known[node] = seen
        last_in_block[node.rank, number] = node
        depends[node] = tuple(sorted(waits))
    return depends
