# SPDX-License-Identifier: Apache-2.0
"""Low latency over ports, replayed many times: no wrong row, no hang. The tests replay some hundreds of times; this:

    PYTHONPATH=python:tests/gpu python tests/gpu/ports_replay_soak.py --rounds 100000 --minutes 8 --json FILE

A round is a dispatch and a combine among ranks that are cut into nodes. On GPUs each number of tokens has a graph,
captured once. Between replays sizes are drawn anew, for each rank its own: ranks with few tokens meet ranks with many.
Each replay draws routes, empty choices and rows on the device, and compares every combined row there with what it has
to be; a row of another replay, token or rank is another number. With --device cpu calls are made one by one.
It ends with the rounds or the minutes, whichever come first, and says how many rounds there were. RANKS_PER_GPU=2 lets
two ranks share each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft import _core
from weft.runtime.progress import progress
from weft.testing.ranks import Rank, run_ranks

SIZES = (0, 1, 7, 33, 64, 128)  # tokens of a rank: no batch, one, odd ones, all
ROUTES = 509  # a prime, so that routes and sizes meet in all ways
CHUNK = 250  # rounds between looks at the clock


@dataclass(frozen=True)
class Options:
    """What to run; ``hooks``: receive phases are launches of their own."""

    ranks: int
    ranks_per_node: int
    provider: str
    device: str
    rounds: int
    minutes: float
    hidden: int
    top_k: int
    fan_out: str
    hooks: bool
    seed: int
    timeout_s: float


@dataclass
class Outcome:
    """Of all ranks together; ``error``: of the first rank that had one."""

    options: Options
    rounds: int = 0
    seconds: float = 0.0
    rows: int = 0
    wrong_rows: int = 0
    us_per_round: float = 0.0
    once_per_node: bool = False  # tokens; and replies
    replies_once_per_node: bool = False
    replays_of_sizes: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all was right and all rounds were made."""
        return (
            not self.error and self.wrong_rows == 0 and self.rows > 0 and self.rounds == self.options.rounds
        )


class Rounds:
    """Round trips of one rank."""

    def __init__(self, rank: Rank, options: Options) -> None:
        o, n = options, rank.size
        self.rank, self.options, self.experts = rank, o, 4 * n
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if o.device == "cuda" else torch.device("cpu")
        )
        hint = weft.Buffer.get_low_latency_rdma_size_hint(max(SIZES), o.hidden, n, self.experts)
        self.buffer = weft.Buffer(
            rank.group,
            0,
            hint,
            low_latency_mode=True,
            timeout_s=o.timeout_s,
            device=self.device,
            explicitly_destroy=True,
        )
        drawn = torch.Generator().manual_seed(o.seed * 1000 + rank.rank)
        shape = (ROUTES, max(SIZES), self.experts)
        idx = torch.rand(shape, generator=drawn).topk(o.top_k).indices
        idx[torch.rand(idx.shape, generator=drawn) < 0.2] = -1
        idx[:, ::13] = -1  # tokens that go nowhere
        self.routes = idx.to(self.device)
        self.turn = torch.zeros((), dtype=torch.int64, device=self.device)
        self.wrong, self.rows = torch.zeros_like(self.turn), torch.zeros_like(self.turn)
        self.column = torch.arange(max(SIZES), device=self.device).unsqueeze(1) * 3 + rank.rank * 11
        self.calls = {tokens: self._prepare(tokens) for tokens in SIZES}

    def _step(self, tokens: int) -> None:
        o = self.options
        idx = self.routes.index_select(0, (self.turn % ROUTES).view(1))[0, :tokens]
        goes = idx >= 0
        # One weight of 1 among zeros: sums are exact.
        weights = (goes & (goes.cumsum(1) == 1)).float()
        value = ((self.column[:tokens] + self.turn * 7) % 251).bfloat16()
        x = value.expand(tokens, o.hidden).contiguous()
        recv, _, handle, _, hook = self.buffer.low_latency_dispatch(
            x, idx, max(SIZES), self.experts, use_fp8=False, return_recv_hook=o.hooks
        )
        if hook is not None:
            hook()
        combined, _, hook = self.buffer.low_latency_combine(
            recv, idx, weights, handle, return_recv_hook=o.hooks
        )
        if hook is not None:
            hook()
        expected = torch.where(goes.any(1, keepdim=True), x, torch.zeros_like(x))
        self.wrong.add_((combined != expected).any(1).sum())
        self.rows.add_(goes.any(1).sum())
        self.turn.add_(1)

    def _prepare(self, tokens: int) -> Callable[[], None]:
        if self.device.type == "cpu":
            return lambda: self._step(tokens)
        for _ in range(2):
            self._step(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(tokens)
        return graph.replay

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self) -> Outcome:
        """Make rounds until there are enough or time is over. Collective."""
        o, rank = self.options, self.rank
        self._settle()
        self.turn.zero_(), self.rows.zero_()  # what ran before the captures is checked, and not counted
        outcome = Outcome(o)
        outcome.once_per_node, outcome.replies_once_per_node = self.once_per_node()
        sizes = random.Random(o.seed * 77 + rank.rank)  # each rank draws its own
        counts = dict.fromkeys(SIZES, 0)
        began = time.monotonic()
        with progress(enabled=rank.rank == 0) as bar:
            task = bar.add_task(f"{o.provider}, {rank.size} ranks by {o.ranks_per_node}", total=o.rounds)
            goes_on = True
            while goes_on:
                for _ in range(min(CHUNK, o.rounds - outcome.rounds)):
                    tokens = sizes.choice(SIZES)
                    counts[tokens] += 1
                    self.calls[tokens]()
                    outcome.rounds += 1
                self._settle()
                bar.update(task, completed=outcome.rounds)
                goes_on = self._goes_on(
                    outcome.rounds < o.rounds and time.monotonic() - began < o.minutes * 60
                )
        outcome.seconds = round(time.monotonic() - began, 1)
        outcome.us_per_round = round(outcome.seconds / max(outcome.rounds, 1) * 1e6, 1)
        outcome.rows, outcome.wrong_rows = int(self.rows), int(self.wrong)
        outcome.replays_of_sizes = {str(tokens): count for tokens, count in counts.items()}
        return outcome

    def once_per_node(self) -> tuple[bool, bool]:
        """Return whether a token, and a sum of its replies, crosses the network once for each node."""
        o, mode = self.options, self.buffer.runtime.low_latency
        form = (max(SIZES), o.top_k, self.experts, o.hidden * 2)
        return bool(mode.sends_once_per_domain(*form, 0)), bool(mode.replies_once_per_domain(*form))

    def _goes_on(self, wishes: bool) -> bool:
        """Return what rank 0 wishes, and no rank has a wrong row."""
        said: list[Any] = [None] * self.rank.size
        dist.all_gather_object(said, (wishes, int(self.wrong) == 0), group=self.rank.group)
        return bool(said[0][0]) and all(is_right for _, is_right in said)


def _soak(rank: Rank, options: Options) -> Outcome:
    if options.device == "cuda":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    rounds = Rounds(rank, options)
    outcome = rounds.run()
    rounds.buffer.destroy()
    return outcome


def run(options: Options) -> Outcome:
    """Run it on ranks of this host; return what all found together. What a rank raises is in ``error``."""
    os.environ["WEFT_RANKS_PER_NODE"] = str(options.ranks_per_node)
    os.environ["WEFT_PROXY_PROVIDER"] = options.provider
    os.environ["WEFT_LOW_LATENCY_FANOUT"] = options.fan_out
    _core.config_reload()
    try:
        of_ranks = run_ranks(
            options.ranks,
            _soak,
            options,
            with_gpus=options.device == "cuda",
            deadline_s=options.minutes * 60 + 3 * options.timeout_s,
        )
    except Exception as error:  # reported with what was asked for; the next provider runs
        return Outcome(options, error=str(error))
    made = of_ranks[0]
    made.rows = sum(outcome.rows for outcome in of_ranks)
    made.wrong_rows = sum(outcome.wrong_rows for outcome in of_ranks)
    return made


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=100_000, help="of each provider (%(default)s)")
    add("--minutes", type=float, default=4.0, help="of each provider at most (%(default)s)")
    add("--ranks", type=int, default=2)
    add("--ranks-per-node", type=int, default=1)
    add("--provider", default="fabric:shm,fabric:tcp", help="with commas between (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.device_count() else "cpu")
    add("--hidden", type=int, default=512)
    add("--top-k", type=int, default=4)
    add("--fan-out", choices=("auto", "direct", "node"), default="auto", help="WEFT_LOW_LATENCY_FANOUT")
    add("--hooks", action="store_true", help="receive phases are launches of their own")
    add("--seed", type=int, default=1)
    add("--timeout-s", type=float, default=60.0, help="of a wait for another rank (%(default)s)")
    add("--json", type=Path, help="file for the result; -: print it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run every provider, print a line for each; return 1 where one was not good."""
    args = vars(_arguments(argv))
    providers, path = args.pop("provider").split(","), args.pop("json")
    outcomes = [run(Options(provider=provider, **args)) for provider in providers]
    for made in outcomes:
        o = made.options
        print(
            f"{'good' if made.is_good else 'NOT GOOD'}: {o.provider}, {o.device}, {o.ranks} ranks by {o.ranks_per_node}"
            f"{', once per node' if made.once_per_node else ''}"
            f"{', replies once per node' if made.replies_once_per_node else ''}: {made.rounds} of {o.rounds} rounds in "
            f"{made.seconds} s, {made.rows} rows, {made.wrong_rows} wrong{': ' + made.error if made.error else ''}"
        )
    if path:
        gpu = torch.cuda.get_device_name(0) if args["device"] == "cuda" else ""
        found = {
            "what": "low latency over ports, replayed",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "version": weft.__version__,
            "command": shlex.join(["python", "tests/gpu/ports_replay_soak.py", *(argv or sys.argv[1:])]),
            "machine": {"cpu_count": os.cpu_count(), "gpu": gpu, "system": platform.platform()},
            "runs": [asdict(made) | {"good": made.is_good} for made in outcomes],
        }
        text = json.dumps(found, indent=2) + "\n"
        sys.stdout.write(text) if str(path) == "-" else path.write_text(text)
    return 0 if all(made.is_good for made in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
