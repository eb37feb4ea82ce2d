# SPDX-License-Identifier: Apache-2.0
"""Runs a test program of DeepEP's repository, unchanged, on CPU ranks over the drop-in deep_ep:

    torchrun --nnodes 2 ... deep_ep_files.py FOLDER/tests/legacy/test_internode.py --num-tokens 64

one process per machine, which starts its ranks itself. What is replaced is torch's (uccl_benches.py), the start of
ranks, which are forked, and timing, which means nothing here: each call runs once. What a program makes to empty a
GPU's cache or to keep it busy, tensors of gigabytes, is small.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import cuda_stand_ins
import torch
import torch.distributed as dist
import uccl_benches

import deep_ep.utils.testing

_GPU_SIZED = {
    (131072, 32768),
    (64_000_000,),
    (8192, 8192),
}  # shapes: what empties a cache, factors of a product


def _fork(function: Any, args: Any = (), nprocs: int = 1, **_: Any) -> Any:
    return torch.multiprocessing.start_processes(function, args=args, nprocs=nprocs, start_method="fork")


def _small(make: Any) -> Any:
    def call(*shape: Any, **options: Any) -> Any:
        sizes = tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape
        return make(*((8, 8) if sizes in _GPU_SIZED else shape), **options)

    return call


def main() -> None:
    """Run the program that the command line names."""
    program = Path(sys.argv[1])
    cuda_stand_ins.install()
    cuda: Any = torch.cuda
    cuda.set_device = lambda device: None
    cuda.current_device = lambda: 0
    torch.set_num_threads(1)
    replaced: Any = dist
    replaced.init_process_group = uccl_benches._init_process_group
    replaced.all_gather_into_tensor = uccl_benches._all_gather_into_tensor
    torch.multiprocessing.spawn = _fork
    made: Any = torch
    made.zeros, made.randn = _small(torch.zeros), _small(torch.randn)
    timing: Any = deep_ep.utils.testing
    timing.bench, timing.bench_kineto = uccl_benches._bench_once, uccl_benches._kineto_once
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(program.parent))
    with uccl_benches.OnTheCpu():
        runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
