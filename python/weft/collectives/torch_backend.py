# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "weft".

    import weft.collectives.torch_backend                       # or weft.collectives.register_torch_backend()
    torch.distributed.init_process_group(backend="weft")

It serves every collective that DDP and FSDP call, on CPU and CUDA tensors of ranks that map each other's memory. On the
CPU a collective is finished when the call returns; on CUDA it is in the current stream's order. Sends and receives run
beside each other, so batched ones may come in any order; messages from one rank to another come in the order in which
they were sent, and a receive with another tag fails on both ranks. Reductions: SUM, PRODUCT, MIN, MAX, AVG; SUM of
sparse COO tensors.
Profilers see each call as an event "weft:all_reduce" and so on, with the shapes of what was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.collectives.calls import Collectives
from weft.collectives.monitored_barrier import MonitoredBarrier
from weft.collectives.peer_threads import PeerThreads
from weft.collectives.torch_work import Event, Pending, finished_work, profilers, seen_as
from weft.errors import PeerLost, invalid
from weft.runtime.communicator import connect
from weft.runtime.roll_call import Gathering, RollCall
from weft.runtime.tensors import lacking_memory

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "average",
}


# Untyped: torch has two signatures for each method, and calls the older ones here.
_ProcessGroup: Any = dist.ProcessGroup


def _op(options: Any, tensor: torch.Tensor) -> str:
    """Return the name of the reduction that a call's options ask for, of such a tensor."""
    given = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    for known, name in _OPS.items():
        if given == known:
            if tensor.is_complex() and name not in ("sum", "average"):  # of each part by itself
                raise invalid("op", name, f"SUM or AVG of {tensor.dtype}")
            return name
    raise invalid("op", given, "SUM, PRODUCT, MIN, MAX or AVG")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory in a type that collectives have. Raises: Error for what has no memory here."""
    if not isinstance(tensor, torch.Tensor):
        raise invalid("tensor", type(tensor).__name__, "a torch.Tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise invalid("tensor.device", tensor.device, "cpu or cuda")
    if tensor.layout is not torch.strided:
        raise invalid("tensor", tensor.layout, "a strided tensor")
    if lack := lacking_memory(tensor):
        raise invalid("tensor", lack, "a tensor with all its memory")
    if tensor.is_complex():
        if tensor.is_conj():
            raise invalid("tensor", "a conjugated view", "a tensor, such as resolve_conj() returns")
        return torch.view_as_real(tensor)
    return tensor


class WeftGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are Weft's. Threads: one caller at a time, as with every process group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._store = store
        self._roll = RollCall(self._part_of_store("processes"), rank)
        self._is_seen = False  # by a profiler
        self._name: str | None = None
        self._barrier = MonitoredBarrier(self._part_of_store("monitored"), rank, size)
        self._calls: dict[str, Collectives] = {}
        self._p2p: dict[str, Collectives] = {}
        self._pairs(torch.empty(0))
        self._senders = PeerThreads("weft-send")
        self._receivers = PeerThreads("weft-recv")

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

    @property
    def _device_types(self) -> list[torch.device]:
        # torch takes a group that has devices before it is listed for one of its own, which this is not.
        is_listed = self in dist.distributed_c10d._world.pg_names
        return [torch.device("cpu"), torch.device("cuda")] if is_listed else []

    supports_coalescing = False  # what torch asks a backend before it batches sends and receives

    def _get_backend(self, device: torch.device) -> WeftGroup:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin calls that torch wants together: each is made at once."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return finished_work(None)

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

    @seen_as("all_reduce")
    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                self._sparse_sum(tensor, opts)
            else:
                op = _op(opts, tensor)
                self._in_place(tensor, lambda t, op=op: self._of(t).all_reduce(t, op))
        return finished_work(list(tensors))

    @seen_as("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    @seen_as("broadcast")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self._in_place(tensor, lambda t: self._of(t).broadcast(t, opts.rootRank))
        return finished_work(list(tensors))

    @seen_as("reduce")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            op = _op(opts, tensor)
            self._in_place(tensor, lambda t, op=op: self._of(t).reduce(t, opts.rootRank, op))
        return finished_work(list(tensors))

    @seen_as("all_gather", 1)
    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            given = _real(tensor).contiguous()
            gathered = self._of(given).all_gather(given.view(-1))
            for part, row in zip(parts, gathered, strict=True):
                _real(part).copy_(row.view(_real(part).shape))
        return finished_work([list(parts) for parts in outputs])

    @seen_as("all_gather", 1)
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather several tensors of one type at once; ``outputs`` has a list of them for each rank."""
        given = torch.cat([_real(part).reshape(-1) for part in inputs])
        gathered = self._of(given).all_gather(given)
        for parts, row in zip(outputs, gathered, strict=True):
            sizes = [_real(part).numel() for part in parts]
            for part, piece in zip(parts, row.split(sizes), strict=True):
                _real(part).copy_(piece.view(_real(part).shape))
        return finished_work([list(parts) for parts in outputs])

    @seen_as("all_gather_into_tensor", 1)
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        given = _real(tensor).contiguous().view(-1)
        self._into(output, lambda out: self._of(given).all_gather(given, out=out))
        return finished_work(output)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, tensor, opts)

    @seen_as("all_gather_into_tensor", 1)
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return finished_work(list(outputs))

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    @seen_as("reduce_scatter_tensor", 1)
    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        op = _op(opts, output)
        given = _real(tensor).contiguous().view(self._size, -1)
        self._into(output, lambda out: self._of(given).reduce_scatter(given, op, out=out))
        return finished_work(output)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)

    @seen_as("reduce_scatter", 1)
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            given = torch.stack([_real(part).contiguous() for part in parts])
            self._reduce_scatter_base(output, given, opts)
        return finished_work(list(outputs))

    @seen_as("reduce_scatter_tensor", 1)
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return finished_work(list(outputs))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    @seen_as("all_to_all", 1)
    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        given = _real(tensor).contiguous()
        splits: dict[str, Any] = {
            "input_splits": input_splits or None,
            "output_splits": output_splits or None,
        }
        self._into(output, lambda out: self._of(given).all_to_all(given, out=out, **splits))
        return finished_work(output)

    def all_to_all_single(self, *args: Any, **options: Any) -> Any:
        return self.alltoall_base(*args, **options)

    @seen_as("all_to_all", 1)
    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        given = torch.cat([_real(part).contiguous().view(-1) for part in inputs])
        sizes_out = [_real(part).numel() for part in outputs]
        found = self._of(given).all_to_all(
            given, input_splits=[_real(part).numel() for part in inputs], output_splits=sizes_out
        )
        for part, piece in zip(outputs, found.split(sizes_out), strict=True):
            _real(part).copy_(piece.view(_real(part).shape))
        return finished_work(list(outputs))

    @seen_as("gather", 1)
    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        given = _real(inputs[0]).contiguous()
        found = self._of(given).gather(given.view(-1), opts.rootRank)
        if found is not None:
            for part, row in zip(outputs[0], found, strict=True):
                _real(part).copy_(row.view(_real(part).shape))
        return finished_work([list(parts) for parts in outputs])

    @seen_as("scatter", 1)
    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        given = None
        if self._rank == opts.rootRank:
            given = torch.cat([_real(part).contiguous().view(-1) for part in inputs[0]])
        self._into(outputs[0], lambda out: self._of(out).scatter(given, out, opts.rootRank))
        return finished_work(list(outputs))

    @seen_as("barrier", 0)
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
        return finished_work(None)

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
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._barrier.wait(limit, wait_all_ranks)

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Any:
        given = _real(tensors[0]).contiguous()
        return self._beside("send", self._senders.of(dst), given, lambda calls: calls.send(given, dst, tag))

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Any:
        target = self._target(tensors)
        work = self._beside(
            "recv", self._receivers.of(src), target, lambda calls: calls.recv(target, src, tag)
        )
        work.source = src
        return work

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first; the work's _source_rank() says who it was."""
        target = self._target(tensors)

        is_known = threading.Event()  # the work, before it is written to

        def take(calls: Collectives) -> None:
            is_known.wait()
            work.source = calls.recv_any(target, tag)

        work = self._beside("recvAnySource", self._receivers.alone(), target, take)
        is_known.set()
        return work

    @staticmethod
    def _target(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        target = _real(tensors[0])
        if not target.is_contiguous():
            raise invalid(
                "tensor", f"strides {tuple(target.stride())}", "a contiguous tensor to receive into"
            )
        return target

    def _beside(
        self,
        name: str,
        submit: Callable[[Callable[[], None]], None],
        tensor: torch.Tensor,
        act: Callable[[Collectives], object],
    ) -> Pending:
        """Run a send or receive in a thread of its peer, which ``submit`` hands it to, and return its work."""
        calls = self._pairs(tensor)
        future: Any = torch.futures.Future()
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        event = Event(name, tensor) if profilers._profiler_enabled() else None

        def run() -> None:
            try:
                if stream is None:
                    act(calls)
                else:
                    with torch.cuda.stream(torch.cuda.Stream(tensor.device)) as own:
                        own.wait_stream(stream)
                        act(calls)
                        own.synchronize()
            except Exception as error:  # handed to whoever waits
                end(error)
            else:
                end(None)

        def end(error: Exception | None) -> None:
            if event is not None:
                event.end_here()
            if error is None:
                future.set_result([tensor])
            else:
                future.set_exception(error)

        submit(run)
        return Pending(future)

    # -- parts -------------------------------------------------------------------------------------------------

    def _sparse_sum(self, tensor: torch.Tensor, opts: Any) -> None:
        """Add up sparse COO tensors of one form; each rank may have other elements, and as many as it likes."""
        if (op := _op(opts, tensor)) != "sum":
            raise invalid("op", op, "SUM, for sparse tensors")
        own = tensor.detach().coalesce()
        indices, values = own.indices(), _real(own.values())
        form = [own.sparse_dim(), *own.shape, *values.shape[1:]]
        facts = torch.tensor([values.shape[0], *_fixed(form)], device=tensor.device)
        counts = self._of(facts).all_gather(facts)
        if not (counts[:, 1:] == counts[0, 1:]).all():
            raise invalid(
                "tensor", f"shape {tuple(own.shape)}", "the same shape and sparse dimensions on all ranks"
            )
        sizes = counts[:, 0].tolist()
        all_indices = self._gather_rows(indices.t().contiguous(), sizes)
        all_values = self._gather_rows(values.contiguous(), sizes)
        if own.is_complex():
            all_values = torch.view_as_complex(all_values)
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, own.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    def _gather_rows(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return all ranks' rows, ``sizes[r]`` from rank r, in rank order."""
        most = max(sizes)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = self._of(padded).all_gather(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    def _in_place(tensor: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
        real = _real(tensor)
        if real.is_contiguous():
            act(real)
            return
        dense = real.contiguous()
        act(dense)
        with torch.no_grad():
            real.copy_(dense)

    @staticmethod
    def _into(output: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
        real = _real(output)
        if real.is_contiguous():
            act(real)
            return
        dense = torch.empty_like(real, memory_format=torch.contiguous_format)
        act(dense)
        with torch.no_grad():
            real.copy_(dense)


_FORM_NUMBERS = 16


def _fixed(form: Sequence[int]) -> list[int]:
    """Return the numbers of a sparse tensor's form, filled up to a length that all ranks have."""
    if len(form) > _FORM_NUMBERS:
        raise invalid("tensor", f"{len(form)} sizes", f"a sparse tensor of at most {_FORM_NUMBERS} sizes")
    return [*form, *[-1] * (_FORM_NUMBERS - len(form))]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> WeftGroup:
    return WeftGroup(store, rank, size, timeout)


def register() -> None:
    """Make "weft" known to torch.distributed; once is enough."""
    if "weft" not in getattr(dist.Backend, "backend_list", []):
        dist.Backend.register_backend("weft", _create, devices=["cpu", "cuda"])


register()
