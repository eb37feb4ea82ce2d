# SPDX-License-Identifier: Apache-2.0
"""One rank of several: a message to the next rank, eagerly and then from a captured graph, over backend nccl.

Run by test_nccl_preload_gpu.py, under torchrun.
"""

import os

import torch
import torch.distributed as dist

LENGTH = 1001

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
sent = torch.full((LENGTH,), float(rank), device="cuda")
received = torch.empty(LENGTH, device="cuda")


def exchange() -> None:
    messages = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def check(added: float) -> None:
    torch.cuda.synchronize()
    assert torch.equal(received, torch.full_like(received, (rank - 1) % ranks + added)), received
    dist.barrier()


exchange()
check(0)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    exchange()
for added in (10.0, 20.0):
    sent.fill_(rank + added)
    received.zero_()
    dist.barrier()
    graph.replay()
    check(added)
del graph
dist.destroy_process_group()
print(f"rank {rank}: right")
