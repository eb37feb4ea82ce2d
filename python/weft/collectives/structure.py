# SPDX-License-Identifier: Apache-2.0
"""The first half of the verifier: peers, bounds, dependencies, and that every send has its receive."""

from __future__ import annotations

from weft.collectives.contract import Buffer
from weft.collectives.ir import MAX_BLOCKS, MAX_CHANNELS, MAX_COUNT, Algorithm, Block, Connection, Step
from weft.errors import Error

BlockId = tuple[int, int]  # rank, block number


class VerificationError(Error):
    """The algorithm is wrong. ``kind`` is structure, race, deadlock or result; the message is the counterexample."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.counterexample = kind, message


def check_structure(algorithm: Algorithm) -> dict[Connection, tuple[BlockId, BlockId]]:
    """Check peers, bounds and dependencies; return the (sending, receiving) block of every connection used.

    Of ranks that are alike it checks and names rank 0's, by its names for the connections.

    Raises: VerificationError of kind structure.
    """
    alike = algorithm.num_ranks // len(algorithm.distinct)
    blocks = sum(len(program.blocks) for program in algorithm.distinct) * alike
    if blocks > MAX_BLOCKS:
        raise broken(f"{blocks} blocks on {algorithm.num_ranks} ranks, allowed: up to {MAX_BLOCKS}")
    for rank, number, block in algorithm.distinct_blocks():
        _check_block(algorithm, rank, number, block)
        for at, step in enumerate(block.steps):
            _check_step(algorithm, rank, number, at, step)
    senders, receivers = _ends(algorithm)
    for key in sorted(senders.keys() | receivers.keys()):
        _check_connection(algorithm, key, senders.get(key), receivers.get(key))
    return {key: (senders[key], receivers[key]) for key in senders}


def broken(message: str) -> VerificationError:
    """Return the error of a wrong structure."""
    return VerificationError("structure", message)


def _check_block(algorithm: Algorithm, rank: int, number: int, block: Block) -> None:
    where = f"rank {rank}, block {number}"
    for role, peer in (("send", block.send), ("receive", block.recv)):
        if peer == rank:
            raise broken(f"{where}: its {role} peer is itself")
        if not -1 <= peer < algorithm.num_ranks:
            raise broken(f"{where}: {role} peer {peer} is not one of the {algorithm.num_ranks} ranks")
    if not 0 <= block.channel < MAX_CHANNELS:
        raise broken(f"{where}: channel {block.channel}, allowed: 0 to {MAX_CHANNELS - 1}")


def _check_step(algorithm: Algorithm, rank: int, number: int, at: int, step: Step) -> None:
    program = algorithm.distinct[rank]
    block = program.blocks[number]
    where = algorithm.place(rank, number, at)
    if step.op.sends and block.send < 0:
        raise broken(f"{where}: its block has no send peer")
    if step.op.receives and block.recv < 0:
        raise broken(f"{where}: its block has no receive peer")
    if not 1 <= step.count <= MAX_COUNT:
        raise broken(f"{where}: cnt {step.count}, allowed: 1 to {MAX_COUNT}")
    length = {
        Buffer.input: program.input_chunks,
        Buffer.output: program.output_chunks,
        Buffer.scratch: program.scratch_chunks,
    }
    used = ([step.src] if step.op.reads_src else []) + ([step.dst] if step.op.writes_dst else [])
    for span in used:
        end = span.index + step.count
        if span.buffer not in length:
            raise broken(f"{where}: buffer {span.buffer!r}, allowed: i, o, s")
        size = _usable(algorithm, rank, span.buffer, length[span.buffer])
        if span.index < 0 or end > size:
            raise broken(f"{where}: {span.buffer}[{span.index}:{end}], but that buffer has {size} chunks")
        rotation = algorithm.rotation
        if rotation is not None and not rotation.keeps_together(span.buffer, span.index, step.count):
            raise broken(f"{where}: {span.buffer}[{span.index}:{end}] are no neighbours on some rank")
    if len(used) == 2 and step.src.buffer == step.dst.buffer and step.src != step.dst:
        overlaps = abs(step.src.index - step.dst.index) < step.count
        if overlaps:
            raise broken(f"{where}: {step.src} and {step.dst} overlap over {step.count} chunks")
    for dep_block, dep_step in step.depends:
        exists = 0 <= dep_block < len(program.blocks) and 0 <= dep_step < len(program.blocks[dep_block].steps)
        if not exists:
            raise broken(f"{where}: waits for step {dep_step} of block {dep_block}, which does not exist")
        if dep_block == number:
            raise broken(f"{where}: waits for a step of its own block")


def _usable(algorithm: Algorithm, rank: int, buffer: str, declared: int) -> int:
    """Return the chunks a step may touch: what the contract gives where the program declares none (in-place forms)."""
    if declared or buffer == Buffer.scratch or algorithm.contract is None:
        return declared
    contract = algorithm.contract
    return contract.input_chunks(rank) if buffer == Buffer.input else contract.output_chunks(rank)


def _ends(algorithm: Algorithm) -> tuple[dict[Connection, BlockId], dict[Connection, BlockId]]:
    senders: dict[Connection, BlockId] = {}
    receivers: dict[Connection, BlockId] = {}
    for rank, number, block in algorithm.distinct_blocks():
        if any(step.op.sends for step in block.steps):
            _claim(senders, algorithm.outgoing(rank, block), (rank, number), "send on")
        if any(step.op.receives for step in block.steps):
            _claim(receivers, algorithm.incoming(rank, block), (rank, number), "receive from")
    return senders, receivers


def _claim(ends: dict[Connection, BlockId], key: Connection, block: BlockId, verb: str) -> None:
    if key in ends:
        src, dst, channel = key
        raise broken(
            f"rank {block[0]}: blocks {ends[key][1]} and {block[1]} both {verb} the connection from rank {src} to rank "
            f"{dst}, channel {channel}"
        )
    ends[key] = block


def _check_connection(
    algorithm: Algorithm, key: Connection, sender: BlockId | None, receiver: BlockId | None
) -> None:
    src, dst, channel = key
    name = f"connection from rank {src} to rank {dst}, channel {channel}"
    if sender is None:
        assert receiver is not None
        at = next(i for i, s in enumerate(block_at(algorithm, receiver).steps) if s.op.receives)
        raise broken(f"{name}: {algorithm.place(*receiver, at)} receives, but rank {src} never sends there")
    if receiver is None:
        at = next(i for i, s in enumerate(block_at(algorithm, sender).steps) if s.op.sends)
        raise broken(f"{name}: {algorithm.place(*sender, at)} sends, but rank {dst} never receives there")
    sends = [(i, s) for i, s in enumerate(block_at(algorithm, sender).steps) if s.op.sends]
    recvs = [(i, s) for i, s in enumerate(block_at(algorithm, receiver).steps) if s.op.receives]
    for (i, send), (j, recv) in zip(sends, recvs, strict=False):
        if send.count != recv.count:
            raise broken(
                f"{name}: {algorithm.place(*sender, i)} sends {send.count} chunks, its receive "
                f"{algorithm.place(*receiver, j)} takes {recv.count}"
            )
    if len(sends) != len(recvs):
        raise broken(f"{name}: {len(sends)} sends, {len(recvs)} receives")


def block_at(algorithm: Algorithm, block: BlockId) -> Block:
    """Return a block of a rank; of ranks that are alike, of rank 0."""
    return algorithm.distinct[block[0]].blocks[block[1]]


def size_warnings(algorithm: Algorithm) -> list[str]:
    """Return where a program declares other sizes than its collective has."""
    contract = algorithm.contract
    if contract is None:
        return []
    out = []
    for program in algorithm.distinct:
        rank = program.rank
        sizes = (
            ("i", program.input_chunks, contract.input_chunks),
            ("o", program.output_chunks, contract.output_chunks),
        )
        for name, declared, wanted in sizes:
            if declared and declared != wanted(rank):
                out.append(
                    f"rank {rank}: {name}_chunks is {declared}, {algorithm.collective} has {wanted(rank)}"
                )
    return out
