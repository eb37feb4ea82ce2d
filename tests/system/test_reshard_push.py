# SPDX-License-Identifier: Apache-2.0
"""A plan run over transfer engines: four trainers (FSDP 2 x TP 2) to four servers (EP 2 x TP 2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from weft.errors import Error, PeerLost
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import TransferEngine, nics
from weft.transfer.reshard import (
    Arrivals,
    Layout,
    Plan,
    Push,
    Rule,
    TensorMeta,
    Update,
    layout_by_rules,
    plan,
    verify,
    write_lists,
)

TIMEOUT_S = 60.0
EXPERTS = 4


def layouts() -> tuple[Layout, Layout]:
    """Return trainers and servers of a model with attention, fused on the servers, and experts."""
    tensors = {
        "norm": TensorMeta((48,), "int32"),
        "q": TensorMeta((32, 48), "int32"),
        "k": TensorMeta((16, 48), "int32"),
        "v": TensorMeta((16, 48), "int32"),
        "out": TensorMeta((48, 32), "int32"),
    }
    for expert in range(EXPERTS):
        tensors[f"e{expert}.gate"] = tensors[f"e{expert}.up"] = TensorMeta((24, 48), "int32")
        tensors[f"e{expert}.down"] = TensorMeta((48, 24), "int32")
    trainers = [
        Rule("norm", {0: "fsdp"}),
        Rule(r"out|e\d\.down", {1: "tp", 0: "fsdp"}),
        Rule(".*", {0: ("tp", "fsdp")}),
    ]
    on = {"ep": lambda match: int(match["e"]) * 2 // EXPERTS}
    servers = [
        Rule("norm"),
        Rule("q", {0: "tp"}, memory="qkv", order=0),
        Rule("k", {0: "tp"}, memory="qkv", order=1),
        Rule("v", {0: "tp"}, memory="qkv", order=2),
        Rule("out", {1: "tp"}, dims=(1, 0)),
        Rule(
            r"e(?P<e>\d)\.(?P<w>gate|up)",
            {0: "tp"},
            on,
            "w13",
            lambda match: (int(match["e"]), int(match["w"] == "up")),
            groups=12,
        ),
        Rule(r"e(?P<e>\d)\.down", {1: "tp"}, on, "w2", lambda match: (int(match["e"]),)),
    ]
    return (
        layout_by_rules(tensors, {"fsdp": 2, "tp": 2}, trainers),
        layout_by_rules(tensors, {"ep": 2, "tp": 2}, servers),
    )


def memories_of(layout: Layout) -> dict[tuple[int, str], np.ndarray[Any, Any]]:
    """Return memory for every box, of a layout in which memory has no gaps."""
    sizes: dict[tuple[int, str], int] = {}
    for row, nbytes in enumerate(layout.nbytes):
        key = (int(layout.boxes.rank[row]), layout.memories[layout.boxes.memory[row]])
        sizes[key] = sizes.get(key, 0) + int(nbytes)
    return {key: np.zeros(size, np.uint8) for key, size in sizes.items()}


def boxes(
    layout: Layout, memories: dict[tuple[int, str], np.ndarray[Any, Any]], version: int
) -> Iterator[Any]:
    """Yield each box's elements in memory, and what they are in a version of the weights."""
    b = layout.boxes
    for row in range(len(b)):
        name = layout.names[b.tensor[row]]
        memory = memories.get((int(b.rank[row]), layout.memories[b.memory[row]]))
        if memory is None:
            continue
        shape = tuple(b.stop[row] - b.start[row])
        whole = (
            np.arange(int(np.prod(layout.extents[b.tensor[row]])), dtype=np.int32) * 7
            + len(name)
            + version * 1000
        )
        whole = whole.reshape(layout.extents[b.tensor[row]])
        part = whole[tuple(slice(x, y) for x, y in zip(b.start[row], b.stop[row], strict=True))]
        yield np.ndarray(shape, np.int32, memory.data, int(b.offset[row]), tuple(b.strides[row])), part


@dataclass
class Job:
    """Engines of all ranks in one process, with their memories."""

    made: Plan
    sources: list[TransferEngine]
    destinations: list[TransferEngine]
    source_memory: dict[tuple[int, str], np.ndarray[Any, Any]]
    destination_memory: dict[tuple[int, str], np.ndarray[Any, Any]]
    pushes: list[Push] = field(default_factory=list)
    arrivals: list[Arrivals] = field(default_factory=list)


@pytest.fixture(params=["fabric:tcp", "fabric:shm"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    unusable = [nic.unusable_because for nic in nics(request.param)]
    if all(unusable):
        pytest.skip(unusable[0])
    src, dst = layouts()
    made = plan(src, dst, bucket_bytes=16 << 10)
    verify(made)
    with ExitStack() as stack:

        def engines(side: str, ranks: int) -> list[TransferEngine]:
            names = [f"{side} {rank}" for rank in range(ranks)]
            return [
                stack.enter_context(TransferEngine(request.param, name=n, timeout_s=TIMEOUT_S)) for n in names
            ]

        one = Job(made, engines("trainer", 4), engines("server", 4), memories_of(src), memories_of(dst))
        bind(one)
        yield one


def bind(job: Job) -> None:
    """Register and attach all memory; make what pushes, and what waits."""
    descriptors = {
        key: job.destinations[key[0]].register(memory, remote_write=True).descriptor
        for key, memory in job.destination_memory.items()
    }
    for rank, engine in enumerate(job.sources):
        for other in job.destinations:
            engine.connect(other.address)
        remotes = {key: engine.attach(descriptor) for key, descriptor in descriptors.items()}
        own = {name: engine.register(m) for (r, name), m in job.source_memory.items() if r == rank}
        job.pushes.append(Push(job.made, rank, engine, own, remotes, first_imm=100))
    for rank, engine in enumerate(job.destinations):
        peers = {source: engine.connect(other.address) for source, other in enumerate(job.sources)}
        job.arrivals.append(Arrivals(job.made, rank, engine, peers, first_imm=100))


def test_updates_arrive_whole(job: Job) -> None:
    for version in (1, 2):
        for view, part in boxes(job.made.src, job.source_memory, version):
            view[...] = part
        updates = [push.start() for push in job.pushes]
        for arrivals in job.arrivals:
            arrivals.wait(version, TIMEOUT_S)
        for update in updates:
            assert update.wait(TIMEOUT_S).share == 1.0
        for view, part in boxes(job.made.dst, job.destination_memory, version):
            assert np.array_equal(view, part)
    assert sum(push.nbytes for push in job.pushes) == job.made.nbytes.sum()


def _update(rank: Rank, provider: str) -> None:
    """Be a trainer (ranks 0 to 3) or a server, for three updates."""
    made = plan(*layouts(), bucket_bytes=16 << 10)
    is_trainer, own = rank.rank < 4, rank.rank % 4
    layout = made.src if is_trainer else made.dst
    memories = {key: memory for key, memory in memories_of(layout).items() if key[0] == own}
    with TransferEngine(provider, name=f"rank {rank.rank}", timeout_s=TIMEOUT_S) as engine:
        mine = {name: engine.register(m, remote_write=not is_trainer) for (_, name), m in memories.items()}
        told: list[Any] = [None] * rank.size
        descriptors = {} if is_trainer else {name: memory.descriptor for name, memory in mine.items()}
        dist.all_gather_object(told, (engine.address, descriptors), rank.group)
        peers = {i % 4: engine.connect(told[i][0]) for i in range(8) if (i < 4) != is_trainer}
        if is_trainer:
            remotes = {(i - 4, n): engine.attach(d) for i in range(4, 8) for n, d in told[i][1].items()}
            push = Push(made, own, engine, mine, remotes)
        else:
            arrivals = Arrivals(made, own, engine, peers)
        for version in (1, 2, 3):
            rank.meet()
            if is_trainer:
                for view, part in boxes(layout, memories, version):
                    view[...] = part
                push.start().wait(TIMEOUT_S)
            else:
                arrivals.wait(version)
                assert all(np.array_equal(view, part) for view, part in boxes(layout, memories, version))
        rank.meet()


@pytest.mark.parametrize("provider", ["fabric:tcp", "fabric:shm"])
def test_updates_arrive_whole_at_other_processes(provider: str) -> None:
    if unusable := nics(provider)[0].unusable_because:
        pytest.skip(unusable)
    run_ranks(8, _update, provider, with_gpus=False)


def test_memory_that_does_not_fit_is_named(job: Job) -> None:
    with pytest.raises(Error, match=r"memories: got None as '.*', allowed: a Memory"):
        Push(job.made, 0, job.sources[0], {}, {})
    small = {name: job.sources[0].register(bytearray(4)) for (r, name) in job.source_memory if r == 0}
    remotes = {key: job.pushes[0]._buckets[0][-1][0][2] for key in job.destination_memory}
    with pytest.raises(Error, match=r"memories: got 4 bytes as '.*', allowed: [0-9]+ or more"):
        Push(job.made, 0, job.sources[0], small, remotes)
    with pytest.raises(Error, match=r"peers: got None as [0-3], allowed: a Peer"):
        Arrivals(job.made, 0, job.destinations[0], {})


def test_other_providers_are_refused_as_their_pages_need_not_be_in_place() -> None:
    src, dst = layouts()
    with (
        TransferEngine("loopback") as engine,
        pytest.raises(Error, match="engine: got one over loopback, allowed"),
    ):
        Push(plan(src, dst), 0, engine, {}, {})


def test_runs_that_continue_each_other_are_one() -> None:
    tensors = {"a": TensorMeta((8, 4), "int32"), "b": TensorMeta((8, 4), "int32")}
    joined = [Rule(name, memory="all", order=i) for i, name in enumerate("ab")]
    src = layout_by_rules(tensors, {"dp": 1}, joined)
    dst = layout_by_rules(
        tensors, {"tp": 2}, [Rule(r.pattern, {1: "tp"}, memory="all", order=r.order) for r in joined]
    )
    (bucket,) = write_lists(plan(src, src), 0)
    (one,) = bucket.lists
    assert one.page_bytes == 256
    columns = write_lists(plan(src, dst), 0)
    assert [one.page_bytes for bucket in columns for one in bucket.lists] == [8, 8]
    assert all(len(one.src_pages.indices) == 16 for bucket in columns for one in bucket.lists)


def test_an_update_that_does_not_end_says_for_whom_it_waits() -> None:
    update = Update(2, 100, [3, 0])
    update.wrote(40)
    update.ended(3, None)
    with pytest.raises(
        PeerLost,
        match=r"source 2 waited 0.01 s for destinations \[0\]: expected 100 bytes written, saw 40",
    ):
        update.wait(0.01)
    update.ended(0, Error("no way"))
    with pytest.raises(Error, match="no way"):
        update.wait(0.01)
