# SPDX-License-Identifier: Apache-2.0
"""``weft demo``: a small mixture-of-experts language model, trained over ranks through Weft and beside it on
one rank.

It trains on the sources of Python's standard library, byte by byte, checks that both runs' losses agree as
far as the arithmetic allows (``weft.demo.agreement``), and draws the loss curves and where the tokens went.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import invalid
from weft.runtime.files import write_file
from weft.runtime.tables import integer_from

if TYPE_CHECKING:
    from weft.demo.train import Outcome, Plan

DEADLINE_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    parser.add_argument(
        "--ranks", type=integer_from(1), default=0, help="default: all GPUs, or 4 without any"
    )
    parser.add_argument(
        "--nodes",
        type=integer_from(1),
        default=1,
        help="spread ranks and experts over so many: network namespaces (as root), else parts of this host; on the CPU",
    )
    parser.add_argument(
        "--steps", type=integer_from(1), default=200, help="training steps of each run (default 200)"
    )
    parser.add_argument(
        "--sequences", type=integer_from(1), default=16, help="sequences of 64 bytes per step, all ranks"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the batches")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the picture and the losses"
    )


def run(args: argparse.Namespace) -> int:
    """Train both, compare, print, draw. Returns 0 when the losses agree, 1 when they do not."""
    from weft.demo import train
    from weft.testing.ranks import run_ranks

    if importlib.util.find_spec("matplotlib") is None:  # told before the training, which takes a while
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    if args.nodes != 1:
        return _run_over_nodes(args)
    num_ranks, plan = _plan(args)
    args.out.mkdir(parents=True, exist_ok=True)  # a folder that can't be written is told before the training
    print(settings_of(plan))
    (alone,) = run_ranks(1, train.train_on_one_rank, plan, with_group=False, deadline_s=DEADLINE_S)
    over_ranks = run_ranks(num_ranks, train.train_over_ranks, plan, deadline_s=DEADLINE_S)[0]
    return _report(args.out, num_ranks, plan, alone, over_ranks)


def _run_over_nodes(args: argparse.Namespace) -> int:
    """The same on nodes, by torchrun on each; rank 0 trains alone afterwards, and reports."""
    import torch.distributed

    from weft.demo import train
    from weft.runtime.bootstrap import Environment
    from weft.testing.machines import run_everywhere
    from weft.testing.ranks import run_as_rank, run_ranks

    is_rank = torch.distributed.is_torchelastic_launched()
    args.ranks, args.device = Environment().size if is_rank else args.ranks or 4, "cpu"
    if args.ranks % args.nodes:
        raise invalid("nodes", args.nodes, f"a number that divides {args.ranks} ranks")
    num_ranks, plan = _plan(args)
    if not is_rank:
        args.out.mkdir(parents=True, exist_ok=True)
        options = ("nodes", "steps", "sequences", "seed", "out")
        same = [word for name in options for word in (f"--{name}", str(getattr(args, name)))]
        return run_everywhere(args.nodes, args.ranks // args.nodes, ["-m", "weft", "demo", *same])
    rank, over_ranks = run_as_rank(train.train_over_ranks, plan, args.nodes)
    if rank:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    print(settings_of(plan))
    (alone,) = run_ranks(1, train.train_on_one_rank, plan, with_group=False, deadline_s=DEADLINE_S)
    return _report(args.out, num_ranks, plan, alone, over_ranks)


def settings_of(plan: Plan) -> str:
    """Return in a line what is trained, on what."""
    shape = plan.shape
    return (
        f"{shape.layers} layers of {shape.experts} experts, top-{shape.top_k}, hidden {shape.hidden}; "
        f"{plan.steps} steps of {plan.sequences} x {shape.length} bytes of Python's standard library; "
        f"{plan.device}"
    )


def why_slower(alone: Outcome, over_ranks: Outcome, num_ranks: int, num_cores: int, device: str) -> str:
    """Return why the run over ranks has fewer tokens per second, or "" where it has not."""
    if len(alone.losses) < 2 or over_ranks.tokens_per_s >= alone.tokens_per_s:
        return ""
    share = f"{over_ranks.communication_share:.0%} of its time is exchange, which one rank has none of"
    cores = (
        f"; {num_ranks} ranks share {num_cores} cores" if device == "cpu" and num_cores < num_ranks else ""
    )
    return (
        f"tokens/s is lower over {num_ranks} ranks: {share}{cores}. The model is tiny, so that this ends in "
        "seconds: the demo shows that the sums agree, not speed."
    )


def _plan(args: argparse.Namespace) -> tuple[int, Plan]:
    import torch

    from weft.demo.model import Shape
    from weft.demo.train import Plan

    torch.set_num_threads(1)  # the ranks are forked from here, and a fork inherits no threads of OpenMP
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and not gpus:
        raise invalid("device", "cuda", "cpu: torch sees no GPU here")
    num_ranks = args.ranks or gpus or 4
    if gpus and num_ranks > gpus:
        raise invalid("ranks", num_ranks, f"1 to {gpus}, one per GPU")
    experts = -(-Shape.experts // num_ranks) * num_ranks
    plan = Plan(Shape(experts=experts), args.steps, args.sequences, args.seed, "cuda" if gpus else "cpu")
    return num_ranks, plan


def _report(folder: Path, num_ranks: int, plan: Plan, alone: Outcome, over_ranks: Outcome) -> int:
    from weft.demo.agreement import compare, last_loss
    from weft.demo.picture import draw
    from weft.runtime.tables import Column, Table, make_console

    runs = {"one rank, without Weft": alone, f"{num_ranks} ranks, through Weft": over_ranks}
    numbers = ("first loss", "loss, last fifth", "tokens/s", "in communication")
    table = Table(
        "weft demo", [Column("run", is_key=True), *(Column(head, is_number=True) for head in numbers)]
    )
    for name, outcome in runs.items():
        losses = (f"{outcome.losses[0]:.4f}", last_loss(outcome.losses))
        table.add(name, *losses, *_speed(outcome))
    console = make_console()
    table.print(console)
    slower = why_slower(alone, over_ranks, num_ranks, len(os.sched_getaffinity(0)), plan.device)
    if slower:
        console.print(slower, highlight=False)
    agreement = compare(alone.losses, over_ranks.losses)
    verdict = "they agree" if agreement.holds else "THEY DISAGREE"
    console.print(f"{verdict}: {agreement.sentence()}", highlight=False, soft_wrap=True)
    curves = {name: outcome.losses for name, outcome in runs.items()}
    write_file(folder / "losses.json", json.dumps({"losses": curves, "rows": over_ranks.rows}) + "\n")
    draw(folder / "demo.png", curves, over_ranks.rows, plan.shape.experts // num_ranks, settings_of(plan))
    console.print(
        f"wrote {folder / 'demo.png'} and {folder / 'losses.json'}", highlight=False, soft_wrap=True
    )
    return 0 if agreement.holds else 1


def _speed(outcome: Outcome) -> tuple[str, str]:
    """Return tokens/s and the share of communication; the first step is not timed, so of one step nothing is known."""
    if len(outcome.losses) < 2:
        return "-", "-"
    return f"{outcome.tokens_per_s:,.0f}", f"{outcome.communication_share:.0%}"
