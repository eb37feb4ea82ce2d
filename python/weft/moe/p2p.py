# SPDX-License-Identifier: Apache-2.0
"""``weft.P2PAllToAll``: dispatch and combine whose sends and receives are launches of their own.

    a2a = weft.P2PAllToAll(group, max_num_tokens=128, num_experts=256, hidden_dim=7168, num_experts_per_token=8)
    handle = a2a.dispatch_send(x, topk_idx, topk_weights)
    shared = shared_expert(x)                       # nothing of the exchange runs meanwhile but the network
    rows = a2a.dispatch_recv(handle)
    a2a.combine_send(my_experts(rows.x, rows.num_tokens), handle)
    out = a2a.combine_recv(handle, out_tokens=shared, accumulate=True)

T tokens here, M at most, R data-parallel groups (ranks, with dp_size 1), E experts, Le of this rank, K slots per token.
It is low-latency mode underneath (``weft.Buffer``): the same kernels, messages and window. Three things differ: where
received rows stand, what elements are summed, and that phases are the caller's.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import Error, invalid
from weft.moe import arguments, trace
from weft.moe.buffer_contexts import device_of
from weft.moe.config import check_flags, check_number
from weft.moe.device_context import DeviceContext
from weft.moe.p2p_phases import PhaseOrder, SavedInput, Turns
from weft.moe.p2p_plans import SUMMED, CombinePlans, DispatchPlans, DpColumn, Layout, P2PSizes
from weft.runtime.bootstrap import find_bootstrap
from weft.runtime.communicator import connect

_IDS = (torch.int64, torch.int32, torch.uint32)


class P2PRows(NamedTuple):
    """What a dispatch brought to this rank.

    x: [max_recv_tokens, hidden], packed: the rows of expert e behind those of e - 1, beginning at a multiple of
        expert_padding; or [Le, max_tokens_per_expert, hidden]. x_scale: the same with hidden_dim_scale, or None.
    num_tokens: int32 [Le]. Rows of an expert stand by source, token, slot; what lies between and behind is undefined.
    weights: float32, src_rank: int32, src_token: int32, one for each row.
    """

    x: Tensor
    x_scale: Tensor | None
    num_tokens: Tensor
    weights: Tensor
    src_rank: Tensor
    src_token: Tensor


class P2PHandle:
    """One exchange on its way: what its next phase needs. Made by dispatch_send()."""

    def __init__(
        self, context: DeviceContext, ids: Tensor, weights: Tensor | None, sent: Any, tensors: Any
    ) -> None:
        self.context = context
        self.num_tokens, self.id_bytes = int(ids.size(0)), ids.element_size()  # of this rank
        self.is_bounded = False  # rows past a bound have no ids, whatever the caller's tensor says
        self.ids = SavedInput("topk_idx", ids)
        self.weights = (
            None if weights is None else SavedInput("topk_weights", weights)
        )  # where tokens' owners use them
        self.phase = "dispatch_send"  # the last one that ran
        self.streams = {context.current_stream}  # that phases ran on
        self.sent = sent  # of the core: the call whose receive is to come
        self.is_pending = True  # that receive has not begun
        self.saved: tuple[Tensor | None, ...] = tensors  # until then
        self.layout: Layout | None = None  # of received rows
        self.routes: Tensor | None = None
        self.rows_shape: tuple[int, ...] = ()
        self.given: Any = None  # of a drop-in: its indices and weights
        self.combine_options: tuple[Any, ...] = ()  # of the send whose receive is to come
        self.reads: tuple[SavedInput | None, ...] = ()  # what the receive reads, too


class P2PAllToAll:
    """Sends tokens to the ranks of their experts, and results back, in four launches of the caller's.

    Args:
        group, comm: the ranks, as for weft.Buffer.
        max_num_tokens: M, most tokens of a rank in one exchange. num_experts: E. hidden_dim: H.
        num_experts_per_token: K.
        in_dtype: of x; opaque, any type. out_dtype: of combined tokens: bfloat16, float16 or float32.
        hidden_dim_scale, scale_dtype: float32 or int32 scales that travel with each row, or neither.
        expert_padding: rows of an expert begin at a multiple of it.
        max_recv_tokens: rows of packed outputs; None: as many as can ever come of tokens whose experts differ.
            max_tokens_per_expert: outputs are [Le, max_tokens_per_expert, H] instead. More rows than fit raise
            weft.Error on the rank that gets them.
        max_private_tokens: M or more, or None: every token has a place of its own at each rank, and leaves before the
            routes of others are known.
        dp_size: so many consecutive ranks are a data-parallel group: they hold the same tokens and the same experts.
            Experts are dealt to groups, ceil(E / R) each. Each rank exchanges with its counterparts in other groups.
        max_in_flight: exchanges that may be under way at once, in whatever order their phases then are. Each has a
            window of its own, with M tokens of every group twice.
        exact: every expert's row returns, and slots are summed in order with one rounding. Otherwise a rank sums its
            rows of a token first, in float32, and rounds to the type of expert_y.
        num_sms: 0: phases take all SMs, on the stream that is current. Else they take so many at most, beside what the
            caller's stream gets between a send and its receive: see below. On the CPU, threads at most.
        timeout_s: bound of every wait for a peer, in seconds; 0 takes WEFT_TIMEOUT_S.
        device: as for weft.Buffer.
    Raises: weft.Error naming a wrong argument; weft.PeerLost naming ranks that stayed away.

    Phases are collective: all ranks call the same ones in the same order, also those of several exchanges. Between two
    phases of an exchange no kernel of it runs. A phase runs on the stream that is current, after phases called before
    it, whatever their streams. CUDA graphs may capture phases: all of an exchange in one graph.
    With num_sms phases run on a stream of the object's own: a send after what the current stream has got, a receive
    right behind its send, whenever it is called, and then the current stream waits for it. What that stream gets
    between the two calls runs beside both, and the send's tensors must stay as they are until it has passed the
    receive. A receive into tensors of the caller's waits for what the stream had got before it.
    Waits: a receive waits for the rows of peers; a send for peers' receive of the call before the last; on the CPU and
    over ports combine_send() also for peers' combine_send().
    Threads: one caller at a time.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        max_num_tokens: int,
        num_experts: int,
        hidden_dim: int,
        num_experts_per_token: int,
        in_dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype = torch.bfloat16,
        hidden_dim_scale: int | None = None,
        scale_dtype: torch.dtype | None = None,
        expert_padding: int = 1,
        max_recv_tokens: int | None = None,
        max_tokens_per_expert: int | None = None,
        max_private_tokens: int | None = None,
        dp_size: int = 1,
        max_in_flight: int = 2,
        exact: bool = False,
        num_sms: int = 0,
        timeout_s: float = 0.0,
        device: torch.device | str | None = None,
        comm: Any = None,
    ) -> None:
        self.sizes = P2PSizes(
            *(max_num_tokens, num_experts, hidden_dim, num_experts_per_token, in_dtype, out_dtype),
            *(hidden_dim_scale, scale_dtype, expert_padding, max_recv_tokens, max_tokens_per_expert),
            *(max_private_tokens, max_in_flight, dp_size, num_sms),
        )
        check_flags(exact=exact)
        timeout_s = check_number("timeout_s", timeout_s, 0)
        if group is None and comm is None:
            raise invalid(
                "group", "None", "a torch.distributed process group, or comm: an mpi4py communicator"
            )
        self.exact = bool(exact)
        self.device = device_of(device)
        given = comm if group is None else group
        ranks = given if dp_size == 1 else DpColumn(find_bootstrap(given), dp_size)
        communicator = connect(ranks, None, self.device, timeout_s)
        self.dp_rank, self.num_dp_groups = int(communicator.rank), int(communicator.size)
        self._agree(communicator)
        self.num_local_experts = self.sizes.local_experts(self.num_dp_groups, self.dp_rank)
        self.max_recv_tokens = self.sizes.rows_of(self.num_dp_groups, self.dp_rank)
        room = self.sizes.window_bytes(self.num_dp_groups)
        self._contexts = [
            DeviceContext(communicator, self.device, 0, room, timeout_s) for _ in range(max_in_flight)
        ]
        self._dispatches = {context: DispatchPlans(context, self.sizes) for context in self._contexts}
        self._combines = {context: CombinePlans(context, self.sizes) for context in self._contexts}
        if self.device.type == "cuda":  # compiled now: peers would wait for it in the first exchange
            context = self._contexts[0]
            self._dispatches[context].sender(0, 8)
            self._combines[context].calls(0, 8, hidden_dim, out_dtype, self.exact, False, 8)
        self._turns = Turns(self._contexts, max_in_flight)
        self._order = PhaseOrder(self._contexts, self.device, num_sms)

    # -- phases ----------------------------------------------------------------------------------------------

    def dispatch_send(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        x_scale: Tensor | None = None,
        bound_m: Tensor | None = None,
    ) -> P2PHandle:
        """Send each token once to every rank that owns one of its experts. Nothing of the call runs afterwards.

        Args:
            x: in_dtype [T, H], contiguous, T <= M. x_scale: scale_dtype [T, hidden_dim_scale].
            topk_idx: int64, int32 or uint32 [T, K]; -1 is an empty slot. topk_weights: float32 [T, K].
            bound_m: int32 of one element: of x, so many rows count, fewer than T perhaps. Read on the device.
        Returns: the handle of this exchange, for the other phases. The tensors may be written again once the stream
            has passed this call; on CUDA topk_idx, and with exact topk_weights, after the last combine_recv() of the
            exchange: before that, one that torch has written is refused.
        """
        context = self._next_context()
        tokens = self._check_rows(x)
        ids, bounded = self._check_ids(topk_idx, tokens), self._check_bound(bound_m)
        shape = (tokens, self.sizes.num_experts_per_token)
        arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), self.device)
        scale = self._check_scale(x_scale, tokens)
        if bounded is not None:
            outside = torch.arange(tokens, device=self.device, dtype=torch.int32) >= bounded
            ids = ids.masked_fill(outside.unsqueeze(1), -1)
        self._turns.check_send(context)
        calls = self._dispatches[context].sender(tokens, ids.element_size())
        tensors = (x, scale, ids, topk_weights, *(None,) * 10)
        sent = self._order.send(context, lambda on: calls.send(*tensors, on), tensors)
        self._turns.note_sent(context, sent, "dispatch_recv")
        handle = P2PHandle(context, ids, topk_weights if self.exact else None, sent, tensors)
        handle.is_bounded = bounded is not None
        return handle

    def dispatch_recv(
        self,
        handle: P2PHandle,
        out_x: Tensor | None = None,
        out_x_scale: Tensor | None = None,
        out_num_tokens: Tensor | None = None,
    ) -> P2PRows:
        """Receive the rows of this rank's experts.

        Args:
            out_x, out_x_scale, out_num_tokens: where to put them; None makes new ones. out_x: in_dtype, contiguous:
                [rows, H], which then bounds the rows, or [Le, rows of an expert, H]. out_x_scale: the same rows with
                hidden_dim_scale, in any strides.
        Raises: weft.Error, code capacity, where more rows came than fit (on CUDA at a later call). On the CPU larger
            tensors may be given right after it; with another send instead, the exchange is over.
        """
        self._check_phase(handle, "dispatch_send", "dispatch_recv")
        self._used_here(handle)
        context = handle.context
        plans = self._dispatches[context]
        layout = plans.layout(out_x, out_x_scale, self.num_local_experts, self.max_recv_tokens)
        with self._order.making():
            made = plans.new_outputs(layout, self.num_local_experts, self.num_dp_groups)
        rows = out_x if out_x is not None else made.x
        assert rows is not None
        scales = made.x_scale if out_x_scale is None else out_x_scale
        counts = made.num_tokens
        if out_num_tokens is not None:
            local = (self.num_local_experts,)
            counts = arguments.check_tensor(
                "out_num_tokens", out_num_tokens, local, (torch.int32,), self.device
            )
        calls = plans.receiver(handle.num_tokens, handle.id_bytes, layout)
        into = (rows, scales, made.src_token, made.ranges, counts, made.routes, made.weights, made.src_rank)
        used = (*handle.saved[:4], None, None, *into)
        call_slot = handle.sent.call_slot
        given = (out_x, out_x_scale, out_num_tokens)
        self._turns.begin_receive(handle)
        self._order.receive(context, lambda on: calls.receive_into(*used, call_slot, on), given, made)
        handle.phase, handle.layout, handle.routes, handle.saved = "dispatch_recv", layout, made.routes, ()
        handle.rows_shape = tuple(rows.shape)
        return P2PRows(rows, scales, counts, made.weights, made.src_rank, made.src_token)

    def combine_send(
        self,
        expert_y: Tensor,
        handle: P2PHandle,
        topk_weights: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> None:
        """Send the experts' rows back, from the places where dispatch_recv() put the tokens' rows.

        Args:
            expert_y: bfloat16, float16 or float32 [.., H] in the shape of the received rows, contiguous; its elements
                are no wider than out_dtype's.
            topk_weights: float32 [T, K] instead of those of the dispatch, on all ranks or on none. On CUDA it stays as
                it is until combine_recv().
            topk_idx: int64, int32 or uint32 [T, K] instead of those of the dispatch, with topk_weights of its slots:
                some may be masked by -1, and a token's ids may be in other slots. As topk_weights otherwise.
        An exchange may be combined again once combine_recv() has run.
        """
        self._check_phase(handle, ("dispatch_recv", "combine_recv"), "combine_send")
        context = handle.context
        self._check_results(expert_y, handle)
        self._used_here(handle)
        ids, weights, id_bytes = handle.ids, handle.weights, handle.id_bytes
        if topk_idx is not None:
            if topk_weights is None:
                raise invalid("topk_weights", "None", "those of the slots of topk_idx, with topk_idx")
            others = self._check_ids(topk_idx, handle.num_tokens)
            if handle.is_bounded:
                others = others.masked_fill((ids.tensor() < 0).all(1, keepdim=True), -1)
            ids, id_bytes = SavedInput("topk_idx", others), others.element_size()
        if topk_weights is not None:
            shape = (handle.num_tokens, self.sizes.num_experts_per_token)
            arguments.check_tensor("topk_weights", topk_weights, shape, (torch.float32,), self.device)
            weights = SavedInput("topk_weights", topk_weights)
        travel = topk_weights is not None and not self.exact
        self._turns.check_send(context)
        key = (handle.num_tokens, id_bytes, int(expert_y.size(-1)), expert_y.dtype)
        options = (*key, self.exact, travel, handle.id_bytes)
        calls = self._combines[context].calls(*options)
        own = None if weights is None else weights.tensor()
        tensors = (expert_y, ids.tensor(), own, handle.routes, None, None, None, handle.ids.tensor())
        sent = self._order.send(context, lambda on: calls.send(*tensors, on), tensors)
        self._turns.note_sent(context, sent, "combine_recv")
        handle.phase, handle.sent, handle.saved = "combine_send", sent, (*tensors, expert_y)
        handle.is_pending, handle.reads = True, (handle.ids, ids, weights)
        handle.combine_options = options

    def combine_recv(
        self, handle: P2PHandle, out_tokens: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Sum the rows of each token: out[t] = sum over k of topk_weights[t, k] * y, in float32.

        Args:
            out_tokens: out_dtype [T, H], contiguous, to be filled; None makes a new one.
            accumulate: sums are added to what out_tokens holds, with one rounding.
        Slots of -1, and rows past bound_m, add nothing.
        """
        self._check_phase(handle, "combine_send", "combine_recv")
        self._used_here(handle)
        check_flags(accumulate=accumulate)
        if accumulate and out_tokens is None:
            raise invalid("accumulate", "True without out_tokens", "True with the tensor to add to")
        context = handle.context
        shape = (handle.num_tokens, handle.combine_options[2])
        if out_tokens is None:
            with self._order.making():
                out = context.empty(*shape, dtype=self.sizes.out_dtype)
        else:
            out = arguments.check_tensor(
                "out_tokens", out_tokens, shape, (self.sizes.out_dtype,), self.device
            )
            arguments.check_alignment("out_tokens", out)
        calls = self._combines[context].calls(*handle.combine_options, bool(accumulate))
        for read in handle.reads:
            if read is not None:
                read.tensor()  # as the send got it
        used = (*handle.saved[:4], out, None, None, handle.saved[7])
        call_slot = handle.sent.call_slot
        self._turns.begin_receive(handle)
        self._order.receive(
            context, lambda on: calls.receive_into(*used, call_slot, on), (out_tokens,), (out,)
        )
        handle.phase, handle.saved = "combine_recv", ()
        return out

    def take_trace(self) -> trace.Trace:
        """Return what kernels of all exchanges noted since the last look, as Buffer.take_trace() does."""
        return trace.take_from(*self._contexts)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape of received rows that no caller gives: [max_recv_tokens, H] or [Le, max_tokens_per_expert, H]."""
        per_expert, hidden = self.sizes.max_tokens_per_expert, self.sizes.hidden_dim
        if per_expert is not None:
            return (self.num_local_experts, per_expert, hidden)
        return (self.max_recv_tokens, hidden)

    def is_row(self, num_tokens: Tensor) -> Tensor:
        """Return bool, one for each place of rows_shape: whether a row stands there. On the device, without a wait."""
        if len(self.rows_shape) == 3:
            places = torch.arange(self.rows_shape[1], device=self.device)
            return places < num_tokens.unsqueeze(1)
        padding = self.sizes.expert_padding
        padded = (num_tokens + padding - 1) // padding * padding
        begins = padded.cumsum(0) - padded
        places = torch.arange(self.rows_shape[0], device=self.device).unsqueeze(1)
        return ((places >= begins) & (places < begins + num_tokens)).any(1)

    # -- life ------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Wait for all ranks, then give the memory back. Raises: weft.PeerLost naming a rank that is gone."""
        contexts, self._contexts = self._contexts, []
        self._dispatches, self._combines = {}, {}
        for context in contexts:
            context.synchronize()
        if contexts:
            contexts[0].communicator.barrier()

    def __enter__(self) -> P2PAllToAll:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy it; after an error without waiting for others."""
        if error is None:
            self.destroy()
        self._contexts = []
        self._dispatches, self._combines = {}, {}

    def __repr__(self) -> str:
        where = f"data-parallel rank {self.dp_rank} of {self.num_dp_groups}, {self.device}"
        return f"weft.P2PAllToAll({where}{'' if self._contexts else ', destroyed'})"

    # -- order -----------------------------------------------------------------------------------------------

    def _used_here(self, handle: P2PHandle) -> None:
        """Tell torch that a handle's own tensors are used on the current stream, where phases have several."""
        context = handle.context
        if not context.is_cuda or context.is_capturing:
            return
        handle.streams.add(context.current_stream)
        if len(handle.streams) > 1:
            weights = None if handle.weights is None else handle.weights.tensor()
            context.hand_over((handle.ids.tensor(), weights, handle.routes))

    def _agree(self, communicator: Any) -> None:
        """Raise on all ranks where they were not made for the same. Collective."""
        mine = {name: str(value) for name, value in (*vars(self.sizes).items(), ("exact", self.exact))}
        per_rank = ("max_recv_tokens", "max_tokens_per_expert", "expert_padding")
        agreed = {name: value for name, value in mine.items() if name not in per_rank}
        for peer, text in enumerate(communicator.all_gather_text(json.dumps(agreed))):
            theirs = json.loads(text)
            for name, value in agreed.items():
                if theirs[name] != value:
                    given = f"{value} on rank {communicator.rank} and {theirs[name]} on rank {peer}"
                    raise invalid(name, given, "the same on all ranks")

    def _next_context(self) -> DeviceContext:
        self._check_alive()
        return self._turns.next()

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if not self._contexts:
            raise Error("P2PAllToAll: used after destroy(), allowed: calls before it", "closed")

    def _check_phase(self, handle: object, after: str | tuple[str, ...], phase: str) -> None:
        self._check_alive()
        if not isinstance(handle, P2PHandle) or handle.context not in self._contexts:
            raise invalid(
                "handle", arguments.describe(handle), "what dispatch_send() of this object returned"
            )
        wanted = (after,) if isinstance(after, str) else after
        if handle.phase not in wanted:
            raise invalid(
                "handle", f"one whose last phase was {handle.phase}", f"{phase}() after {' or '.join(wanted)}"
            )

    def _check_rows(self, x: object) -> int:
        rows = arguments.check_rows("x", x, "tokens", (self.sizes.in_dtype,), self.device)
        if rows.size(1) != self.sizes.hidden_dim:
            raise invalid("x", arguments.describe(rows), f"rows of hidden_dim, {self.sizes.hidden_dim}")
        if rows.size(0) > self.sizes.max_num_tokens:
            raise invalid(
                "x", f"{rows.size(0)} tokens", f"at most max_num_tokens, {self.sizes.max_num_tokens}"
            )
        return int(rows.size(0))

    def _check_ids(self, topk_idx: object, tokens: int) -> Tensor:
        shape = (tokens, self.sizes.num_experts_per_token)
        ids = arguments.check_tensor("topk_idx", topk_idx, shape, _IDS, self.device)
        return ids.view(torch.int32) if ids.dtype == torch.uint32 else ids

    def _check_bound(self, bound_m: object) -> Tensor | None:
        if bound_m is None:
            return None
        shape = tuple(bound_m.shape) if isinstance(bound_m, Tensor) else (1,)
        bound = arguments.check_tensor("bound_m", bound_m, shape, (torch.int32,), self.device)
        if bound.numel() != 1:
            raise invalid("bound_m", arguments.describe(bound), "int32 of one element")
        return bound

    def _check_scale(self, x_scale: object, tokens: int) -> Tensor | None:
        words, dtype = self.sizes.hidden_dim_scale, self.sizes.scale_dtype
        if words is None or dtype is None:
            if x_scale is not None:
                raise invalid("x_scale", arguments.describe(x_scale), "None without hidden_dim_scale")
            return None
        scale = arguments.check_tensor(
            "x_scale", x_scale, (tokens, words), (dtype,), self.device, contiguous=False
        )
        return scale.contiguous()

    def _check_results(self, expert_y: object, handle: P2PHandle) -> None:
        shape: tuple[int | str, ...] = (*handle.rows_shape[:-1], "hidden")
        y = arguments.check_tensor("expert_y", expert_y, shape, tuple(SUMMED), self.device)
        arguments.check_alignment("expert_y", y)
        bytes_of_row = y.size(-1) * y.element_size()
        if bytes_of_row == 0 or bytes_of_row % arguments.ROW_ALIGNMENT_BYTES:
            raise invalid("expert_y", f"rows of {bytes_of_row} bytes", "a multiple of 16 bytes, above 0")
        most = self.sizes.hidden_dim * self.sizes.out_dtype.itemsize
        if bytes_of_row > most:
            raise invalid(
                "expert_y", arguments.describe(y), f"rows of at most {most} bytes, hidden_dim of out_dtype"
            )
