# SPDX-License-Identifier: Apache-2.0
"""``weft profile sides`` finds the same row in the reports of two commits, whatever else their rows say."""

from __future__ import annotations

from typing import Any

from weft.profile import sides


def rows(factor: float, **more: Any) -> list[dict[str, Any]]:
    return [
        {"call": call, "bytes": size, "us": factor * size, "enqueue_us": None, "checked": True, "gbs": factor}
        | more
        for call in ("all_reduce", "all_gather")
        for size in (1024, 3000)
    ]


def test_rows_of_two_commits_meet() -> None:
    before = rows(1.0, algorithm="ring") + rows(3.0, algorithm="ring")
    now = rows(2.0, algorithm="exchange", ranks_per_node=0, provider="") * 2
    samples = sides.sort({"before": before, "now": now})
    assert samples["all_gather bytes=3000", "us"] == {"before": [3000, 9000], "now": [6000, 6000]}
    assert len(samples) == 4
    found = sides.compare(samples, [("before", {}), ("now", {})])
    assert [row["ratio"]["now"] for row in found] == [1.0] * 4
    assert [row["noise"] for row in found] == [3.0] * 4


def test_rows_that_only_the_algorithm_tells_apart_stay_apart() -> None:
    both = rows(1.0, algorithm="ring") + rows(2.0, algorithm="tree")
    samples = sides.sort({"one": both, "other": both})
    assert samples["all_reduce bytes=1024 tree", "us"] == {"one": [2048], "other": [2048]}
    assert len(samples) == 8
