# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "weft".

    import weft                                    # makes it known: weft.runtime.torch_registration says when
    torch.distributed.init_process_group(backend="weft")

It serves every collective that DDP and FSDP call, on CPU and CUDA tensors of ranks that map each other's memory.

* On CUDA a collective is in the current stream's order.
* On the CPU it is finished when the call returns. With ``async_op=True``, and in DDP, it runs in a thread of the group,
  in the order of the calls, and wait() raises what went wrong. torch before 2.8 does not say which calls are
  asynchronous: none is then.
* Sends and receives run beside collectives and beside each other, so batched ones may come in any order. Messages from
  one rank to another come in the order in which they were sent. A receive with another tag fails on both ranks. A rank
  may send to itself: such a send ends with the receive that takes it, and recv_anysource() does not see it.
* Lists of all_gather and reduce_scatter may have another size for each rank, the same ones on all ranks.

* A group may be split: torch.distributed.split_group().

Reductions: SUM, PRODUCT, MIN, MAX, AVG; PREMUL_SUM with a number or a tensor as its factor; BAND, BOR, BXOR of integers
and bool; SUM and PREMUL_SUM of sparse COO tensors. Types that are moved and not reduced: float8_e8m0fnu,
float8_e4m3fnuz, float8_e5m2fnuz, float4_e2m1fn_x2.
Profilers see each call as an event "weft:all_reduce" and so on, with the shapes of what was given.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft import _core
from weft.collectives.call_checks import copy_into
from weft.collectives.calls import Collectives
from weft.collectives.calls_in_order import CallsInOrder
from weft.collectives.monitored_barrier import MonitoredBarrier
from weft.collectives.own_messages import OwnMessages
from weft.collectives.peer_threads import PeerThreads
from weft.collectives.torch_reduction import Asked, asked_of
from weft.collectives.torch_tensors import (
    add_up,
    are_even,
    check_parts,
    gather_uneven,
    in_place,
    into,
    real_of,
    reduce_scatter_uneven,
)
from weft.collectives.torch_work import (
    LEFT,
    Event,
    Pending,
    collective,
    finished_work,
    in_modes_of_now,
    outside_of_dynamo,
    profilers,
    run_into,
)
from weft.errors import PeerLost, invalid
from weft.runtime.communicator import connect
from weft.runtime.roll_call import Gathering, RollCall
from weft.runtime.torch_registration import device_types

# Untyped: torch has two signatures for each method, and calls the older ones here.
_ProcessGroup: Any = dist.ProcessGroup
_Backend: Any = torch._C._distributed_c10d.Backend


class _Half(_Backend):  # type: ignore[misc]
    """What torch's C++ half of a group takes for its backend, so that it has a name there. It serves no call."""

    def getBackendName(self) -> str:
        return "weft"

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


class WeftGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are Weft's. Threads: one caller at a time, as with every process group."""

    # Abilities that torch asks a backend for. Sends and receives are not batched.
    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False
    supports_tensor_alloc = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._owner = _core.OwnerProcess()
        self._rank, self._size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._store = store
        self._splits = 0  # calls of split_group(), alike on all ranks
        self._join_torch()
        self._roll = RollCall(self._part_of_store("processes"), rank)
        self._order = CallsInOrder("weft-collectives")
        self._together: list[Any] | None = None  # works of calls that torch wants together
        self._left: deque[Pending] = deque(maxlen=LEFT)
        self._name: str | None = None
        self._barrier = MonitoredBarrier(self._part_of_store("monitored"), rank, size)
        self._calls: dict[str, Collectives] = {}
        self._p2p: dict[str, Collectives] = {}
        self._pairs(torch.empty(0))
        self._own = OwnMessages(rank, self._timeout_s)
        self._senders = PeerThreads("weft-send")
        self._receivers = PeerThreads("weft-recv")

    def check_owner(self) -> None:
        """Raises: weft.Error in a child that was forked from the process of this rank."""
        self._owner.check("process group")

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "weft"

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        """The name that torch gave this group."""
        if self._name is None:
            self._name = str(dist.distributed_c10d._world.pg_names[self])
        return self._name

    def _join_torch(self) -> None:
        """Give torch's C++ half what names and devices it asks a group for, where its backends can be Python's."""
        try:
            half = _Half(self._rank, self._size)
        except TypeError:  # an older torch, which asks for none
            return
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in self._device_types:
            self._register_backend(device, kind, half)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    @property
    def options(self) -> Any:
        """What torch asks a backend for: its timeout."""
        return _Backend.Options("weft", timedelta(seconds=self._timeout_s))

    def get_group_store(self) -> Any:
        return self._store

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> WeftGroup | None:
        """Return a group of some of this group's ranks, in that order; None on the others. All ranks of the group call.

        opts, device_types: nothing depends on them.
        """
        self._splits += 1
        if self._rank not in new_ranks:
            return None
        name = f"split/{self._splits}/{'-'.join(map(str, new_ranks))}"
        group = WeftGroup(
            self._part_of_store(name),
            *(new_ranks.index(self._rank), len(new_ranks)),
            timeout or timedelta(seconds=self._timeout_s),
        )
        group._set_group_name(group_name or f"{self.group_name}/{name}")
        group._set_group_desc(group_desc or "undefined")
        return group

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Connect all ranks now; torch calls it where a group is made for a device."""
        self._of(torch.empty(0, device=device))

    def _get_backend(self, device: torch.device) -> WeftGroup:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin calls that torch wants together: each is made at once."""
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """Return work that ends when all calls since the start have, and with the first error of theirs."""
        works, self._together = self._together, None
        if not works:
            return finished_work(None)
        return self._in_order("coalesced", lambda: all(work.wait() for work in works), None)

    def shutdown(self) -> None:
        """Wait for calls under way, for at most one deadline more; torch's destroy_process_group() calls it."""
        if not self._owner.is_this:  # their threads are not in a forked child
            return
        self._order.end()
        self._senders.end()
        self._receivers.end()

    # -- the communicators, made at the first call on a device, which every rank makes -----------------------------

    def _of(self, tensor: torch.Tensor, timeout_s: float | None = None) -> Collectives:
        device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
        kind = tensor.device.type
        if kind not in self._calls:
            self._calls[kind] = self._make(device, f"calls/{kind}", timeout_s)
            self._pairs(tensor)
        return self._calls[kind]

    def _pairs(self, tensor: torch.Tensor) -> Collectives:
        """Return what sends and receives use. Making it is collective, so on CUDA the first collective call does."""
        kind = tensor.device.type
        if kind not in self._p2p:
            device = "cpu" if kind == "cpu" else f"cuda:{tensor.device.index}"
            self._p2p[kind] = self._make(device, f"pairs/{kind}")
        return self._p2p[kind]

    def _make(self, device: str, name: str, timeout_s: float | None = None) -> Collectives:
        """Return new collectives. Ranks wait ``timeout_s`` for each other to come, then the group's time."""
        bootstrap = Gathering(self._part_of_store(name), self._roll, self._rank, self._size)
        if timeout_s is not None:
            bootstrap.all_gather(b"", timeout_s)
        return Collectives(connect(None, bootstrap, device, self._timeout_s))

    def _part_of_store(self, name: str) -> Any:
        return torch._C._distributed_c10d.PrefixStore(f"weft/{name}", self._store)

    # -- collectives -------------------------------------------------------------------------------------------

    @collective("all_reduce")
    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                add_up(tensor, asked_of(opts, tensor), self._of)
            else:
                in_place(tensor, partial(self._sum_of_all, asked=asked_of(opts, tensor)))
        return list(tensors)

    def _sum_of_all(self, tensor: torch.Tensor, asked: Asked) -> None:
        self._of(tensor).all_reduce(asked.scaled(tensor), asked.op, out=tensor)

    allreduce_coalesced = allreduce

    @collective("broadcast")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            in_place(tensor, lambda t: self._of(t).broadcast(t, opts.rootRank))
        return list(tensors)

    @collective("reduce")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            in_place(tensor, partial(self._sum_at, root=opts.rootRank, asked=asked_of(opts, tensor)))
        return list(tensors)

    def _sum_at(self, tensor: torch.Tensor, root: int, asked: Asked) -> None:
        given = asked.scaled(tensor)
        self._of(tensor).reduce(given, root, asked.op)
        if self._rank == root:
            copy_into(tensor, given)

    @collective("all_gather", 1)
    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            check_parts("outputs", parts, self._size, tensor, self._rank)
            if not are_even(parts):
                gather_uneven(parts, tensor, self._rank, self._of)
                continue
            given = real_of(tensor).contiguous()
            gathered = self._of(given).all_gather(given.view(-1))
            for part, row in zip(parts, gathered, strict=True):
                real_of(part).copy_(row.view(real_of(part).shape))
        return [list(parts) for parts in outputs]

    @collective("all_gather", 1)
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather several tensors of one type at once; ``outputs`` has a list of them for each rank."""
        given = torch.cat([real_of(part).reshape(-1) for part in inputs])
        gathered = self._of(given).all_gather(given)
        for parts, row in zip(outputs, gathered, strict=True):
            sizes = [real_of(part).numel() for part in parts]
            for part, piece in zip(parts, row.split(sizes), strict=True):
                real_of(part).copy_(piece.view(real_of(part).shape))
        return [list(parts) for parts in outputs]

    @collective("all_gather_into_tensor", 1)
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        self._gather_into(output, tensor)
        return output

    def _gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        given = real_of(tensor).contiguous().view(-1)
        into(output, lambda out: self._of(given).all_gather(given, out=out))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, tensor, opts)

    @collective("all_gather_into_tensor", 1)
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._gather_into(output, tensor)
        return list(outputs)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    @collective("reduce_scatter_tensor", 1)
    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        self._scatter_sums(output, tensor, opts)
        return output

    def _scatter_sums(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> None:
        asked = asked_of(opts, output)
        given = asked.scaled(real_of(tensor).contiguous()).view(self._size, -1)
        into(output, lambda out: self._of(given).reduce_scatter(given, asked.op, out=out))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)

    @collective("reduce_scatter", 1)
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            check_parts("inputs", parts, self._size, output, self._rank)
            if not are_even(parts):
                reduce_scatter_uneven(output, parts, self._rank, asked_of(opts, output), self._of)
                continue
            given = torch.stack([real_of(part).contiguous() for part in parts])
            self._scatter_sums(output, given, opts)
        return list(outputs)

    @collective("reduce_scatter_tensor", 1)
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scatter_sums(output, tensor, opts)
        return list(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    @collective("all_to_all", 1)
    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        given = real_of(tensor).contiguous()
        splits: dict[str, Any] = {
            "input_splits": input_splits or None,
            "output_splits": output_splits or None,
        }
        into(output, lambda out: self._of(given).all_to_all(given, out=out, **splits))
        return output

    def all_to_all_single(self, *args: Any, **options: Any) -> Any:
        return self.alltoall_base(*args, **options)

    @collective("all_to_all", 1)
    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        given = torch.cat([real_of(part).contiguous().view(-1) for part in inputs])
        sizes_out = [real_of(part).numel() for part in outputs]
        found = self._of(given).all_to_all(
            given, input_splits=[real_of(part).numel() for part in inputs], output_splits=sizes_out
        )
        for part, piece in zip(outputs, found.split(sizes_out), strict=True):
            real_of(part).copy_(piece.view(real_of(part).shape))
        return list(outputs)

    @collective("gather", 1)
    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        if self._rank == opts.rootRank:
            check_parts("outputs", outputs[0], self._size, inputs[0])
        given = real_of(inputs[0]).contiguous()
        found = self._of(given).gather(given.view(-1), opts.rootRank)
        if found is not None:
            for part, row in zip(outputs[0], found, strict=True):
                real_of(part).copy_(row.view(real_of(part).shape))
        return [list(parts) for parts in outputs]

    @collective("scatter", 1)
    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        given = None
        if self._rank == opts.rootRank:
            check_parts("inputs", inputs[0], self._size, outputs[0])
            given = torch.cat([real_of(part).contiguous().view(-1) for part in inputs[0]])
        into(outputs[0], lambda out: self._of(out).scatter(given, out, opts.rootRank))
        return list(outputs)

    @collective("barrier", 0)
    def barrier(self, opts: Any = None) -> Any:
        device = "cuda" if opts is not None and getattr(opts, "device_ids", None) else "cpu"
        token = torch.zeros(1, device=device)
        timeout_s = self._own_timeout_s(opts)
        try:
            calls = self._of(token, timeout_s)
            with calls.within(timeout_s):
                calls.all_reduce(token)
            if device == "cuda":
                torch.cuda.current_stream().synchronize()
        except PeerLost as error:
            wait_ms = round((timeout_s or self._timeout_s) * 1000)
            raise PeerLost(f"barrier: Timed out waiting {wait_ms}ms: {error}") from error
        return None

    @staticmethod
    def _own_timeout_s(opts: Any) -> float | None:
        """Return the bound that a call was given for itself; None: the group's."""
        given = getattr(opts, "timeout", None)
        return given.total_seconds() if given is not None and given > timedelta(0) else None

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 says who stayed away.

        Raises: PeerLost on rank 0 past the timeout, naming the first rank that is missing, or all with
            ``wait_all_ranks``; on the others when rank 0 gave up, or did not come.
        """
        self.check_owner()
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._barrier.wait(limit, wait_all_ranks)

    # -- point to point ----------------------------------------------------------------------------------------

    @outside_of_dynamo
    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Any:
        self.check_owner()
        given = real_of(tensors[0]).contiguous()
        send = self._own.send if dst == self._rank else partial(self._pairs(given).send, dst=dst)
        return self._in_thread("send", self._senders.of(dst), given, lambda: send(given, tag=tag))

    @outside_of_dynamo
    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Any:
        self.check_owner()
        target = self._target(tensors)
        recv = self._own.recv if src == self._rank else partial(self._pairs(target).recv, src=src)
        work = self._in_thread("recv", self._receivers.of(src), target, lambda: recv(target, tag=tag))
        work.source = src
        return work

    @outside_of_dynamo
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whichever other rank sends first; the work's _source_rank() says who it was."""
        self.check_owner()
        target = self._target(tensors)
        calls = self._pairs(target)
        is_known = threading.Event()  # the work, before it is written to

        def take() -> None:
            is_known.wait()
            work.source = calls.recv_any(target, tag)

        work = self._in_thread("recvAnySource", self._receivers.exclusive(), target, take)
        is_known.set()
        return work

    @staticmethod
    def _target(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        target = real_of(tensors[0])
        if not target.is_contiguous():
            raise invalid(
                "tensor", f"strides {tuple(target.stride())}", "a contiguous tensor to receive into"
            )
        return target

    def _in_thread(
        self,
        name: str,
        submit: Callable[[Callable[[], object]], None],
        tensor: torch.Tensor,
        act: Callable[[], object],
    ) -> Pending:
        """Run a send or receive in a thread of its peer, which ``submit`` hands it to, and return its work."""
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        event = Event(name, tensor) if profilers._profiler_enabled() else None

        def call() -> list[torch.Tensor]:
            if stream is None:
                act()
            else:
                with torch.cuda.stream(torch.cuda.Stream(tensor.device)) as own:
                    own.wait_stream(stream)
                    act()
                    own.synchronize()
            return [tensor]

        future: Any = torch.futures.Future()
        submit(lambda: run_into(future, call, event))
        return Pending(f"rank {self._rank}, {name}", future)

    def _in_order(self, name: str, call: Callable[[], Any], event: Event | None) -> Pending:
        """Run a collective of CPU tensors after those before it, beside its caller, and return its work."""
        future: Any = torch.futures.Future()
        told = f"rank {self._rank}, {name}"
        work = Pending(told, future, self._left)
        call = in_modes_of_now(call)

        def run(lost: Exception | None) -> Exception | None:  # without the work, which knows who lets it go
            if lost is not None:
                lost = PeerLost(f"{told}: not run, as one before it ended so: {lost}")
            return run_into(future, call, event, lost)

        self._order.in_thread(run)
        if self._together is not None:
            self._together.append(work)
        return work
