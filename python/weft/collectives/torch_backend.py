# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "weft".

    import weft.collectives.torch_backend                       # or weft.collectives.register_torch_backend()
    torch.distributed.init_process_group(backend="weft")

It serves every collective that DDP and FSDP call, on CPU and CUDA tensors of ranks that map each other's memory. On the
CPU a collective is finished when the call returns; on CUDA it is in the current stream's order. Sends and receives run
beside each other, so batched ones may come in any order. Reductions: SUM, PRODUCT, MIN, MAX, AVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.collectives.calls import Collectives
from weft.errors import Error, invalid
from weft.runtime.bootstrap import _Store
from weft.runtime.communicator import connect
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


def _op(options: Any) -> str:
    given = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    for known, name in _OPS.items():
        if given == known:
            return name
    raise invalid("op", given, "SUM, PRODUCT, MIN, MAX or AVG")


def _work(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class _Pending(torch._C._distributed_c10d.Work):
    """A send or receive under way. torch's own work of a future forgets what went wrong when it is waited for."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future


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
        self._calls: dict[str, Collectives] = {}
        self._p2p: dict[str, Collectives] = {}
        self._pairs(torch.empty(0))
        self._senders = ThreadPoolExecutor(1, "weft-send")
        self._receivers = ThreadPoolExecutor(1, "weft-recv")

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "weft"

    @property
    def group_name(self) -> str:
        """The name that torch gave this group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    supports_coalescing = False  # what torch asks a backend before it batches sends and receives

    def _get_backend(self, device: torch.device) -> WeftGroup:
        return self

    # -- the communicators, made at the first call on a device, which every rank makes -----------------------------

    def _of(self, tensor: torch.Tensor) -> Collectives:
        device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index}"
        kind = tensor.device.type
        if kind not in self._calls:
            self._calls[kind] = self._make(device, f"calls/{kind}")
            self._pairs(tensor)
        return self._calls[kind]

    def _pairs(self, tensor: torch.Tensor) -> Collectives:
        """Return what sends and receives use. Making it is collective, so on CUDA the first collective call does."""
        kind = tensor.device.type
        if kind not in self._p2p:
            device = "cpu" if kind == "cpu" else f"cuda:{tensor.device.index}"
            self._p2p[kind] = self._make(device, f"pairs/{kind}")
        return self._p2p[kind]

    def _make(self, device: str, name: str) -> Collectives:
        bootstrap = _Store(
            torch._C._distributed_c10d.PrefixStore(f"weft/{name}", self._store), self._rank, self._size
        )
        return Collectives(connect(None, bootstrap, device, self._timeout_s))

    # -- collectives -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            self._in_place(tensor, lambda t: self._of(t).all_reduce(t, _op(opts)))
        return _work(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self._in_place(tensor, lambda t: self._of(t).broadcast(t, opts.rootRank))
        return _work(list(tensors))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self._in_place(tensor, lambda t: self._of(t).reduce(t, opts.rootRank, _op(opts)))
        return _work(list(tensors))

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            given = _real(tensor).contiguous()
            gathered = self._of(given).all_gather(given.view(-1))
            for part, row in zip(parts, gathered, strict=True):
                _real(part).copy_(row.view(_real(part).shape))
        return _work([list(parts) for parts in outputs])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        given = _real(tensor).contiguous().view(-1)
        self._into(output, lambda out: self._of(given).all_gather(given, out=out))
        return _work(output)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, tensor, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return _work(list(outputs))

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        given = _real(tensor).contiguous().view(self._size, -1)
        self._into(output, lambda out: self._of(given).reduce_scatter(given, _op(opts), out=out))
        return _work(output)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            given = torch.stack([_real(part).contiguous() for part in parts])
            self._reduce_scatter_base(output, given, opts)
        return _work(list(outputs))

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _work(list(outputs))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

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
        return _work(output)

    def all_to_all_single(self, *args: Any, **options: Any) -> Any:
        return self.alltoall_base(*args, **options)

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
        return _work(list(outputs))

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        given = _real(inputs[0]).contiguous()
        found = self._of(given).gather(given.view(-1), opts.rootRank)
        if found is not None:
            for part, row in zip(outputs[0], found, strict=True):
                _real(part).copy_(row.view(_real(part).shape))
        return _work([list(parts) for parts in outputs])

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        given = None
        if self._rank == opts.rootRank:
            given = torch.cat([_real(part).contiguous().view(-1) for part in inputs[0]])
        self._into(outputs[0], lambda out: self._of(out).scatter(given, out, opts.rootRank))
        return _work(list(outputs))

    def barrier(self, opts: Any = None) -> Any:
        device = "cuda" if opts is not None and getattr(opts, "device_ids", None) else "cpu"
        token = torch.zeros(1, device=device)
        self._of(token).all_reduce(token)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return _work(None)

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Any:
        given = _real(tensors[0]).contiguous()
        return self._beside(self._senders, given, lambda calls: calls.send(given, dst))

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Any:
        target = _real(tensors[0])
        if not target.is_contiguous():
            raise invalid(
                "tensor", f"strides {tuple(target.stride())}", "a contiguous tensor to receive into"
            )
        return self._beside(self._receivers, target, lambda calls: calls.recv(target, src))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        raise Error("backend weft: recv needs a source rank", "unsupported")

    def _beside(
        self, thread: ThreadPoolExecutor, tensor: torch.Tensor, act: Callable[[Collectives], object]
    ) -> Any:
        """Run a send or receive in a thread of its own and return its work."""
        calls = self._pairs(tensor)
        future: Any = torch.futures.Future()
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

        def run() -> None:
            try:
                if stream is None:
                    act(calls)
                else:
                    with torch.cuda.stream(torch.cuda.Stream(tensor.device)) as own:
                        own.wait_stream(stream)
                        act(calls)
                        own.synchronize()
                future.set_result([tensor])
            except Exception as error:  # handed to whoever waits
                future.set_exception(error)

        thread.submit(run)
        return _Pending(future)

    # -- parts -------------------------------------------------------------------------------------------------

    @staticmethod
    def _in_place(tensor: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
        real = _real(tensor)
        if real.is_contiguous():
            act(real)
            return
        dense = real.contiguous()
        act(dense)
        real.copy_(dense)

    @staticmethod
    def _into(output: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
        real = _real(output)
        if real.is_contiguous():
            act(real)
            return
        dense = torch.empty_like(real, memory_format=torch.contiguous_format)
        act(dense)
        real.copy_(dense)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> WeftGroup:
    return WeftGroup(store, rank, size, timeout)


def register() -> None:
    """Make "weft" known to torch.distributed; once is enough."""
    if "weft" not in getattr(dist.Backend, "backend_list", []):
        dist.Backend.register_backend("weft", _create, devices=["cpu", "cuda"])


register()
