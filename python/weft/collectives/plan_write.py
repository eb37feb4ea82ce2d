# SPDX-License-Identifier: Apache-2.0
"""Algorithms as MSCCL++ JSON plans. What reads them is in plan_json.py."""

from __future__ import annotations

import json
from typing import Any

from weft.collectives.contract import Buffer, Collective
from weft.collectives.ir import Algorithm, Op, Span
from weft.collectives.values import Value
from weft.collectives.verifier import promised


def _contract_fields(algorithm: Algorithm, contract: Collective) -> dict[str, Any]:
    def parts(slots: list[list[Value | None]]) -> list[Any]:
        return [[value and [list(part) for part in value.parts] for value in own] for own in slots]

    before = [own.get(Buffer.input, []) for own in contract.init_buffers()]
    after = promised(algorithm, contract)
    own = contract.in_form(True)
    named = [
        (rank, buffer, at, own.alias(rank, buffer, at))
        for slots, buffer in ((before, Buffer.input), (after, Buffer.output))
        for rank in range(algorithm.num_ranks)
        for at in range(len(slots[rank]))
    ]
    same = [[r, b, at, *to] for r, b, at, to in named if algorithm.inplace and to not in ((b, at), ("i", at))]
    return {"chunks": algorithm.chunks, "before": parts(before), "after": parts(after), "same": same}


def to_plan(algorithm: Algorithm) -> str:
    """Return the algorithm as an MSCCL++ plan, with the same blocks and order.

    Every message has a place of its own in the receiver's scratch, is put there and signalled; other blocks of a rank
    are waited for by semaphores.
    """
    return json.dumps(_Writer(algorithm).plan(), indent=1) + "\n"


class _Writer:
    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._inbox: dict[tuple[int, int, int], int] = {}  # of every connection, its first place in scratch
        self._scratch = [program.scratch_chunks for program in algorithm.ranks]
        for rank, _, block in algorithm.blocks():
            chunks = sum(step.count for step in block.steps if step.op.receives)
            if chunks:
                self._inbox[block.recv, rank, block.channel] = self._scratch[rank]
                self._scratch[rank] += chunks

    def plan(self) -> dict[str, Any]:
        algorithm = self._algorithm
        gpus = [self._gpu(rank) for rank in range(algorithm.num_ranks)]
        plan: dict[str, Any] = {
            "name": algorithm.name,
            "collective": algorithm.collective,
            "protocol": "Simple",
        }
        plan |= {"inplace": algorithm.inplace, "min_message_size": algorithm.min_bytes}
        if algorithm.max_bytes is not None:
            plan["max_message_size"] = algorithm.max_bytes
        if algorithm.collective == "custom" and algorithm.contract is not None:
            plan["weft_contract"] = _contract_fields(algorithm, algorithm.contract)
        return {**plan, "gpus": gpus}

    def _gpu(self, rank: int) -> dict[str, Any]:
        program = self._algorithm.ranks[rank]
        edges = sorted(
            {
                (dep, (number, at))
                for number, block in enumerate(program.blocks)
                for at, step in enumerate(block.steps)
                for dep in step.depends
            }
        )
        # Both ends count a pair's channels alike: by the pair's own channels, in either direction.
        links = sorted(
            {
                (peer, block.channel)
                for block in program.blocks
                for peer in (block.send, block.recv)
                if peer >= 0
            }
            | {
                (r, b.channel)
                for r, _, b in self._algorithm.blocks()
                if rank in (b.send, b.recv) and r != rank
            }
        )
        peers = sorted({peer for peer, _ in links})
        buffers = [{"rank": peer, "type": "s", "access_channel_types": ["memory"]} for peer in peers]
        sizes = program.input_chunks, program.output_chunks, self._scratch[rank]
        return {
            "id": rank,
            **dict(zip(("input_chunks", "output_chunks", "scratch_chunks"), sizes, strict=True)),
            "threadblocks": [
                {
                    "id": number,
                    "ops": self._ops(rank, number, edges, links, peers),
                    "channels": [{"channel_type": "memory", "channel_ids": list(range(len(links)))}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": list(range(len(peers)))}
                    ],
                }
                for number in range(len(program.blocks))
            ],
            "channels": [{"channel_type": "memory", "connected_to": [peer for peer, _ in links]}],
            "remote_buffers": buffers,
            "semaphores": [{"init_value": 0} for _ in edges],
        }

    def _ops(
        self, rank: int, number: int, edges: list[Any], links: list[tuple[int, int]], peers: list[int]
    ) -> list[dict[str, Any]]:
        block = self._algorithm.ranks[rank].blocks[number]
        ops: list[dict[str, Any]] = []
        received = sent = 0
        for at, step in enumerate(block.steps):
            acquired = [e for e, (_, to) in enumerate(edges) if to == (number, at)]
            if acquired:
                ops.append({"name": "sem_acquire", "semaphore_ids": acquired})
            src, dst = _local(step.src, step.count), _local(step.dst, step.count)
            result = src
            if step.op.receives:
                first = self._inbox[block.recv, rank, block.channel] + received
                came = _local(Span(Buffer.scratch, first), step.count)
                received += step.count
                ops.append(_channel("wait", links.index((block.recv, block.channel))))
                result = dst if step.op.writes_dst else came
                if step.op.reads_src:
                    ops.append({"name": "re", "src_buff": [src, came], "dst_buff": [result]})
                else:
                    ops.append({"name": "copy", "src_buff": [came], "dst_buff": [dst]})
            elif step.op is Op.COPY:
                ops.append({"name": "copy", "src_buff": [src], "dst_buff": [dst]})
            elif step.op is Op.REDUCE:
                ops.append({"name": "re", "src_buff": [dst, src], "dst_buff": [dst]})
            if step.op.sends:
                there = self._inbox[rank, block.send, block.channel] + sent
                sent += step.count
                target = {"buffer_id": peers.index(block.send), "index": there, "size": step.count}
                put = {"name": "put", "src_buff": [result], "dst_buff": [target], "channel_type": "memory"}
                ops += [put, _channel("signal", links.index((block.send, block.channel)))]
            released = [e for e, (done, _) in enumerate(edges) if done == (number, at)]
            if released:
                ops.append({"name": "sem_release", "semaphore_ids": released})
        return ops


def _local(span: Span, size: int) -> dict[str, Any]:
    return {"type": span.buffer, "index": max(span.index, 0), "size": size}


def _channel(name: str, channel: int) -> dict[str, Any]:
    return {"name": name, "channel_type": "memory", "channel_ids": [channel]}
