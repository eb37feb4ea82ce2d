# SPDX-License-Identifier: Apache-2.0
"""``weft plan reshard``, and the examples of models that it plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft import cli
from weft.transfer.reshard import plan, verify
from weft.transfer.reshard.presets import PRESETS, server_layout, tensors_of, trainer_layout
from weft.transfer.reshard_command import _PRESETS

SMALL = ["plan", "reshard", "--preset", "tiny", "--trainers", "16", "--servers", "8"]


def test_the_plan_is_printed_with_its_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*SMALL, "--verify", "--cache", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for said in ("tiny, bfloat16: 16 trainers to 8 servers", "bound / predicted", "proven in, s"):
        assert said in shown
    assert len(list(tmp_path.iterdir())) == 1


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json", "--nic-gbit", "8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sources"] == 16 and facts["destinations"] == 8
    assert facts["predicted_s"] >= facts["bound_s"] > 0
    assert facts["predicted_s"] == pytest.approx(
        max(facts["source_bytes_max"], facts["destination_bytes_max"]) / 1e9
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--trainers", "3"], "trainers: got 3, allowed: 1, 2, 4, 8"),
        (["--dtype", "int7"], "dtype: got 'int7', allowed: bfloat16"),
        (["--bucket", "0"], "bucket_bytes: got 0, allowed: 1 or more"),
        (["--nic-gbit", "0"], "source_gbit: got 0.0, allowed: numbers above 0"),
    ],
)
def test_what_cannot_be_planned_is_named(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main([*SMALL, *options]) == 1
    assert message in capsys.readouterr().err


def test_other_plans_stand_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--mode", "ll", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["mode"] == "ll"


def test_presets_have_the_parameters_that_their_models_are_known_for() -> None:
    assert tuple(PRESETS) == _PRESETS
    counts = {}
    for name, model in PRESETS.items():
        metas = tensors_of(model).values()
        counts[name] = sum(m.shape[0] * (m.shape[1] if len(m.shape) > 1 else 1) for m in metas)
    assert counts["deepseek-v3"] == pytest.approx(671e9, rel=0.01)
    assert counts["kimi-k2"] == pytest.approx(1.03e12, rel=0.02)


@pytest.mark.parametrize("trainers, servers", [(1, 1), (4, 4), (8, 2), (64, 16)])
def test_small_examples_are_proven(trainers: int, servers: int) -> None:
    model = PRESETS["tiny"]
    tensors = tensors_of(model)
    made = plan(trainer_layout(model, tensors, trainers), server_layout(model, tensors, servers))
    verify(made)
    assert made.share > 0.9 or servers < trainers
