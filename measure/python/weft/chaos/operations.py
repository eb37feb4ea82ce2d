# SPDX-License-Identifier: Apache-2.0
"""The calls that ``weft chaos`` makes: each draws its own sizes and form, and compares its result with the oracle.

    OPERATIONS["all_reduce"].run(place, random.Random(7))     # on every rank, with the same random numbers

A wrong result is an AssertionError; whatever Weft raises passes through. To add a call, write a function with
``@operation``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch

import weft
from weft.chaos.connected_engine import SLOT_BYTES, ConnectedEngine, pattern
from weft.collectives.exchanges import EXCHANGES
from weft.collectives.library import entries
from weft.collectives.variants import Choice, parse_variant
from weft.errors import Error
from weft.runtime.bootstrap import find_bootstrap
from weft.testing import elastic_refs, oracle
from weft.testing.cases import MoeCase
from weft.testing.numerics import calc_diff
from weft.testing.round_trips import (
    FORMATS,
    check_combined,
    check_dispatched,
    check_received,
    dispatch,
    expected_combined,
    expert_output,
    outputs_of,
)

_Made = TypeVar("_Made")
PORTS, MAPPED, ENGINE = (
    "ports",
    "mapped",
    "engine",
)  # ports: any communicator; mapped: one whose ranks share memory
MOST_TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 512, 12, 8  # the largest case of expert parallelism


@dataclass
class Place:
    """The state of one rank in a round: its number, how it meets the others, and the objects that it made. Made things
    are shared by later calls, so every rank makes them in the same order.

    meet: makes a Bootstrap, or a group, of all ranks. timeout_s: bound of every wait.
    """

    rank: int
    size: int
    transport: str
    timeout_s: float
    peer_dead_s: float
    meet: Callable[[], Any]
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def comm(self) -> weft.Communicator:
        """The communicator. Collective at its first use, as all that follow."""
        return self._once("comm", self._make_comm)

    @property
    def buffer(self) -> weft.Buffer:
        """A buffer for both modes."""
        return self._once("buffer", self._make_buffer)

    @property
    def elastic(self) -> weft.ElasticBuffer:
        """An elastic buffer."""
        return self._once("elastic", self._make_elastic)

    @property
    def engine(self) -> ConnectedEngine:
        """A transfer engine, connected to those of all others."""
        return self._once("engine", self._make_engine)

    def close(self) -> None:
        """Let go of all that was made; what is left then has leaked."""
        if engine := self.made.get("engine"):
            engine.close()
        self.made.clear()

    def _once(self, name: str, make: Callable[[], _Made]) -> _Made:
        if name not in self.made:
            self.made[name] = make()
        return cast(_Made, self.made[name])

    def _make_comm(self) -> weft.Communicator:
        comm = weft.Communicator(self.meet(), timeout_s=self.timeout_s)
        assert comm.collectives  # collective, too: so no send or receive is the first use
        return comm

    def _make_buffer(self) -> weft.Buffer:
        rdma = weft.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS * TOP_K, HIDDEN, self.size, EXPERTS)
        return weft.Buffer(self.meet(), 4 << 20, rdma, low_latency_mode=True, timeout_s=self.timeout_s)

    def _make_elastic(self) -> weft.ElasticBuffer:
        limit = self.timeout_s
        buffer = weft.ElasticBuffer(
            self.meet(), num_bytes=8 << 20, num_cpu_timeout_secs=limit, num_gpu_timeout_secs=limit
        )
        buffer.pp_set_config(1 << 16, 2)
        return buffer

    def _make_engine(self) -> ConnectedEngine:
        ranks = find_bootstrap(self.meet())
        return ConnectedEngine(self.rank, ranks, self.transport, self.timeout_s, self.peer_dead_s)


@dataclass(frozen=True)
class Operation:
    """One call. ``needs``: PORTS, MAPPED or ENGINE; ``weight``: how often it is drawn."""

    name: str
    needs: str
    weight: int
    run: Callable[[Place, random.Random], None]


OPERATIONS: dict[str, Operation] = {}


def operation(needs: str, weight: int = 2) -> Callable[[Callable[[Place, random.Random], None]], None]:
    """Register a function under its name. All ranks make the objects that it needs before, even ranks that then do
    nothing."""

    def register(run: Callable[[Place, random.Random], None]) -> None:
        def make_and_run(place: Place, chance: random.Random) -> None:
            if needs != MAPPED:
                assert place.engine if needs == ENGINE else place.comm
            run(place, chance)

        name = run.__name__
        OPERATIONS[name] = Operation(name, needs, weight, make_and_run)

    return register


# ---- collectives: all ranks know all inputs, which are small whole numbers, so that every sum is exact

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.float64, torch.uint8)
_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda every: every.sum(0),
    "product": lambda every: every.prod(0),
    "min": lambda every: every.amin(0),
    "max": lambda every: every.amax(0),
}


def _elems(chance: random.Random, most: int = 200_000) -> int:
    return min(int(2 ** chance.uniform(0, 18)), most)


def _inputs(place: Place, chance: random.Random, multiple_of: int = 1) -> torch.Tensor:
    """Return [ranks, elements] of a drawn type, values 0 to 3."""
    elems, dtype = _elems(chance) * multiple_of, chance.choice(_DTYPES)
    salt = chance.randrange(1000)
    numbers = torch.arange(elems) * 7
    return torch.stack([(numbers + 5 * r + salt) % 13 % 4 for r in range(place.size)]).to(dtype)


def _reduction(chance: random.Random, every: torch.Tensor) -> tuple[str, torch.Tensor]:
    name = chance.choice(list(_REDUCED))
    return name, _REDUCED[name](every.double()).to(every.dtype)


def _same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        wrong = -1 if found.shape != wanted.shape else int((found != wanted).sum())
        raise AssertionError(f"{what}: {wrong} of {wanted.numel()} {wanted.dtype} elements are wrong")


def _choice(place: Place, chance: random.Random, collective: str, root: int) -> Choice | None:
    """Draw the algorithm of a call: half of the time the chosen one, else any of the library in any form."""
    if place.size == 1 or chance.random() < 0.5:
        return None
    names = [name for name, e in entries().items() if e.collective == collective and e.applies(place.size)]
    name, inplace = chance.choice(names), chance.random() < 0.5 and collective not in ("gather", "scatter")
    protocol = chance.choice(("Simple", "LL", "LL128"))
    can_exchange = place.transport == "mapped" and name in EXCHANGES and protocol != "LL128"
    modes = ("program", "exchange", "staged") if protocol == "Simple" else ("program", "exchange")
    mode = chance.choice(modes) if can_exchange else "program"
    words = f"{name} {protocol} {mode}"
    try:
        return parse_variant(words).choice(place.size, inplace, root)
    except Error:  # there is no such form: every rank finds so
        return None


@operation(PORTS, 4)
def all_reduce(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance)
    op, wanted = _reduction(chance, every)
    choice, own = _choice(place, chance, "allreduce", 0), every[place.rank].clone()
    out = torch.empty_like(own) if chance.random() < 0.5 else None
    found = place.comm.collectives.all_reduce(own, op, out=out, algorithm=choice)
    _same(found, wanted, f"all_reduce {op} {choice and choice.label()}")


@operation(PORTS)
def all_gather(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance)
    choice = _choice(place, chance, "allgather", 0)
    found = place.comm.collectives.all_gather(every[place.rank].clone(), algorithm=choice)
    _same(found, every, f"all_gather {choice and choice.label()}")


@operation(PORTS)
def reduce_scatter(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance, place.size)
    op, wanted = _reduction(chance, every)
    choice, own = _choice(place, chance, "reducescatter", 0), every[place.rank].clone()
    found = place.comm.collectives.reduce_scatter(own, op, algorithm=choice)
    _same(found, wanted.view(place.size, -1)[place.rank], f"reduce_scatter {op} {choice and choice.label()}")


@operation(PORTS)
def all_to_all(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance, place.size)
    choice = _choice(place, chance, "alltoall", 0)
    parts = every.view(place.size, place.size, -1)
    found = place.comm.collectives.all_to_all(parts[place.rank].clone(), algorithm=choice)
    _same(found, parts[:, place.rank], f"all_to_all {choice and choice.label()}")


@operation(PORTS)
def all_to_all_uneven(place: Place, chance: random.Random) -> None:
    n, most = place.size, chance.choice((3, 50, 5000))
    rows = [[chance.randrange(most) for _ in range(n)] for _ in range(n)]  # sender, receiver
    sent = [torch.arange(sum(rows[r]), dtype=torch.int64) + 1_000_000 * r for r in range(n)]
    came = [torch.split(sent[r], rows[r])[place.rank] for r in range(n)]
    found = place.comm.all_to_all(
        sent[place.rank].clone(),
        input_splits=rows[place.rank],
        output_splits=[rows[r][place.rank] for r in range(n)],
    )
    _same(found, torch.cat(came), "all_to_all with splits")


@operation(PORTS)
def broadcast(place: Place, chance: random.Random) -> None:
    every, root = _inputs(place, chance), chance.randrange(place.size)
    choice = _choice(place, chance, "broadcast", root)
    found = place.comm.collectives.broadcast(every[place.rank].clone(), root, algorithm=choice)
    _same(found, every[root], f"broadcast from {root} {choice and choice.label()}")


@operation(PORTS)
def reduce(place: Place, chance: random.Random) -> None:
    every, root = _inputs(place, chance), chance.randrange(place.size)
    op, wanted = _reduction(chance, every)
    choice, own = _choice(place, chance, "reduce", root), every[place.rank].clone()
    found = place.comm.collectives.reduce(own, root, op, algorithm=choice)
    what = f"reduce {op} to {root} {choice and choice.label()}"
    _same(found, wanted if place.rank == root else every[place.rank], what)


@operation(PORTS)
def gather(place: Place, chance: random.Random) -> None:
    every, root = _inputs(place, chance), chance.randrange(place.size)
    choice = _choice(place, chance, "gather", root)
    found = place.comm.collectives.gather(every[place.rank].clone(), root, algorithm=choice)
    assert (found is None) == (place.rank != root)
    if found is not None:
        _same(found, every, f"gather to {root}")


@operation(PORTS)
def scatter(place: Place, chance: random.Random) -> None:
    every, root = _inputs(place, chance, place.size), chance.randrange(place.size)
    choice, parts = _choice(place, chance, "scatter", root), every[root].view(place.size, -1)
    given, out = parts.clone() if place.rank == root else None, torch.empty_like(parts[0])
    found = place.comm.collectives.scatter(given, out, root, algorithm=choice)
    _same(found, parts[place.rank], f"scatter from {root}")


@operation(PORTS)
def send_recv(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance)
    _same(place.comm.send_recv(every[place.rank].clone()), every[place.rank - 1], "send_recv")


@operation(PORTS)
def send_and_receive(place: Place, chance: random.Random) -> None:
    every = _inputs(place, chance)
    src, dst = chance.sample(range(place.size), 2)
    if place.rank == src:
        place.comm.send(every[src].clone(), dst)
    elif place.rank == dst:
        _same(place.comm.recv(torch.empty_like(every[src]), src), every[src], f"recv from {src}")


@operation(PORTS, 1)
def barrier(place: Place, chance: random.Random) -> None:
    place.comm.barrier()


def compile_kernel(place: Place, chance: random.Random) -> None:
    """Run a program in a kernel of its own, which the C++ compiler makes where no cache has it."""
    choice = parse_variant("allgather_ring Simple compiled").choice(place.size, False)
    every = torch.arange(place.size * 100.0).view(place.size, 100)
    found = place.comm.collectives.all_gather(every[place.rank].clone(), algorithm=choice)
    _same(found, every, "a compiled all_gather")


# ---- expert parallelism


def _case(place: Place, chance: random.Random, hidden_step: int = 8, top_k: int = TOP_K) -> MoeCase:
    return MoeCase(
        tokens=tuple(chance.randrange(MOST_TOKENS + 1) for _ in range(place.size)),
        hidden=hidden_step * chance.randint(1, HIDDEN // hidden_step),
        top_k=chance.randint(1, top_k),
        num_experts=chance.randint(place.size, EXPERTS),
        routing=chance.choice(("distinct", "any", "one expert", "none")),
        empty_share=chance.choice((0.0, 0.3, 0.9)),
        seed=chance.randrange(1000),
    )


@operation(MAPPED, 5)
def high_throughput(place: Place, chance: random.Random) -> None:
    case, me = _case(place, chance), place.rank
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(place.buffer, case, me)
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    check_received(case, me, rows, recv_x, recv_idx, recv_weights)
    assert counts == rows.per_expert
    if chance.random() < 0.3:  # the same routes again
        again: Any = place.buffer.dispatch(case.x(me), handle=handle)[0]
        assert torch.equal(again, recv_x)
    combined, _, _ = place.buffer.combine(expert_output(recv_x, me), handle)
    check_combined(case, me, combined)


@operation(MAPPED, 5)
def low_latency(place: Place, chance: random.Random) -> None:
    form, hooks = chance.choice(FORMATS), chance.random() < 0.5
    case, me = _case(place, chance, 512 if form.use_ue8m0 else 128 if form.use_fp8 else 8), place.rank
    most = MOST_TOKENS * TOP_K  # rows may name an expert twice
    topk_idx, weights = case.topk_idx(me), case.topk_weights(me)
    options: dict[str, Any] = form.options()
    recv, counts, handle, _, hook = place.buffer.low_latency_dispatch(
        case.x(me), topk_idx, most, case.num_experts, return_recv_hook=hooks, **options
    )
    if hook is not None:
        hook()
    check_dispatched(case, me, most, form, recv, counts, handle)
    combined, _, hook = place.buffer.low_latency_combine(
        outputs_of(recv), topk_idx, weights, handle, return_recv_hook=hooks
    )
    if hook is not None:
        hook()
    if combined.numel():
        assert calc_diff(combined, expected_combined(case, me, form)) < 1e-5, "low_latency_combine"


@operation(MAPPED, 4)
def elastic(place: Place, chance: random.Random) -> None:
    case, me = _case(place, chance), place.rank
    case = replace(case, num_experts=place.size * chance.randint(1, EXPERTS // place.size))
    options: dict[str, Any] = {"do_cpu_sync": False} if chance.random() < 0.3 else {}
    received: Any = place.elastic.dispatch(
        case.x(me),
        case.topk_idx(me),
        case.topk_weights(me),
        num_experts=case.num_experts,
        num_max_tokens_per_rank=MOST_TOKENS,
        **options,
    )
    x, idx, weights, handle, _ = received
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    n = len(rows.src_rank)
    assert torch.equal(x[:n], rows.take(case.all_x())), "elastic dispatch: rows"
    assert torch.equal(idx[:n], rows.topk_idx), "elastic dispatch: ids"
    # Every slot's expert returns its row: the sum of a token's rows has as many terms as it has slots.
    y = torch.zeros_like(x)
    y[:n] = (x[:n].float() * (rows.topk_idx >= 0).sum(1, keepdim=True)).bfloat16()
    combined, _, _ = place.elastic.combine(y, handle, topk_weights=weights)
    values = case.x(me).unsqueeze(1).expand(-1, case.top_k, -1)
    wanted = elastic_refs.combine(values, case.topk_idx(me), 1, place.size, case.num_experts, None, True)
    assert torch.equal(combined, wanted), "elastic combine"


@operation(MAPPED)
def pipeline(place: Place, chance: random.Random) -> None:
    """Every rank sends to the next one and receives from the previous one."""
    every = _inputs(place, chance).view(place.size, -1).contiguous()
    every = every.view(torch.uint8)[:, : 1 << 16].contiguous()
    place.elastic.pp_send(every[place.rank].clone(), (place.rank + 1) % place.size)
    got = torch.full_like(every[0], 255)
    place.elastic.pp_recv(got, (place.rank - 1) % place.size)
    _same(got, every[place.rank - 1], "pp_recv")


# ---- transfer engine: every rank draws who moves what to whom; the other ranks do nothing


def _move(place: Place, chance: random.Random) -> tuple[int, int, int, bytes]:
    """Return (source, destination, offset, bytes)."""
    src, dst = chance.sample(range(place.size), 2)
    length = _elems(chance, SLOT_BYTES)
    offset = chance.randrange(SLOT_BYTES - length + 1)
    return src, dst, offset, chance.randbytes(length)


@operation(ENGINE, 4)
def write(place: Place, chance: random.Random) -> None:
    src, dst, offset, data = _move(place, chance)
    if place.rank == src:
        place.engine.write(dst, offset, data)
    elif place.rank == dst:
        assert place.engine.written_by(src, offset, len(data)) == data, f"write from {src}"


@operation(ENGINE, 2)
def write_pages(place: Place, chance: random.Random) -> None:
    src, dst, _, data = _move(place, chance)
    page = chance.randint(1, 300)
    data = data[: max(len(data) // page, 1) * page].ljust(page, b".")
    if place.rank == src:
        place.engine.write(dst, 0, data, page)
    elif place.rank == dst:
        assert place.engine.written_by(src, 0, len(data)) == data, f"write_pages from {src}"


@operation(ENGINE, 2)
def read(place: Place, chance: random.Random) -> None:
    src, dst, offset, data = _move(place, chance)
    if place.rank == dst:
        found = place.engine.read(src, offset, len(data))
        assert found == pattern(src)[offset : offset + len(data)], f"read from {src}"


@operation(ENGINE, 2)
def message(place: Place, chance: random.Random) -> None:
    src, dst, _, data = _move(place, chance)
    if place.rank == src:
        place.engine.send(dst, data)
    elif place.rank == dst:
        assert place.engine.recv(src, len(data)) == data, f"recv from {src}"


@operation(ENGINE, 1)
def engine_barrier(place: Place, chance: random.Random) -> None:
    place.engine.barrier()
