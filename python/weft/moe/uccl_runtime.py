# SPDX-License-Identifier: Apache-2.0
"""The class Buffer of UCCL-EP's extension: calls with addresses, in two steps, whose outputs the caller allocates.

    runtime = Runtime(rank, num_ranks, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
    runtime.sync(device_ids, handles)          # every rank's get_local_device_id() and get_local_ipc_handle()
    num_rows, counts, _ = runtime.intranode_prepare(...)
    event = runtime.intranode_dispatch(...)    # positions are UCCL-EP's

UCCL-EP's Python wraps it, and so do its benches. Behind it is a ``weft.Buffer``, whose outputs are copied to where the
caller wants them; ``prepare`` sends a row of 16 bytes per token to learn how many come. Programs that can choose call
``weft.Buffer``, which does neither. Handles are known by the address of a tensor that the caller keeps in them.
Threads: one caller at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import Error, invalid
from weft.moe.buffer import Buffer
from weft.moe.uccl_memory import EventHandle, Memory

_ROW_TYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}  # by bytes; dispatch moves bits
_COMBINE_TYPES = {5: torch.float16, 6: torch.bfloat16, 7: torch.float32}  # by UCCL-EP's numbers
_SOURCE_META_BYTES, _MAX_NVL_PEERS = 8, 8  # how wide callers make tensors that only UCCL-EP's kernels read


# What callers give, by position.
_ORDER = "previous is_async allocate_on_comm_stream stream"
LAYOUT = f"topk_idx num_tokens num_topk num_experts per_rank per_rdma_rank per_expert in_rank {_ORDER}"
INTRANODE_PREPARE = (
    "per_rank in_rank per_expert num_tokens num_experts rank_prefix channel_prefix expert_alignment num_worst_tokens "
    f"config {_ORDER}"
)
_ROWS = (
    "x num_tokens hidden element_bytes scales num_scales scale_token_stride scale_hidden_stride "
    "topk_idx num_topk topk_weights in_rank "
)
_RECEIVED = "recv_x recv_scales recv_topk_idx recv_topk_weights "
INTRANODE_DISPATCH = (
    f"{_ROWS} rank_prefix channel_prefix num_experts num_worst_tokens is_cached config num_rows {_RECEIVED}"
    f"recv_channel_prefix recv_src_idx send_head {_ORDER}"
)
_SUMMED = "x num_rows hidden element_type element_bytes topk_weights num_topk bias_0 bias_1 "
INTRANODE_COMBINE = (
    f"{_SUMMED} src_idx num_tokens rank_prefix channel_prefix send_head config out out_weights {_ORDER}"
)
INTERNODE_PREPARE = (
    "per_rank per_rdma_rank per_expert in_rank num_tokens hidden element_bytes num_scales num_topk num_experts "
    "expert_alignment num_worst_tokens config rdma_channel_prefix rdma_rank_prefix gbl_channel_prefix "
    f"gbl_rank_prefix {_ORDER}"
)
INTERNODE_DISPATCH = (
    f"{_ROWS} rdma_channel_prefix rdma_rank_prefix gbl_channel_prefix gbl_rank_prefix num_experts num_worst_tokens "
    f"is_cached num_rdma_rows config {_RECEIVED} recv_src_meta recv_rdma_channel_prefix recv_gbl_channel_prefix "
    f"send_rdma_head send_nvl_head {_ORDER}"
)
INTERNODE_COMBINE = (
    f"{_SUMMED} src_meta num_tokens in_rank rdma_channel_prefix rdma_rank_prefix gbl_channel_prefix send_rdma_head "
    f"send_nvl_head config out out_weights {_ORDER}"
)
LOW_LATENCY_DISPATCH = (
    "x num_tokens hidden topk_idx topk_rows num_topk recv_x recv_scales recv_count recv_src_info recv_layout_range "
    "recv_stats wait_stats stream max_tokens num_experts use_fp8 round_scale use_ue8m0 is_async return_recv_hook"
)
LOW_LATENCY_COMBINE = (
    "x num_local_experts num_slots hidden topk_idx num_tokens num_topk topk_weights src_info src_info_dim0 "
    "src_info_dim1 layout_range layout_range_dim0 layout_range_dim1 wait_stats stream max_tokens num_experts "
    "use_logfmt zero_copy is_async return_recv_hook out"
)


@dataclass
class _Prepared:
    """A dispatch between its two steps, and then its handle."""

    per_rank: Tensor
    per_expert: Tensor
    handle: Any = None  # until the number of rows is known


class Runtime:
    """The calls of UCCL-EP's extension on a ``weft.Buffer``.

    Args:
        rank, num_ranks: this rank's place in its group and the group's size.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode: as for weft.Buffer.
        explicitly_destroy, num_local_ranks: taken, not looked at.
    Addresses are of contiguous tensors on the current device, 0 for none; strides are in elements. Calls work in the
    order of the stream whose address they are given.
    Raises: weft.Error, as weft.Buffer's methods do, and for calls before sync().
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        explicitly_destroy: bool = False,
        num_local_ranks: int = -1,
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._sizes = (num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._memory = Memory(self._device)
        self._made: Buffer | None = None
        # By an address in the caller's handle. What a caller lets go stays until another tensor takes its place.
        self._dispatches: dict[int, _Prepared] = {}
        self._low_latency: dict[int, Any] = {}

    # -- life ------------------------------------------------------------------------------------------------

    def sync(
        self,
        device_ids: list[int],
        all_gathered_handles: list[Any],
        root_unique_id_opt: object = None,
        all_gathered_rdma_handles: object = None,
    ) -> None:
        """Meet the other ranks, whose handles name them in torch.distributed's default group. Collective."""
        if len(all_gathered_handles) != self._num_ranks:
            given = f"{len(all_gathered_handles)} handles"
            raise invalid("all_gathered_handles", given, f"one of each of the {self._num_ranks} ranks")
        ranks = [struct.unpack("<q", bytes(handle))[0] for handle in all_gathered_handles]
        is_all = ranks == list(range(dist.get_world_size()))
        group = dist.group.WORLD if is_all else dist.new_group(ranks, use_local_synchronization=True)
        num_nvl_bytes, num_rdma_bytes, low_latency_mode = self._sizes
        self._made = Buffer(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            explicitly_destroy=True,
            device=self._device,
        )

    @property
    def _buffer(self) -> Buffer:
        if self._made is None:
            raise Error(
                "uccl.ep.Buffer: used before sync() or after destroy(), allowed: calls between", "closed"
            )
        return self._made

    def destroy(self) -> None:
        """Wait for all ranks, then let go of the memory. Collective."""
        self._buffer.destroy()
        self._made = None
        self._dispatches.clear()
        self._low_latency.clear()

    def is_available(self) -> bool:
        """Return whether the ranks have met."""
        return self._made is not None

    def get_local_ipc_handle(self) -> bytearray:
        """Return what sync() knows this rank by."""
        return bytearray(struct.pack("<q", dist.get_rank()))

    get_local_rdma_ipc_handle = get_local_atomics_ipc_handle = get_local_ipc_handle

    def get_local_device_id(self) -> int:
        """Return the index of the CUDA device; 0 on the CPU."""
        return self._device.index or 0

    def set_rdma_buffer(self, addr: int, is_host_ptr: bool = False) -> None:
        """Do nothing: the memory that calls use is the buffer's own."""

    def reset_rdma_buffer(self) -> None:
        """Do nothing: signals only grow, whatever is called in between."""

    def get_num_rdma_ranks(self) -> int:
        """Return how many groups of ranks there are, as num_tokens_per_rdma_rank counts them."""
        return int(self._runtime().get_num_rdma_ranks())

    def get_rdma_rank(self) -> int:
        """Return the group that this rank is in."""
        return int(self._runtime().get_rdma_rank())

    def get_root_rdma_rank(self, global_: bool) -> int:
        """Return this rank's place in its group where ``global_``, else 0."""
        return int(self._runtime().get_root_rdma_rank(global_))

    def _runtime(self) -> Any:
        return self._buffer.runtime

    def get_num_max_nvl_peers(self) -> int:
        """Return how wide a handle's send_nvl_head is."""
        return _MAX_NVL_PEERS

    def get_source_meta_bytes(self) -> int:
        """Return how wide a handle's recv_src_meta is."""
        return _SOURCE_META_BYTES

    def get_comm_stream(self) -> int:
        """Return the address of the communication stream; 0 on the CPU."""
        stream = self._buffer.get_comm_stream()
        return int(stream.cuda_stream) if self._device.type == "cuda" else 0

    # -- high throughput -------------------------------------------------------------------------------------

    def get_dispatch_layout(self, *given: Any) -> EventHandle | None:
        """Fill what Buffer.get_dispatch_layout() returns; num_tokens_per_rdma_rank may be 0. See LAYOUT."""
        call = _named(LAYOUT, given)
        with self._memory.in_order(call.stream, call.previous):
            ids = self._memory.at(call.topk_idx, torch.int64, call.num_tokens, call.num_topk)
            counted = self._buffer.get_dispatch_layout(ids, call.num_experts)
            outputs = (call.per_rank, call.per_rdma_rank, call.per_expert, call.in_rank)
            for address, made in zip(outputs, counted[:4], strict=True):
                if made is not None:
                    self._memory.fill(address, made)
            return _event(call)

    def intranode_prepare(self, *given: Any) -> tuple[int, list[int], EventHandle | None]:
        """Fill rank_prefix i32[R, R]; return (rows to come, slots of each local expert, event). Collective."""
        call = _named(INTRANODE_PREPARE, given)
        with self._memory.in_order(call.stream, call.previous):
            prepared, num_rows, counts = self._prepare(call)
            self._dispatches[call.rank_prefix] = prepared
            if prepared.handle is not None:
                self._memory.fill(call.rank_prefix, prepared.handle[0])
            return num_rows, counts, _event(call)

    def intranode_dispatch(self, *given: Any) -> EventHandle | None:
        """Fill the received rows, scales, ids and weights, and recv_src_idx. See INTRANODE_DISPATCH. Collective."""
        call = _named(INTRANODE_DISPATCH, given)
        with self._memory.in_order(call.stream, call.previous):
            prepared = self._found(self._dispatches, call.rank_prefix, "rank_prefix_matrix")
            self._dispatch(prepared, call)
            if not call.is_cached:
                self._memory.fill(call.rank_prefix, prepared.handle[0])
                if call.num_rows and len(prepared.handle) == 9:
                    self._memory.fill(call.recv_src_idx, prepared.handle[3])
            return _event(call)

    def intranode_combine(self, *given: Any) -> EventHandle | None:
        """Fill the summed rows and, with weights, theirs. See INTRANODE_COMBINE. Collective."""
        call = _named(INTRANODE_COMBINE, given)
        with self._memory.in_order(call.stream, call.previous):
            self._combine(self._found(self._dispatches, call.rank_prefix, "rank_prefix_matrix"), call)
            return _event(call)

    def internode_prepare(self, *given: Any) -> tuple[int, int, list[int], EventHandle | None]:
        """Fill gbl_rank_prefix i32[R]; return (rows to come, the same again, slots of experts, event). Collective."""
        call = _named(INTERNODE_PREPARE, given)
        with self._memory.in_order(call.stream, call.previous):
            prepared, num_rows, counts = self._prepare(call)
            self._dispatches[call.rdma_rank_prefix] = prepared
            if prepared.handle is not None:
                self._memory.fill(call.gbl_rank_prefix, prepared.handle[0][:, self._rank])
            return num_rows, num_rows, counts, _event(call)

    def internode_dispatch(self, *given: Any) -> EventHandle | None:
        """Fill the received rows, scales, ids and weights. See INTERNODE_DISPATCH. Collective."""
        call = _named(INTERNODE_DISPATCH, given)
        with self._memory.in_order(call.stream, call.previous):
            prepared = self._found(self._dispatches, call.rdma_rank_prefix, "recv_rdma_rank_prefix_sum")
            self._dispatch(prepared, call)
            if not call.is_cached:
                self._memory.fill(call.gbl_rank_prefix, prepared.handle[0][:, self._rank])
            return _event(call)

    def internode_combine(self, *given: Any) -> EventHandle | None:
        """Fill the summed rows and, with weights, theirs. See INTERNODE_COMBINE. Collective."""
        call = _named(INTERNODE_COMBINE, given)
        with self._memory.in_order(call.stream, call.previous):
            self._combine(
                self._found(self._dispatches, call.rdma_rank_prefix, "recv_rdma_rank_prefix_sum"), call
            )
            return _event(call)

    # -- low latency -----------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, max_tokens: int, hidden: int, num_experts: int, stream: int) -> None:
        """Check the sizes. There is nothing to clean."""
        self._buffer.clean_low_latency_buffer(max_tokens, hidden, num_experts)

    def low_latency_dispatch(self, *given: Any) -> tuple[EventHandle | None, Callable[[], None] | None]:
        """Fill rows [Le, R * M, hidden], scales, counts and handle. See LOW_LATENCY_DISPATCH. Collective."""
        call, at = _named(LOW_LATENCY_DISPATCH, given), self._memory.at
        stats, waits = call.recv_stats, call.wait_stats
        with self._memory.in_order(call.stream, None):
            rows, counts, handle, _, hook = self._buffer.low_latency_dispatch(
                at(call.x, torch.bfloat16, call.num_tokens, call.hidden),
                at(call.topk_idx, torch.int64, call.topk_rows, call.num_topk),
                call.max_tokens,
                call.num_experts,
                at(stats, torch.int32, call.num_experts // self._num_ranks) if stats else None,
                at(waits, torch.int64, self._num_ranks) if waits else None,
                call.use_fp8,
                call.round_scale,
                call.use_ue8m0,
                return_recv_hook=call.return_recv_hook,
            )
        self._low_latency[call.recv_src_info] = handle

        def receive() -> None:
            with self._memory.in_order(call.stream, None):
                if hook is not None:
                    hook()
                self._memory.fill(call.recv_x, rows[0] if call.use_fp8 else rows)
                if call.use_fp8:  # the caller's are [Le, n, R * M], of which it hands out the transposed view
                    self._memory.fill(call.recv_scales, rows[1].transpose(1, 2))
                self._memory.fill(call.recv_count, counts)
                self._memory.fill(call.recv_src_info, handle[0])
                self._memory.fill(call.recv_layout_range, handle[1])

        if call.return_recv_hook:
            return None, receive
        receive()
        return _event(call), None

    def low_latency_combine(self, *given: Any) -> tuple[EventHandle | None, Callable[[], None] | None]:
        """Fill out bf16 [T, hidden] with weighted sums. See LOW_LATENCY_COMBINE. Collective."""
        call, at = _named(LOW_LATENCY_COMBINE, given), self._memory.at
        if call.zero_copy:
            raise invalid("zero_copy", True, "False: rows are where the caller says")
        handle = self._found(self._low_latency, call.src_info, "src_info")
        waits = call.wait_stats
        with self._memory.in_order(call.stream, None):
            _, _, hook = self._buffer.low_latency_combine(
                at(call.x, torch.bfloat16, call.num_local_experts, call.num_slots, call.hidden),
                at(call.topk_idx, torch.int64, call.num_tokens, call.num_topk),
                at(call.topk_weights, torch.float32, call.num_tokens, call.num_topk),
                handle,
                call.use_logfmt,
                return_recv_hook=call.return_recv_hook,
                out=at(call.out, torch.bfloat16, call.num_tokens, call.hidden),
                combine_wait_recv_cost_stats=at(waits, torch.int64, self._num_ranks) if waits else None,
            )
            return _event(call), hook

    # -- what both use ---------------------------------------------------------------------------------------

    def _prepare(self, call: SimpleNamespace) -> tuple[_Prepared, int, list[int]]:
        """Return what is known before a dispatch, how many rows will come, and the slots of local experts."""
        prepared = _Prepared(
            self._memory.at(call.per_rank, torch.int32, self._num_ranks).clone(),
            self._memory.at(call.per_expert, torch.int32, call.num_experts).clone(),
        )
        if call.num_worst_tokens:
            return prepared, call.num_worst_tokens, []
        rows, _, _, counts, prepared.handle, _ = self._buffer.dispatch(
            torch.zeros(call.num_tokens, 16, dtype=torch.uint8, device=self._device),
            num_tokens_per_rank=prepared.per_rank,
            is_token_in_rank=self._in_rank(call),
            num_tokens_per_expert=prepared.per_expert,
            expert_alignment=call.expert_alignment,
            config=call.config,
        )
        assert isinstance(rows, Tensor) and counts is not None
        return prepared, rows.size(0), counts

    def _dispatch(self, prepared: _Prepared, call: SimpleNamespace) -> None:
        """Dispatch along the prepared routes or, with ids and weights, along new ones that are the same."""
        ids: Tensor | None = None
        weights: Tensor | None = None
        # Not by the address of ids: tensors without a row have none, and all ranks have to call the same.
        if call.num_topk and not call.is_cached:
            shape = (call.num_tokens, call.num_topk)
            rows, ids, weights, _, prepared.handle, _ = self._buffer.dispatch(
                self._payload(call),
                num_tokens_per_rank=prepared.per_rank,
                is_token_in_rank=self._in_rank(call),
                num_tokens_per_expert=prepared.per_expert,
                topk_idx=self._memory.at(call.topk_idx, torch.int64, *shape),
                topk_weights=self._memory.at(call.topk_weights, torch.float32, *shape),
                num_worst_tokens=call.num_worst_tokens,
                config=call.config,
            )
        else:
            rows = self._buffer.dispatch(self._payload(call), handle=prepared.handle, config=call.config)[0]
        x, scales = (rows[0], rows[1]) if isinstance(rows, tuple) else (rows, None)
        outputs = (call.recv_x, call.recv_scales, call.recv_topk_idx, call.recv_topk_weights)
        for address, made in zip(outputs, (x, scales, ids, weights), strict=True):
            if made is not None:
                self._memory.fill(address, made)

    def _combine(self, prepared: _Prepared, call: SimpleNamespace) -> None:
        if call.element_type not in _COMBINE_TYPES:
            raise invalid("x_dtype_code", call.element_type, "5, 6 or 7: float16, bfloat16 or float32")
        dtype, at = _COMBINE_TYPES[call.element_type], self._memory.at
        biases = [address for address in (call.bias_0, call.bias_1) if address]
        bias = tuple(at(address, dtype, call.num_tokens, call.hidden) for address in biases)
        weights = call.topk_weights
        summed, sums, _ = self._buffer.combine(
            at(call.x, dtype, call.num_rows, call.hidden),
            prepared.handle,
            at(weights, torch.float32, call.num_rows, call.num_topk) if weights else None,
            bias=bias if len(bias) == 2 else bias[0] if bias else None,
            config=call.config,
        )
        self._memory.fill(call.out, summed)
        if sums is not None:
            self._memory.fill(call.out_weights, sums)

    def _payload(self, call: SimpleNamespace) -> Any:
        if call.element_bytes not in _ROW_TYPES:
            raise invalid("x_element_size", call.element_bytes, "1, 2 or 4 bytes")
        x = self._memory.at(call.x, _ROW_TYPES[call.element_bytes], call.num_tokens, call.hidden)
        if not call.num_scales:
            return x
        strides = (call.scale_token_stride, call.scale_hidden_stride)
        reach = 1 + (call.num_tokens - 1) * strides[0] + (call.num_scales - 1) * strides[1]
        flat = self._memory.at(call.scales, torch.float32, reach if call.num_tokens else 0)
        return x, flat.as_strided((call.num_tokens, call.num_scales), strides)

    def _in_rank(self, call: SimpleNamespace) -> Tensor:
        return self._memory.at(call.in_rank, torch.bool, call.num_tokens, self._num_ranks)

    def _found(self, known: dict[int, Any], address: int, name: str) -> Any:
        if address not in known:
            raise invalid(
                "handle", f"a {name} that no call filled", "the handle of a dispatch of this buffer"
            )
        return known[address]


def _named(names: str, given: tuple[Any, ...]) -> SimpleNamespace:
    """Return what a call was given, by name."""
    expected = names.split()
    if len(given) != len(expected):
        raise invalid("arguments", f"{len(given)}", f"{len(expected)}: {', '.join(expected)}")
    return SimpleNamespace(**dict(zip(expected, given, strict=True)))


def _event(call: SimpleNamespace) -> EventHandle | None:
    return EventHandle() if call.is_async else None
