# SPDX-License-Identifier: Apache-2.0
"""The device contexts of one buffer, and the buffer's life: what ``Buffer`` and ``ElasticBuffer`` share.

contexts = BufferContexts("Buffer", group, None, device=None, heap_bytes=lambda nodes: sum(nodes) << 28)
context = contexts.of("x", x)      # checks that the buffer lives and that the tensor is on a device of it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.errors import Error, PeerLost, invalid
from weft.moe import arguments
from weft.moe.device_context import DeviceContext
from weft.runtime.communicator import connect, device_name
from weft.runtime.plain import PlanBook


class BufferContexts:
    """Device contexts by device. That of the buffer's own device is made at once, collectively; that of the CPU when
    a CPU tensor first comes.

    Args:
        owner: the class that messages name. group, comm: the ranks, as for weft.Buffer.
        device: what this rank computes on; None is torch's current GPU, or the CPU where there is none.
        heap_bytes: room for rows at first, for the numbers of ranks of all nodes.
        low_latency_bytes, timeout_s, may_mask, single_rank_domains: as for DeviceContext.
        explicitly_destroy: destroy() is allowed.
    Raises: weft.Error naming a wrong argument; weft.PeerLost naming ranks that stayed away.
    Threads: one caller at a time.
    """

    def __init__(
        self,
        owner: str,
        group: Any,
        comm: Any,
        *,
        device: torch.device | str | None,
        heap_bytes: Callable[[list[int]], int],
        low_latency_bytes: int = 0,
        timeout_s: float = 0.0,
        may_mask: bool = False,
        single_rank_domains: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        if group is None and comm is None:
            raise invalid(
                "group", "None", "a torch.distributed process group, or comm: an mpi4py communicator"
            )
        self.device = device_of(device)
        self._owner = owner
        self._ranks = (group, comm if group is None else None)
        self._sizes = (heap_bytes, low_latency_bytes, timeout_s)
        self._may_mask = may_mask
        self._single_rank_domains = single_rank_domains
        self._explicitly_destroy = explicitly_destroy
        self._by_device: dict[torch.device, DeviceContext] = {}
        self.plans = PlanBook()  # of calls on these contexts
        self.main: DeviceContext | None = self._on(self.device)  # None after destroy()
        self.rank = int(self.main.communicator.rank)
        self.size = int(self.main.communicator.size)

    def alive(self) -> DeviceContext:
        """Return the context of the buffer's own device. Raises: weft.Error, code closed, after destroy()."""
        if self.main is None:
            raise Error(f"{self._owner}: used after destroy(), allowed: calls before it", "closed")
        return self.main

    def of(self, argument: str, value: object) -> DeviceContext:
        """Return the context for the device of a tensor, or of the first of a tuple.

        Raises: weft.Error naming ``argument`` for anything else, and for other devices than the buffer's or the
        CPU.
        """
        self.alive()
        tensor = value[0] if isinstance(value, (tuple, list)) and value else value
        if not isinstance(tensor, Tensor):
            raise invalid(argument, arguments.describe(value), self._places())
        if tensor.device != self.device and tensor.device.type != "cpu":
            raise invalid(argument, arguments.describe(tensor), self._places())
        return self._on(tensor.device)

    def _places(self) -> str:
        """Return where tensors may be, for messages: each place once."""
        return "a tensor on cpu" if self.device.type == "cpu" else f"a tensor on {self.device} or cpu"

    def destroy(self) -> None:
        """Wait for all ranks, then let go of the memory; see Buffer.destroy()."""
        if not self._explicitly_destroy:
            raise invalid("explicitly_destroy", False, "True for a buffer that is destroyed by hand")
        context = self.alive()
        context.synchronize()
        try:
            context.communicator.barrier()
        except PeerLost:
            if not self._may_mask:
                raise  # else calls have gone on without that rank, and so may this one
        finally:
            self.main = None
            self._by_device.clear()
            self.plans.clear()

    def close(self, is_clean: bool) -> None:
        """Let go of the memory at the end of a ``with`` block, after all ranks if nothing was raised in it.

        After an error the others may never come, so this rank does not wait for them.
        """
        if self.main is None:
            return
        context = self.main
        try:
            if is_clean:
                context.synchronize()
                context.communicator.barrier()
        finally:
            self.main = None
            self._by_device.clear()
            self.plans.clear()

    def describe(self, name: str, **facts: object) -> str:
        """Return the repr of a buffer on these contexts."""
        shown = "".join(f", {key} {value}" for key, value in facts.items())
        end = "" if self.main is not None else ", destroyed"
        return f"weft.{name}(rank {self.rank} of {self.size}, {self.device}{shown}{end})"

    def comm_stream(self) -> Any:
        """Return the torch.cuda.Stream that calls run on; on the CPU, the current torch.cpu.Stream."""
        context = self.alive()
        context.is_comm_in_use = True  # by the caller
        return context.comm_stream if context.is_cuda else torch.cpu.current_stream()

    def _on(self, device: torch.device) -> DeviceContext:
        if device not in self._by_device:
            heap_bytes, low_latency_bytes, timeout_s = self._sizes
            communicator = connect(*self._ranks, device, timeout_s)
            room = heap_bytes(list(Counter(facts["node"] for facts in communicator.facts).values()))
            context = DeviceContext(
                communicator,
                device,
                room,
                low_latency_bytes,
                timeout_s,
                self._may_mask,
                self._single_rank_domains,
            )
            self._by_device[device] = context
        return self._by_device[device]


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device a buffer computes on, with its index."""
    try:
        chosen = torch.device(device_name(None) if device is None else device)
    except (TypeError, ValueError, RuntimeError):
        raise invalid("device", arguments.describe(device), "a CPU or CUDA device") from None
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    if chosen.type not in ("cpu", "cuda"):
        raise invalid("device", chosen, "a CPU or CUDA device")
    return chosen
