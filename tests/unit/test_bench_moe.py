# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from weft.bench.moe import check, floors, kernel_time
from weft.bench.moe.routes import make_routes
from weft.bench.moe.straggler import straggler_lines
from weft.bench.moe.trace import TracedCall
from weft.bench.report import Row
from weft.errors import Error
from weft.moe.trace import Span
from weft.testing import oracle


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_routes_are_distinct_experts_and_the_same_everywhere(kind: str) -> None:
    first = make_routes(kind, 2, 3, 50, 4, 10, seed=7)
    again = make_routes(kind, 2, 3, 50, 4, 10, seed=7)
    assert all(
        torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert not torch.equal(first[0][0], first[1][0])
    for topk_idx in first[0]:
        assert topk_idx.dtype == torch.int64 and topk_idx.min() >= 0 and topk_idx.max() < 10
        assert all(len(set(row)) == 4 for row in topk_idx.tolist())


def test_zipf_is_uneven_and_uniform_is_not() -> None:
    def share_of_busiest(kind: str) -> float:
        chosen = make_routes(kind, 1, 1, 4000, 2, 64, seed=1)[0][0].flatten()
        return torch.bincount(chosen, minlength=64).max().item() / len(chosen)

    assert share_of_busiest("uniform") < 0.03
    assert share_of_busiest("zipf") > 0.1


def test_routes_come_from_a_file(tmp_path: Path) -> None:
    array = numpy.arange(2 * 3 * 2).reshape(2, 3, 2) % 5 - 1
    numpy.save(tmp_path / "routes.npy", array)
    sets = make_routes(str(tmp_path / "routes.npy"), 3, num_ranks=2, tokens=3, top_k=2, experts=5, seed=0)
    assert len(sets) == 3
    assert torch.equal(sets[2][1], torch.from_numpy(array[1]).long())


@pytest.mark.parametrize(("ranks", "experts"), [(3, 5), (2, 3)])
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, ranks: int, experts: int) -> None:
    numpy.save(tmp_path / "routes.npy", numpy.arange(2 * 3 * 2).reshape(2, 3, 2) % 5 - 1)
    with pytest.raises(Error, match="routes"):
        make_routes(str(tmp_path / "routes.npy"), 1, ranks, 3, 2, experts, seed=0)


def test_traffic_counts_each_row_once_per_rank() -> None:
    routes = [torch.tensor([[0, 1], [0, 3], [-1, -1]]), torch.tensor([[2, 3], [3, -1], [0, 2]])]
    traffic = floors.traffic_of(routes, experts=4)
    assert traffic.received == (1 + 2 + 1 + 1 + 2) / 2
    assert traffic.egress == (1 + 1) / 2  # token 1 of rank 0, token 2 of rank 1
    assert traffic.selections == (4 + 5) / 2


def test_kernels_in_a_row_are_told_apart_by_their_blocks() -> None:
    ends = [(30, 50), (0, 12), (2, 20), (21, 25), (19, 20), (20, 24), (31, 40)]
    blocks = [Span("dispatch", begin, end, None, 0, 0) for begin, end in ends]
    assert kernel_time.launches_of(blocks) == [(0, 20), (20, 25), (30, 50)]
    assert kernel_time.launches_of([]) == []


def test_what_a_profiler_saw_of_a_call_lies_between_its_marks() -> None:
    mark = "at::cuda::spin_kernel(long)"
    ran = [
        ("all_reduce", 0.0, 9.0),
        (mark, 10.0, 11.0),
        ("dispatch", 14.0, 30.0),
        ("Memset", 12.0, 13.0),
        ("copy", 15.0, 32.5),
        (mark, 33.0, 34.0),
        ("all_reduce", 35.0, 36.0),
        (mark, 40.0, 41.0),
        ("combine", 42.0, 50.0),
        (mark, 51.0, 52.0),
    ]
    assert kernel_time.spans_between_marks(ran[::-1]) == [(12.0, 32.5), (42.0, 50.0)]


def test_times_of_other_libraries_get_a_column() -> None:
    row = Row("ll_dispatch", "fp8", 128, 1, [30.0])
    kernel_time.add_kernel_times(
        [row], {"ll_dispatch": [12.0]}, {"deep_ep": {"ll_dispatch": [40.0, 20.0, 30.0]}}
    )
    assert row.extra == {"kernel_us": 12.0, "deep_ep_kernel_us": 30.0}


def a_dispatch() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[object]]:
    inputs = [check.make_rows(rank, 5, 16, seed=0) for rank in range(2)]
    weights = [check.make_weights(rank, 5, 2, seed=0) for rank in range(2)]
    routes = make_routes("uniform", 1, 2, 5, 2, 4, seed=0)[0]
    rows = oracle.ht_dispatch(routes, 4, 1)
    return (
        inputs,
        weights,
        routes,
        [rows.take(inputs), rows.topk_idx, rows.take_weights(weights), rows.per_expert],
    )


def test_the_check_passes_what_the_oracle_says_and_nothing_else() -> None:
    inputs, weights, routes, received = a_dispatch()
    check.check_ht_dispatch(received, inputs, weights, routes, 4, 1)
    for index in range(3):
        broken = [part.clone() if isinstance(part, torch.Tensor) else part for part in received]
        tensor = broken[index]
        assert isinstance(tensor, torch.Tensor)
        tensor.view(-1)[3] += 1
        with pytest.raises(check.Mismatch):
            check.check_ht_dispatch(broken, inputs, weights, routes, 4, 1)


def test_combine_check_agrees_with_the_oracle_and_tells_ranks_apart() -> None:
    inputs, _, routes, _ = a_dispatch()
    back = [oracle.ht_dispatch(routes, 4, rank).take(inputs) * check.rank_factor(rank) for rank in range(2)]
    combined = oracle.ht_combine(back, routes, 4, rank=0)
    check.check_ht_combine(combined, inputs[0], routes[0], 4, 2, 2)
    swapped = [back[0] * check.rank_factor(1) / check.rank_factor(0), back[1]]
    with pytest.raises(check.Mismatch, match="combined_x"):
        check.check_ht_combine(oracle.ht_combine(swapped, routes, 4, rank=0), inputs[0], routes[0], 4, 2, 2)


def traced(rank: int, lined_up_us: float, begin_us: float, core_wait_us: float | None) -> TracedCall:
    """Return a call in which rank 1 is awaited until 3050 us, or it waits for nobody; it works for 20 us itself."""
    wait = (
        begin_us,
        max(begin_us, 3050.0 if rank != 1 else begin_us),
        "wait dispatch.rendezvous",
        1 - min(rank, 1),
    )
    work = (wait[1], wait[1] + 20, "dispatch.rows", None)
    spans = [
        Span(name, round(begin * 1e3), round(end * 1e3), peer, 0, 0)
        for begin, end, name, peer in (wait, work)
    ]
    return TracedCall("weft dispatch", spans, 0, round(lined_up_us * 1e3), core_wait_us)


@pytest.mark.parametrize(
    ("core_wait_us", "is_slow"), [(0.0, True), (None, True), (3040.0, False), (9000.0, False)]
)
def test_a_rank_that_waits_for_a_core_is_not_called_slow(core_wait_us: float | None, is_slow: bool) -> None:
    """Rank 1 begins 3 ms after the others: by itself, on a GPU, or because no core was free."""
    others = None if core_wait_us is None else 0.0
    of_ranks = [
        [traced(rank, 0, 3040 if rank == 1 else 40, core_wait_us if rank == 1 else others) for _ in range(5)]
        for rank in range(4)
    ]
    lines = straggler_lines(of_ranks)
    reports = "weft dispatch: rank 1 is slow: its peers wait 3010 us for it"
    assert (reports in lines) == is_slow
    assert ("no rank is slow" in lines) != is_slow
    assert any(line.startswith("ranks share cores here") for line in lines) == bool(core_wait_us)


def test_a_rank_that_is_not_late_every_time_is_not_called_slow_on_the_cpu() -> None:
    of_ranks = [
        [traced(rank, 0, 3040 if rank == 1 and at < 4 else 40, 0.0) for at in range(5)] for rank in range(4)
    ]
    assert straggler_lines(of_ranks)[-1] == "no rank is slow"
