# SPDX-License-Identifier: Apache-2.0
"""Weight broadcast: a trainer writes its parameters into N inference processes, as after a step of RL.

    python examples/transfer_weight_broadcast.py --workers 3 --megabytes 64 --provider shm

The workers register the tensors of their own model and hand the descriptors to the trainer once. Each update
is then one-sided: the trainer writes every parameter to every worker, tells each with an immediate, and waits
until all have verified and switched over (a barrier) before it changes the weights again. Checksums are
compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from multiprocessing.connection import Connection

import torch
from rich.progress import Progress

from weft.errors import Error
from weft.transfer import TransferEngine, nics

UPDATED, SWITCHED = 1, 2


def make_model(megabytes: int) -> torch.nn.Module:
    """Return a model whose parameters take about that much."""
    width = 1024
    layers = max(megabytes * 1000 * 1000 // (4 * width * width), 1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def checksum(model: torch.nn.Module) -> int:
    """Return one CRC over all parameters."""
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().view(torch.uint8).numpy().tobytes(), crc)
    return crc


def worker(rank: int, megabytes: int, updates: int, provider: str, line: Connection) -> None:
    """Hold a copy of the model that the trainer writes into."""
    engine = TransferEngine(provider, name=f"worker-{rank}")
    model = make_model(megabytes)
    memories = [engine.register(p.detach(), remote_write=True) for p in model.parameters()]
    line.send((engine.address, [memory.descriptor for memory in memories]))
    trainer = engine.connect(line.recv())
    for update in range(1, updates + 1):
        engine.imm(trainer, UPDATED).wait(update * len(memories))
        line.send(checksum(model))
        engine.barrier([trainer], SWITCHED)
    engine.close()


def main() -> None:
    """Read the arguments, and say whom the trainer lost if it did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--provider", default="shm", choices=["tcp", "shm"])
    args = parser.parse_args()
    if min(args.workers, args.megabytes, args.updates) < 1:
        parser.error("--workers, --megabytes, --updates: allowed: 1 or more")
    try:
        train(args)
    except (Error, EOFError, OSError) as error:
        raise SystemExit(f"the trainer lost a worker: {error or 'it has ended'}") from None


def train(args: argparse.Namespace) -> None:
    """Start the workers and be the trainer."""
    provider = f"fabric:{args.provider}"
    unusable = [nic.unusable_because for nic in nics(provider)]
    if all(unusable):
        raise SystemExit(f"{provider} cannot be used here: {next(iter(unusable), 'no NIC')}")
    context = multiprocessing.get_context("spawn")
    engine = TransferEngine(provider, name="trainer")
    model = make_model(args.megabytes)
    parameters = [p.detach() for p in model.parameters()]
    memories = [engine.register(p) for p in parameters]
    lines, remotes, peers, processes = [], [], [], []
    for rank in range(args.workers):
        ours, theirs = context.Pipe()
        arguments = (rank, args.megabytes, args.updates, provider, theirs)
        processes.append(context.Process(target=worker, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # so that ours ends when the worker does
        address, descriptors = ours.recv()
        peers.append(engine.connect(address))
        remotes.append([engine.attach(descriptor) for descriptor in descriptors])
        ours.send(engine.address)
        lines.append(ours)
    total_bytes = sum(memory.nbytes for memory in memories)
    moving_s = 0.0
    with Progress() as bar:
        task = bar.add_task("parameters written", total=args.updates * args.workers * len(memories))
        for _ in range(args.updates):
            for p in parameters:
                p.add_(torch.randn_like(p), alpha=0.01)  # the optimizer's step
            began = time.perf_counter()
            transfers = [
                engine.write(memory, remotes[w][i], imm=UPDATED)
                for i, memory in enumerate(memories)
                for w in range(args.workers)
            ]
            for transfer in transfers:
                transfer.wait()
                bar.advance(task)
            moving_s += time.perf_counter() - began
            expected = checksum(model)
            if any(line.recv() != expected for line in lines):
                raise SystemExit("a worker has other weights than the trainer")
            engine.barrier(peers, SWITCHED)
    for process in processes:
        process.join()
    engine.close()
    gbps = args.updates * args.workers * total_bytes / moving_s / 1e9
    size = f"{total_bytes / 1e6:.0f} MB"
    print(f"{args.updates} updates of {size} to {args.workers} workers verified, {gbps:.2f} GB/s")


if __name__ == "__main__":
    main()
