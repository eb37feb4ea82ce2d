# SPDX-License-Identifier: Apache-2.0
"""``weft plan reshard``: which bytes go where between trainers and servers, and how long that takes on paper.

The plan is the one that ``weft.transfer.plan`` makes; the prediction is the bytes of the busiest link over its rate. It
needs numpy alone: no GPU, no network, no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from weft.runtime.tables import Column, Table, add_wide_argument, integer_from, make_console, size, size_text

_EXAMPLES = """\
examples:
  weft plan reshard                                     DeepSeek-V3, 256 trainers to 128 servers, BF16
  weft plan reshard --preset kimi-k2 --dtype float8_e4m3fn
  weft plan reshard --preset tiny --trainers 4 --servers 4 --verify
"""
_PRESETS = ("deepseek-v3", "kimi-k2", "tiny")  # of weft.transfer.reshard.presets, which needs numpy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft plan reshard``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("--preset", choices=_PRESETS, default=_PRESETS[0], help="the model (%(default)s)")
    parser.add_argument(
        "--trainers", type=integer_from(1), default=256, metavar="N", help="ranks (%(default)s)"
    )
    parser.add_argument(
        "--servers", type=integer_from(1), default=128, metavar="N", help="ranks (%(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="of all parameters, on both sides: plans do not cast (%(default)s)",
    )
    parser.add_argument(
        "--nic-gbit", type=float, default=400, help="network of each rank, Gbit/s (%(default)s)"
    )
    parser.add_argument(
        "--bucket", type=size, default=1 << 30, metavar="BYTES", help="of parameters: 64M, 1G (1G)"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="where plans are kept, and found again")
    parser.add_argument("--verify", action="store_true", help="prove the plan, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_wide_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0. Raises: weft.Error naming what cannot be planned."""
    facts = make_plan(args)
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return 0
    table = Table(
        f"{args.preset}, {args.dtype}: {args.trainers} trainers to {args.servers} servers",
        [Column("what", is_key=True), Column("is", is_number=True)],
    )
    for name, value in _lines(facts):
        table.add(name, value)
    table.print(make_console(args.wide))
    return 0


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is known of the plan of a preset, and how long it took to make. Raises: weft.Error."""
    from weft.transfer.reshard import presets
    from weft.transfer.reshard.plan import Links
    from weft.transfer.reshard.planner import plan, summary
    from weft.transfer.reshard.verify import verify

    model = presets.PRESETS[args.preset]
    began = time.perf_counter()
    tensors = presets.tensors_of(model, args.dtype)
    src = presets.trainer_layout(model, tensors, args.trainers)
    dst = presets.server_layout(model, tensors, args.servers)
    laid_out = time.perf_counter()
    links = Links(args.nic_gbit, args.nic_gbit)
    made = plan(src, dst, links=links, bucket_bytes=args.bucket, cache=args.cache)
    planned = time.perf_counter()
    facts = {**summary(made), "layouts_s": laid_out - began, "planning_s": planned - laid_out}
    if args.verify:
        verify(made)
        facts["verifying_s"] = time.perf_counter() - planned
    return facts


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("tensors", f"{facts['tensors']:,}"),
        ("moved", size_text(int(facts["bytes"]))),
        ("pieces", f"{facts['pieces']:,}"),
        ("dense runs", f"{facts['runs']:,}"),
        ("mean run", size_text(int(facts["run_bytes_mean"]))),
        ("shortest run", size_text(int(facts["run_bytes_min"]))),
        ("pairs of ranks", f"{facts['pairs']}"),
        ("buckets", f"{facts['buckets']}"),
        ("out of the busiest trainer", size_text(int(facts["source_bytes_max"]))),
        ("out of a trainer, mean", size_text(int(facts["source_bytes_mean"]))),
        ("into the busiest server", size_text(int(facts["destination_bytes_max"]))),
        ("predicted, s", f"{facts['predicted_s']:.3f}"),
        ("bound, s", f"{facts['bound_s']:.3f}"),
        ("bound / predicted", f"{facts['share']:.3f}"),
        ("planned in, s", f"{facts['planning_s']:.2f}"),
    ]
    if "verifying_s" in facts:
        lines.append(("proven in, s", f"{facts['verifying_s']:.2f}"))
    return lines
