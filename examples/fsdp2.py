# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with FSDP2 (fully_shard) over backend "weft", on GPUs or CPUs.

    torchrun --nproc-per-node 4 examples/fsdp2.py

Prints the loss of every fifth step, averaged over ranks; ``--backend gloo`` (or nccl) gives the same losses, which are
also those of ddp.py. On CPUs the steps take about a second; what takes long is that every rank imports torch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="weft")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if args.backend == "weft":
        import weft  # noqa: F401 - makes the backend known
    is_cuda = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{ranks} ranks over {args.backend} on {device.type}", flush=True)

    torch.manual_seed(0)  # the same model everywhere
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)  # each rank its own rows
        x = torch.randn(32, 64, generator=generator).to(device)
        y = x[:, :8].sin()
        loss = nn.functional.mse_loss(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3}  loss {mean.item() / ranks:.6f}", flush=True)
    # The mesh keeps the group, and so gloo's threads, until Python ends. One that still holds the last tensor would
    # then end the process by a signal; while this waits it can let go.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
