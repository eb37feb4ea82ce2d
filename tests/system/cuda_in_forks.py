# SPDX-License-Identifier: Apache-2.0
"""Objects of CPU ranks open no CUDA driver; a child that was forked after its parent opened one does not call it.

Its libcuda.so.1 adds a byte to the file $CUDA_CALLS for each call of cuInit.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft import _core

CALLS = Path(os.environ["CUDA_CALLS"])


def use_the_cpu() -> None:
    """Make, use and end what a rank on the CPU has."""
    communicator = weft.Communicator(device="cpu")
    communicator.all_reduce(torch.ones(5))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    buffer = weft.Buffer(dist.group.WORLD, 1 << 22, device="cpu")
    ids = torch.zeros(3, 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    rows, *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(3, 1), **layout)
    assert (buffer.combine(rows, handle)[0] == x).all()
    del communicator, buffer, rows, handle
    gc.collect()
    dist.destroy_process_group()


use_the_cpu()
assert not CALLS.exists(), "an object of a CPU rank opened the CUDA driver"
assert len(_core.gpus()) == 1
assert CALLS.read_text() == "+"
child = os.fork()
if child == 0:
    try:
        _core.gpus()
    except weft.Error as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert len(_core.gpus()) == 1
print("done")
