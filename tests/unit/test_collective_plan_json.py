# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ JSON plans: played into verified algorithms, or refused with place and reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.collectives import verify
from weft.collectives.library import build
from weft.collectives.plan_json import from_plan
from weft.collectives.plan_write import to_plan
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


def test_plan_without_its_synchronisation_is_a_race() -> None:
    for plan in (all_gather_plan(), two_block_plan()):
        for gpu in plan["gpus"]:
            for block in gpu["threadblocks"]:
                block["ops"] = [op for op in block["ops"] if op["name"] in ("copy", "put", "re")]
        for reschedule in (False, True):
            with pytest.raises(
                Error, match=r"p.json: rank \d, block \d, operation \d \(\w+\): (race|scratch)"
            ):
                from_plan(json.dumps(plan), "p.json", reschedule)


def two_block_plan() -> dict[str, Any]:
    """Return an all-reduce whose first block fetches the peer's input and whose second adds it, by a semaphore."""
    plan = all_gather_plan()
    plan.update(name="two", collective="allreduce")
    channel = {"channel_type": "memory", "channel_ids": [0]}
    for gpu in plan["gpus"]:
        gpu.update(output_chunks=1, scratch_chunks=1, semaphores=[{"init_value": 0}])
        gpu["remote_buffers"][0]["type"] = "s"
        own, out, kept = ({"type": name, "index": 0, "size": 1} for name in "ios")
        gpu["threadblocks"][0]["ops"] = [
            {
                "name": "put",
                "src_buff": [own],
                "dst_buff": [{"buffer_id": 0, "index": 0, "size": 1}],
                **channel,
            },
            {"name": "signal", **channel},
            {"name": "wait", **channel},
            {"name": "sem_release", "semaphore_ids": [0]},
        ]
        adds = {"name": "re", "src_buff": [own, kept], "dst_buff": [out]}
        second = {"id": 1, "ops": [{"name": "sem_acquire", "semaphore_ids": [0]}, adds], "channels": []}
        gpu["threadblocks"].append({**second, "remote_buffer_refs": []})
    return plan


@pytest.mark.parametrize("missing", ["signal", "sem_release", "sem_acquire", "wait"])
def test_every_synchronisation_of_a_plan_counts(missing: str) -> None:
    assert from_plan(json.dumps(two_block_plan())).num_ranks == 2
    plan = two_block_plan()
    for block in plan["gpus"][1]["threadblocks"]:
        block["ops"] = [op for op in block["ops"] if op["name"] != missing]
    with pytest.raises(
        Error, match=r"p.json: rank \d, block \d, operation \d \(\w+\): (race|deadlock|scratch)"
    ):
        from_plan(json.dumps(plan), "p.json")


def test_relaxed_signals_order_no_data() -> None:
    plan = all_gather_plan()
    for gpu in plan["gpus"]:
        ops = gpu["threadblocks"][0]["ops"]
        ops[2]["name"], ops[3]["name"] = "rlxsignal", "rlxwait"
        ops.append({"name": "copy", "src_buff": [{"type": "o", "index": 1 - gpu["id"], "size": 1}]})
        ops[-1]["dst_buff"] = [{"type": "s", "index": 0, "size": 1}]
        gpu["scratch_chunks"] = 1
    with pytest.raises(Error, match="race: it reads o"):
        from_plan(json.dumps(plan), "p.json")
    text = json.dumps(plan).replace("rlx", "")
    assert from_plan(text).num_ranks == 2


def test_plan_runs_as_its_author_laid_it_out() -> None:
    algorithm = from_plan(json.dumps(two_block_plan()))
    rank = algorithm.ranks[0]
    kinds = sorted("".join(step.op.value for step in block.steps) for block in rank.blocks)
    assert kinds == ["cpyre", "r", "s"]  # both of the plan's blocks, and one that receives
    again = from_plan(json.dumps(two_block_plan()), reschedule=True)
    assert verify(again).result_checked


def test_plan_that_does_something_else_is_refused() -> None:
    plan = all_gather_plan()
    del plan["gpus"][0]["threadblocks"][0]["ops"][1]
    says = r"p.json: the plan does not do AllGather.*rank 1 o\[0\] holds nothing.*last written by nobody"
    with pytest.raises(Error, match=says):
        from_plan(json.dumps(plan), "p.json")


def test_bad_plans_say_what_and_where() -> None:
    plan = all_gather_plan()
    op = plan["gpus"][0]["threadblocks"][0]["ops"][1]
    for key, value, says in (
        ("name", "gstore", r"\(gstore\): needs multicast"),
        ("name", "pat", r"\(pat\): name: got 'pat', allowed: put"),
        ("src_buff", [{"type": "x", "index": 0, "size": 1}], r"\(put\): type: got 'x', allowed: i, o"),
        ("src_buff", [{"type": "i", "index": 0, "size": 2}], r"\(put\): sizes \[2, 1\], allowed: all alike"),
        ("src_buff", [], r"\(put\): src_buff and dst_buff: allowed: one operand or more"),
        ("dst_buff", [{"buffer_id": 3, "index": 0, "size": 1}], r"\(put\): remote_buffer_ids: got 3"),
        (
            "dst_buff",
            [{"buffer_id": 0, "index": 7, "size": 1}],
            r"\(put\): o\[7:8\] of rank 1: that buffer has 2",
        ),
        ("dst_buff", [{"buffer_id": 0, "size": 1}], r"\(put\): index is missing"),
    ):
        before = dict(op)
        op[key] = value
        with pytest.raises(Error, match=r"p.json: rank 0, block 0, operation 1 " + says):
            from_plan(json.dumps(plan), "p.json")
        op.update(before)
    with pytest.raises(Error, match="not JSON"):
        from_plan("{", "p.json")
    with pytest.raises(Error, match=r"p.json: gpus: got none"):
        from_plan('{"gpus": []}', "p.json")
    with pytest.raises(Error, match=r"p.json: gpus is missing"):
        from_plan("{}", "p.json")


def test_packets_that_are_written_twice_are_refused() -> None:
    plan = packet_all_reduce_plan()
    ops = plan["gpus"][0]["threadblocks"][0]["ops"]
    ops.insert(1, dict(ops[0]))
    with pytest.raises(
        Error, match=r"operation 1 \(ppkt\): writes packets twice into scratch\[0:1\] of rank 1"
    ):
        from_plan(json.dumps(plan), "p.json")


def grouped_plan() -> dict[str, Any]:
    """Return the all-gather with both blocks of a group at every copy and put, each with its own signal."""
    plan = all_gather_plan()
    for gpu in plan["gpus"]:
        first = gpu["threadblocks"][0]
        gpu["channels"][0]["connected_to"] *= 2
        gpu["threadblocks"] = [
            {
                **first,
                "id": number,
                "ops": [
                    {**op, **({"tbg_info": {"tb_id": number, "tbg_size": 2}} if "src_buff" in op else {})}
                    for op in first["ops"]
                ],
                "channels": [{"channel_type": "memory", "channel_ids": [number]}],
            }
            for number in range(2)
        ]
    return plan


def test_thread_block_groups_share_an_operation() -> None:
    algorithm = from_plan(json.dumps(grouped_plan()))
    assert algorithm.chunks == 4 and verify(algorithm).result_checked
    assert sum(1 for _ in algorithm.steps()) == 2 * 2 * 3
    plan = grouped_plan()
    plan["gpus"][0]["threadblocks"][1]["ops"] = []
    with pytest.raises(Error, match=r"p.json: "):
        from_plan(json.dumps(plan), "p.json")


def test_older_form_is_read() -> None:
    """Releases to 0.7: a channel joins two buffers, and operands have fields of their own."""
    gpus = []
    for rank in range(2):
        joined = {"src": "i", "dst": "s"}
        ops = [
            {
                "name": "put",
                "o_buff": joined,
                "o_cids": [{"id": 0, "off": 0}],
                "srcs": [{"buff": "i", "off": 0}],
            },
            {"name": "signal", "o_buff": joined, "o_cids": [{"id": 0, "off": 0}]},
            {"name": "wait", "i_buff": joined, "i_cids": [{"id": 0, "off": 0}]},
            {"name": "nop", "deps": [{"tb": 0, "step": 2}]},
            {
                **{"name": "re", "srcs": [{"buff": "s", "off": 0}], "ctype": "none"},
                **{"srcbuff": "i", "srcoff": 0, "dstbuff": "o", "dstoff": 0},
            },
        ]
        block = {
            "id": 0,
            "ops": [{"ctype": "sm", "cnt": 1, **op} for op in ops],
            "channels": [{**joined, "ctype": "sm", "cids": [0]}],
        }
        chunks = {"inputChunks": 1, "outputChunks": 1, "scratchChunks": 1, "chunkGroups": 1}
        channel = {"srcbuff": "i", "dstbuff": "s", "type": "sm", "connectedTo": [1 - rank]}
        gpus.append({"id": rank, **chunks, "threadblocks": [block], "channels": [channel]})
    plan = {"name": "old", "colletive": "allreduce", "protocol": "Simple", "inplace": False, "gpus": gpus}
    algorithm = from_plan(json.dumps(plan))
    assert algorithm.collective == "allreduce" and verify(algorithm).result_checked
    del gpus[1]["threadblocks"][0]["ops"][1]  # type: ignore[index]
    with pytest.raises(Error, match=r"rank 0, block 0, operation 2 \(wait\): deadlock"):
        from_plan(json.dumps(plan), "p.json")


@pytest.mark.parametrize(
    "name",
    ["allgather_ring", "allreduce_allpairs", "alltoall_allpairs", "reducescatter_ring", "broadcast_chain"],
)
def test_library_survives_a_plan(name: str) -> None:
    algorithm = build(name, 3).compile()
    again = from_plan(to_plan(algorithm), "again.json")
    assert verify(again).result_checked and again.contract is not None
    assert again.collective == algorithm.collective and again.chunks == algorithm.chunks


@pytest.mark.parametrize("number", ["NaN", "1e400", "-1", "0", "100000000000"])
def test_absurd_numbers_are_refused(number: str) -> None:
    text = json.dumps(all_gather_plan())
    assert '"input_chunks": 1,' in text
    with pytest.raises(Error, match=r"p\.json"):
        from_plan(text.replace('"input_chunks": 1,', f'"input_chunks": {number},'), "p.json")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Error, match="not JSON"):
        from_plan("[" * 100_000, "p.json")


def test_a_plan_of_an_unknown_collective_is_a_custom_one_without_a_contract() -> None:
    plan = all_gather_plan()
    plan["collective"] = "test"
    algorithm = from_plan(json.dumps(plan), "test.json")
    assert algorithm.contract is None and "taken for a custom one" in algorithm.notes[0]
    assert "not proven: what it computes" in verify(algorithm).proven
    for gpu in plan["gpus"]:
        gpu["threadblocks"][0]["ops"] = [op for op in gpu["threadblocks"][0]["ops"] if op["name"] != "wait"]
    with pytest.raises(Error, match="race"):
        from_plan(json.dumps(plan), "test.json")


def test_a_sum_that_is_sent_as_well_need_not_name_its_channel() -> None:
    plan = all_gather_plan()
    plan["collective"] = "test"
    for gpu in plan["gpus"]:
        gpu["input_chunks"] = 2
        copy, put, *rest = gpu["threadblocks"][0]["ops"]
        sources = [{"type": "i", "index": at, "size": 1} for at in (0, 1)]
        both = {"name": "res", "src_buff": sources, "dst_buff": [*copy["dst_buff"], *put["dst_buff"]]}
        gpu["threadblocks"][0]["ops"] = [both, *rest]
    sent = from_plan(json.dumps(plan), "sums.json")
    assert {step.op.value for *_, step in sent.steps()} == {"cpy", "re", "s", "r"}


def test_a_plan_without_chunks_has_nothing_to_run() -> None:
    plan = all_gather_plan()
    for gpu in plan["gpus"]:
        gpu.update(input_chunks=0, output_chunks=0)
    with pytest.raises(Error, match="nothing to run"):
        from_plan(json.dumps(plan), "none.json")
