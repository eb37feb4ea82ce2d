# SPDX-License-Identifier: Apache-2.0
"""``weft.Buffer`` with UCCL-EP's names around it; its drop-in re-exports them.

    proxies, workers = initialize_uccl(scratch_ptr, num_bytes, rank, num_ranks, group)   # nothing is started here
    buffer = Buffer(group, num_nvl_bytes=1 << 28, is_intranode=True)                     # weft.Buffer
    destroy_uccl(proxies, workers)

UCCL-EP's extension has a class Buffer, too, of addresses instead of tensors, which its own Python wraps: made with a
rank's number in place of the group, that is what one gets (weft.moe.uccl_runtime).
docs/uccl_compatibility.md says what is served. Threads: one caller at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import Error, invalid
from weft.moe import buffer, foreign_variables
from weft.moe.uccl_runtime import Runtime

_log = logging.getLogger("weft.uccl")


def understand_variables() -> None:
    """Take UCCL-EP's variables for settings of Weft's, and say in one line what was made of each.

    It is a warning if one of them is not used. A value of Weft's own variable wins.
    """
    foreign_variables.say("UCCL-EP", _log, _core.take_uccl_variables())


class Buffer(buffer.Buffer):
    """``weft.Buffer`` with UCCL-EP's arguments; with the number of a rank instead of a group, a ``Runtime``.

    Args:
        is_intranode: True refuses a group of several nodes; Weft finds out by itself who is where.
        options: keywords that weft.Buffer has beside UCCL-EP's.
    Raises: weft.Error naming the argument, as weft.Buffer does.
    """

    def __new__(cls, group: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(group, int) or "rank" in options:
            return Runtime(*(() if group is None else (group,)), *args, **options)
        return super().__new__(cls)

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            explicitly_destroy,
            **options,
        )
        nodes = {facts["node"] for facts in self._contexts.alive().communicator.facts}
        if is_intranode and len(nodes) > 1:
            raise invalid("is_intranode", True, f"None or False for a group of {len(nodes)} nodes")

    def reset_rdma_buffer(self) -> None:
        """Nothing is to be reset: signals only grow, whatever is called in between."""


class Proxy:
    """What UCCL-EP's programs hold for a proxy thread. Weft's start with the communicator that needs them.

    Takes all of UCCL-EP's arguments and looks at none.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def set_peers_meta(self, peers_meta: Sequence[dict[str, Any]]) -> None: ...
    def set_atomic_buffer_ptr(self, address: int) -> None: ...
    def start_dual(self) -> None: ...
    def stop(self) -> None: ...
    def notify_proxy_thread_adaptive_sleeper(self) -> None: ...
    def calculate_and_set_dispatch_recv_data_offset(
        self, num_tokens: int, hidden: int, num_experts: int
    ) -> None: ...

    def get_listen_port(self) -> int:
        """Return 0: nothing listens."""
        return 0

    def get_atomic_buffer_ptr(self) -> int:
        """Return 0: signals lie in the window."""
        return 0


def initialize_uccl(
    scratch_ptr: Any,
    scratch_nbytes: int,
    rank: int,
    num_ranks: int,
    group: Any,
    num_experts: int = 0,
    is_intranode: bool | None = None,
    use_normal_mode: bool = False,
    rdma_buffer_is_host_allocated: bool = False,
) -> tuple[list[Proxy], None]:
    """Return (proxies, workers) to hand to destroy_uccl(). Nothing is started: a buffer brings what it needs."""
    return [Proxy() for _ in range(get_num_proxy_threads())], None


def destroy_uccl(proxies: Sequence[Proxy], workers: object) -> None:
    """Do nothing: what a buffer started ends with it."""


def get_num_proxy_threads() -> int:
    """Return how many Proxy objects programs are to make: one. WEFT_PROXIES says how many threads there are."""
    return 1


def register_proxies(device_index: int, proxies: Sequence[Proxy]) -> None:
    """Do nothing: a buffer knows its own."""


def register_proxy(device_index: int, proxies: Proxy) -> None:
    """Do nothing: a buffer knows its own."""


def unregister_proxy(device_index: int) -> None:
    """Do nothing: none was registered."""


def has_proxy(device_index: int) -> bool:
    """Return False: none was registered."""
    return False


def stop_all_registered_proxies() -> None:
    """Do nothing: none was registered."""


def connect_atomic_buffer(proxy: Proxy, runtime: Runtime) -> None:
    """Do nothing: signals lie in the window."""


def get_oob_ip() -> str:
    """Return the address where ranks of several nodes hear of each other: WEFT_INTERFACE's, or the first found."""
    return str(_core.rendezvous_interface()["address"])


def get_physical_gpu_rank(device_index: int) -> int:
    """Return the place of a CUDA device among all of this machine's, by PCI address.

    Ranks on the CPU need numbers that differ, too: theirs in torch.distributed, if it is up.
    """
    try:
        address = str(_core.gpus()[device_index]["pci_address"]).lower()
    except (Error, IndexError):
        return dist.get_rank() if dist.is_initialized() else device_index
    # The driver lists them all, whatever CUDA_VISIBLE_DEVICES leaves to this process.
    known = sorted(entry.name.lower() for entry in Path("/proc/driver/nvidia/gpus").glob("*"))
    return known.index(address) if address in known else device_index


def get_rdma_buffer(
    num_rdma_bytes: int, device_index: int, force_device_alloc: bool = False
) -> tuple[Any, bool]:
    """Return (DLPack capsule of one byte, whether it is on the host): the memory that calls use is the buffer's own."""
    on_host = not torch.cuda.is_available()
    device = torch.device("cpu") if on_host else torch.device("cuda", device_index)
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    return torch.utils.dlpack.to_dlpack(byte), on_host  # type: ignore[attr-defined]


def can_register_rdma_gpu_buffer(device_index: int, num_bytes: int) -> bool:
    """Return True: what a NIC cannot reach, Weft keeps where it can."""
    return True


def rdma_buffer_should_use_host_alloc(device_index: int, num_bytes: int = 4096) -> bool:
    """Return False: see can_register_rdma_gpu_buffer()."""
    return False
