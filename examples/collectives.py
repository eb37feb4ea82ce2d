# SPDX-License-Identifier: Apache-2.0
"""Collectives on torch tensors, without torch.distributed's process groups.

torchrun --nproc-per-node 4 examples/collectives.py
"""

from __future__ import annotations

import torch

import weft

comm = weft.Communicator(device="cpu")  # torchrun's ranks; without a device: the GPU, if any
gradients = torch.full((1000,), float(comm.rank))
comm.all_reduce(gradients, "average")
rows = comm.all_gather(torch.tensor([comm.rank]))
mine = comm.all_to_all(torch.arange(comm.size) + 10 * comm.rank)
if comm.rank == 0:
    print(f"average {gradients[0]:.2f}, ranks {rows.flatten().tolist()}, to rank 0 {mine.tolist()}")
