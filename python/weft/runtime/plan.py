# SPDX-License-Identifier: Apache-2.0
"""``weft plan``: what dispatch and combine do over nodes, and how long that takes on paper.

Decisions are those of the planners that calls use (src/plan); the prediction is bytes over rates, puts over their rate,
and latencies, for tokens that choose experts with equal chances. It needs no GPU, no network and no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from weft import _core
from weft.runtime.tables import Column, Table, add_wide_argument, make_console

MODES = {"ht": "high throughput in two levels", "ll": "low latency"}
_HOPPER_SHARED_BYTES = 227 * 1024
_FP8_GROUP = 128  # channels that share a float32 scale

_EXAMPLES = """\
examples:
  weft plan                                    two nodes of 8 GPUs, 4096 tokens a rank, hidden 7168, top 8 of 256
  weft plan --mode ll --tokens 128 --fp8       a decoding step
  weft plan --nodes 2,4,8,16 --nic-gbit 200    a row for each number of nodes
  weft plan --json | jq .[0].dispatch.us       for scripts

The time is the largest of: bytes over mapped links, bytes over the network, puts; and the latencies before it. What
kernels do besides is not in it, so a call takes longer. "limited by" says which of them it is. "us" is for a network
that reads and writes memory of the GPU. "host us" is for one that does not: what it carries is stored to memory of the
host and read from there, over PCIe (WEFT_PORT_WINDOWS). Rates and latencies of the machine are arguments: the
defaults of mapped links, PCIe and SMs are an H200's, those of the network are examples.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    model = parser.add_argument_group("the call")
    model.add_argument(
        "--mode", choices=[*MODES, "both"], default="both", help="ht: high throughput; ll: low latency"
    )
    model.add_argument("--tokens", type=int, metavar="T", help="of each rank (4096 with ht, 128 with ll)")
    model.add_argument(
        "--hidden", type=int, default=7168, metavar="H", help="channels of a row (%(default)s)"
    )
    model.add_argument("--top-k", type=int, default=8, metavar="K", help="experts of a token (%(default)s)")
    model.add_argument("--experts", type=int, default=256, metavar="E", help="over all ranks (%(default)s)")
    model.add_argument(
        "--fp8", action="store_true", help="dispatch FP8 rows with a scale per 128 channels, not BF16"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--nodes", type=_numbers, default=[2], metavar="N,N", help="numbers of nodes (2)")
    machine.add_argument("--ranks-per-node", type=int, default=8, metavar="W", help="(%(default)s)")
    machine.add_argument(
        "--nic-gbit", type=float, default=400, help="network of each rank, Gbit/s (%(default)s)"
    )
    machine.add_argument(
        "--latency-us", type=float, default=5, help="of a put over the network (%(default)s)"
    )
    machine.add_argument(
        "--puts",
        type=float,
        default=1,
        help="10^6 puts a rank posts per second, see weft bench channel --calls fifo (%(default)s)",
    )
    machine.add_argument("--sms", type=int, default=132, help="of a GPU (%(default)s)")
    machine.add_argument("--nvlinks", type=int, default=18, help="of a GPU; 0: PCIe (%(default)s)")
    machine.add_argument(
        "--compute-major", type=int, default=9, help="8: Ampere, 9: Hopper, 10: Blackwell (%(default)s)"
    )
    machine.add_argument(
        "--mapped-gb-s", type=float, default=341, help="a GPU's pushes to its node, GB/s (%(default)s)"
    )
    machine.add_argument(
        "--mapped-latency-us", type=float, default=1.3, help="of a store to a peer (%(default)s)"
    )
    machine.add_argument(
        "--pcie-gb-s",
        type=float,
        default=55,
        help="between a GPU and its host, each way, GB/s (%(default)s: 16 lanes of the fifth generation)",
    )
    machine.add_argument(
        "--pcie-latency-us", type=float, default=1.5, help="of a store to the host's memory (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of tables: a list, one for each plan"
    )
    add_wide_argument(parser)
    _add_reshard(parser)


def _add_reshard(parser: argparse.ArgumentParser) -> None:
    """Offer ``weft plan reshard``, which plans something else."""
    from weft.transfer import reshard_command

    line = "which bytes go where between trainers and servers, and how long that takes on paper"
    reshard = parser.add_subparsers(metavar="reshard").add_parser("reshard", help=line, description=line)
    reshard_command.add_arguments(reshard)
    reshard.set_defaults(run=reshard_command.run, refuse=reshard.error)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed: whole numbers with commas between"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Print the plans; return 0. Raises: weft.Error naming what cannot be planned."""
    modes = list(MODES) if args.mode == "both" else [args.mode]
    plans = [make_plan(mode, nodes, args) for mode in modes for nodes in args.nodes]
    if args.json:
        json.dump(plans, sys.stdout, indent=2)
        print()
        return 0
    console = make_console(args.wide)
    for mode in modes:
        for table in tables_of(mode, [plan for plan in plans if plan["mode"] == mode]):
            if isinstance(table, Table):
                table.print(console)
            else:
                console.print(table + "\n", highlight=False, markup=False)
    return 0


def make_plan(mode: str, nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of one mode on so many nodes: what was asked, decisions and prediction. Raises: weft.Error."""
    for name in ("nic_gbit", "puts", "mapped_gb_s", "pcie_gb_s"):
        _check(name, getattr(args, name), getattr(args, name) > 0, "a number above 0")
    for name in ("latency_us", "mapped_latency_us", "pcie_latency_us"):
        _check(name, getattr(args, name), getattr(args, name) >= 0, "0 or more")
    for name in ("hidden", "top_k", "experts", "ranks_per_node", "sms"):
        _check(name, getattr(args, name), 1 <= getattr(args, name) < 1 << 20, "1 to 1048575")
    _check("nodes", nodes, 1 <= nodes <= 4096, "1 to 4096")
    tokens = args.tokens if args.tokens is not None else (4096 if mode == "ht" else 128)
    _check("tokens", tokens, 1 <= tokens < 1 << 24, "1 to 16777215")
    shape = {
        "nodes": nodes,
        "ranks_per_node": args.ranks_per_node,
        "tokens": tokens,
        "top_k": args.top_k,
        "experts": args.experts,
        "row_bytes": args.hidden * (1 if args.fp8 else 2),
        "scale_bytes": -(-args.hidden // _FP8_GROUP) * 4 if args.fp8 else 0,
        "result_bytes": args.hidden * 2,
    }
    machine = {
        "sms": args.sms,
        "shared_bytes": _HOPPER_SHARED_BYTES,
        "nvlinks": args.nvlinks,
        "compute_major": args.compute_major,
        "mapped_gb_s": args.mapped_gb_s,
        "network_gb_s": args.nic_gbit / 8,
        "mapped_latency_us": args.mapped_latency_us,
        "network_latency_us": args.latency_us,
        "million_puts_per_s": args.puts,
        "pcie_gb_s": args.pcie_gb_s,
        "pcie_latency_us": args.pcie_latency_us,
    }
    plan: dict[str, Any] = _core.plan_experts(mode == "ll", shape, machine)
    return {"mode": mode, **shape, "machine": machine, **plan}


def _check(name: str, given: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        from weft.errors import invalid

        raise invalid(f"--{name.replace('_', '-')}", given, allowed)


def tables_of(mode: str, plans: list[dict[str, Any]]) -> list[Table | str]:
    """Return what to print of the plans of one mode."""
    asked = plans[0]
    title = (
        f"{MODES[mode].capitalize()}\n"
        f"{asked['tokens']} tokens a rank, top {asked['top_k']} of {asked['experts']} experts, "
        f"{asked['ranks_per_node']} ranks a node\n"
        f"rows of {asked['row_bytes']} bytes, {asked['scale_bytes']} of scales; results of {asked['result_bytes']}"
    )
    return [title, _roles(mode, plans), _prediction(plans), *_fan_out(mode, plans)]


def _roles(mode: str, plans: list[dict[str, Any]]) -> Table:
    numbers = (
        "SMs",
        "threads",
        "row warps",
        "other warps",
        "network warps",
        "batches",
        "piece KiB",
        "chunk KiB",
        "inbox MiB",
    )
    table = Table(
        "Grid, roles of each SM's warps, pieces to mapped ranks, chunks on the network",
        [
            Column("nodes", is_number=True, is_key=True),
            Column("call", is_key=True),
            *(Column(head, is_number=True) for head in numbers),
        ],
    )
    for plan in plans:
        for call in ("dispatch", "combine"):
            phase = plan[call]
            roles = ("row_warps", "other_warps", "batch_warps")
            table.add(
                str(plan["nodes"]),
                call,
                str(phase["blocks"]),
                str(phase["threads_per_block"]),
                *(str(phase[role]) if phase[role] and mode == "ht" else "" for role in roles),
                str(plan["batches"] or ""),
                f"{plan['piece_bytes'] / 1024:.1f}" if mode == "ht" and call == "dispatch" else "",
                f"{phase['chunk_bytes'] / 1024:.1f}" if phase["chunk_bytes"] else "",
                f"{plan['inbox_bytes'] / 2**20:.0f}" if plan["inbox_bytes"] and call == "dispatch" else "",
            )
    return table


def _prediction(plans: list[dict[str, Any]]) -> Table:
    numbers = ("mapped MB", "network MB", "puts")
    table = Table(
        "Prediction: what each rank sends, and how long a call takes at least",
        [
            Column("nodes", is_number=True, is_key=True),
            Column("call", is_key=True),
            *(Column(head, is_number=True) for head in numbers),
            Column("us", is_number=True),
            Column("host us", is_number=True),
            Column("limited by", never_folds=True),
        ],
    )
    for plan in plans:
        for call in ("dispatch", "combine"):
            phase = plan[call]
            table.add(
                str(plan["nodes"]),
                call,
                f"{phase['mapped_bytes'] / 1e6:.2f}",
                f"{phase['network_bytes'] / 1e6:.2f}",
                str(phase["puts"]),
                f"{phase['us']:.1f}",
                f"{phase['host_us']:.1f}",
                phase["bound"]
                + (f"; host: {phase['host_bound']}" if phase["host_bound"] != phase["bound"] else ""),
            )
    return table


def _fan_out(mode: str, plans: list[dict[str, Any]]) -> list[Table | str]:
    """Say what crosses the network how often, and what the other way would bring."""
    over_nodes = [plan for plan in plans if plan["nodes"] > 1]
    if not over_nodes:
        return []
    if mode == "ht":
        return ["Fan-out: a row crosses the network once for each (token, node), then by stores."]
    table = Table(
        "Fan-out: a row for each (token, rank), or one for each (token, node)",
        [
            Column("nodes", is_number=True, is_key=True),
            Column("call", is_key=True),
            *(
                Column(head, is_number=True)
                for head in ("rank MB", "rank puts", "rank us", "node MB", "node puts", "node us")
            ),
            Column("chosen", never_folds=True),
        ],
        fold_constants=False,
    )
    for plan in over_nodes:
        for call in ("dispatch", "combine"):
            figures = [
                text
                for way in (plan[call]["per_rank"], plan[call]["per_node"])
                for text in (f"{way['network_bytes'] / 1e6:.2f}", str(way["puts"]), f"{way['us']:.1f}")
            ]
            table.add(str(plan["nodes"]), call, *figures, plan[call]["fan_out"])
    return [table]
