# SPDX-License-Identifier: Apache-2.0
"""The clock of calls in a row, with a GPU's events that are made up: each call takes 5 us, and each event 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.bench.eager import Eager

CALL_US, EVENT_US = 5.0, 3.0


class Gpu:
    """What has run so far, as the time that it took."""

    def __init__(self) -> None:
        self.us = 0.0
        self.turns = 0

    def run(self) -> None:
        self.us += CALL_US


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Event:
        at_us = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            made.us += EVENT_US
            self.at_us = made.us

        def elapsed_time(self, later: Event) -> float:
            return (later.at_us - self.at_us) / 1e3

    def gather(results: list[Any], mine: Any, group: Any) -> None:
        results[0] = mine

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return made


@pytest.mark.parametrize(("rounds", "a_batch"), [(4, 10), (100, 20)])
def test_an_event_behind_many_turns_hardly_counts(gpu: Gpu, rounds: int, a_batch: int) -> None:
    def turn(clock: Eager) -> None:
        gpu.turns += 1
        with clock.together("pair"):
            clock.call("dispatch", gpu.run)
            clock.call("combine", gpu.run)

    clock = Eager(on_gpu=True)
    clock.measure(turn, rounds, warmup=3)
    assert gpu.turns == 3 + 2 * rounds + 5 * a_batch
    times = clock.slowest(None)
    assert times["dispatch"].eager_us == pytest.approx(CALL_US + EVENT_US)
    assert times["pair"].eager_us == pytest.approx(2 * CALL_US + EVENT_US / a_batch)
