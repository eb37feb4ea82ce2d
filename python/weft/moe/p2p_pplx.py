# SPDX-License-Identifier: Apache-2.0
"""``weft.P2PAllToAll`` with the calls of pplx-garden's class of that name; its drop-in re-exports this.

    all_to_all = P2PAllToAll(max_num_tokens=128, num_experts=256, expert_padding=16, ..., global_group=group)
    all_to_all.dispatch(counts, rows, None, x, None, indices, weights, do_recv=False)
    all_to_all.dispatch(counts, rows, None, x, None, indices, weights, do_send=False)
    all_to_all.combine(out, indices, weights, y)

A receive is that of the oldest send without one; a combine is that of the received dispatch with its indices, or of the
last one, and sums with its own weights.
docs/pplx_garden_compatibility.md says what is served. Threads: one caller at a time.
"""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import Error, invalid, quoted
from weft.moe import arguments, p2p
from weft.moe.p2p_phases import times_written

_IN_FLIGHT = 2


class ParallelGroup:
    """Ranks of torch.distributed. group: a process group; None is the default one."""

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        self.group = torch.distributed.group.WORLD if group is None else group
        self.device = torch.device("cpu") if device is None else device
        self.rank = int(torch.distributed.get_rank(self.group))
        self.size = int(torch.distributed.get_world_size(self.group))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier(group=self.group)

    def slice_by_count(self, count: int) -> ParallelGroup:
        """Return this rank's of ``count`` groups of consecutive ranks. Collective over the default group."""
        if count < 1 or self.size % count:
            raise invalid("count", count, f"a divisor of the {self.size} ranks")
        each = self.size // count
        ranks = torch.distributed.get_process_group_ranks(self.group)
        parts = [ranks[at : at + each] for at in range(0, self.size, each)]
        groups = [torch.distributed.new_group(part) for part in parts]
        return ParallelGroup(groups[self.rank // each], self.device)


class _Ranks:
    """A group with all_gather_object() as a bootstrap."""

    def __init__(self, group: Any) -> None:
        for name in ("rank", "size", "all_gather_object"):
            if not hasattr(group, name):
                raise invalid("global_group", quoted(group), "rank, size, all_gather_object() and barrier()")
        self._group = group
        self.rank, self.size = int(group.rank), int(group.size)

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give ``data`` to every rank."""
        return [bytes(of_rank) for of_rank in self._group.all_gather_object(data)]


class AllToAllKernel(abc.ABC):
    """What a program checks an all-to-all's type by."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Give everything back. Collective."""


class P2PAllToAll(AllToAllKernel):
    """pplx-garden's all-to-all. Arguments are those of its class; see docs/pplx_garden_compatibility.md."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        num_experts: int,
        expert_padding: int,
        hidden_dim: int,
        hidden_dim_scale: int | None,
        in_dtype: torch.dtype,
        out_dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        num_experts_per_token: int,
        nets_per_gpu: int,
        max_private_tokens: int | None,
        device: torch.device,
        dp_group: Any,
        node_group: Any,
        global_group: Any,
        imm_base: int = 0x80000000,
        transfer_engine: Any = None,
        worker_cpu: int | None = None,
        max_tokens_per_expert: int | None = None,
    ) -> None:
        self.weft = p2p.P2PAllToAll(
            _Ranks(global_group),
            max_num_tokens=max_num_tokens,
            num_experts=num_experts,
            hidden_dim=hidden_dim,
            num_experts_per_token=num_experts_per_token,
            in_dtype=in_dtype,
            out_dtype=out_dtype,
            hidden_dim_scale=hidden_dim_scale,
            scale_dtype=scale_dtype,
            expert_padding=expert_padding,
            max_tokens_per_expert=max_tokens_per_expert,
            dp_size=1 if dp_group is None else int(dp_group.size),
            max_in_flight=_IN_FLIGHT,
            device=device,
        )
        self._global_group = global_group
        self._sent: deque[p2p.P2PHandle] = deque()  # dispatches, and combines, whose receive is to come
        self._returning: deque[p2p.P2PHandle] = deque()
        self._received: deque[p2p.P2PHandle] = deque(maxlen=_IN_FLIGHT)  # the last few

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        weights: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Send tokens, receive rows, or both."""
        _check_phases(do_send, do_recv)
        if do_send:
            sending = (dp_x.contiguous(), indices.contiguous(), weights.contiguous(), dp_x_scale, bound_m)
            handle = self.weft.dispatch_send(*sending)
            handle.given = _Given(indices, weights)
            self._sent.append(handle)
        if do_recv:
            self._receive(
                _oldest(self._sent, "dispatch"), out_expert_num_tokens, out_expert_x, out_expert_x_scale
            )
            self._sent.popleft()

    def dispatch_async(self, **arguments: Any) -> P2PDispatchHandle:
        """Send tokens; the handle receives. Arguments are those of dispatch() without do_send and do_recv."""
        self.dispatch(**arguments, do_recv=False)
        return P2PDispatchHandle(self, self._sent.pop(), arguments)

    def combine(
        self,
        out_tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        expert_y: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        accumulate: bool = False,
    ) -> None:
        """Send results back, sum them, or both. Rows past bound_m of the dispatch get zeros."""
        _check_phases(do_send, do_recv)
        if do_send:
            handle = self._dispatched(indices)
            others: tuple[Tensor, ...] = ()
            if not handle.given.has_indices(indices):
                others = (weights.contiguous(), indices.contiguous())
            elif not handle.given.has_weights(weights):
                others = (weights.contiguous(),)
            self.weft.combine_send(self._results(expert_y), handle, *others)
            self._returning.append(handle)
        if do_recv:
            self._sum(_oldest(self._returning, "combine"), out_tokens, accumulate)
            self._returning.popleft()

    def combine_async(
        self,
        *,
        out_tokens: Tensor,
        dispatch_handle: P2PDispatchHandle,
        expert_y: Tensor,
        bound_m: Tensor | None = None,
        accumulate: bool = False,
    ) -> P2PCombineHandle:
        """Send results back; the handle sums them."""
        self.weft.combine_send(self._results(expert_y), dispatch_handle.handle)
        return P2PCombineHandle(self, dispatch_handle.handle, out_tokens, accumulate)

    def get_perf_stats(self) -> dict[str, Any]:
        """Return nothing: weft.metrics() has counts of calls, bytes and waits."""
        return {}

    def destroy(self) -> None:
        """Wait for all ranks, and give the memory back."""
        self.weft.destroy()
        self._global_group.barrier()

    def _receive(self, handle: p2p.P2PHandle, counts: Tensor, x: Tensor, scale: Tensor | None) -> None:
        local = self.weft.num_local_experts
        arguments.check_tensor(
            "out_expert_num_tokens", counts, ("experts",), (torch.int32,), self.weft.device, contiguous=False
        )
        if counts.size(0) < local:
            raise invalid(
                "out_expert_num_tokens", arguments.describe(counts), f"one of each of {local} experts"
            )
        if x.dim() == 3:  # the last ranks own fewer experts where these do not come out even
            x, scale = x[:local], None if scale is None else scale[:local]
        rows = self.weft.dispatch_recv(handle, x, scale)
        counts[:local].copy_(rows.num_tokens)
        counts[local:].zero_()
        self._received.append(handle)

    def _results(self, expert_y: Tensor) -> Tensor:
        own = expert_y[: self.weft.num_local_experts] if expert_y.dim() == 3 else expert_y
        return own.contiguous()

    def _sum(self, handle: p2p.P2PHandle, out: Tensor, accumulate: bool) -> None:
        if out.is_contiguous():
            self.weft.combine_recv(handle, out, accumulate)
            return
        into = out.contiguous()
        out.copy_(self.weft.combine_recv(handle, into, accumulate))

    def _dispatched(self, indices: Tensor) -> p2p.P2PHandle:
        if not self._received:
            raise Error("combine: called before a dispatch has received, allowed: after one", "invalid")
        for handle in reversed(self._received):
            if _is_same(handle.given.indices, indices):
                return handle
        return self._received[-1]


@dataclass
class P2PDispatchHandle:
    """A dispatch on its way."""

    kernel: P2PAllToAll
    handle: p2p.P2PHandle
    arguments: dict[str, Any]
    recv_done: bool = False

    def recv(self) -> None:
        """Receive the rows, once."""
        if self.recv_done:
            return
        a = self.arguments
        self.kernel._receive(
            self.handle, a["out_expert_num_tokens"], a["out_expert_x"], a["out_expert_x_scale"]
        )
        self.recv_done = True


@dataclass
class P2PCombineHandle:
    """A combine on its way."""

    kernel: P2PAllToAll
    handle: p2p.P2PHandle
    out_tokens: Tensor
    accumulate: bool
    recv_done: bool = False

    def recv(self) -> None:
        """Sum the results, once."""
        if not self.recv_done:
            self.kernel._sum(self.handle, self.out_tokens, self.accumulate)
        self.recv_done = True


class _Given:
    """The indices and weights of a dispatch, by which its combine is known. Kept: no others get their memory."""

    def __init__(self, indices: Tensor, weights: Tensor) -> None:
        self.indices, self._weights = indices, weights
        self._times_written = times_written(weights)
        self._indices_written = times_written(indices)

    def has_indices(self, indices: Tensor) -> bool:
        """Return whether a combine's indices are those of the dispatch: as has_weights() finds it of weights."""
        return _is_same(self.indices, indices) and times_written(indices) == self._indices_written

    def has_weights(self, weights: Tensor) -> bool:
        """Return whether a combine's weights are those that went with the dispatch, and need not travel again.

        All ranks must find the same, also those without tokens: so it goes by which tensor it is.
        On the CPU weights always travel. On CUDA, in inference mode, torch does not tell of writes: none is assumed.
        """
        is_same = _is_same(self._weights, weights) and times_written(weights) == self._times_written
        return is_same and weights.is_cuda


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same part of the same memory, be it empty."""
    return bool(
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _check_phases(do_send: bool, do_recv: bool) -> None:
    if not (do_send or do_recv):
        raise invalid("do_send", "False with do_recv=False", "one of the two, or both")


def _oldest(waiting: deque[p2p.P2PHandle], call: str) -> p2p.P2PHandle:
    if not waiting:
        raise Error(
            f"{call}: do_recv without a send before it, allowed: one receive for each send", "invalid"
        )
    return waiting[0]
