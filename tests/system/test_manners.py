# SPDX-License-Identifier: Apache-2.0
"""Manners of the API: with blocks end what they began, reprs say something, and ``dir(weft)`` shows what there is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from programs import environment

import weft
from weft.collectives import AllGather, Program, chunk
from weft.errors import Error
from weft.moe import buffer_contexts
from weft.moe.elastic_sessions import GatherSessions
from weft.runtime.communicator import device_name
from weft.testing.ranks import Rank, RankPool
from weft.transfer import LoopbackNetwork, TransferEngine


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2, with_gpus=False) as pool:
        yield pool


def end_with_blocks(rank: Rank) -> None:
    made = (
        weft.Buffer(rank.group, 1 << 16, device="cpu"),
        weft.ElasticBuffer(rank.group, num_max_tokens_per_rank=8, hidden=64, num_topk=2, device="cpu"),
    )
    for buffer in made:
        name = f"weft.{type(buffer).__name__}(rank {rank.rank} of 2, cpu, num_"
        with buffer as entered:
            assert entered is buffer
            assert repr(buffer).startswith(name) and "destroyed" not in repr(buffer)
        assert repr(buffer).endswith(", destroyed)")
        with pytest.raises(Error, match="after destroy"):
            buffer.dispatch(torch.zeros(1, 64, dtype=torch.bfloat16))
        with buffer:
            pass  # ended already: nothing to do


def leave_by_an_error(rank: Rank) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        weft.Buffer(rank.group, 1 << 16, device="cpu", timeout_s=60.0),
    ):
        if rank.rank == 0:
            raise ZeroDivisionError  # rank 1 is not waited for, though it never leaves by itself
        raise ZeroDivisionError


def show_hybrid(rank: Rank) -> None:
    with weft.HybridEPBuffer(rank.group, 64, 8, 2) as buffer:
        assert repr(buffer).startswith("weft.HybridEPBuffer(HybridEPConfig(hidden_dim=64")


def show_handle(rank: Rank) -> None:
    with weft.ElasticBuffer(
        rank.group, num_max_tokens_per_rank=8, hidden=64, num_topk=2, device="cpu"
    ) as buffer:
        ids, weights = torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
        rows, _, _, handle, event = buffer.dispatch(
            torch.zeros(3, 64).bfloat16(), ids, weights, num_experts=4
        )
        assert repr(handle) == f"EPHandle(3 tokens, top-2 of 4 experts, {rows.size(0)} rows here)"
        assert repr(event) == "EventOverlap(finished, keeps 0 tensors)"


def show_window(rank: Rank) -> None:
    communicator = weft.Communicator(rank.group)
    assert repr(communicator.collectives) == f"Collectives(rank {rank.rank} of 2, cpu)"
    assert repr(communicator) == f"weft.Communicator(rank {rank.rank} of 2, cpu)"
    window = weft.Window(communicator, 4096)
    assert repr(window) == f"weft.Window({window.num_bytes} bytes on each of 2 ranks)"


def test_a_with_block_destroys_a_buffer(pair: RankPool) -> None:
    pair.run(end_with_blocks)


def test_a_with_block_that_fails_waits_for_nobody(pair: RankPool) -> None:
    pair.run(leave_by_an_error)


def test_communicators_and_windows_say_what_they_are(pair: RankPool) -> None:
    pair.run(show_window)


def test_handles_and_events_say_what_they_are(pair: RankPool) -> None:
    pair.run(show_handle)
    pair.run(show_hybrid)


def test_programs_say_what_they_are() -> None:
    with Program("pair", AllGather(2)) as program:
        for rank in range(2):
            chunk(rank, "i", 0).copy(rank, "o", rank).copy(1 - rank)
    assert repr(program) == "Program('pair': AllGather(2, 1, inplace=False), 4 operations)"
    algorithm = program.compile()
    assert repr(algorithm) == "Algorithm('pair': allgather, 2 ranks, 2 chunks, Simple, out of place)"


def test_transfers_say_what_they_are() -> None:
    with TransferEngine(LoopbackNetwork(), name="one") as engine:
        assert repr(engine).startswith("TransferEngine('one', loopback")
        memory = engine.register(bytearray(64), remote_write=True)
        assert repr(memory) == f"Memory(64 bytes, {memory.path})"


def test_all_gather_takes_the_name_that_deep_ep_gives() -> None:
    assert GatherSessions.all_gather.__code__.co_varnames[1] == "t"


def test_dir_shows_the_public_names_and_parts() -> None:
    assert set(weft.__all__) <= set(dir(weft))
    assert {"collectives", "moe", "transfer"} <= set(dir(weft))
    assert "annotations" not in dir(weft)


def test_parts_need_no_import_of_their_own() -> None:
    program = (
        "import sys, weft; assert 'torch' not in sys.modules; weft.transfer.Pages, weft.collectives.Program"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment()
    )
    assert ran.returncode == 0, ran.stderr


def test_no_device_is_torchs_current_gpu_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_name(None) == "cuda:3"
    assert buffer_contexts.device_of(None) == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_name(None) == "cpu"
    assert buffer_contexts.device_of(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "torch")
    assert device_name(None) == "cpu"
