# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ JSON execution plans, in.

    algorithm = from_plan(text, "allreduce.json")     # Error: file, rank, block, operation, what is wrong

A plan says with signals, waits and packets what a program of ours says with data. So a plan is played: every block
runs until it must wait, data operations become copies and reductions of a traced program, and our compiler makes the
schedule, which is verified like any other. What the plan's author chose as blocks and channels is not kept. A wait that
nobody ends is reported as a deadlock. Synchronisation that is missing between two blocks is not: the order of the play
is one that the plan allows, and the compiled program keeps it. Switch channels and thread block groups are refused.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from weft.collectives.contract import standard
from weft.collectives.ir import MAX_CHUNKS, Algorithm
from weft.collectives.language import Program
from weft.errors import Error

_PACKET_READS = ("upkt", "rppkt", "repkt", "recpkt", "respkt", "recspkt")
_SKIPPED = ("nop", "flush")
_REDUCTIONS = ("re", "res", "rre", "rres", "repkt", "recpkt", "respkt", "recspkt")
_COPIES = ("put", "pws", "pwsf", "get", "copy", "ppkt", "rppkt", "cpkt", "upkt")
_SWITCH = ("glre", "glres", "gstore", "gstorepkt")

Slot = tuple[int, str, int, int]  # rank, buffer, first chunk, chunks


def from_plan(text: str, file: str = "plan.json") -> Algorithm:
    """Read a plan; return it compiled and verified. Raises: Error, ProgramError, VerificationError."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Error(f"{file}: not JSON: {error}") from None
    try:
        return _Play(plan, file).run()
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise Error(
            f"{file}: a field is missing or of a wrong form: {type(error).__name__}: {error}"
        ) from None


class _Play:
    def __init__(self, plan: dict[str, Any], file: str) -> None:
        self._file = file
        self._gpus: list[dict[str, Any]] = sorted(plan["gpus"], key=lambda gpu: int(gpu["id"]))
        name = str(plan["collective"]).lower()
        chunks = int(self._gpus[0]["input_chunks"])
        if not 1 <= chunks <= MAX_CHUNKS:
            raise Error(f"{file}: input_chunks: got {chunks}, allowed: 1 to {MAX_CHUNKS}")
        ranks = len(self._gpus)
        contract = standard(
            name, ranks, chunks * ranks if name == "allgather" else chunks, bool(plan["inplace"])
        )
        if contract is None:
            raise Error(f"{file}: collective: got {name!r}, allowed: those of MSCCL")
        high = plan.get("max_message_size")
        self._program = Program(
            str(plan["name"]),
            contract,
            protocol=str(plan.get("protocol", "Simple")),
            min_bytes=int(plan.get("min_message_size", 0)),
            max_bytes=None if high is None or int(high) >= (1 << 64) - 1 else int(high),
        )
        self._signals: dict[object, int] = defaultdict(int)
        self._waited: dict[object, int] = defaultdict(int)
        self._semaphores: dict[tuple[int, int], int] = {}
        self._packets: set[tuple[int, str, int]] = set()
        self._arrived: dict[tuple[int, int], set[int]] = defaultdict(set)
        for gpu in self._gpus:
            for number, semaphore in enumerate(gpu.get("semaphores", [])):
                self._semaphores[int(gpu["id"]), number] = int(semaphore["init_value"])

    def run(self) -> Algorithm:
        blocks = [(gpu, block, _flat(block["ops"])) for gpu in self._gpus for block in gpu["threadblocks"]]
        at = [0] * len(blocks)
        moved = True
        while moved:
            moved = False
            for i, (gpu, block, ops) in enumerate(blocks):
                while at[i] < len(ops) and self._step(gpu, block, at[i], ops[at[i]]):
                    at[i] += 1
                    moved = True
        for i, (gpu, block, ops) in enumerate(blocks):
            if at[i] < len(ops):
                raise Error(
                    f"{self._place(gpu, block, at[i], ops[at[i]])}: deadlock: it waits for what never comes"
                )
        return self._program.compile()

    def _place(self, gpu: dict[str, Any], block: dict[str, Any], at: int, op: dict[str, Any]) -> str:
        return f"{self._file}: rank {gpu['id']}, block {block['id']}, operation {at} ({op['name']})"

    def _step(self, gpu: dict[str, Any], block: dict[str, Any], at: int, op: dict[str, Any]) -> bool:
        """Run one operation; False when it must wait."""
        name = op["name"]
        place = self._place(gpu, block, at, op)
        if name in _SWITCH:
            raise Error(f"{place}: switch channels need multicast, which Weft does not use")
        if int(op.get("tbg_info", {}).get("tbg_size", 1)) > 1:
            raise Error(f"{place}: thread block groups are not supported")
        if name in _SKIPPED:
            return True
        if name == "barrier":
            return self._barrier(gpu, block, at, op)
        if name in ("sem_acquire", "sem_release"):
            return self._semaphore(gpu, op, name == "sem_acquire")
        if name in ("signal", "rlxsignal"):
            self._signal(gpu, block, op)
            return True
        if name in ("wait", "rlxwait"):
            return self._wait(gpu, block, op)
        if name not in _COPIES and name not in _REDUCTIONS:
            raise Error(f"{place}: unknown operation")
        if not self._data(gpu, block, op, place):
            return False
        if name in ("pws", "pwsf"):
            self._signal(gpu, block, op)
        return True

    # -- synchronisation ---------------------------------------------------------------------------------------

    def _barrier(self, gpu: dict[str, Any], block: dict[str, Any], at: int, op: dict[str, Any]) -> bool:
        if "barrier_id" not in op:
            return True  # of one block alone
        key = int(gpu["id"]), int(op["barrier_id"])
        count = int(op["num_threadblocks"])
        mine = (int(block["id"]) << 16) + at
        self._arrived[key].add(mine)
        rounds = sum(1 for seen in self._arrived[key] if seen >> 16 == int(block["id"]))
        return len(self._arrived[key]) >= rounds * count

    def _semaphore(self, gpu: dict[str, Any], op: dict[str, Any], acquires: bool) -> bool:
        keys = [(int(gpu["id"]), int(number)) for number in op["semaphore_ids"]]
        if acquires and any(self._semaphores.get(key, 0) < 1 for key in keys):
            return False
        for key in keys:
            self._semaphores[key] = self._semaphores.get(key, 0) + (-1 if acquires else 1)
        return True

    def _connections(
        self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any]
    ) -> list[tuple[str, int, int]]:
        """Return (type, peer, which of the channels to that peer) of the channels that an operation names."""
        kind = op["channel_type"]
        own = next(c for c in block["channels"] if c["channel_type"] == kind)["channel_ids"]
        peers = next(c for c in gpu["channels"] if c["channel_type"] == kind)["connected_to"]
        out = []
        for index in op["channel_ids"]:
            channel = own[index]
            out.append((kind, int(peers[channel]), peers[:channel].count(peers[channel])))
        return out

    def _signal(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any]) -> None:
        for kind, peer, number in self._connections(gpu, block, op):
            self._signals[kind, int(gpu["id"]), peer, number] += 1

    def _wait(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any]) -> bool:
        keys = [
            (kind, peer, int(gpu["id"]), number) for kind, peer, number in self._connections(gpu, block, op)
        ]
        if any(self._signals[key] <= self._waited[key] for key in keys):
            return False
        for key in keys:
            self._waited[key] += 1
        return True

    # -- data --------------------------------------------------------------------------------------------------

    def _slots(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], side: str) -> list[Slot]:
        out = []
        for operand in op.get(side, []):
            index, count = int(operand["index"]), int(operand["size"])
            if "buffer_id" not in operand:
                out.append((int(gpu["id"]), _BUFFER_NAMES[operand["type"]], index, count))
                continue
            refs = next(
                r for r in block["remote_buffer_refs"] if r["access_channel_type"] == op["channel_type"]
            )
            buffer = gpu["remote_buffers"][refs["remote_buffer_ids"][operand["buffer_id"]]]
            out.append((int(buffer["rank"]), _BUFFER_NAMES[buffer["type"]], index, count))
        return out

    def _data(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], place: str) -> bool:
        name = op["name"]
        sources, targets = (self._slots(gpu, block, op, side) for side in ("src_buff", "dst_buff"))
        if name in _PACKET_READS:
            packets = sources if name in ("upkt", "rppkt") else sources[1:]
            if any((r, b, i + c) not in self._packets for r, b, i, n in packets for c in range(n)):
                return False
        if not sources or not targets:
            raise Error(f"{place}: it needs sources and destinations")
        if name in _REDUCTIONS:
            self._reduce(sources, targets[0], place)
            sources, targets = [targets[0]], targets[1:]
        elif len(sources) == 1:
            sources = sources * len(targets)
        for source, target in zip(
            sources * len(targets) if name in _REDUCTIONS else sources, targets, strict=False
        ):
            self._copy(source, target, place)
        if name.endswith("pkt") and name not in ("upkt", "repkt"):
            for rank, buffer, index, count in targets:
                self._packets.update((rank, buffer, index + c) for c in range(count))
        return True

    def _ref(self, slot: Slot, place: str) -> Any:
        rank, buffer, index, count = slot
        ref = self._program.chunk(rank, buffer, index, count)
        if ref is None:
            raise Error(f"{place}: rank {rank} {buffer}[{index}:{index + count}] holds nothing yet")
        return ref

    def _copy(self, source: Slot, target: Slot, place: str) -> None:
        self._ref(source, place).copy(target[0], target[1], target[2])

    def _reduce(self, sources: list[Slot], target: Slot, place: str) -> None:
        rest = list(sources)
        if target in rest:
            rest.remove(target)
        else:
            self._copy(rest.pop(0), target, place)
        for source in rest:
            self._ref(target, place).reduce(self._ref(source, place))


_BUFFER_NAMES = {"i": "i", "o": "o", "s": "scratch", "input": "i", "output": "o", "scratch": "scratch"}


def _flat(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations with pipelines unrolled: playing a body once moves all its units."""
    out: list[dict[str, Any]] = []
    for op in ops:
        out += _flat(op["ops"]) if op["name"] == "pipeline" else [op]
    return out
