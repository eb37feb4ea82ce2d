# SPDX-License-Identifier: Apache-2.0
"""Runs a bench of UCCL-EP, unchanged, on CPU ranks: ``torchrun ... uccl_benches.py FOLDER/test_intranode.py --help``.

The bench, and the buffer.py and utils.py beside it, are those of a checkout of UCCL. What is replaced is torch's: where
they say CUDA, tensors are made on the CPU, streams and events have nothing to order, and gloo stands for NCCL
(cuda_stand_ins.py). Times that a bench prints mean nothing then, so that each call is timed once instead of 50 times.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import cuda_stand_ins
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnTheCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _init_process_group(*_: Any, **options: Any) -> None:
    options = {name: value for name, value in options.items() if name not in ("backend", "device_id")}
    _THEIRS(backend="gloo", **options)


def _all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """As NCCL does, whatever the shape of the output, and of FP8, too: gloo wants the input's shape, longer."""
    if tensor.element_size() == 1:
        output, tensor = output.view(torch.uint8), tensor.view(torch.uint8)
    return _GATHER(output.view(-1, *tensor.shape[1:]), tensor, *args, **options)


_THEIRS, _GATHER = dist.init_process_group, dist.all_gather_into_tensor


def _bench_once(function: Any, *_: Any, **__: Any) -> tuple[float, float, float]:
    function()
    return 1.0, 1.0, 1.0


def _kineto_once(function: Any, kernel_names: Any, *_: Any, **options: Any) -> Any:
    function()
    periods = int(options.get("num_kernels_per_period", 1))
    times = [[1.0] * periods if periods > 1 else 1.0 for _ in kernel_names]
    return tuple(times) if isinstance(kernel_names, tuple) else times[0]


def main() -> None:
    """Run the bench that the command line names, as torchrun would."""
    bench = Path(sys.argv[1])
    cuda_stand_ins.install()
    cuda: Any = torch.cuda
    cuda.set_device = lambda device: None
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: "none"
    cuda.ExternalStream = cuda_stand_ins.Stream
    torch.set_default_device = lambda device: None
    dist.init_process_group, dist.all_gather_into_tensor = _init_process_group, _all_gather_into_tensor
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(bench.parent))
    import utils  # the bench's own

    utils.bench, utils.bench_kineto = _bench_once, _kineto_once
    with OnTheCpu():
        runpy.run_path(str(bench), run_name="__main__")


if __name__ == "__main__":
    main()
