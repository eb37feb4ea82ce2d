# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from weft.demo import _speed, agreement
from weft.demo.model import ByteModel, Local, Shape
from weft.demo.text import batch, load_text
from weft.demo.train import Outcome

SMALL = Shape(hidden=32, layers=1, heads=2, length=16, experts=4, top_k=2, expert_hidden=32)


def test_text_is_the_standard_library_and_the_same_each_time() -> None:
    text = load_text(200_000)
    assert text.numel() == 200_000
    assert b"import" in bytes(text.tolist())
    assert torch.equal(text, load_text(200_000))


def test_batches_depend_on_step_and_seed_alone() -> None:
    text = load_text(50_000)
    assert torch.equal(batch(text, 3, 4, 16, seed=1), batch(text, 3, 4, 16, seed=1))
    assert not torch.equal(batch(text, 3, 4, 16, seed=1), batch(text, 4, 4, 16, seed=1))
    assert batch(text, 0, 4, 16, seed=0).shape == (4, 17)


def test_a_mixture_of_experts_is_the_weighted_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    (mixture,) = ByteModel(SMALL, Local(SMALL.experts)).mixtures()
    x = torch.randn(1, 6, SMALL.hidden)
    best, chosen = mixture.router(x[0]).topk(SMALL.top_k, dim=-1)
    weights = best.softmax(-1)
    expected = torch.zeros(6, SMALL.hidden)
    for row in range(6):
        for slot in range(SMALL.top_k):
            expert = chosen[row, slot]
            hidden = torch.nn.functional.gelu(x[0, row].bfloat16().float() @ mixture.up[expert])
            expected[row] += weights[row, slot] * (hidden @ mixture.down[expert])
    torch.testing.assert_close(mixture(x)[0], expected, rtol=2**-8, atol=1e-4)


def test_every_process_draws_the_same_model() -> None:
    class Share(Local):
        def __init__(self, first_expert: int) -> None:
            super().__init__(2)
            self.first_expert = first_expert

    models = []
    for exchange in (Local(4), Share(0), Share(2)):
        torch.manual_seed(5)
        models.append(ByteModel(SMALL, exchange))
    whole, first, second = (model.mixtures()[0].up for model in models)
    assert torch.equal(torch.cat([first, second]), whole)
    for a, b in zip(models[0].shared_parameters(), models[2].shared_parameters(), strict=True):
        assert torch.equal(a, b)


def test_agreement_has_a_limit_at_each_end() -> None:
    alone = [5.0] + [2.0] * 9
    assert agreement.compare(alone, alone).holds
    assert not agreement.compare(alone, [5.1] + [2.0] * 9).holds
    assert not agreement.compare(alone, [5.0] + [2.2] * 9).holds
    assert agreement.compare(alone, [5.0] + [2.2] * 5 + [2.0] * 4).holds


def test_a_run_of_one_step_claims_no_speed() -> None:
    assert _speed(Outcome([5.0, 4.0], 1234.5, 0.48)) == ("1,234", "48%")
    assert _speed(Outcome([5.0], 0.0, 0.0)) == ("-", "-")
