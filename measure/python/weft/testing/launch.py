# SPDX-License-Identifier: Apache-2.0
"""Start-up and machine facts of expert-parallel test programs.

    rank, num_ranks, group = init_dist(local_rank, num_local_ranks)
    dist_print(f"rank {rank} of {num_ranks}")

Works with and without GPUs: NCCL and CUDA where there are any, else gloo and the CPU.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Error
from weft.moe.arguments import check_deterministic_fill

_DEFAULT_NIC_NAME = os.environ.get("EP_NIC_NAME", "mlx5_0")  # as in DeepEP


class _Process:
    """What init_dist and init_seed decided for this process."""

    local_rank = 0
    local_seed = 0
    global_seed = 0


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Join all processes of all nodes; return (rank, ranks, a group of all).

    Reads the launcher's MASTER_ADDR (127.0.0.1), MASTER_PORT (8361), WORLD_SIZE (number of *nodes*, 1) and
    RANK (index of this *node*, 0). Makes bf16 the default type and the local GPU, if any, the default device.
    """
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    num_ranks = int(os.environ.get("WORLD_SIZE", "1")) * num_local_ranks
    rank = int(os.environ.get("RANK", "0")) * num_local_ranks + local_rank
    _Process.local_rank = local_rank
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", init_method=address, world_size=num_ranks, rank=rank, device_id=device
        )
        torch.set_default_device("cuda")
    else:
        dist.init_process_group("gloo", address, world_size=num_ranks, rank=rank)
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    return rank, num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(global_seed: int) -> None:
    """Seed torch and random with the global seed plus this process's rank."""
    _Process.global_seed = global_seed
    _Process.local_seed = global_seed + dist.get_rank()
    torch.manual_seed(_Process.local_seed)
    random.seed(_Process.local_seed)


def get_global_seed() -> int:
    """Return the seed given to init_seed."""
    return _Process.global_seed


def get_local_seed() -> int:
    """Return the seed of this process: the global one plus its rank."""
    return _Process.local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on each node's first, then wait for all ranks. Collective."""
    if not once_in_node or _Process.local_rank == 0:
        sys.stdout.write(s + "\n")
        sys.stdout.flush()
    dist.barrier()


def check_nvlink_connections(group: Any) -> None:
    """Raise weft.Error unless every two GPUs of the group that share a machine reach each other's memory.

    Weft also works where they do not, more slowly. Without GPUs nothing is checked.
    """
    if not torch.cuda.is_available():
        return
    mine = torch.cuda.current_device()
    devices = [0] * group.size()
    dist.all_gather_object(devices, mine, group=group)
    for device in set(devices) - {mine}:
        if device < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(mine, device):
            raise Error(f"GPU {mine} cannot access the memory of GPU {device}", "unsupported")


def check_torch_deterministic() -> None:
    """Raise weft.Error when torch would fill every new tensor, which races with communication streams."""
    check_deterministic_fill(torch.device("cuda"))


@lru_cache
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """Return ``factor`` times the GB/s of the first GPU's NVLinks together, one direction; 0 when unknown."""
    try:
        command = ["nvidia-smi", "nvlink", "--status", "--id=0"]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return factor * sum(float(gbs) for gbs in re.findall(r"Link \d+: ([\d.]+) GB/s", report))


@lru_cache
def get_rdma_gbs(nic_name: str = _DEFAULT_NIC_NAME) -> float:
    """Return the GB/s of a NIC's first port, or of the fastest NIC where there is none of that name.

    Infinite on a machine without NICs: programs divide by it, and none of their traffic takes that way.
    """
    try:
        names = [nic.name for nic in Path("/sys/class/infiniband").iterdir()]
    except OSError:
        names = []
    rates = [_port_gbs(name) for name in ([nic_name] if nic_name in names else names)]
    return max(rates, default=0.0) or math.inf


def _port_gbs(nic_name: str) -> float:
    rate = re.match(r"([\d.]+) Gb/sec", _nic_attribute(nic_name, "ports/1/rate"))
    return float(rate.group(1)) / 8 if rate else 0.0


@lru_cache
def check_fast_rdma_atomic_support(nic_name: str = _DEFAULT_NIC_NAME) -> bool:
    """Return whether the NIC is a ConnectX-8 or newer, whose remote atomics are fast."""
    model = re.match(r"MT(\d+)", _nic_attribute(nic_name, "hca_type"))
    return model is not None and int(model.group(1)) >= 4131


def _nic_attribute(nic_name: str, attribute: str) -> str:
    try:
        return (Path("/sys/class/infiniband") / nic_name / attribute).read_text()
    except OSError:
        return ""
