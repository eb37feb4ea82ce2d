# SPDX-License-Identifier: Apache-2.0
"""The model behind ``weft plan``, beside routes that are drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from weft import cli


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert cli.main(["plan", "--json", *options]) == 0
    plans: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return plans


@pytest.mark.parametrize(
    ("nodes", "each", "experts", "top_k"), [(2, 2, 16, 4), (4, 8, 256, 8), (3, 2, 40, 2), (2, 4, 5, 3)]
)
def test_bytes_are_those_of_drawn_routes(
    capsys: pytest.CaptureFixture[str], nodes: int, each: int, experts: int, top_k: int
) -> None:
    """The last ranks own fewer experts, or none, where these do not divide."""
    tokens, row, ranks = 4000, 4096, nodes * each
    machine = f"--nodes {nodes} --ranks-per-node {each}"
    call = f"--experts {experts} --top-k {top_k} --tokens {tokens} --hidden 2048"
    ht, ll = plan(capsys, *machine.split(), *call.split())
    random = torch.Generator().manual_seed(1)
    node_rows = rank_rows = near_rows = 0
    for source in range(ranks):
        ids = torch.rand(tokens, experts, generator=random).topk(top_k).indices
        goes = torch.zeros(tokens, ranks, dtype=torch.bool)
        goes.scatter_(1, ids // -(-experts // ranks), True)
        far = goes.view(tokens, nodes, each).clone()
        far[:, source // each] = False
        node_rows += int(far.any(2).sum())
        rank_rows += int(far.sum())
        near_rows += int(goes.view(tokens, nodes, each)[:, source // each].sum()) - int(goes[:, source].sum())
    # A message of high throughput has ids, weights and places beside its row; one of low latency ids and places.
    assert ht["dispatch"]["network_bytes"] == pytest.approx(node_rows / ranks * row, rel=0.05)
    assert ht["combine"]["network_bytes"] == pytest.approx(node_rows / ranks * row, rel=0.05)
    for call in (ll["dispatch"], ll["combine"]):
        assert call["per_rank"]["network_bytes"] == pytest.approx(rank_rows / ranks * row, rel=0.08)
        assert call["per_node"]["network_bytes"] == pytest.approx(node_rows / ranks * row, rel=0.08)
        chosen = call["per_node" if call["fan_out"] == "node" else "per_rank"]
        assert {name: call[name] for name in chosen} == chosen
    # What goes on within a node: a dispatch's rows to other ranks of it, a combine's to the rail peers.
    inner = near_rows + (rank_rows * (each - 1) / each if ll["combine"]["fan_out"] == "node" else 0)
    assert ll["combine"]["mapped_bytes"] == pytest.approx(inner / ranks * row, rel=0.08)


@pytest.mark.parametrize(
    ("machine", "fan_out"),
    [
        ("--ranks-per-node 8", "node"),
        ("--ranks-per-node 2 --tokens 1 --puts 10", "direct"),  # a put saves less than the mapped link costs
        ("--ranks-per-node 8 --mapped-gb-s 4", "direct"),  # a node that is slower than its network
        ("--ranks-per-node 8 --mapped-gb-s 4 --nic-gbit 10", "node"),
        ("--ranks-per-node 1", "direct"),  # there is nobody to share with
    ],
)
def test_fan_out_follows_the_machine(capsys: pytest.CaptureFixture[str], machine: str, fan_out: str) -> None:
    (made,) = plan(capsys, "--mode", "ll", *machine.split())
    for call in (made["dispatch"], made["combine"]):
        assert call["fan_out"] == fan_out, call
        assert call["us"] == min(call["per_rank"]["us"], call["per_node"]["us"])


def test_a_faster_link_is_no_longer_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    def bound(*options: str) -> tuple[str, float]:
        dispatch = plan(capsys, "--mode", "ht", *options)[0]["dispatch"]
        return dispatch["bound"], dispatch["us"]

    network, slow = bound()
    mapped, fast = bound("--nic-gbit", "100000")
    assert (network, mapped) == ("network", "mapped links") and fast < slow
    assert bound("--puts", "0.001")[0] == "puts"
    assert bound("--tokens", "1", "--puts", "1000")[0] == "latency"


def test_memory_of_the_host_costs_a_crossing_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    """A dispatch of high throughput waits for two trips over the network, a combine for one."""

    def both(*options: str) -> tuple[dict[str, Any], dict[str, Any]]:
        made = plan(capsys, "--mode", "ht", *options)[0]
        return made["dispatch"], made["combine"]

    for call, trips in zip(both(), (2, 1), strict=True):
        assert call["host_us"] == pytest.approx(call["us"] + 2 * trips * 1.5)
        assert call["host_bound"] == call["bound"] == "network"
    for call, slower in zip(both(), both("--pcie-gb-s", "25", "--pcie-latency-us", "0"), strict=True):
        assert slower["us"] == call["us"] and slower["host_bound"] == "PCIe"
        assert slower["host_us"] - slower["us"] == pytest.approx(
            call["network_bytes"] * (1 / 25e3 - 1 / 50e3)
        )
    for call in both("--nodes", "1"):
        assert call["host_us"] == call["us"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "7"], "hidden: got rows of 14 and 14 bytes, allowed: multiples of 16"),
        (["--top-k", "9", "--experts", "8"], "top_k: got 9, allowed: 1 to the 8 experts"),
        (["--nodes", "0"], "--nodes: got 0, allowed: 1 to 4096"),
        (["--nic-gbit", "0"], "--nic-gbit: got 0.0, allowed: a number above 0"),
        (["--hidden", "524288"], "hidden: got rows that take"),
    ],
)
def test_what_cannot_be_planned_is_named(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["plan", "--mode", "ht", *options]) == 1
    assert message in capsys.readouterr().err


def test_help_has_examples_and_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    for said in (
        "weft plan --mode ll --tokens 128 --fp8",
        "a call takes longer",
        "--ranks-per-node W",
        "the machine:",
    ):
        assert said in shown
