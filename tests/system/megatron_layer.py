# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's MoE layer over the drop-in deep_ep against the same layer over Megatron's own all-to-all, on CPU ranks.

    tools/megatron-test            every case, on 2 and on 4 ranks
    tools/megatron-test 4 wider    cases whose name holds one of these words; a number: on so many ranks alone

A case builds megatron.core's MoELayer three times with the same weights: with the dispatcher "alltoall", which is the
reference, and with "flex" over `deep_ep.Buffer` and over `deep_ep.HybridEPBuffer`. Each step gives all three the same
tokens and compares the output and every gradient: of the tokens, the router and each expert. All weights then follow
the reference's gradients. Megatron's files are those of its wheel; cuda_stand_ins.py says what replaces torch.cuda.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import cuda_stand_ins
import torch
import torch.distributed as dist
from torch import Tensor

cuda_stand_ins.install()

import megatron.core  # noqa: E402 - after the stand-ins
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer.moe.fused_a2a import reset_hybrid_ep_buffer  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import weft  # noqa: E402

RANKS = (2, 4)
STEPS = 3
CASE_TIMEOUT_S = 200
# Rows travel as bfloat16, whose neighbours are 2^-8 apart; the two ways round partial sums at different places.
TOLERANCE = 0.01
REFERENCE, DEEP_EP, HYBRID_EP = "alltoall", "deepep", "hybridep"
CASES: dict[str, Callable[[], None]] = {}


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


class PlainRouter(TopKRouter):
    """Megatron's router. Its gating needs Transformer Engine's matrix product, also where that is not installed."""

    def gating(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input.float(), self.weight.float())


def make_layer(
    kind: str, hidden: int = 64, local_experts: int = 3, top_k: int = 3, **options: Any
) -> MoELayer:
    ranks = dist.get_world_size()
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": kind}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=4,
        num_moe_experts=local_experts * ranks,
        moe_router_topk=top_k,
        ffn_hidden_size=96,
        moe_ffn_hidden_size=96,
        expert_model_parallel_size=ranks,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        **({"moe_token_dispatcher_type": kind} if kind == REFERENCE else flex),
        **options,
    )
    submodules = get_moe_module_spec(use_te=False, num_experts=local_experts * ranks).submodules
    submodules.router = PlainRouter
    return MoELayer(config, submodules)


def make_layers(*kinds: str, **options: Any) -> dict[str, MoELayer]:
    """Layers with the same weights, larger than Megatron's at the start so that all gradients are."""
    torch.manual_seed(1)
    layers = {kind: make_layer(kind, **options) for kind in (REFERENCE, *kinds)}
    reference = layers[REFERENCE]
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            seed = 0 if name.startswith("router") else 1 + dist.get_rank()
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
    for layer in layers.values():
        layer.load_state_dict(reference.state_dict())
    return layers


def make_tokens(count: int, hidden: int, step: int, lean: float = 0.0) -> Tensor:
    """bf16[count, 1, hidden], of this rank and step; ``lean`` makes them alike, so that few experts get most."""
    seed = 100 * step + dist.get_rank()
    values = torch.randn(count, 1, hidden, generator=torch.Generator().manual_seed(seed))
    common = torch.randn(hidden, generator=torch.Generator().manual_seed(7))
    return (values + lean * common).bfloat16()


def forward(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's input, which takes a gradient, and its output."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(leaf)
    return leaf, output


def backward(layer: MoELayer, leaf: Tensor, output: Tensor, step: int) -> dict[str, Tensor]:
    """Return the output and every gradient, by name."""
    generator = torch.Generator().manual_seed(1000 + step)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16())
    results = {"output": output.detach(), "tokens": leaf.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: torch.zeros(0) if value is None else value for name, value in results.items()}


def check(kind: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, expected in want.items():
        actual = got[name]
        if expected.numel() == 0 and not actual.any():
            continue  # an expert without tokens: no gradient, or one of zeros
        assert actual.shape == expected.shape, f"{kind}: {name}: {tuple(actual.shape)}"
        error, size = (actual.float() - expected.float()).flatten(1), expected.float().flatten(1)
        largest_row = size.norm(dim=1).max().item() if size.numel() else 0.0
        is_empty = "expert" in name or not want["tokens"].numel()
        assert largest_row > 0 or is_empty, f"{name}: nothing to compare"
        worst_row = error.norm(dim=1).max().item() if size.numel() else 0.0
        WORST[kind] = max(WORST.get(kind, 0.0), worst_row / max(largest_row, 1e-9))
        message = f"{kind}: {name}: a row is off by {worst_row:.3g}; the largest row is {largest_row:.3g}"
        assert worst_row <= TOLERANCE * largest_row, message
        empty = (size == 0).all(dim=1)
        assert not actual.flatten(1)[empty].any(), f"{kind}: {name}: rows that have to be zero are not"


WORST: dict[str, float] = {}


def run_steps(layers: dict[str, MoELayer], tokens: Callable[[int], Tensor]) -> None:
    """Run each step through every layer, and compare."""
    reference = layers[REFERENCE]
    for step in range(STEPS):
        x = tokens(step)
        results = {kind: backward(layer, *forward(layer, x), step) for kind, layer in layers.items()}
        for kind in layers:
            check(kind, results[kind], results[REFERENCE])
        follow(reference, layers)


def follow(reference: MoELayer, layers: dict[str, MoELayer]) -> None:
    """Take a step of a twentieth of each weight's norm, the same in all layers."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.startswith("router"):
                dist.all_reduce(parameter.grad)
            if parameter.grad is not None and parameter.grad.any():
                parameter -= parameter.grad * (0.05 * parameter.norm() / parameter.grad.norm())
    for layer in layers.values():
        layer.load_state_dict(reference.state_dict())


def experts_of(layer: MoELayer, x: Tensor) -> Tensor:
    """bool[tokens, experts]: whom Megatron's router sends each token to."""
    with torch.no_grad():
        return layer.router(x)[1]


@case
def even() -> None:
    run_steps(make_layers(DEEP_EP, HYBRID_EP), lambda step: make_tokens(16, 64, step))


@case
def uneven() -> None:
    """Ranks have different numbers of tokens, one of them none at first. HybridEP wants as many on every rank."""
    layers = make_layers(DEEP_EP)
    run_steps(layers, lambda step: make_tokens(11 * (dist.get_rank() + step), 64, step))


@case
def few_experts() -> None:
    """A few experts get nearly all tokens, and some get hardly any."""
    layers = make_layers(DEEP_EP, HYBRID_EP)
    counts = experts_of(layers[REFERENCE], make_tokens(20, 64, 0, lean=3.0)).sum(0)
    assert counts.min() <= 1 and counts.max() >= 15, counts
    run_steps(layers, lambda step: make_tokens(20, 64, step, lean=3.0))


@case
def one_expert_a_rank() -> None:
    run_steps(
        make_layers(DEEP_EP, HYBRID_EP, local_experts=1, top_k=1, moe_router_pre_softmax=True),
        lambda step: make_tokens(9, 64, step),
    )


@case
def capacity() -> None:
    """Experts drop what is over their capacity, so that some tokens go nowhere."""
    layers = make_layers(DEEP_EP, HYBRID_EP, moe_expert_capacity_factor=0.5)
    kept = experts_of(layers[REFERENCE], make_tokens(24, 64, 0, lean=2.0)).sum(1)
    assert kept.min() == 0 and kept.max() >= 2, kept
    run_steps(layers, lambda step: make_tokens(24, 64, step, lean=2.0))


@case
def capacity_padded() -> None:
    """Every expert gets as many rows as its capacity. Megatron's DeepEP back end has no such mode."""
    layers = make_layers(HYBRID_EP, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    run_steps(layers, lambda step: make_tokens(24, 64, step, lean=1.0))


@case
def weights_on_input() -> None:
    layers = make_layers(
        DEEP_EP, HYBRID_EP, top_k=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True
    )
    run_steps(layers, lambda step: make_tokens(10, 64, step))


@case
def wider() -> None:
    """A wider layer runs between the forward and the backward pass: Megatron replaces its buffer."""
    narrow, wide = make_layers(DEEP_EP), make_layers(DEEP_EP, hidden=256)
    for step in range(STEPS):
        passes = {}
        for kind in narrow:
            first = forward(narrow[kind], make_tokens(12, 64, step))
            passes[kind] = first, forward(wide[kind], make_tokens(5, 256, step))
        for layers, at in ((wide, 1), (narrow, 0)):
            results = {kind: backward(layers[kind], *passes[kind][at], step) for kind in layers}
            check(DEEP_EP, results[DEEP_EP], results[REFERENCE])


def run_rank(rank: int, ranks: int, names: list[str], meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    for name in names:
        WORST.clear()
        reset_hybrid_ep_buffer()
        started = time.perf_counter()
        CASES[name]()
        dist.barrier()
        off = ", ".join(f"{kind} {worst:.1e}" for kind, worst in WORST.items() if kind != REFERENCE)
        if rank == 0:
            print(
                f"{ranks} ranks: {name}: ok, {time.perf_counter() - started:.1f} s; off by {off}", flush=True
            )
    dist.destroy_process_group()


def run_ranks(ranks: int, names: list[str]) -> bool:
    """Fork the ranks, so that Megatron is imported once; return whether all of them ended well."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=run_rank, args=(rank, ranks, names, meeting)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in waited(processes):
            if process.exitcode != 0:
                print(f"{ranks} ranks: a rank ended with {process.exitcode}", flush=True)
                for other in processes:
                    other.kill()
                return False
    return True


def waited(processes: list[Any]) -> Iterator[Any]:
    """Yield each process when it has ended; one that takes longer than all cases may is ended."""
    until = time.monotonic() + CASE_TIMEOUT_S
    left = list(processes)
    while left:
        sentinels = [process.sentinel for process in left]
        ready = multiprocessing.connection.wait(sentinels, max(0, until - time.monotonic()))
        if not ready:
            print(f"not finished after {CASE_TIMEOUT_S} s", flush=True)
            left[0].kill()
        for process in [process for process in left if process.sentinel in ready or not ready]:
            if ready or process is left[0]:
                process.join()
                left.remove(process)
                yield process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    sizes = [int(word) for word in words if word.isdigit()] or RANKS
    wanted = [word for word in words if not word.isdigit()]
    names = [name for name in CASES if not wanted or any(word in name for word in wanted)]
    print(
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, weft {weft.__version__}",
        flush=True,
    )
    return 0 if names and all([run_ranks(ranks, names) for ranks in sizes]) else 1


if __name__ == "__main__":
    sys.exit(main())
