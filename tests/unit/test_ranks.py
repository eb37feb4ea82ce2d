# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from weft.testing.ranks import Rank, RankError, RankPool, run_ranks


def gather(rank: Rank, value: int) -> list[int]:
    values: list[int] = [0] * rank.size
    torch.distributed.all_gather_object(values, value + rank.rank, group=rank.group)
    return values


def count_runs(rank: Rank) -> int:
    rank.kept["runs"] = rank.kept.get("runs", 0) + 1
    return int(rank.kept["runs"])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_come_in_rank_order(num_ranks: int) -> None:
    expected = [10 + r for r in range(num_ranks)]
    assert run_ranks(num_ranks, gather, 10) == [expected] * num_ranks


def test_without_a_group_torch_distributed_is_left_alone() -> None:
    def function(rank: Rank) -> tuple[bool, bool]:
        return rank.group is None, torch.distributed.is_initialized()

    assert run_ranks(2, function, with_group=False) == [(True, False)] * 2


def test_a_pool_keeps_its_ranks_between_runs() -> None:
    with RankPool(2, with_group=False) as pool:
        assert pool.run(count_runs) == [1, 1]
        assert pool.run(count_runs) == [2, 2]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    def function(rank: Rank) -> None:
        if rank.rank == 1:
            raise KeyError("the missing key")

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: raised.*the missing key") as raised:
        run_ranks(2, function, with_group=False)
    assert raised.value.ranks == [1]


def test_a_dead_rank_is_named() -> None:
    def function(rank: Rank) -> None:
        if rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="rank 0 of 2: died with exit code -9"):
        run_ranks(2, function, with_group=False)


def test_a_silent_rank_is_named_with_its_stack() -> None:
    def function(rank: Rank) -> None:
        if rank.rank == 1:
            time.sleep(60)

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: no answer.*in function"):
        run_ranks(2, function, with_group=False, deadline_s=0.5)


def test_who_has_met_may_end_at_once() -> None:
    def function(rank: Rank) -> int:
        for _ in range(3):
            rank.meet()
        if rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank.meetings

    assert run_ranks(3, function, with_group=False, lost={0}) == [None, 3, 3]


def test_who_does_not_come_to_a_meeting_is_named() -> None:
    def function(rank: Rank) -> str:
        if rank.rank == 1:
            return ""
        with pytest.raises(TimeoutError) as raised:
            rank.meet(deadline_s=0.2)
        return str(raised.value)

    said, _ = run_ranks(2, function, with_group=False)
    assert said == "rank 0: meet, waited 0.2 s for ranks [1]"


def test_ranks_that_are_meant_to_be_lost_do_not_fail_the_run() -> None:
    def function(rank: Rank) -> int:
        if rank.rank > 0:
            os.kill(os.getpid(), signal.SIGKILL if rank.rank == 1 else signal.SIGSTOP)
        return rank.rank

    assert run_ranks(3, function, with_group=False, lost={1, 2}) == [0, None, None]
