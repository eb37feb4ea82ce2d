# SPDX-License-Identifier: Apache-2.0
"""What an MSCCL++ JSON plan says, in one form, whichever release wrote it.

    plan = read_plan(text, "allreduce.json")     # Error names gpu, threadblock, operation and field

Releases to 0.7 name channels by the buffers that they join and operands in fields of their own (``srcs``, ``o_cids``);
later ones have lists of operands and remote buffers. Both become PlanOps on slots of ranks. Pipelines are unrolled:
playing a body once moves all its units. Chunks are cut so that a thread block group's shares are whole chunks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from weft.collectives.ir import MAX_CHUNKS
from weft.errors import Error

_BUFFERS = {"i": "i", "o": "o", "s": "scratch", "input": "i", "output": "o", "scratch": "scratch"}
_NEEDS_MULTICAST = ("glre", "glres", "gstore", "gstorepkt")
_NOTHING = ("nop", "flush")
_SIGNALS = {"signal": True, "rlxsignal": False, "wait": True, "rlxwait": False}  # False: of execution alone
# Operation: (whether it adds its sources, which sources are packets, which targets are); first of them, or -1 for none
_MOVES: dict[str, tuple[bool, int, int]] = {
    **dict.fromkeys(("put", "pws", "pwsf", "get", "copy"), (False, -1, -1)),
    "ppkt": (False, -1, 0),
    "rppkt": (False, 0, 0),
    "tpkt": (False, -1, 0),
    "cpkt": (False, -1, 0),
    "upkt": (False, 0, -1),
    **dict.fromkeys(("re", "res", "rre", "rres"), (True, -1, -1)),
    "repkt": (True, 1, -1),
    **dict.fromkeys(("recpkt", "respkt", "recspkt"), (True, 1, 1)),
    # names of older releases
    **dict.fromkeys(("rs", "rrc", "rrcs"), (True, -1, -1)),
    **{"rpkt": (True, 1, -1), "rspkt": (True, 1, 1)},
}
_OLD_MOVES: dict[str, tuple[bool, int, int]] = {
    **dict.fromkeys(("put", "pws", "pwsf", "get", "copy"), (False, -1, -1)),
    **dict.fromkeys(("re", "rs", "rrc", "rrcs"), (True, -1, -1)),
    "ppkt": (False, -1, 0),
    "tpkt": (False, -1, 0),
    "cpkt": (False, 0, -1),
    "rpkt": (True, 1, -1),
    "rspkt": (True, 1, 1),
}
_OLD_TYPES = {"sm": "memory", "proxy": "port"}

End = tuple[str, int, int]  # type of channel, peer, which of the channels of that type to that peer


@dataclasses.dataclass(frozen=True)
class Operand:
    """Consecutive chunks of a rank's buffer; ``is_packets``: each value travels with a flag."""

    rank: int
    buffer: str
    index: int
    size: int
    is_packets: bool = False


@dataclasses.dataclass
class PlanOp:
    """One operation. ``kind``: nothing, barrier, acquire, release, signal, wait or move."""

    kind: str
    place: str  # in words, for messages
    ends: list[End] = dataclasses.field(default_factory=list)
    is_strong: bool = True  # a signal or wait orders data, too
    barrier: tuple[int, int] = (0, 1)  # number, blocks
    semaphores: list[int] = dataclasses.field(default_factory=list)
    reduces: bool = False
    signals: bool = False  # after the data
    sources: list[Operand] = dataclasses.field(default_factory=list)
    targets: list[Operand] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class PlanBlock:
    rank: int
    number: int
    ops: list[PlanOp]


@dataclasses.dataclass
class Plan:
    """A plan; ``chunks`` are those of one rank's input and output, ``cut`` of each into how many it was cut."""

    name: str
    collective: str
    protocol: str
    inplace: bool
    ranks: int
    chunks: tuple[int, int]
    cut: int
    min_bytes: int
    max_bytes: int | None
    blocks: list[PlanBlock]
    semaphores: dict[tuple[int, int], int]
    contract: Any = None  # of a custom collective, as to_plan() writes it


class _Node:
    """An element of the file, and where it stands."""

    def __init__(self, value: Any, place: str) -> None:
        self.value, self.place = value, place
        if not isinstance(value, dict):
            raise Error(f"{place}: got {value!r:.40}, allowed: an object with fields")

    def error(self, message: str) -> Error:
        return Error(f"{self.place}: {message}")

    def field(self, *names: str) -> Any:
        for name in names:
            if name in self.value:
                return self.value[name]
        raise self.error(f"{names[0]} is missing")

    def has(self, name: str) -> bool:
        return name in self.value

    def number(self, *names: str, default: int | None = None, most: int = MAX_CHUNKS) -> int:
        if default is not None and not any(name in self.value for name in names):
            return default
        value = self.field(*names)
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            number = -1
        if isinstance(value, (bool, str)) or number != value or not 0 <= number <= most:
            raise self.error(f"{names[0]}: got {value!r:.40}, allowed: a whole number from 0 to {most}")
        return number

    def nodes(self, *names: str, what: str = "", is_needed: bool = True) -> list[_Node]:
        if not is_needed and not any(name in self.value for name in names):
            return []
        value = self.field(*names)
        if not isinstance(value, list):
            raise self.error(f"{names[0]}: got {value!r:.40}, allowed: a list")
        return [_Node(one, f"{self.place}{what and f', {what} {at}'}") for at, one in enumerate(value)]

    def numbers(self, *names: str) -> list[int]:
        value = self.field(*names)
        is_numbers = isinstance(value, list) and all(isinstance(v, int) and v >= 0 for v in value)
        if not is_numbers:
            raise self.error(f"{names[0]}: got {value!r:.60}, allowed: a list of numbers from 0 on")
        return list(value)


def read_plan(text: str, file: str) -> Plan:
    """Read a plan of any release. Raises: Error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Error(f"{file}: not JSON: {error}") from None
    plan = _Node(value, file)
    gpus = plan.nodes("gpus")
    if not gpus:
        raise plan.error("gpus: got none, allowed: one or more")
    ranks = [gpu.number("id") for gpu in gpus]
    if sorted(ranks) != list(range(len(gpus))):
        raise plan.error(f"gpus: ids are {ranks}, allowed: 0 to {len(gpus) - 1}, each once")
    gpus.sort(key=lambda gpu: gpu.number("id"))
    if plan.has("dynamic") or gpus[0].has("dynamic_input_chunks"):
        raise plan.error("dynamic: its sizes are filled in at run time; allowed: a plan that has them")
    is_old = gpus[0].has("inputChunks")
    reader, has_tpkt = (_OldGpu if is_old else _Gpu), '"tpkt"' in text
    blocks = [block for gpu in gpus for block in reader(gpu, file, gpus, has_tpkt).blocks()]
    cut = math.lcm(*(part[1] for block in blocks for _, part in block.ops))
    sizes = [_chunks(gpu, cut) for gpu in gpus]
    no_limit = (1 << 64) - 1
    high = plan.number("max_message_size", default=no_limit, most=no_limit)
    protocol = str(plan.value.get("protocol", "Simple"))
    if protocol not in ("Simple", "LL"):
        raise plan.error(f"protocol: got {protocol!r}, allowed: Simple, LL")
    return Plan(
        name=str(plan.field("name")),
        collective=str(plan.field("collective", "colletive")).lower(),  # as release 0.5 spells it
        protocol=protocol,
        inplace=bool(plan.field("inplace")),
        ranks=len(gpus),
        chunks=sizes[0],
        cut=cut,
        min_bytes=plan.number("min_message_size", default=0, most=no_limit),
        contract=plan.value.get("weft_contract"),
        max_bytes=None if high == no_limit else high,
        blocks=[
            PlanBlock(block.rank, block.number, [_cut(op, part, cut) for op, part in block.ops])
            for block in blocks
        ],
        semaphores={
            (gpu.number("id"), at): semaphore.number("init_value")
            for gpu in gpus
            for at, semaphore in enumerate(gpu.nodes("semaphores", is_needed=False))
        },
    )


def _chunks(gpu: _Node, cut: int) -> tuple[int, int]:
    taken, given = (
        gpu.number(f"{side}_chunks", f"{side}Chunks", default=0 if gpu.has(f"{other}Chunks") else None)
        for side, other in (("input", "output"), ("output", "input"))
    )
    most = MAX_CHUNKS // cut
    if taken == given == 0:
        raise gpu.error("has chunks of neither input nor output, so there is nothing to run")
    if not 1 <= max(taken, given) <= most:
        raise gpu.error(f"input_chunks: got {taken}, output_chunks {given}, allowed: 1 to {most}")
    return taken * cut, given * cut


def _cut(op: PlanOp, part: tuple[int, int], cut: int) -> PlanOp:
    """Return the operation on smaller chunks, and of a group's operation the block's own share."""
    number, of = part

    def share(operand: Operand) -> Operand:
        size = operand.size * cut // of
        return dataclasses.replace(operand, index=operand.index * cut + number * size, size=size)

    sources, targets = ([share(operand) for operand in side] for side in (op.sources, op.targets))
    return dataclasses.replace(op, sources=sources, targets=targets)


@dataclasses.dataclass
class _Block:
    rank: int
    number: int
    ops: list[tuple[PlanOp, tuple[int, int]]]  # with (share, of how many)


class _Gpu:
    """Reads the blocks of a gpu, as releases from 0.8 on write them."""

    moves = _MOVES

    def __init__(self, gpu: _Node, file: str, gpus: list[_Node], packs_by_tpkt: bool) -> None:
        self.gpu, self.file = gpu, file
        if packs_by_tpkt:  # the first releases with this form unpacked by cpkt
            self.moves = {**self.moves, "cpkt": _OLD_MOVES["cpkt"]}
        self.rank = gpu.number("id")
        self.ranks = len(gpus)
        gpu.place = f"{file}: rank {self.rank}"

    def blocks(self) -> list[_Block]:
        return [self._block(block) for block in self.gpu.nodes("threadblocks", what="block")]

    def _block(self, block: _Node) -> _Block:
        number = block.number("id")
        block.place = f"{self.file}: rank {self.rank}, block {number}"
        return _Block(self.rank, number, self._ops(block, block.nodes("ops"), []))

    def _ops(
        self, block: _Node, nodes: list[_Node], found: list[tuple[PlanOp, tuple[int, int]]]
    ) -> list[tuple[PlanOp, tuple[int, int]]]:
        for op in nodes:
            op.place = f"{block.place}, operation {len(found)} ({op.field('name')})"
            if op.field("name") == "pipeline":
                self._ops(block, op.nodes("ops"), found)
                continue
            group = _Node(op.value.get("tbg_info", {}), op.place)
            of = group.number("tbg_size", default=1)
            share = group.number("tb_id", "tbg_id", default=0)
            if not 1 <= of <= MAX_CHUNKS or share >= of:
                raise op.error(f"tbg_info: got share {share} of {of}, allowed: 0 to one less than the size")
            found.append((self._op(block, op), (share, of)))
        return found

    def _op(self, block: _Node, op: _Node) -> PlanOp:
        name = str(op.field("name"))
        done = PlanOp("nothing", op.place)
        if name in _NEEDS_MULTICAST or str(op.value.get("ctype", "")) == "nvls":
            raise op.error(
                "needs multicast, which Weft's programs do not use: they reach peers by mapped memory"
            )
        if name in _NOTHING:
            return done
        if name == "barrier":
            if not op.has("barrier_id"):
                return done  # of one block alone
            done.kind = "barrier"
            done.barrier = op.number("barrier_id"), op.number("num_threadblocks", "nthread_blocks")
        elif name in ("sem_acquire", "sem_release"):
            done.kind, done.semaphores = name[4:], op.numbers("semaphore_ids")
        elif name in _SIGNALS:
            done.kind, done.is_strong = ("wait" if name.endswith("wait") else "signal"), _SIGNALS[name]
            done.ends = self.ends(block, op, done.kind == "wait")
        elif name in self.moves:
            self._move(block, op, name, done)
        else:
            allowed = ", ".join((*self.moves, *_SIGNALS, *_NOTHING, "barrier", "sem_acquire", "sem_release"))
            raise op.error(f"name: got {name!r}, allowed: {allowed}")
        return done

    def _move(self, block: _Node, op: _Node, name: str, done: PlanOp) -> None:
        reduces, packets_in, packets_out = self.moves[name]
        done.kind, done.reduces = "move", reduces
        sources, targets = self.operands(block, op, True), self.operands(block, op, False)
        if not sources or not targets:
            raise op.error("src_buff and dst_buff: allowed: one operand or more of each")
        is_pairwise = not reduces and len(sources) == len(targets)
        if not (reduces or is_pairwise or len(sources) == 1):
            raise op.error(
                f"got {len(sources)} sources and {len(targets)} destinations, allowed: as many, or one source"
            )
        done.sources = [self._packed(one, at >= packets_in >= 0) for at, one in enumerate(sources)]
        done.targets = [self._packed(one, at >= packets_out >= 0) for at, one in enumerate(targets)]
        if any(one.size != sources[0].size or one.size < 1 for one in (*sources, *targets)):
            raise op.error(
                f"sizes {[one.size for one in (*sources, *targets)]}, allowed: all alike, 1 or more"
            )
        if name in ("pws", "pwsf"):
            done.signals, done.ends = True, self.ends(block, op, False)

    def _kind(self, op: _Node, name: str) -> str:
        return str(op.field(name))

    def _packed(self, operand: Operand, is_packets: bool) -> Operand:
        return dataclasses.replace(operand, is_packets=is_packets)

    def _buffer(self, node: _Node, *names: str) -> str:
        name = str(node.field(*names))
        if name not in _BUFFERS:
            raise node.error(f"{names[0]}: got {name!r}, allowed: {', '.join(_BUFFERS)}")
        return _BUFFERS[name]

    def _one(self, node: _Node, what: str, found: list[Any], at: int) -> Any:
        if not 0 <= at < len(found):
            raise node.error(f"{what}: got {at}, allowed: below {len(found)}")
        return found[at]

    def _rank(self, node: _Node, rank: Any) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise node.error(f"rank: got {rank!r}, allowed: 0 to {self.ranks - 1}")
        return rank

    def _typed(self, nodes: list[_Node], key: str, kind: str, names: tuple[str, ...]) -> list[int]:
        return [n for node in nodes if node.field(key, "type") == kind for n in node.numbers(*names)]

    def ends(self, block: _Node, op: _Node, waits: bool) -> list[End]:
        """Return the channels that an operation names."""
        kind = self._kind(op, "channel_type")
        own = self._typed(block.nodes("channels"), "channel_type", kind, ("channel_ids", "cids"))
        channels = self.gpu.nodes("channels")
        peers = self._typed(channels, "channel_type", kind, ("connected_to", "connectedTo"))
        out = []
        for index in op.numbers("channel_ids", "cids"):
            channel = self._one(op, "channel_ids", own, index)
            peer = self._rank(op, self._one(op, "channel", peers, channel))
            out.append((kind, peer, peers[:channel].count(peer)))
        return out

    def operands(self, block: _Node, op: _Node, are_sources: bool) -> list[Operand]:
        side = "src_buff" if are_sources else "dst_buff"
        return [self._operand(block, op, operand) for operand in op.nodes(side, is_needed=False)]

    def _operand(self, block: _Node, op: _Node, operand: _Node) -> Operand:
        index, size = operand.number("index", "offset"), operand.number("size")
        if not any(operand.has(name) for name in ("buffer_id", "buff_id")):
            return Operand(self.rank, self._buffer(operand, "type"), index, size)
        refs = block.nodes("remote_buffer_refs", "remoteBufferRefs")
        kinds = {str(ref.field("access_channel_type", "type")) for ref in refs}
        is_given = (
            op.has("channel_type") or len(kinds) != 1
        )  # release 0.9 leaves it out where a sum is sent as well
        kind = self._kind(op, "channel_type") if is_given else kinds.pop()
        ids = self._typed(refs, "access_channel_type", kind, ("remote_buffer_ids", "remoteBufferIds"))
        number = self._one(op, "remote_buffer_ids", ids, operand.number("buffer_id", "buff_id"))
        buffers = self.gpu.nodes("remote_buffers", "remoteBuffers")
        buffer: _Node = self._one(op, "remote_buffers", buffers, number)
        return Operand(self._rank(op, buffer.field("rank")), self._buffer(buffer, "type"), index, size)


class _OldGpu(_Gpu):
    """Reads the blocks of a gpu, as releases to 0.7 write them: a channel joins two buffers."""

    moves = _OLD_MOVES

    def _channel(self, block: _Node, op: _Node, joined: _Node, index: int) -> tuple[End, str]:
        """Return an operation's channel, and the peer's buffer behind it."""
        kind = self._kind(op, "ctype")
        source, target = joined.field("src"), joined.field("dst")
        own = [
            number
            for node in block.nodes("channels")
            if (node.field("ctype"), node.field("src"), node.field("dst")) == (kind, source, target)
            for number in node.numbers("cids")
        ]
        number = self._one(op, "cids", own, index)
        peers: list[int] = []  # of all channels of the type, as the executor numbers them
        alike: list[int] = []  # places in `peers` of those that join the same buffers
        for node in self.gpu.nodes("channels"):
            if node.field("type") != kind:
                continue
            connected = node.numbers("connectedTo")
            if (node.field("srcbuff"), node.field("dstbuff")) == (source, target):
                alike += range(len(peers), len(peers) + len(connected))
            peers += connected
        at = self._one(op, "channels", alike, number)
        end = _OLD_TYPES.get(kind, kind), self._rank(op, peers[at]), peers[:at].count(peers[at])
        return end, self._buffer(joined, "dst")

    def ends(self, block: _Node, op: _Node, waits: bool) -> list[End]:
        side = "i" if waits else "o"
        joined = _Node(op.field(f"{side}_buff"), op.place)
        return [self._channel(block, op, joined, one.number("id"))[0] for one in op.nodes(f"{side}_cids")]

    def operands(self, block: _Node, op: _Node, are_sources: bool) -> list[Operand]:
        own, listed, side = ("src", "srcs", "i") if are_sources else ("dst", "dsts", "o")
        size = op.number("cnt", default=1)
        out = []
        if op.has(f"{own}buff"):
            out.append(Operand(self.rank, self._buffer(op, f"{own}buff"), op.number(f"{own}off"), size))
        for one in op.nodes(listed, is_needed=False):
            out.append(Operand(self.rank, self._buffer(one, "buff"), one.number("off"), size))
        if op.has(f"{side}_cids"):
            joined = _Node(op.field(f"{side}_buff"), op.place)
            for one in op.nodes(f"{side}_cids"):
                (_, peer, _), buffer = self._channel(block, op, joined, one.number("id"))
                out.append(Operand(peer, buffer, one.number("off"), size))
        return out
