# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's model, on one rank or over many, from the same seed on the same bytes.

Over ranks, each step's sequences are divided among the ranks, each rank owns a share of the experts, and rows
meet their experts through Weft. Every loss is a sum over the rank's bytes divided by the bytes of all ranks,
so the sum of the ranks' gradients is the gradient of one rank with all sequences: an expert's arrives whole
where the expert lives; those of the parameters that every rank holds are summed with an all-reduce of
torch.distributed.

Over nodes it is the same, with gradients summed by ``weft.Communicator``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch.nn import functional

import weft
from weft.demo.model import ByteModel, Exchange, Local, OverRanks, Shape
from weft.demo.text import batch, load_text
from weft.runtime.progress import progress
from weft.testing.ranks import Rank

SumUp = Callable[[torch.Tensor], Any]  # replaces a tensor by its sum over ranks


@dataclass(frozen=True)
class Plan:
    """What to train: the model, how many steps of how many sequences, from which seed, on 'cpu' or 'cuda'."""

    shape: Shape
    steps: int
    sequences: int
    seed: int
    device: str
    learning_rate: float = 2e-3
    warmup_steps: int = 20


@dataclass
class Outcome:
    """What one run showed.

    Attributes:
        losses: nats per byte of each step, over all ranks.
        tokens_per_s: of all ranks together, over the steps after the first.
        communication_share: of the time of those steps, on rank 0, waiting for slower ranks included.
        rows: per rank, how many of its rows chose each expert, over all layers and steps.
    """

    losses: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0
    communication_share: float = 0.0
    rows: list[list[int]] = field(default_factory=list)


class Stopwatch:
    """Sums the time of marked stretches: of the host on the CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def seconds(self) -> float:
        """Return the sum so far, once the GPU has caught up."""
        if self._on_gpu:
            torch.cuda.synchronize()
        on_gpu_ms: float = sum(start.elapsed_time(end) for start, end in self._events)
        return self._seconds + on_gpu_ms / 1000


class TimedBuffer:
    """A buffer whose calls are counted as communication."""

    def __init__(self, buffer: Any, stopwatch: Stopwatch) -> None:
        self._buffer = buffer
        self._stopwatch = stopwatch

    def get_dispatch_layout(self, *args: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return self._buffer.get_dispatch_layout(*args, **named)

    def dispatch(self, *args: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return self._buffer.dispatch(*args, **named)

    def combine(self, *args: Any, **named: Any) -> Any:
        with self._stopwatch.running():
            return self._buffer.combine(*args, **named)


def train_on_one_rank(me: Rank, plan: Plan) -> Outcome:
    """Train on this process alone, without Weft, with one thread like every rank of a run over ranks."""
    device = _device_of(me, plan)
    return _train(
        me, plan, device, Local(plan.shape.experts), Stopwatch(device), None, "one rank, without Weft"
    )


def train_over_ranks(me: Rank, plan: Plan, nodes: int = 1) -> Outcome:
    """Train over the ranks of ``me.group``, which are on so many nodes, through one ``weft.Buffer``. Collective."""
    device = _device_of(me, plan)
    sum_up = _sum_of_torch(me, plan) if nodes == 1 else weft.Communicator(me.group).all_reduce
    hidden_bytes = plan.shape.hidden * 2
    configs = (weft.Buffer.get_dispatch_config(me.size), weft.Buffer.get_combine_config(me.size))
    nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, me.size) for config in configs)
    rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, me.size) for config in configs)
    buffer = weft.Buffer(me.group, nvl_bytes, rdma_bytes, explicitly_destroy=True, device=device)
    stopwatch = Stopwatch(device)
    exchange = OverRanks(plan.shape.experts, me.rank, me.size, TimedBuffer(buffer, stopwatch))
    title = f"{me.size} ranks{f' on {nodes} nodes' if nodes > 1 else ''}, through Weft"
    outcome = _train(me, plan, device, exchange, stopwatch, sum_up, title)
    rows: list[list[int]] = [[] for _ in range(me.size)]
    torch.distributed.all_gather_object(rows, outcome.rows[0], group=me.group)
    buffer.destroy()
    outcome.rows = rows
    return outcome


def _sum_of_torch(me: Rank, plan: Plan) -> SumUp:
    group = torch.distributed.new_group(backend="nccl") if plan.device == "cuda" else me.group
    return functools.partial(torch.distributed.all_reduce, group=group)


def _device_of(me: Rank, plan: Plan) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(me.rank)
    return torch.device("cuda", me.rank)


def _train(
    me: Rank,
    plan: Plan,
    device: torch.device,
    exchange: Exchange,
    stopwatch: Stopwatch,
    sum_up: SumUp | None,
    title: str,
) -> Outcome:
    torch.manual_seed(plan.seed)
    model = ByteModel(plan.shape, exchange).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.01)
    text = load_text()
    outcome = Outcome()
    started, communicated = 0.0, 0.0
    with progress(enabled=me.rank == 0) as bar:
        task = bar.add_task(title, total=plan.steps)
        for step in range(plan.steps):
            for parameters in optimizer.param_groups:
                parameters["lr"] = plan.learning_rate * min(1.0, (step + 1) / plan.warmup_steps)
            tokens = batch(text, step, plan.sequences, plan.shape.length, plan.seed).to(device)
            outcome.losses.append(_step(model, optimizer, tokens, me, sum_up, stopwatch))
            if step == 0:  # the first step sets things up; it is not timed
                started, communicated = time.perf_counter(), stopwatch.seconds()
            bar.update(task, advance=1, description=f"{title}: loss {outcome.losses[-1]:.3f}")
    elapsed = time.perf_counter() - started
    outcome.tokens_per_s = (plan.steps - 1) * plan.sequences * plan.shape.length / elapsed
    outcome.communication_share = (stopwatch.seconds() - communicated) / elapsed
    outcome.rows = [torch.stack([mixture.rows_per_expert for mixture in model.mixtures()]).sum(0).tolist()]
    return outcome


def _step(
    model: ByteModel,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    me: Rank,
    sum_up: SumUp | None,
    stopwatch: Stopwatch,
) -> float:
    """Take one step on this rank's share of int64[sequences, length + 1]; return the loss over all ranks."""
    mine = tokens.tensor_split(me.size)[me.rank]
    scores = model(mine[:, :-1])
    total = functional.cross_entropy(scores.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
    loss = total / tokens[:, 1:].numel()
    optimizer.zero_grad()
    loss.backward()
    summed = loss.detach().reshape(1)
    if sum_up is not None:
        with stopwatch.running():
            summed = _sum_over_ranks(model, summed, sum_up)
    optimizer.step()
    return summed.item()


def _sum_over_ranks(model: ByteModel, loss: torch.Tensor, sum_up: SumUp) -> torch.Tensor:
    """Sum the gradients of the shared parameters, and the loss, over the ranks in one call; return the loss."""
    tensors = [*(p.grad for p in model.shared_parameters() if p.grad is not None), loss]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sum_up(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
    return loss
