# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ JSON plans: played into verified algorithms, or refused with place and reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.collectives import verify
from weft.collectives.plan_json import from_plan
from weft.errors import Error


def all_gather_plan(ranks: int = 2) -> dict[str, Any]:
    """Return a plan in which every rank puts its chunk into the peer's output and signals, then waits."""
    gpus = []
    for rank in range(ranks):
        peer = 1 - rank
        remote = {"buffer_id": 0, "index": rank, "size": 1}
        own = {"type": "i", "index": 0, "size": 1}
        here = {"type": "o", "index": rank, "size": 1}
        channel = {"channel_type": "memory", "channel_ids": [0]}
        ops = [
            {"name": "copy", "src_buff": [own], "dst_buff": [here]},
            {"name": "put", "src_buff": [own], "dst_buff": [remote], **channel},
            {"name": "signal", **channel},
            {"name": "wait", **channel},
        ]
        block = {
            "id": 0,
            "ops": ops,
            "channels": [{"channel_type": "memory", "channel_ids": [0]}],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}],
        }
        gpus.append(
            {
                "id": rank,
                "input_chunks": 1,
                "output_chunks": 2,
                "scratch_chunks": 0,
                "threadblocks": [block],
                "channels": [{"channel_type": "memory", "connected_to": [peer]}],
                "remote_buffers": [{"rank": peer, "type": "o", "access_channel_types": ["memory"]}],
                "semaphores": [],
            }
        )
    return {"name": "ag", "collective": "allgather", "protocol": "Simple", "inplace": False, "gpus": gpus}


def packet_all_reduce_plan() -> dict[str, Any]:
    """Return a one-shot all-reduce: packets into the peer's scratch, then a sum of plain data and packets."""
    plan = all_gather_plan()
    plan.update(name="ar", collective="allreduce", protocol="LL")
    for gpu in plan["gpus"]:
        gpu.update(output_chunks=1, scratch_chunks=1)
        gpu["remote_buffers"][0]["type"] = "s"
        own = {"type": "i", "index": 0, "size": 1}
        remote = {"buffer_id": 0, "index": 0, "size": 1}
        packets = {"type": "s", "index": 0, "size": 1}
        out = {"type": "o", "index": 0, "size": 1}
        channel = {"channel_type": "memory", "channel_ids": [0]}
        gpu["threadblocks"][0]["ops"] = [
            {"name": "ppkt", "src_buff": [own], "dst_buff": [remote], **channel},
            {"name": "repkt", "src_buff": [own, packets], "dst_buff": [out]},
        ]
    return plan


@pytest.mark.parametrize("plan", [all_gather_plan(), packet_all_reduce_plan()], ids=["puts", "packets"])
def test_plan_becomes_a_verified_algorithm(plan: dict[str, Any]) -> None:
    algorithm = from_plan(json.dumps(plan))
    assert algorithm.num_ranks == 2 and verify(algorithm).result_checked


def test_wait_without_signal_is_a_deadlock() -> None:
    plan = all_gather_plan()
    del plan["gpus"][1]["threadblocks"][0]["ops"][2]
    with pytest.raises(Error, match=r"rank 0, block 0, operation 3 .wait.: deadlock"):
        from_plan(json.dumps(plan), "p.json")


def test_plan_that_does_something_else_is_refused() -> None:
    plan = all_gather_plan()
    del plan["gpus"][0]["threadblocks"][0]["ops"][0]
    with pytest.raises(Error, match="does not do AllGather"):
        from_plan(json.dumps(plan), "p.json")


def test_bad_plans_say_what_and_where() -> None:
    plan = all_gather_plan()
    plan["gpus"][0]["threadblocks"][0]["ops"][1]["name"] = "gstore"
    with pytest.raises(Error, match=r"p.json: rank 0, block 0, operation 1 .gstore.: switch channels"):
        from_plan(json.dumps(plan), "p.json")
    with pytest.raises(Error, match="not JSON"):
        from_plan("{", "p.json")
    with pytest.raises(Error, match="a field is missing"):
        from_plan('{"gpus": []}', "p.json")


@pytest.mark.parametrize("number", ["NaN", "1e400", "-1", "0", "100000000000"])
def test_absurd_numbers_are_refused(number: str) -> None:
    text = json.dumps(all_gather_plan())
    assert '"input_chunks": 1,' in text
    with pytest.raises(Error, match=r"p\.json"):
        from_plan(text.replace('"input_chunks": 1,', f'"input_chunks": {number},'), "p.json")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Error, match="not JSON"):
        from_plan("[" * 100_000, "p.json")
