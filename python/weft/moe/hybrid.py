# SPDX-License-Identifier: Apache-2.0
"""``weft.HybridEPBuffer``: dispatch and combine with the interface of DeepEP's hybrid-ep branch.

    buffer = weft.HybridEPBuffer(group=group, hidden_dim=7168, max_num_of_tokens_per_rank=4096, num_local_experts=32)
    rows, row_probs, _, tokens_per_expert, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routing_map, probs=probs, pad_multiple=128)
    combined, combined_probs = buffer.combine_with_unpermute(hidden=my_experts(rows), probs=row_probs, handle=handle)

T tokens here, N rows received here, X rows in expert order, R ranks, E experts, Le of them here, K slots per token.
Megatron-LM ("hybridep") and torchtitan call it. It is an ``ElasticBuffer`` in its expanded layout: one call sends rows
and puts them in their experts' segments, and one sums them on their way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import MAX_SMS, check_flags, check_integer
from weft.moe.elastic import ElasticBuffer
from weft.moe.elastic_handle import EPHandle
from weft.moe.elastic_sizes import MAX_HIDDEN

_TOKEN_MULTIPLE = 16

Handle = tuple[Any, ...]


@dataclass
class HybridEPConfig:
    """The sizes that a buffer or a dispatch has. ``ep_handle`` is what a dispatch leaves for Weft's own calls."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int = 1
    num_of_experts: int = 0
    ep_handle: EPHandle | None = None


@dataclass
class HybridEPConfigurer:
    """Where clients read a buffer's sizes: ``buffer.configurer.buffer_config``."""

    buffer_config: HybridEPConfig


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Return (routing_map bool [T, E], probs float32 [T, E] or None) of top-k routes; -1 is an empty slot."""
    shape = (num_of_tokens, num_of_experts)
    routing_map = _scattered(topk_idx, torch.ones_like(topk_idx, dtype=torch.float32), shape) > 0
    return routing_map, None if topk_weights is None else _scattered(topk_idx, topk_weights.float(), shape)


def _scattered(ids: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return float32 zeros of a shape with each row's values at its ids; those of id -1 are left out."""
    out = torch.zeros(shape, dtype=torch.float32, device=ids.device)
    return out.scatter_add_(1, ids.clamp(min=0).long(), values.masked_fill(ids < 0, 0))


class HybridEPBuffer:
    """Dispatch and combine among ranks of one node or several, with rows in the order of experts.

    Args:
        group: as for weft.Buffer.
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8: the largest shape; calls grow it. The second
            is the same on all ranks, also where a call with more tokens raises it.
        num_sms_dispatch_api, num_sms_combine_api: SMs of the two; None takes Weft's default.
        num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute, load_cached_kernels, use_shared_buffer,
            enable_custom_allgather, num_of_hybrid_ep_ranks_per_nvlink_domain, use_mnnvl: taken for compatibility.
    Raises: weft.Error naming a wrong argument; weft.PeerLost naming ranks that stayed away.

    Collective calls, threads and errors: as for weft.Buffer. Results are in the current stream's order.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        hidden = check_integer("hidden_dim", hidden_dim, 1, MAX_HIDDEN)
        tokens = check_integer(
            "max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0, arguments.MAX_ROWS
        )
        local = check_integer("num_local_experts", num_local_experts, 1, arguments.MAX_EXPERTS_PER_RANK)
        self.num_sms_dispatch_api = check_integer(
            "num_sms_dispatch_api", num_sms_dispatch_api or 0, 0, MAX_SMS
        )
        self.num_sms_combine_api = check_integer("num_sms_combine_api", num_sms_combine_api or 0, 0, MAX_SMS)
        self.group = group
        self.use_fp8 = bool(use_fp8)
        self._buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=max(tokens, 1), hidden=hidden, use_fp8_dispatch=self.use_fp8
        )
        self.rank, self.group_size = self._buffer.rank_idx, self._buffer.num_ranks
        self.num_of_nodes, per_node = self._buffer.get_logical_domain_size()
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_node
        self.local_rank, self.node_rank = self._buffer.scaleup_rank_idx, self._buffer.scaleout_rank_idx
        self.config = HybridEPConfig(hidden, max(tokens, 1), local, per_node, self.num_of_nodes)

    # -- life and facts --------------------------------------------------------------------------------------

    @property
    def configurer(self) -> HybridEPConfigurer:
        """The buffer's sizes under the name of newer versions of DeepEP's branch; ``config`` is the same."""
        return HybridEPConfigurer(self.config)

    @property
    def runtime(self) -> Any:
        """What runs the calls; None once the buffer is closed."""
        return self._buffer.runtime

    def __repr__(self) -> str:
        return f"weft.HybridEPBuffer({self.config!r}, {self._buffer!r})"

    def __enter__(self) -> HybridEPBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer.__exit__(kind, value, trace)

    def empty_jit_cache(self) -> None:
        """Do nothing: kernels are kept by what they are made of, and none of them goes stale."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
    ) -> HybridEPConfig:
        """Return the sizes of a call; the most tokens of a rank, rounded up to 16, grow with it. None: the buffer's.

        pad_multiple, use_fp8 and fuse_permute_dispatch change no size.
        """
        check_integer("pad_multiple", pad_multiple or 0, 0)
        check_flags(use_fp8=bool(use_fp8), fuse_permute_dispatch=fuse_permute_dispatch)
        known = self.config
        hidden = check_integer("hidden_dim", hidden_dim or known.hidden_dim, 1, MAX_HIDDEN)
        tokens = check_integer("num_of_tokens_per_rank", num_of_tokens_per_rank or 0, 0, arguments.MAX_ROWS)
        local = check_integer(
            "num_local_experts",
            num_local_experts or known.num_of_experts_per_rank,
            1,
            arguments.MAX_EXPERTS_PER_RANK,
        )
        if tokens > known.max_num_of_tokens_per_rank:
            known.max_num_of_tokens_per_rank = -(-tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        sizes = (known.num_of_ranks_per_node, known.num_of_nodes)
        return HybridEPConfig(hidden, known.max_num_of_tokens_per_rank, local, *sizes)

    # -- rows in the order of experts ------------------------------------------------------------------------

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        num_of_tokens_per_rank: int | None = None,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Handle]:
        """Send each token to the ranks of its experts, and return its rows in the order of experts.

        Args:
            hidden: [T, hidden], any type; scaling_factor: its float32 or int32 [T, n], or None.
            routing_map: bool [T, E]; or topk_idx [T, K] with num_of_experts, which costs less. Not with a handle.
            probs: float32 [T, E]; topk_weights: float32 [T, K] in its place; both None: no probabilities. All ranks
                give them, or none does.
            pad_multiple: each expert's rows are filled up with zeros to a multiple of it; None: 1.
            num_permuted_tokens: rows that are returned, zeros after the real ones; None: the real ones.
            non_blocking: tokens_per_expert comes on the device, and rows past num_permuted_tokens are dropped: the
                handle's last entry is then 1, counts are of the rows that stay, and a combine adds nothing for the
                others. The host waits for the counts all the same.
            handle: repeat the routes of an earlier dispatch.
            num_of_tokens_per_rank: the most tokens of any rank, where that is more than the buffer's.
            use_fp8, fuse_permute_dispatch, num_dispatched_tokens, use_host_meta: taken for compatibility.
        Returns: (rows [X, hidden], in order of expert, source rank, token; probabilities float32 [X] or None; scales
            [X, n] or None; padded rows per expert, int64 [Le]; handle).
        Raises: weft.Error also when num_permuted_tokens is less than the rows that came, unless non_blocking.
        """
        data = hidden if scaling_factor is None else (hidden, scaling_factor)
        if handle is None:
            tokens = max(hidden.size(0), num_of_tokens_per_rank or 0)
            ids, weights, config = self._routes(
                (hidden.size(0), tokens),
                *(routing_map, probs, topk_idx, topk_weights, num_of_experts, num_of_experts_per_rank),
            )
            rows, _, row_probs, ep_handle, _ = self._buffer.dispatch(
                data,
                ids,
                weights,
                num_experts=config.num_of_experts,
                num_max_tokens_per_rank=config.max_num_of_tokens_per_rank,
                expert_alignment=pad_multiple or 1,
                num_sms=self.num_sms_dispatch_api,
                do_expand=True,
                do_zero_padding=True,
            )
            config.ep_handle = ep_handle
        else:
            config, ep_handle = _config_of(handle)
            weights = _weights_of(ep_handle.topk_idx, probs, topk_weights)
            rows, _, row_probs, ep_handle, _ = self._buffer.dispatch(
                data,
                topk_weights=weights,
                handle=ep_handle,
                do_expand=True,
                do_zero_padding=True,
                num_sms=self.num_sms_dispatch_api,
            )
        out, scales = (rows[0], rows[1]) if isinstance(rows, tuple) else (rows, None)
        may_drop = non_blocking if handle is None else _has_dropped(handle)
        wanted = _wanted_rows(num_permuted_tokens, out.size(0), may_drop)
        counts = torch.tensor(ep_handle.num_recv_tokens_per_expert_list, dtype=torch.int64)
        if wanted < out.size(0):
            counts = counts.cumsum(0).clamp(max=wanted).diff(prepend=counts.new_zeros(1))
        if non_blocking:
            counts = counts.to(out.device, non_blocking=True)
        return (
            _filled(out, wanted),
            None if row_probs is None else _filled(row_probs, wanted),
            None if scales is None else _filled(scales, wanted),
            counts,
            handle if handle is not None else _permuted_handle(config, ep_handle, wanted < out.size(0)),
        )

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        apply_probs_to_hidden: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their tokens and sum them.

        Args:
            hidden: bf16 [X or more, hidden], the rows of the matching dispatch_with_permute.
            probs: float32 [X or more], or None. apply_probs_to_hidden: the sum is weighted by them.
            pad_multiple, fuse_unpermute_combine, num_dispatched_tokens: taken for compatibility.
        Returns: (combined bf16 [T, hidden]; the probabilities that came back, float32 [T, E], or None).
        """
        config, ep_handle = _config_of(handle)
        num_rows = ep_handle.num_expanded_tokens
        if _has_dropped(handle):  # what was dropped adds nothing
            hidden, probs = _filled(hidden, num_rows), None if probs is None else _filled(probs, num_rows)
        hidden = hidden[:num_rows]
        if probs is not None:
            probs = probs[:num_rows].float().reshape(-1).contiguous()
        if apply_probs_to_hidden:
            if probs is None:
                raise invalid("probs", None, "a tensor with apply_probs_to_hidden")
            hidden = (hidden.float() * probs.unsqueeze(1)).to(hidden.dtype)
        return self._combined(hidden.contiguous(), probs, config, ep_handle)

    # -- rows in the order of arrival ------------------------------------------------------------------------

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Handle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Handle]:
        """Send each token once to every rank that owns one of its experts.

        Args: as of dispatch_with_permute; num_dispatched_tokens_tensor, num_dispatched_tokens: taken.
        Returns: (rows [N, hidden], in order of source rank, token; probabilities float32 [N, E], those of experts
            elsewhere too, or None; scales [N, n] or None; handle).
        """
        data = hidden if scaling_factor is None else (hidden, scaling_factor)
        if handle is None:
            if topk_idx is not None and routing_map is None:
                experts = check_integer("num_of_experts", num_of_experts, 1)
                routing_map, dense = indices_to_map(topk_idx, topk_weights, hidden.size(0), experts)
                probs = probs if dense is None else dense
            ids, weights, config = self._routes(
                (hidden.size(0), hidden.size(0)), routing_map, probs, None, None, num_of_experts, None
            )
            rows, _, row_probs, ep_handle, _ = self._buffer.dispatch(
                data,
                ids,
                weights,
                num_experts=config.num_of_experts,
                num_max_tokens_per_rank=config.max_num_of_tokens_per_rank,
                num_sms=self.num_sms_dispatch_api,
            )
            config.ep_handle = ep_handle
            handle = (*_handle_entries(config, ep_handle), hidden.size(0), config)
        else:
            config, ep_handle = _config_of(handle)
            if probs is None and topk_idx is not None and topk_weights is not None:
                probs = indices_to_map(topk_idx, topk_weights, hidden.size(0), config.num_of_experts)[1]
            rows, _, row_probs, _, _ = self._buffer.dispatch(
                data,
                topk_weights=_weights_of(ep_handle.topk_idx, probs, None),
                handle=ep_handle,
                num_sms=self.num_sms_dispatch_api,
            )
        out, scales = (rows[0], rows[1]) if isinstance(rows, tuple) else (rows, None)
        return out, row_probs, scales, handle

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: Handle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their tokens and sum them, unweighted.

        Args: hidden: bf16 [N, hidden], the rows of the matching dispatch. probs: float32 [N, E], or None.
        Returns: (combined bf16 [T, hidden]; the probabilities that came back, float32 [T, E], or None).
        """
        config, ep_handle = _config_of(handle)
        return self._combined(hidden, probs, config, ep_handle)

    # -- parts -----------------------------------------------------------------------------------------------

    def _combined(
        self, rows: Tensor, probs: Tensor | None, config: HybridEPConfig, ep_handle: EPHandle
    ) -> tuple[Tensor, Tensor | None]:
        combined, weights, _ = self._buffer.combine(rows, ep_handle, probs, num_sms=self.num_sms_combine_api)
        if weights is None:
            return combined, None
        return combined, _scattered(ep_handle.topk_idx, weights, (combined.size(0), config.num_of_experts))

    def _routes(
        self,
        tokens: tuple[int, int],
        routing_map: Tensor | None,
        probs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_of_experts: int | None,
        num_of_experts_per_rank: int | None,
    ) -> tuple[Tensor, Tensor | None, HybridEPConfig]:
        """Return (expert ids, weights or None, sizes) of a first dispatch; a map becomes E slots per token."""
        if routing_map is not None:
            if routing_map.dtype != torch.bool or routing_map.dim() != 2 or routing_map.size(0) != tokens[0]:
                raise invalid("routing_map", arguments.describe(routing_map), f"bool [{tokens[0]}, experts]")
            experts = routing_map.size(1)
            every = torch.arange(experts, dtype=torch.int32, device=routing_map.device)
            ids = torch.where(routing_map, every, -1)
        elif topk_idx is not None:
            experts = check_integer("num_of_experts", num_of_experts, 1)
            ids = topk_idx.contiguous()
        else:
            raise invalid("routing_map", None, "a map, or topk_idx, or a handle")
        if experts % self.group_size:
            raise invalid("num_of_experts", experts, f"a multiple of the {self.group_size} ranks")
        local = experts // self.group_size
        if num_of_experts_per_rank is not None and num_of_experts_per_rank != local:
            raise invalid(
                "num_of_experts_per_rank", num_of_experts_per_rank, f"{local}, of {experts} experts"
            )
        config = self.update_template_config(None, tokens[1], local)
        config.num_of_experts = experts
        return ids, _weights_of(ids, probs, topk_weights), config


def _weights_of(ids: Tensor, probs: Tensor | None, topk_weights: Tensor | None) -> Tensor | None:
    """Return the weight of each slot: the client's own, or picked from its probabilities of all experts."""
    if topk_weights is not None:
        return topk_weights.float().contiguous()
    if probs is None:
        return None
    if probs.size(0) != ids.size(0):
        raise invalid("probs", arguments.describe(probs), f"float32 [{ids.size(0)}, experts]")
    return probs.float().gather(1, ids.clamp(min=0).long()).masked_fill(ids < 0, 0)


def _config_of(handle: Handle | None) -> tuple[HybridEPConfig, EPHandle]:
    for entry in handle if isinstance(handle, (tuple, list)) else ():
        if isinstance(entry, HybridEPConfig) and entry.ep_handle is not None:
            return entry, entry.ep_handle
    raise invalid("handle", type(handle).__name__, "the handle of a dispatch")


def _handle_entries(config: HybridEPConfig, ep_handle: EPHandle) -> Handle:
    """Return what handles begin with. The maps between nodes are None: the config's handle has them."""
    ids = ep_handle.recv_topk_idx
    ones = torch.ones_like(ids, dtype=torch.float32)
    local_map = _scattered(ids, ones, (ids.size(0), config.num_of_experts_per_rank)) > 0
    num_rows = torch.tensor([ep_handle.num_recv_tokens], dtype=torch.int32)
    return ep_handle.dst_buffer_slot_idx, None, None, num_rows, local_map


def _permuted_handle(config: HybridEPConfig, ep_handle: EPHandle, has_dropped: bool) -> Handle:
    row_id_map = ep_handle.recv_src_metadata[:, 2:]
    has_overflowed = torch.tensor([has_dropped], dtype=torch.int32)
    entries = _handle_entries(config, ep_handle)
    return (*entries, row_id_map, ep_handle.topk_idx.size(0), config, has_overflowed)


def _has_dropped(handle: Handle | None) -> bool:
    """Return whether the dispatch that made a handle left rows out, as the handle's last entry says."""
    flag = handle[-1] if handle else None
    return isinstance(flag, Tensor) and bool(flag)


def _wanted_rows(given: int | None, real: int, may_drop: bool) -> int:
    if given is None:
        return real
    if check_integer("num_permuted_tokens", given, 0) < real and not may_drop:
        raise invalid("num_permuted_tokens", given, f"at least the {real} rows that came")
    return int(given)


def _filled(rows: Tensor, wanted: int) -> Tensor:
    """Return the first rows, or all with zeros after them; never a view."""
    if rows.size(0) == wanted:
        return rows
    if rows.size(0) > wanted:
        return rows[:wanted].clone()
    return torch.cat((rows, rows.new_zeros((wanted - rows.size(0), *rows.shape[1:]))))
