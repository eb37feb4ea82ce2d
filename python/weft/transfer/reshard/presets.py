# SPDX-License-Identifier: Apache-2.0
"""Layouts of known models on trainers and servers, for ``weft plan reshard`` and for measuring the planner.

Shapes are those of the models' published configurations. How trainers and servers cut them is an example: FSDP within
pipeline stages and expert-parallel ranks on one side, tensor parallelism in data-parallel groups with all ranks sharing
the experts on the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import invalid
from weft.transfer.reshard.layout import Layout, TensorMeta
from weft.transfer.reshard.rules import Rule, layout_by_rules


@dataclass(frozen=True)
class Model:
    """A mixture-of-experts model with latent attention, as DeepSeek-V3 and its kin."""

    layers: int
    dense_layers: int
    experts: int
    heads: int
    vocabulary: int
    hidden: int = 7168
    dense_width: int = 18432
    expert_width: int = 2048
    query_rank: int = 1536
    latent: int = 512
    rope: int = 64
    head: int = 128


PRESETS = {
    "deepseek-v3": Model(layers=61, dense_layers=3, experts=256, heads=128, vocabulary=129280),
    "kimi-k2": Model(layers=61, dense_layers=1, experts=384, heads=64, vocabulary=163840),
    "tiny": Model(4, 1, 16, 8, 512, 64, 128, 32, 24, 16, 8, 16),
}
_LAYER = r"model\.layers\.(?P<l>\d+)\."


def tensors_of(model: Model, dtype: str = "bfloat16") -> dict[str, TensorMeta]:
    """Return every parameter by its checkpoint's name, all of one type."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocabulary, model.hidden),
        "model.norm.weight": (model.hidden,),
        "lm_head.weight": (model.vocabulary, model.hidden),
    }
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in _attention(model).items()}
        if layer < model.dense_layers:
            shapes |= _gated(f"{at}.mlp", model.hidden, model.dense_width)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (model.experts, model.hidden)
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (model.experts,)
        shapes |= _gated(f"{at}.mlp.shared_experts", model.hidden, model.expert_width)
        for expert in range(model.experts):
            shapes |= _gated(f"{at}.mlp.experts.{expert}", model.hidden, model.expert_width)
    return {name: TensorMeta(shape, dtype) for name, shape in shapes.items()}


def _attention(model: Model) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (model.hidden,),
        "post_attention_layernorm": (model.hidden,),
        "self_attn.q_a_proj": (model.query_rank, model.hidden),
        "self_attn.q_a_layernorm": (model.query_rank,),
        "self_attn.q_b_proj": (model.heads * (model.head + model.rope), model.query_rank),
        "self_attn.kv_a_proj_with_mqa": (model.latent + model.rope, model.hidden),
        "self_attn.kv_a_layernorm": (model.latent,),
        "self_attn.kv_b_proj": (model.heads * 2 * model.head, model.latent),
        "self_attn.o_proj": (model.hidden, model.heads * model.head),
    }


def _gated(at: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (width, hidden),
        f"{at}.up_proj.weight": (width, hidden),
        f"{at}.down_proj.weight": (hidden, width),
    }


def trainer_layout(model: Model, tensors: Mapping[str, TensorMeta], ranks: int) -> Layout:
    """Return trainers: as many pipeline stages as fit, up to 8; in a stage, experts over up to 8 ranks, the rest FSDP.

    Raises: weft.Error unless there are a power of two of them.
    """
    _check_power("trainers", ranks)
    stages = min(8, ranks)
    expert_ranks = min(8, ranks // stages)
    mesh = {"pp": stages, "dp": ranks // stages // expert_ranks, "ep": expert_ranks}

    def stage(match: re.Match[str]) -> int:
        return int(match["l"]) * stages // model.layers

    def expert_rank(match: re.Match[str]) -> int:
        return int(match["e"]) * expert_ranks // model.experts

    fsdp = {0: ("dp", "ep")}
    rules = [
        Rule(_LAYER + r"mlp\.experts\.(?P<e>\d+)\..*", {0: "dp"}, {"pp": stage, "ep": expert_rank}),
        Rule(_LAYER + ".*", fsdp, {"pp": stage}),
        Rule(r"model\.embed_tokens\..*", fsdp, {"pp": lambda match: 0}),
        Rule(".*", fsdp, {"pp": lambda match: stages - 1}),
    ]
    return layout_by_rules(tensors, mesh, rules)


def server_layout(model: Model, tensors: Mapping[str, TensorMeta], ranks: int) -> Layout:
    """Return servers: tensor parallelism of up to 8 in data-parallel groups, and experts over all ranks, fused.

    Raises: weft.Error unless there are a power of two of them.
    """
    _check_power("servers", ranks)
    parts = min(8, ranks)
    mesh = {"dp": ranks // parts, "tp": parts}

    def rank_of(match: re.Match[str]) -> int:
        return int(match["e"]) * ranks // model.experts

    expert = {"dp": lambda match: rank_of(match) // parts, "tp": lambda match: rank_of(match) % parts}
    at = r"model.layers.\g<l>."
    rules = [
        Rule(
            _LAYER + r"mlp\.experts\.(?P<e>\d+)\.(?P<w>gate|up)_proj\.weight",
            on=expert,
            memory=at + "mlp.experts.w13",
            order=lambda match: (int(match["e"]), int(match["w"] == "up")),
        ),
        Rule(
            _LAYER + r"mlp\.experts\.(?P<e>\d+)\.down_proj\.weight",
            on=expert,
            memory=at + "mlp.experts.w2",
            order=lambda match: (int(match["e"]),),
        ),
        Rule(
            _LAYER + r"(?P<m>mlp|mlp\.shared_experts)\.(?P<w>gate|up)_proj\.weight",
            {0: "tp"},
            memory=at + r"\g<m>.gate_up_proj",
            order=lambda match: (int(match["w"] == "up"),),
        ),
        Rule(
            _LAYER + r"self_attn\.(?P<w>q_a_proj|kv_a_proj_with_mqa)\.weight",
            memory=at + "self_attn.fused_qkv_a_proj",
            order=lambda match: (int(match["w"][0] == "k"),),
        ),
        Rule(_LAYER + r"self_attn\.(q_b|kv_b)_proj\.weight", {0: "tp"}),
        Rule(_LAYER + r"(self_attn\.o_proj|mlp.*\.down_proj)\.weight", {1: "tp"}),
        Rule(r"(model\.embed_tokens|lm_head)\.weight", {0: "tp"}),
        Rule(".*"),
    ]
    return layout_by_rules(tensors, mesh, rules)


def _check_power(argument: str, ranks: int) -> None:
    if ranks < 1 or ranks & (ranks - 1):
        raise invalid(argument, ranks, "1, 2, 4, 8, ...: the examples cut by powers of two")
