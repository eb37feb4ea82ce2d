# SPDX-License-Identifier: Apache-2.0
"""KV-cache hand-over: a prefill process writes its cache page by page, layer by layer, into a decode process.

    python examples/transfer_kv_cache.py --layers 16 --tokens 2048 --provider tcp

The two processes share nothing but a line for addresses. Prefill computes a layer, then writes that layer's
pages with an immediate whose id is the layer; decode waits for layer after layer and starts on each as it
arrives, while later ones are still under way. Page tables differ on the two sides, as they do in serving
engines. Every layer is verified by checksum.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from rich.progress import Progress

from weft.errors import Error
from weft.transfer import Pages, Peer, TransferEngine, nics

PAGE_TOKENS = 16
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """The cache: [layers, pool pages, 2 (K, V), tokens of a page, heads, head size] in bf16."""

    layers: int
    tokens: int
    heads: int = 8
    head_size: int = 64

    @property
    def pages(self) -> int:
        return self.tokens // PAGE_TOKENS

    @property
    def pool_pages(self) -> int:
        return 2 * self.pages

    @property
    def page_bytes(self) -> int:
        return 2 * PAGE_TOKENS * self.heads * self.head_size * 2

    def empty_pool(self) -> torch.Tensor:
        return torch.zeros(
            self.layers, self.pool_pages, 2, PAGE_TOKENS, self.heads, self.head_size, dtype=torch.bfloat16
        )

    def pages_of(self, layer: int, table: list[int]) -> Pages:
        return Pages(table, self.page_bytes, offset=layer * self.pool_pages * self.page_bytes)


def checksum(layer: torch.Tensor, table: list[int]) -> int:
    """Return the CRC of a request's pages of one layer, in the order of its tokens."""
    return zlib.crc32(layer[table].contiguous().view(torch.uint8).numpy().tobytes())


def prefill(shape: Shape, provider: str, line: Connection) -> None:
    """Compute layer after layer and write each to the decode process as soon as it is there."""
    torch.manual_seed(1)
    engine = TransferEngine(provider, name="prefill")
    pool = shape.empty_pool()
    table = torch.randperm(shape.pool_pages)[: shape.pages].tolist()
    memory = engine.register(pool)
    address, descriptor, their_table = line.recv()
    engine.connect(address)
    remote = engine.attach(descriptor)
    written = engine.counter()
    for layer in range(shape.layers):
        pool[layer, table] = torch.randn(shape.pages, *pool.shape[2:]).to(torch.bfloat16)  # the layer's work
        line.send(checksum(pool[layer], table))
        engine.write_pages(
            memory,
            shape.pages_of(layer, table),
            remote,
            shape.pages_of(layer, their_table),
            shape.page_bytes,
            imm=layer,
            counter=written,
        )
    written.wait(shape.layers)
    line.recv()  # decode is through
    engine.close()


def first_peer(engine: TransferEngine) -> Peer:
    """Wait for somebody to connect."""
    give_up = time.monotonic() + PATIENCE_S
    while not engine.peers:
        if time.monotonic() > give_up:
            raise SystemExit(f"nobody connected to {engine.name} in {PATIENCE_S:.0f} s")
        engine.progress()
        time.sleep(0.001)
    return engine.peers[0]


def decode(shape: Shape, provider: str, line: Connection) -> float:
    """Use each layer as it arrives; return GB/s from the first layer to the last."""
    torch.manual_seed(2)
    engine = TransferEngine(provider, name="decode")
    pool = shape.empty_pool()
    table = torch.randperm(shape.pool_pages)[: shape.pages].tolist()
    memory = engine.register(pool, remote_write=True)
    line.send((engine.address, memory.descriptor, table))
    peer = first_peer(engine)
    began = time.perf_counter()
    with Progress() as bar:
        task = bar.add_task("KV cache, layers", total=shape.layers)
        for layer in range(shape.layers):
            engine.imm(peer, layer).wait(1)  # all pages of this layer are in place
            if checksum(pool[layer], table) != line.recv():
                raise SystemExit(f"layer {layer} arrived damaged")
            bar.advance(task)
    seconds = time.perf_counter() - began
    line.send("done")
    engine.close()
    return shape.layers * shape.pages * shape.page_bytes / seconds / 1e9


def main() -> None:
    """Run both processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--provider", default="tcp", choices=["tcp", "shm"])
    args = parser.parse_args()
    if args.layers < 1 or args.tokens < PAGE_TOKENS or args.tokens % PAGE_TOKENS:
        parser.error(
            f"--layers, --tokens: got {args.layers}, {args.tokens}; allowed: 1 or more, multiples of {PAGE_TOKENS}"
        )
    shape = Shape(args.layers, args.tokens)
    provider = f"fabric:{args.provider}"
    unusable = [nic.unusable_because for nic in nics(provider)]
    if all(unusable):
        raise SystemExit(f"{provider} cannot be used here: {next(iter(unusable), 'no NIC')}")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(shape, provider, theirs), daemon=True)
    process.start()
    theirs.close()  # so that ours ends when prefill does
    try:
        speed = decode(shape, provider, ours)
    except (Error, EOFError, OSError) as error:
        raise SystemExit(f"decode lost prefill: {error or 'it has ended'}") from None
    process.join(PATIENCE_S)
    print(
        f"{shape.layers} layers of {shape.pages} pages of {shape.page_bytes} bytes verified, {speed:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
