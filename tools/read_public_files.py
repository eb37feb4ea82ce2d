# SPDX-License-Identifier: Apache-2.0
"""Reads folders of algorithm files that others wrote, and says how many load, verify and run. Fetches nothing.

Usage: python tools/read_public_files.py FOLDER ... [--run] [--most-ranks 8] [--args "8 1; 4 1; 8 2 1"] [--json FILE]

Files: MSCCL XML (.xml with an algo), MSCCL++ plans (.json with gpus) and MSCCL's scripts (.py that import msccl; they
run). Others are passed over. Of the arguments of --args a script takes the first with which it loads and is verified.
--run runs what is verified on CPU ranks, with chunks of 1 and 1000 elements, and compares with the contract.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

import weft
from weft.collectives.contract import Buffer
from weft.collectives.files import load_file, programs_of
from weft.collectives.ir import Algorithm
from weft.collectives.verifier import promised, verify
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, RankError, run_ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--most-ranks", type=int, default=8)
    parser.add_argument("--args", default="")
    parser.add_argument("--json", type=Path, help="what was said of each file is added there, by folder")
    args = parser.parse_args()
    for folder in args.folders:
        counts = {"files": 0, "load": 0, "verify": 0, "run": 0}
        said: dict[str, str] = {}
        for file in sorted(path for path in folder.rglob("*") if _is_algorithm(path)):
            counts["files"] += 1
            said[str(file.relative_to(folder))] = _try_all(file, args, counts)
            print(f"{file.relative_to(folder)}: {said[str(file.relative_to(folder))]}", flush=True)
        print(f"{folder}: {', '.join(f'{name} {count}' for name, count in counts.items())}", flush=True)
        if args.json:
            _keep(args.json, folder, {**counts, "said": said})
    return 0


def _keep(path: Path, folder: Path, found: dict[str, Any]) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {"folders": {}}
    document |= {"date": date.today().isoformat(), "weft": weft.__version__}
    document["command"] = shlex.join(["python", *sys.argv])
    document["folders"][folder.name] = found
    path.write_text(json.dumps(document, indent=1) + "\n")


def _is_algorithm(file: Path) -> bool:
    """Return whether a file is one of the three kinds. A script that does not import msccl is not run."""
    if file.suffix not in (".xml", ".json", ".py") or not file.is_file():
        return False
    text = file.read_text(errors="replace")
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            plan = json.loads(text)
            return isinstance(plan, dict) and "gpus" in plan
        return False
    return "<algo " in text if file.suffix == ".xml" else "from msccl." in text and "XML()" in text


def _try_all(file: Path, args: argparse.Namespace, counts: dict[str, int]) -> str:
    """Try a script with each of --args, until one works; tell the first refusal that is more than a usage."""
    if file.suffix != ".py":
        return _try(file, [], args, counts)
    refusals = []
    for given in args.args.split(";"):
        now = dict.fromkeys(counts, 0)
        said = _try(file, shlex.split(given), args, now)
        if now["verify"]:
            counts.update({name: counts[name] + now[name] for name in counts})
            return f"{given.strip()}: {said}"
        if said != _USAGE:
            refusals.append(f"{given.strip()}: {said}")
    return refusals[0] if refusals else _USAGE


_USAGE = "takes other arguments"


def _try(file: Path, arguments: list[str], args: argparse.Namespace, counts: dict[str, int]) -> str:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            algorithms = _load(file, arguments)
        counts["load"] += 1
        limits = [verify(algorithm).limit for algorithm in algorithms]
        counts["verify"] += 1
        if not args.run:
            return "verified"
        if any(a.num_ranks > args.most_ranks or a.contract is None for a in algorithms):
            return "verified; not run: too many ranks, or no contract"
        for algorithm, limit in zip(algorithms, limits, strict=True):
            run_ranks(algorithm.num_ranks, _run, algorithm, [4] if limit else [1, 1000], deadline_s=280)
        counts["run"] += 1
        return "verified, ran"
    except (Error, RankError, OSError) as error:
        return str(error)
    except SystemExit:
        return _USAGE


def _load(file: Path, arguments: list[str]) -> list[Algorithm]:
    if file.suffix != ".py":
        return [load_file(file)]
    return [program.compile() for program in programs_of(file, 0, {}, arguments)]


def _run(rank: Rank, algorithm: Algorithm, sizes: list[int]) -> None:
    collectives = Communicator(rank.group, device="cpu", timeout_s=60).collectives
    contract = algorithm.contract
    assert contract is not None
    inplace = not algorithm.outofplace
    wanted = promised(algorithm, contract)[rank.rank]

    def number(parts: tuple[tuple[int, int], ...]) -> float:
        return float(sum(1 + r * 31 % 17 + c * 7 % 11 for r, c in parts))

    held = contract.in_form(False).init_buffers()[rank.rank].get(Buffer.input, [])
    for elems in sizes:
        tensor = torch.tensor([number(v.parts) if v else 0.0 for v in held]).repeat_interleave(elems)
        out = None
        if inplace and len(wanted) > len(held):  # the input is a part of the output
            out = torch.zeros(len(wanted) * elems)
            at = contract.in_form(True).alias(rank.rank, "i", 0)[1] * elems
            out[at : at + len(tensor)] = tensor
            tensor = out[at : at + len(tensor)]
        elif inplace and len(wanted) < len(held):  # the other way round
            at = contract.in_form(True).alias(rank.rank, "o", 0)[1] * elems
            out = tensor[at : at + len(wanted) * elems]
        found = collectives.run(algorithm, tensor, out)
        for at, value in enumerate(wanted):
            chunk = found[at * elems : (at + 1) * elems]
            if value is not None and not (chunk == number(value.parts)).all():
                raise Error(
                    f"rank {rank.rank}, o[{at}], chunks of {elems}: got {chunk[0]}, should be {value}"
                )


if __name__ == "__main__":
    sys.exit(main())
