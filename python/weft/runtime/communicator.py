# SPDX-License-Identifier: Apache-2.0
"""Ranks that work together, and the memory they share.

    comm = weft.Communicator(group, device="cuda:0", timeout_s=30)
    window = weft.Window(comm, 1 << 20)
    window.tensor(peer, (4, 1024), torch.bfloat16).copy_(rows)     # a store into the peer's memory
    comm.all_reduce(gradients, "average")                          # and the other collectives
    comm.barrier()

Threads: collective calls (making, growing, ``barrier``) one at a time per communicator and in the same order
on all ranks; everything else from any thread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft import _core
from weft.errors import invalid, shortened
from weft.runtime.bootstrap import Bootstrap, find_bootstrap
from weft.runtime.tensors import index_of
from weft.runtime.watching import communicator_made

if TYPE_CHECKING:
    import torch

    from weft.collectives.calls import Collectives
    from weft.collectives.ir import Algorithm


def device_name(device: Any) -> str:
    """Return "cpu" or "cuda:N" for what users pass as a device.

    Args:
        device: a tensor (its device), a torch.device, such a name, or None: torch's current GPU where torch is
            loaded and has one, else the CPU. "cuda" alone is torch's current GPU.
    """
    if device is None:
        torch_loaded = sys.modules.get("torch")
        device = "cuda" if torch_loaded is not None and torch_loaded.cuda.is_available() else "cpu"
    name = str(getattr(device, "device", device))
    if name != "cuda":
        return name
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def connect(group: Any, comm: Any, device: Any, timeout_s: float, transport: str = "") -> Any:
    """Return a core communicator of the ranks of ``group`` or, if that is None, of ``comm``. Collective.

    Args:
        group, comm: what Communicator takes; a Communicator on the same device is used as it is.
        device: see device_name. timeout_s: 0 takes WEFT_TIMEOUT_S. transport: "" takes WEFT_TRANSPORT.
    """
    given = comm if group is None else group
    if isinstance(given, Communicator):
        if given.device == device_name(device):
            return given.core
        given = given.bootstrap
    core = _core.Communicator.create(find_bootstrap(given), device_name(device), timeout_s, transport)
    communicator_made(core)
    return core


class Communicator:
    """A group of ranks, one device each, and the transport from each to each. Making one is collective.

    Args:
        group: a torch process group (any backend), an mpi4py communicator, a Bootstrap, another Communicator,
            or None: torch's default group if there is one, else what the launcher (torchrun, mpirun, srun)
            has set, else a single rank.
        device: what this rank computes on: a tensor on it, a torch.device or a name; None is torch's current GPU where
            torch is loaded and has one, else the CPU.
        timeout_s: bound of every wait for a peer, in seconds; None takes WEFT_TIMEOUT_S.
        transport: names from ``weft info`` with commas between, or "auto"; None takes WEFT_TRANSPORT.
    Raises: Error when the ranks disagree or a rank cannot be reached, with each transport's reason; PeerLost,
        naming the ranks that stayed away.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        device: Any = None,
        timeout_s: float | None = None,
        transport: str | None = None,
    ) -> None:
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
            raise invalid("timeout_s", timeout_s, "a number above 0, or None")
        if transport is not None and not isinstance(transport, str):
            raise invalid("transport", shortened(transport), "a name that weft info prints, or None")
        self.bootstrap: Bootstrap = find_bootstrap(
            group.bootstrap if isinstance(group, Communicator) else group
        )
        self.core = _core.Communicator.create(
            self.bootstrap, device_name(device), timeout_s or 0.0, transport or ""
        )
        self._collectives: Collectives | None = None
        communicator_made(self.core)

    @property
    def rank(self) -> int:
        """This process among ``size``."""
        return int(self.core.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.core.size)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return str(self.core.device)

    @property
    def timeout_s(self) -> float:
        """Bound of every wait for a peer, in seconds."""
        return float(self.core.timeout_s)

    @property
    def nodes(self) -> list[int]:
        """The node of each rank; ranks with the same number share one."""
        return [facts["node"] for facts in self.core.facts]

    def transport_to(self, peer: int) -> str | None:
        """Return the name of the transport to ``peer``; None for this rank itself."""
        rank = index_of(peer)
        if rank is None or not 0 <= rank < self.size:
            raise invalid("peer", shortened(peer), f"0 to {self.size - 1}")
        name = self.core.transport_to(rank)
        return None if name is None else str(name)

    def barrier(self) -> None:
        """Wait until every rank has called this; says nothing about work queued on a GPU.

        Raises: PeerLost.
        """
        self.core.barrier()

    # -- collectives on torch tensors: weft.collectives.calls has all details and errors ------------------------------

    @property
    def collectives(self) -> Collectives:
        """The object behind the calls below, with more options. Made at the first use, which is collective."""
        if self._collectives is None:
            from weft.collectives.calls import Collectives

            self._collectives = Collectives(self.core, self.timeout_s)
        return self._collectives

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks, in place or into ``out`` (same shape and dtype); return the result.

        Args:
            tensor: contiguous, on this communicator's device; the same dtype and number of elements on all ranks.
            op: sum, product, min, max or average; of integers and torch.bool also band, bor or bxor.
            algorithm: one of your own, in the place of the chosen one: from a program's compile() or from
                weft.collectives.load(). The calls below have it, too.
        Collective, as all that follow. On CUDA in the current stream's order, and may be captured; on the CPU finished
        on return. One caller at a time. Raises: Error for a wrong argument, before anything moves; PeerLost.
        """
        return self.collectives.all_reduce(tensor, op, out=out, algorithm=algorithm)

    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Return all ranks' tensors as [ranks, *shape], in rank order; ``out`` has that many elements."""
        return self.collectives.all_gather(tensor, out=out, algorithm=algorithm)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks; return part ``rank`` of the first dimension, which divides by the ranks."""
        return self.collectives.reduce_scatter(tensor, op, out=out, algorithm=algorithm)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Send part q of ``tensor`` to rank q; return the parts that came, in rank order.

        Parts are equal shares of the first dimension, or have ``input_splits`` rows each; ``output_splits`` then says
        how many rows come from each rank.
        """
        return self.collectives.all_to_all(
            tensor, out=out, input_splits=input_splits, output_splits=output_splits, algorithm=algorithm
        )

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, algorithm: Algorithm | None = None
    ) -> torch.Tensor:
        """Overwrite ``tensor`` with rank ``root``'s; return it."""
        return self.collectives.broadcast(tensor, root, algorithm=algorithm)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks into rank ``root``'s ``tensor``, in place; return it. Other ranks' tensors stay."""
        return self.collectives.reduce(tensor, root, op, algorithm=algorithm)

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor | None:
        """Return all ranks' tensors as [ranks, *shape] on rank ``root``, None elsewhere."""
        return self.collectives.gather(tensor, root, out=out, algorithm=algorithm)

    def scatter(
        self,
        tensor: torch.Tensor | None,
        out: torch.Tensor,
        root: int = 0,
        *,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Fill ``out`` with part ``rank`` of rank ``root``'s ``tensor`` and return it; other ranks pass None."""
        return self.collectives.scatter(tensor, out, root, algorithm=algorithm)

    def send_recv(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Pass ``tensor`` to the next rank; return what the previous one passed."""
        return self.collectives.send_recv(tensor, out=out, algorithm=algorithm)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to rank ``dst``, which calls recv(); the other ranks do nothing. The first use of a communicator's
        collectives must not be a send or recv, unless all ranks take part: see ``collectives``."""
        self.collectives.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill ``tensor`` with what rank ``src`` sends; return it."""
        return self.collectives.recv(tensor, src)

    def __repr__(self) -> str:
        return f"weft.Communicator(rank {self.rank} of {self.size}, {self.device})"


class Window:
    """Memory allocated alike on every rank, so that (rank, offset) names a byte. Making one is collective.

    Args:
        communicator: its ranks.
        num_bytes: at least 1, the same on all ranks; rounded up to pages. Zero-filled.
    Raises: Error, the same on all ranks, when sizes differ or a rank cannot allocate; PeerLost.
    A window must outlive the kernels that use it; tensors from ``tensor`` keep it alive.
    """

    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        self.communicator = communicator
        self.core = _core.Window.create(communicator.core, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size on each rank."""
        return int(self.core.bytes)

    def address(self, rank: int) -> int:
        """Return where ``rank``'s window starts for this process; it never changes."""
        return int(self.core.base(rank))

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a view of ``rank``'s memory, on this rank's device; it keeps the window alive.

        Args:
            shape, dtype: of the view, row-major. offset: its first byte in the window, aligned for ``dtype``.
        Reading and writing are plain loads and stores: order them with ``Communicator.barrier`` or signals.
        Raises: Error when it does not lie within the window.
        """
        import torch
        from torch.utils.dlpack import from_dlpack

        num_bytes = math.prod(shape) * dtype.itemsize
        if offset % dtype.itemsize:
            raise invalid("offset", offset, f"a multiple of {dtype.itemsize} for {dtype}")
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.communicator.device)
        view: torch.Tensor = from_dlpack(self.core.view(rank, offset, num_bytes))
        return view.view(dtype).view(shape)

    def grow(self, num_bytes: int) -> None:
        """Make the window at least ``num_bytes`` large; contents and addresses stay. Collective.

        Raises: as making one; after an error the window is as it was.
        """
        self.core.grow(num_bytes)

    def __repr__(self) -> str:
        return f"weft.Window({self.num_bytes} bytes on each of {self.communicator.size} ranks)"


__all__ = ["Communicator", "Window", "connect", "device_name"]
