# SPDX-License-Identifier: Apache-2.0
"""A transformer block whose tokens go in two halves: while one half's rows travel, the other half computes.

    torchrun --nproc-per-node 2 examples/p2p_overlap.py --trace trace.json

Runs the block with the halves one after the other, then with their phases taking turns, on GPUs on a stream each; the
results are the same, bit by bit. Prints both times; trace.json shows the second in https://ui.perfetto.dev: the ranges
`dispatch in flight` and `combine in flight` of one half lie over attention and experts of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import weft

HALVES, HEADS, TOP_K, EXPERTS_PER_RANK = 2, 4, 2, 4


class Block(nn.Module):
    """Attention, a shared expert, and routed experts, of which this rank has some."""

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, HEADS, batch_first=True)
        self.router = nn.Linear(hidden, EXPERTS_PER_RANK * ranks)
        self.shared = nn.Linear(hidden, hidden)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(EXPERTS_PER_RANK))

    def half(self, a2a: weft.P2PAllToAll, x: Tensor, done: list[Tensor]) -> Iterator[None]:
        """Run the block for some tokens, and stop wherever the other half may take its turn."""
        with record_function("attention"):
            normed = self.norm(x).unsqueeze(0)
            h = x + self.attention(normed, normed, normed, need_weights=False)[0].squeeze(0)
        scores, indices = self.router(h).softmax(-1).topk(TOP_K)
        handle = a2a.dispatch_send(h, indices, scores.float())
        flight = _Flight("dispatch in flight")
        yield
        with record_function("shared expert"):
            out = self.shared(h)
        yield
        flight.ends()
        rows = a2a.dispatch_recv(handle)
        with record_function("experts"):
            y = self.run_experts(a2a, rows)
        a2a.combine_send(y, handle)
        flight = _Flight("combine in flight")
        yield
        flight.ends()
        done.append(h + a2a.combine_recv(handle, out, accumulate=True))

    def run_experts(self, a2a: weft.P2PAllToAll, rows: weft.P2PRows) -> Tensor:
        """Run every expert over its rows: padded ones, so that each has as many, and nobody waits for counts."""
        y = torch.zeros_like(rows.x)
        for expert, layer in enumerate(self.experts):
            y[expert] = layer(rows.x[expert].nan_to_num(0.0))
        return y


class _Flight:
    """A range in the trace from here to ends()."""

    def __init__(self, name: str) -> None:
        self._range = record_function(name)
        self._range.__enter__()

    def ends(self) -> None:
        self._range.__exit__(None, None, None)


def run(block: Block, a2a: weft.P2PAllToAll, x: Tensor, takes_turns: bool) -> Tensor:
    """Return the block of all tokens."""
    results: list[list[Tensor]] = [[] for _ in range(HALVES)]
    halves = [block.half(a2a, part, done) for part, done in zip(x.chunk(HALVES), results, strict=True)]
    streams = [torch.cuda.Stream() if x.is_cuda else None for _ in halves]
    for stream in filter(None, streams):
        stream.wait_stream(torch.cuda.current_stream())
    waiting = list(range(HALVES))
    while waiting:
        at = waiting.pop(0)
        with torch.cuda.stream(streams[at]) if x.is_cuda else contextlib.nullcontext():
            if next(halves[at], "over") != "over":
                waiting = [*waiting, at] if takes_turns else [at, *waiting]
    for stream in filter(None, streams):
        torch.cuda.current_stream().wait_stream(stream)
    return torch.cat([done[0] for done in results])


def timed(block: Block, a2a: weft.P2PAllToAll, x: Tensor, takes_turns: bool) -> tuple[Tensor, float]:
    """Return the result, and milliseconds of the median run."""
    took = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        result = run(block, a2a, x, takes_turns)
        if x.is_cuda:
            torch.cuda.synchronize()
        took.append((time.perf_counter() - start) * 1e3)
    return result, sorted(took)[len(took) // 2]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trace", metavar="FILE", help="of rank 0, for ui.perfetto.dev")
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    block = Block(args.hidden, ranks).to(device, torch.bfloat16)
    x = torch.randn(args.tokens, args.hidden).to(device, torch.bfloat16)
    a2a = weft.P2PAllToAll(
        dist.group.WORLD,
        max_num_tokens=-(-args.tokens // HALVES),
        num_experts=EXPERTS_PER_RANK * ranks,
        hidden_dim=args.hidden,
        num_experts_per_token=TOP_K,
        max_tokens_per_expert=args.tokens * ranks,
        max_in_flight=HALVES,
        device=device,
    )
    with a2a:
        one_by_one, alone_ms = timed(block, a2a, x, takes_turns=False)
        in_turns, both_ms = timed(block, a2a, x, takes_turns=True)
        assert torch.equal(one_by_one, in_turns)
        if args.trace:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
            with profile(activities=activities) as trace:
                dist.barrier()  # a profile imports a part of torch first: on the CPU who waits in a call takes a core
                run(block, a2a, x, takes_turns=True)
            if rank == 0:
                trace.export_chrome_trace(args.trace)
    if rank == 0:
        print(f"halves one after the other: {alone_ms:.2f} ms; in turns: {both_ms:.2f} ms; the same results")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
