# SPDX-License-Identifier: Apache-2.0
"""Layouts, plans and their proof, against indexing of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.errors import Error
from weft.transfer.reshard import (
    Box,
    Layout,
    Links,
    Plan,
    Rule,
    Split,
    TensorMeta,
    layout_by_rules,
    layout_of,
    plan,
    verify,
)
from weft.transfer.reshard.dtensors import boxes_of_dtensor

DTYPES = {"uint8": np.uint8, "int16": np.int16, "int32": np.int32, "int64": np.int64}
Memories = dict[tuple[int, str], np.ndarray[Any, Any]]


def full_tensors(layout: Layout) -> dict[str, torch.Tensor]:
    """Return tensors whose elements are all different, as far as their types can tell."""
    return {
        name: torch.from_numpy(
            (np.arange(int(np.prod(meta.shape))) + 31 * i).astype(DTYPES[meta.dtype])
        ).view(meta.shape)
        for i, (name, meta) in enumerate(layout.tensors.items())
    }


def memories_of(layout: Layout, fill: int) -> Memories:
    """Return memories just long enough for the boxes."""
    ends: dict[tuple[int, str], int] = {}
    boxes = layout.boxes
    for row in range(len(boxes)):
        key = (int(boxes.rank[row]), layout.memories[boxes.memory[row]])
        span = int(((boxes.stop[row] - boxes.start[row] - 1) * boxes.strides[row]).sum())
        end = int(boxes.offset[row]) + span + int(layout.item_bytes[boxes.tensor[row]])
        ends[key] = max(ends.get(key, 0), end)
    return {key: np.full(end, fill, np.uint8) for key, end in ends.items()}


def elements(layout: Layout, memories: Memories, row: int) -> np.ndarray[Any, Any]:
    """Return the elements of a box as they lie in memory, as a view."""
    boxes = layout.boxes
    memory = memories[int(boxes.rank[row]), layout.memories[boxes.memory[row]]]
    dtype = np.dtype(DTYPES[layout.tensors[layout.names[boxes.tensor[row]]].dtype])
    return np.ndarray(
        tuple(boxes.stop[row] - boxes.start[row]),
        dtype,
        memory.data,
        int(boxes.offset[row]),
        tuple(boxes.strides[row]),
    )


def expected(layout: Layout, full: dict[str, torch.Tensor], row: int) -> np.ndarray[Any, Any]:
    boxes, name = layout.boxes, layout.names[layout.boxes.tensor[row]]
    whole = full[name].reshape((1,) * (4 - full[name].ndim) + tuple(full[name].shape))
    return whole[
        tuple(slice(int(a), int(b)) for a, b in zip(boxes.start[row], boxes.stop[row], strict=True))
    ].numpy()


def filled(layout: Layout, full: dict[str, torch.Tensor]) -> Memories:
    memories = memories_of(layout, 0)
    for row in range(len(layout.boxes)):
        elements(layout, memories, row)[...] = expected(layout, full, row)
    return memories


def run(made: Plan, sources: Memories, destinations: Memories) -> Memories:
    """Run a plan by its forms, a byte range at a time; return how often each byte was written."""
    written = {key: np.zeros(len(memory), np.uint8) for key, memory in destinations.items()}
    src, dst = made.src, made.dst
    for piece in range(len(made)):
        form = made.form[piece]
        source = sources[int(made.src_rank[piece]), src.memories[src.boxes.memory[made.src_box[piece]]]]
        key = (int(made.dst_rank[piece]), dst.memories[dst.boxes.memory[made.dst_box[piece]]])
        length = int(made.forms.run[form])
        for place in np.ndindex(tuple(made.forms.count[form])):
            a = int(made.src_offset[piece] + np.dot(place, made.forms.src_stride[form]))
            b = int(made.dst_offset[piece] + np.dot(place, made.forms.dst_stride[form]))
            destinations[key][b : b + length] = source[a : a + length]
            written[key][b : b + length] += 1
    return written


def check(made: Plan) -> None:
    """Prove a plan, run it, and compare all of the destinations' memory."""
    verify(made)
    full = full_tensors(made.dst)
    named = full_tensors(made.src)
    assert (
        all(torch.equal(named[name], whole) for name, whole in full.items() if name in named) or made.src.tied
    )
    destinations = memories_of(made.dst, 0xEE)
    written = run(made, filled(made.src, full if set(named) <= set(full) else named), destinations)
    needed = {key: np.zeros(len(memory), np.uint8) for key, memory in destinations.items()}
    for row in range(len(made.dst.boxes)):
        assert np.array_equal(elements(made.dst, destinations, row), expected(made.dst, full, row))
        marks = {key: memory.copy() for key, memory in needed.items()}
        view = elements(made.dst, marks, row)
        view[...] = np.frombuffer(b"\1" * view.itemsize, view.dtype)[0]
        needed = marks
    assert all(np.array_equal(written[key], needed[key]) for key in needed)


# ---- random layouts


@dataclass
class Drawn:
    src: Layout
    dst: Layout


@st.composite
def pairs(draw: Any) -> Drawn:
    """Draw tensors, and a layout of each side by rules, by placements of DTensors, or by boxes."""
    shapes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3))
    tensors = {
        f"t{i}": TensorMeta(tuple(shape), draw(st.sampled_from(sorted(DTYPES))))
        for i, shape in enumerate(shapes)
    }
    kinds = st.sampled_from([by_rules, by_placements, by_boxes])
    return Drawn(draw(draw(kinds)(tensors)), draw(draw(kinds)(tensors)))


@st.composite
def by_rules(draw: Any, tensors: dict[str, TensorMeta]) -> Layout:
    mesh = {"a": draw(st.integers(1, 2)), "b": draw(st.integers(1, 3)), "c": draw(st.integers(1, 2))}
    rules, is_joined = [], draw(st.booleans())
    for i, (name, meta) in enumerate(tensors.items()):
        dims = len(meta.shape)
        shard: dict[int, list[str]] = {}
        for axis in draw(st.permutations("abc")):
            dim = draw(st.integers(-1, dims - 1))
            if dim >= 0:
                shard.setdefault(dim, []).append(axis)
        order = tuple(draw(st.permutations(range(dims))))
        pad = {0: meta.shape[0] + draw(st.integers(0, 3))}
        rules.append(Rule(name, shard, memory="all" if is_joined else None, order=-i, dims=order, pad=pad))
    return layout_by_rules(tensors, mesh, rules)


@st.composite
def by_placements(draw: Any, tensors: dict[str, TensorMeta]) -> Layout:
    mesh = np.arange(12).reshape(2, 3, 2)[
        : draw(st.integers(1, 2)), : draw(st.integers(1, 3)), : draw(st.integers(1, 2))
    ]
    boxes = []
    for name, meta in tensors.items():
        boxes += boxes_of_dtensor(name, meta, mesh, [draw(placements(len(meta.shape))) for _ in range(3)])
    return Layout.boxed(tensors, boxes)


def placements(dims: int) -> Any:
    return st.one_of(
        st.just(Replicate()),
        st.builds(Shard, st.integers(0, dims - 1)),
        st.builds(_StridedShard, st.integers(0, dims - 1), split_factor=st.integers(1, 3)),
    )


@st.composite
def by_boxes(draw: Any, tensors: dict[str, TensorMeta]) -> Layout:
    """Draw cuts of each tensor whose parts lie on one or more ranks, some of them with room between elements."""
    boxes = []
    for name, meta in tensors.items():
        edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in meta.shape]
        for place in np.ndindex(tuple(len(edge) - 1 for edge in edges)):
            start = tuple(edge[i] for edge, i in zip(edges, place, strict=True))
            stop = tuple(edge[i + 1] for edge, i in zip(edges, place, strict=True))
            strides, step = [], meta.item_bytes
            for a, b in zip(reversed(start), reversed(stop), strict=True):
                step *= draw(st.integers(1, 2))
                strides.append(step)
                step *= b - a
            memory = f"{name}{place}"
            for rank in draw(st.sets(st.integers(0, 4), min_size=1, max_size=3)):
                boxes.append(
                    Box(rank, name, start, stop, memory, draw(st.integers(0, 3)), tuple(reversed(strides)))
                )
    return Layout.boxed(tensors, boxes)


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([1, 64, 1 << 30]))
def test_a_plan_moves_what_indexing_says(drawn: Drawn, bucket_bytes: int) -> None:
    made = plan(drawn.src, drawn.dst, bucket_bytes=bucket_bytes)
    check(made)
    assert made.bound_s <= made.predicted_s * (1 + 1e-9)
    assert made.destination_bytes.tolist() == np.bincount(drawn.dst.boxes.rank, drawn.dst.nbytes).tolist()


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_no_mutant_of_a_plan_is_proven(drawn: Drawn, data: Any) -> None:
    made = plan(drawn.src, drawn.dst)
    mutant = data.draw(st.sampled_from(MUTANTS))(made, data.draw(st.integers(0, len(made) - 1)), data)
    if mutant is None:
        return
    with pytest.raises(Error, match=r"^verify: .*allowed: every byte of every destination once"):
        verify(mutant)


def _rows(made: Plan, rows: Any) -> Plan:
    names = ("src_box", "dst_box", "bucket", "form", "start", "src_offset", "dst_offset")
    return replace(made, **{name: getattr(made, name)[rows] for name in names})


def _dropped(made: Plan, piece: int, data: Any) -> Plan:
    return _rows(made, np.delete(np.arange(len(made)), piece))


def _doubled(made: Plan, piece: int, data: Any) -> Plan:
    return _rows(made, np.append(np.arange(len(made)), piece))


def _instead(made: Plan, piece: int, data: Any) -> Plan | None:
    """Write another piece of the same box twice, and not this one."""
    others = np.flatnonzero((made.dst_box == made.dst_box[piece]) & (np.arange(len(made)) != piece))
    rows = np.arange(len(made))
    rows[piece] = data.draw(st.sampled_from(others.tolist())) if len(others) else piece
    return _rows(made, rows) if len(others) else None


def _shifted(column: str) -> Any:
    def mutate(made: Plan, piece: int, data: Any) -> Plan:
        values = getattr(made, column).copy()
        by = data.draw(st.sampled_from([-2, -1, 1, 2]))
        if values.ndim == 2:
            values[piece, data.draw(st.integers(0, 3))] += by
        else:
            values[piece] += by
        return replace(made, **{column: values})

    return mutate


def _other_form(column: str) -> Any:
    def mutate(made: Plan, piece: int, data: Any) -> Plan | None:
        values = getattr(made.forms, column).copy()
        form = made.form[piece]
        if values.ndim == 1:
            values[form] += data.draw(st.sampled_from([-1, 1]))
        else:
            used = np.flatnonzero(made.forms.count[form] > 1) if column != "extent" else np.arange(4)
            if not len(used):
                return None
            values[form, data.draw(st.sampled_from(used.tolist()))] += 1
        return replace(made, forms=replace(made.forms, **{column: values}))

    return mutate


def _emptied(made: Plan, piece: int, data: Any) -> Plan:
    """Loops that are never walked: all else stays as it is."""
    count = made.forms.count.copy()
    count[made.form[piece], data.draw(st.integers(0, 3))] = 0
    return replace(made, forms=replace(made.forms, count=count))


MUTANTS = [
    _emptied,
    _dropped,
    _doubled,
    _instead,
    *map(_shifted, ("start", "src_offset", "dst_offset")),
    *map(_other_form, ("extent", "run", "count", "src_stride", "dst_stride")),
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_boxes_of_a_dtensor_are_the_shards_that_torch_cuts(shape: list[int], data: Any) -> None:
    meta = TensorMeta(tuple(shape), "int32")
    mesh = np.arange(12).reshape(2, 3, 2)
    chosen = [data.draw(placements(len(shape))) for _ in range(3)]
    layout = Layout.boxed({"w": meta}, boxes_of_dtensor("w", meta, mesh, chosen))
    full = full_tensors(layout)
    memories = filled(layout, full)
    for place in np.ndindex(mesh.shape):
        local = full["w"]
        for size, coordinate, placement in zip(mesh.shape, place, chosen, strict=True):
            if not isinstance(placement, Replicate):
                local = placement._split_tensor(local, size, with_padding=False)[0][coordinate]
        memory = memories.get((int(mesh[place]), "w"), np.zeros(0, np.uint8))
        assert memory.tobytes() == local.contiguous().numpy().tobytes()


def test_a_strided_shard_has_the_rows_that_torchs_first_offset_hides() -> None:
    meta = TensorMeta((8,), "int32")
    boxes = boxes_of_dtensor("w", meta, np.arange(2), [_StridedShard(0, split_factor=2)])
    assert [(box.start, box.stop) for box in boxes if box.rank == 0] == [((0,), (2,)), ((4,), (6,))]


def test_a_state_dict_of_dtensors_says_what_all_ranks_have() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(35, dtype=torch.int32).view(5, 7)
        cut = distribute_tensor(whole, mesh, [Shard(0), Shard(-1)], src_data_rank=None)
        layout = layout_of({"cut": cut, "norm": torch.zeros(3)}, ranks=range(4))
        held = {layout.describe(row) for row in range(len(layout.boxes)) if layout.boxes.tensor[row] == 0}
        assert held == {
            "cut[0:3, 0:4] of rank 0",
            "cut[0:3, 4:7] of rank 1",
            "cut[3:5, 0:4] of rank 2",
            "cut[3:5, 4:7] of rank 3",
        }
        assert tuple(cut.to_local().shape) == (3, 4)
        partial = DTensor.from_local(torch.zeros(2, 2), mesh, [Partial(), Replicate()])
        with pytest.raises(Error, match=r"placements of 'p': got Partial\(sum\), allowed: Shard"):
            layout_of({"p": partial})
    finally:
        dist.destroy_process_group()


# ---- rules


def memory_of(layout: Layout, rank: int, name: str, dtype: str = "int32") -> list[int]:
    memories = filled(layout, full_tensors(layout))
    return memories[rank, name].view(DTYPES[dtype]).tolist()


def test_query_key_and_value_lie_blocked_or_by_groups_of_heads() -> None:
    tensors = {name: TensorMeta((n, 1), "int32") for name, n in (("q", 8), ("k", 4), ("v", 4))}
    rules = [
        Rule(name, {0: "tp"}, memory="qkv", order=i, groups=groups)
        for groups in (1,)
        for i, name in enumerate("qkv")
    ]
    blocked = layout_by_rules(tensors, {"tp": 2}, rules)
    k, q, v = (full_tensors(blocked)[name].flatten().tolist() for name in "kqv")
    assert memory_of(blocked, 1, "qkv") == q[4:] + k[2:] + v[2:]
    by_groups = layout_by_rules(tensors, {"tp": 2}, [replace(rule, groups=2) for rule in rules])
    assert memory_of(by_groups, 1, "qkv") == q[4:6] + k[2:3] + v[2:3] + q[6:] + k[3:] + v[3:]
    check(plan(blocked, by_groups))


def test_key_heads_are_replicated_where_ranks_are_more() -> None:
    tensors = {"k": TensorMeta((4, 3), "int32")}
    layout = layout_by_rules(tensors, {"tp": 4}, [Rule("k", {0: Split("tp", 2)})])
    assert memory_of(layout, 0, "k") == memory_of(layout, 1, "k") == list(range(6))
    assert memory_of(layout, 2, "k") == memory_of(layout, 3, "k") == list(range(6, 12))
    check(plan(layout, layout_by_rules(tensors, {"tp": 3}, [Rule("k", {1: "tp"})])))


def test_experts_are_stacked_on_their_ranks_and_copies_are_replicas() -> None:
    tensors = {f"e.{e}.{w}": TensorMeta((2, 2), "int32") for e in range(4) for w in ("gate", "up")}
    where = {0: (0,), 1: (0,), 2: (1,), 3: (1, 0)}  # the last is redundant
    rule = Rule(
        r"e\.(?P<e>\d+)\.(?P<w>gate|up)",
        on={"ep": lambda match: where[int(match["e"])]},
        memory="w13",
        order=lambda match: (int(match["e"]), int(match["w"] == "up")),
    )
    layout = layout_by_rules(tensors, {"ep": 2}, [rule])
    full = full_tensors(layout)
    assert (
        memory_of(layout, 1, "w13")
        == torch.cat([full[f"e.{e}.{w}"].flatten() for e in (2, 3) for w in ("gate", "up")]).tolist()
    )
    interleaved = layout_by_rules(tensors, {"ep": 2}, [replace(rule, groups=2)])
    gate, up = full["e.2.gate"], full["e.2.up"]
    assert memory_of(interleaved, 1, "w13")[:8] == torch.stack([gate, up], dim=1).flatten().tolist()
    assert len(interleaved.boxes) == len(layout.boxes)  # alternating rows are a stride, not boxes
    check(plan(layout, interleaved))
    check(plan(interleaved, layout))


def test_transposed_and_padded_parameters() -> None:
    tensors = {"embed": TensorMeta((5, 2), "int32"), "w": TensorMeta((3, 4), "int32")}
    rules = [Rule("embed", {0: "tp"}, pad={0: 8}), Rule("w", {1: "tp"}, dims=(1, 0))]
    layout = layout_by_rules(tensors, {"tp": 2}, rules)
    assert memory_of(layout, 1, "embed") == [8, 9]  # rows 5 to 7 are nobody's
    assert memory_of(layout, 1, "w") == full_tensors(layout)["w"][:, 2:].T.flatten().tolist()
    check(plan(layout_by_rules(tensors, {"dp": 3}, [Rule(".*", {0: "dp"})]), layout))


def test_tied_names_are_one_tensor_of_which_memory_is_written_once() -> None:
    meta = TensorMeta((4, 2), "int32")
    tensors = {"embed": meta, "head": meta}
    tied = {"head": "embed"}
    one = layout_by_rules(tensors, {"tp": 2}, [Rule("embed", {0: "tp"})], tied=tied)
    both = Layout.boxed(tensors, [Box(0, name, (0, 0), (4, 2), "shared") for name in tensors], tied=tied)
    separate = layout_by_rules(tensors, {"tp": 2}, [Rule(".*", {1: "tp"})])
    full = {name: torch.arange(8, dtype=torch.int32).view(4, 2) for name in tensors}
    turned = Layout.boxed(tensors, [Box(0, "head", (0, 0), (4, 2))], tied={"embed": "head"})
    for made in (
        plan(one, both),
        plan(both, one),
        plan(one, separate),
        plan(one, turned),
        plan(turned, both),
    ):
        verify(made)
        destinations = memories_of(made.dst, 0xEE)
        written = run(made, filled(made.src, full), destinations)
        assert all((times == 1).all() for times in written.values())
        for row in range(len(made.dst.boxes)):
            assert np.array_equal(elements(made.dst, destinations, row), expected(made.dst, full, row))
    with pytest.raises(Error, match="no tensor 'head'"):
        plan(layout_by_rules({"embed": meta}, {}, [Rule("embed")]), separate)


def test_layouts_of_ranks_are_merged_and_equal_ones_have_one_digest() -> None:
    meta = TensorMeta((4, 4), "int32")
    boxes = [Box(r, "w", (r, 0), (r + 1, 4)) for r in range(4)]
    whole = Layout.boxed({"w": meta}, boxes)
    merged = Layout.merged([Layout.boxed({"w": meta}, [box]) for box in reversed(boxes)])
    assert (
        merged.digest
        == whole.digest
        == layout_by_rules({"w": meta}, {"dp": 4}, [Rule("w", {0: "dp"})]).digest
    )
    assert whole.digest != Layout.boxed({"w": meta}, boxes[:3]).digest
    with pytest.raises(Error, match="parts: got 'w' as "):
        Layout.merged([whole, Layout.boxed({"w": TensorMeta((4, 4))}, [])])


def test_a_state_dict_of_plain_tensors() -> None:
    state = {"a.weight": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(())}
    layout = layout_of(state, ranks=range(2))
    assert layout.tensors["a.weight"] == TensorMeta((3, 2), "bfloat16")
    assert len(layout.boxes) == 4 and layout.ranks == 2
    with pytest.raises(Error, match=r"state\['a'\]: got strides \(1, 3\), allowed: a contiguous"):
        layout_of({"a": torch.zeros(2, 3).T})


# ---- choice, bound, files


def test_the_choice_among_replicas_is_balanced_and_near_the_bound() -> None:
    tensors = {f"w{i}": TensorMeta((512, 64), "int32") for i in range(8)}
    tensors["own"] = TensorMeta((1024, 64), "int32")  # only rank 0 has it
    boxes = [Box(r, f"w{i}", (0, 0), (512, 64)) for i in range(8) for r in range(4)]
    src = Layout.boxed(tensors, [*boxes, Box(0, "own", (0, 0), (1024, 64))])
    dst = layout_by_rules(tensors, {"tp": 4}, [Rule(".*", {0: "tp"})])
    made = plan(src, dst, links=Links(100, 1000))
    verify(made)
    assert made.share > 0.97
    assert made.source_bytes.max() <= 1.03 * made.nbytes.sum() / 4
    slow = plan(src, dst, links=Links([100, 100, 100, 10], 1000))
    verify(slow)
    assert slow.source_bytes[3] < slow.source_bytes[2] / 8
    assert slow.share > 0.9


def test_holders_that_overlap_are_cut_into_cells() -> None:
    tensors = {"w": TensorMeta((12, 2), "int32")}
    spans = [(0, 12), (0, 5), (3, 9), (8, 12)]
    src = Layout.boxed(tensors, [Box(r, "w", (a, 0), (b, 2)) for r, (a, b) in enumerate(spans)])
    check(plan(src, layout_by_rules(tensors, {"tp": 5}, [Rule("w", {0: "tp"})])))


def test_a_bound_is_what_only_some_sources_hold() -> None:
    tensors = {"a": TensorMeta((1000,), "int32"), "b": TensorMeta((1000,), "int32")}
    src = Layout.boxed(
        tensors, [Box(0, "a", (0,), (1000,)), Box(0, "b", (0,), (1000,)), Box(1, "b", (0,), (1000,))]
    )
    dst = Layout.boxed(tensors, [Box(r, name, (0,), (1000,)) for r in range(3) for name in tensors])
    made = plan(src, dst, links=Links(8e-6, 1))  # 1000 bytes a second
    assert made.bound_s == pytest.approx(12.0)  # 3 copies of 8000 bytes from two sources
    assert made.predicted_s == pytest.approx(12.0)


def test_a_plan_is_kept_under_its_digests(tmp_path: Path) -> None:
    tensors = {"w": TensorMeta((64, 8), "int32")}
    src = layout_by_rules(tensors, {"dp": 4}, [Rule("w", {0: "dp"})])
    dst = layout_by_rules(tensors, {"tp": 2}, [Rule("w", {1: "tp"})])
    made = plan(src, dst, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    again = plan(src, dst, cache=tmp_path)
    assert file.stat().st_mtime_ns == before
    assert all(
        np.array_equal(getattr(made, n), getattr(again, n))
        for n in ("src_box", "dst_offset", "form", "start")
    )
    assert again.digest == made.digest != _dropped(made, 0, None).digest
    verify(again)
    with pytest.raises(Error, match="allowed: a plan of the same layouts, links, buckets and format"):
        Plan.load(file, dst, src, bucket_bytes=1 << 30)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Error, match=r"allowed: a file of Plan\.save"):
        Plan.load(file, src, dst, bucket_bytes=1 << 30)
    check(plan(src, dst, cache=tmp_path))


def test_destinations_whose_boxes_share_bytes_are_refused() -> None:
    tensors = {"a": TensorMeta((4,), "int32"), "b": TensorMeta((4,), "int32")}
    src = layout_by_rules(tensors, {}, [Rule(".*")])
    dst = Layout.boxed(tensors, [Box(0, "a", (0,), (4,), "m"), Box(0, "b", (0,), (4,), "m", 12)])
    with pytest.raises(
        Error, match=r"a\[0:4\] of rank 0 and b\[0:4\] of rank 0 share bytes of the memory 'm'"
    ):
        verify(plan(src, dst))
    apart = [Box(0, "a", (0,), (4,), "m", 0, (8,)), Box(0, "b", (0,), (4,), "m", 4, (8,))]
    check(plan(src, Layout.boxed(tensors, apart)))


META = {"w": TensorMeta((4, 4), "int32")}
REFUSED = [
    (
        lambda: Layout.boxed(META, [Box(0, "w", (0.5, 0), (4, 4))]),
        r"boxes: got Box\(rank=0.*allowed: whole numbers",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 2}, [Rule("w", {0: 7})]),
        "shard: got 7, allowed: Split, or axes of the mesh",
    ),
    (lambda: TensorMeta((1,) * 5), r"shape: got \(1, 1, 1, 1, 1\), allowed: 0 to 4 dimensions"),
    (lambda: TensorMeta((1,), "int7"), "dtype: got 'int7', allowed: bfloat16"),
    (
        lambda: Layout.boxed(META, [Box(0, "x", (0,), (1,))]),
        "boxes: got a box of 'x', allowed: names in tensors",
    ),
    (
        lambda: Layout.boxed(META, [Box(0, "w", (0,), (1,))]),
        r"start of a box of 'w': got \(0,\), allowed: 2 numbers",
    ),
    (
        lambda: Layout.boxed(META, [Box(0, "w", (0, 0), (5, 4))]),
        r"boxes: got w\[0:5, 0:4\] of rank 0 of a tensor",
    ),
    (lambda: Layout.boxed(META, [Box(0, "w", (0, 0), (4, 4), None, -4)]), "with offset -4"),
    (lambda: layout_by_rules(META, {}, [Rule("x")]), "rules: got none for 'w', allowed: a rule that matches"),
    (
        lambda: layout_by_rules(META, {"tp": 2}, [Rule("w", {0: "ep"})]),
        "shard: got 'ep', allowed: axes of the mesh: tp",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 2}, [Rule("w", {2: "tp"})]),
        r"shard: got 2, allowed: dimensions of \(4, 4\)",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 2}, [Rule("w", {0: Split("tp", 3)})]),
        "parts: got 3, allowed: a divisor of 2",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 2}, [Rule("w", on={"tp": lambda match: 2})]),
        r"on: got 'tp' at \(2,\)",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 1}, [Rule("w", groups=3)]),
        "groups: got 3, allowed: divisors of the rows",
    ),
    (
        lambda: layout_by_rules(META, {"tp": 1}, [Rule("w", dims=(0, 0))]),
        r"dims: got \(0, 0\), allowed: an order of 0",
    ),
    (lambda: layout_by_rules(META, {}, [Rule("w", pad={0: 3})]), "pad: got 0: 3"),
    (lambda: layout_by_rules(META, {}, [Rule("(")]), r"pattern: got '\('"),
    (lambda: plan(Layout.boxed({}, []), FULL), "src: got no tensor 'w'"),
    (
        lambda: plan(Layout.boxed(META, [Box(0, "w", (0, 0), (3, 4))]), FULL),
        r"12 of 16 elements of w\[0:4, 0:4\]",
    ),
    (lambda: plan(layout_of({"w": torch.zeros(4, 4)}), FULL), "plans do not cast"),
    (lambda: plan(FULL, FULL, links=Links(0)), "source_gbit: got 0, allowed: numbers above 0"),
    (
        lambda: plan(FULL, FULL, links=Links(1, [1, 2])),
        r"destination_gbit: got \[1, 2\], allowed: one number, or 1",
    ),
    (lambda: plan(FULL, FULL, cache="/nowhere"), "cache: got '/nowhere', allowed: a folder that exists"),
]
FULL = layout_by_rules(META, {}, [Rule("w")])


@pytest.mark.parametrize("call, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        call()
