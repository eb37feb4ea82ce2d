# SPDX-License-Identifier: Apache-2.0
"""Every kind of kernel once, on small tensors: what the sanitizers watch.

torchrun --nproc-per-node 2 tests/gpu/small_job.py [--device cpu]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed

import weft
from weft.runtime.communicator import Communicator
from weft.testing.numerics import calc_diff
from weft.testing.ranks import Rank

sys.path.append(str(Path(__file__).parents[1] / "system"))
from micro_batches import overlap_two_micro_batches

TOKENS, HIDDEN, TOP_K, EXPERTS = 33, 512, 3, 8
ROUNDS = 4  # of two micro-batches with hooks, on two streams


def round_trips(group: torch.distributed.ProcessGroup, rank: int, device: str) -> None:
    """Take tokens to their experts and back, in both modes; experts return what they get."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16().to(device)
    idx = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices.to(device)
    weights = torch.full((TOKENS, TOP_K), 0.25, device=device)
    num_bytes = weft.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = weft.Buffer(group, 16 << 20, num_bytes, low_latency_mode=True)

    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    rows, _, row_weights, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
    rows = buffer.dispatch(x, handle=handle)[0]
    combined, back, _ = buffer.combine(rows, handle, topk_weights=row_weights)
    assert torch.equal(combined, (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    assert torch.equal(back, weights)

    (q, scales), _, ll_handle, _, hook = buffer.low_latency_dispatch(
        x, idx, TOKENS, EXPERTS, use_fp8=True, return_recv_hook=True
    )
    hook()
    results = (q.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).nan_to_num().bfloat16()
    output, _, _ = buffer.low_latency_combine(results, idx, weights, ll_handle)
    assert calc_diff(output, x.float() * 0.25 * TOP_K) < 1e-3


def collectives(group: torch.distributed.ProcessGroup, rank: int, device: torch.device) -> None:
    """Reduce over every protocol's size, and gather."""
    comm = Communicator(group, device=device)
    for elems in (3, 5000, 300_000):
        total = comm.all_reduce(torch.full((elems,), float(rank + 1), device=device))
        assert (total == group.size() * (group.size() + 1) / 2).all()
        gathered = comm.all_gather(torch.full((elems,), float(rank), device=device))
        assert torch.equal(gathered.view(group.size(), -1)[:, 0].cpu(), torch.arange(float(group.size())))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    device = (
        torch.device("cpu") if "cpu" in sys.argv else torch.device("cuda", rank % torch.cuda.device_count())
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = torch.distributed.group.WORLD
    round_trips(group, rank, str(device))
    overlap_two_micro_batches(
        Rank(rank, group.size(), group, Path(tempfile.gettempdir())), ROUNDS, str(device)
    )
    collectives(group, rank, device)
    torch.distributed.barrier()
    print(f"rank {rank}: all agreed")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
