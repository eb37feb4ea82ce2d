# SPDX-License-Identifier: Apache-2.0
"""``weft warm``: compile a model's kernels before the first call needs them, with or without a GPU.

    weft warm config.json --ranks 8 --arch sm_90a          # a model's Hugging Face configuration
    weft warm --hidden 7168 --top-k 8 --experts 256 --ranks 8
    WEFT_RECORD_KERNELS=run.jsonl torchrun ... serve.py    # then: weft warm --recorded run.jsonl
    weft warm config.json --ranks 8 --arch sm_90a --cache /opt/weft --for-image

What is compiled goes into the cache (``WEFT_CACHE_DIR``, or ``--cache``); what is there already is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weft import _core
from weft.errors import Error, invalid

MODES = ("ht", "ll")
FORMATS = ("bf16", "fp8", "ue8m0", "mxfp8", "nvfp4")
_SCALE_GROUP = 128  # channels that share an FP8 scale

# What configuration files call the three numbers.
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts")

EXAMPLES = """examples:
  a model's config.json, for the GPUs of this machine:
    weft warm config.json --ranks 8
  a folder that has one, for two sizes of group; no GPU is needed:
    weft warm ./DeepSeek-V3 --ranks 8,16 --arch sm_90a
  by the numbers:
    weft warm --hidden 7168 --top-k 8 --experts 256 --mode ll --formats fp8
  what a run used, collectives and programs for the CPU among it:
    WEFT_RECORD_KERNELS=run.jsonl torchrun ... ; weft warm --recorded run.jsonl
  a cache to be shipped in an image, which then sets WEFT_CACHE_PATH=/opt/weft:
    weft warm config.json --arch sm_90a --cache /opt/weft --for-image
"""


@dataclass(frozen=True)
class Model:
    """The numbers of a mixture-of-experts model that kernels depend on."""

    hidden: int
    top_k: int
    experts: int


@dataclass(frozen=True)
class Job:
    """One kernel to compile. target: "sm_90a", or "cpu"."""

    key: Any
    target: str

    def identity(self) -> tuple[object, ...]:
        """Return what makes it differ from other jobs."""
        key = self.key
        shape = tuple(key.shape)
        return (self.target, key.file, key.name, key.mesh_type, shape, key.threads_per_block, key.prelude)

    def text(self) -> str:
        """Return the kernel, its target and its constants."""
        constants = " ".join(f"{name}={value}" for name, value in self.key.shape)
        return f"{self.key.name} for {self.target} ({constants})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft warm``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Compile kernels into the cache, so that the first calls of a model need not."
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what a model needs")
    what.add_argument(
        "model", nargs="?", help="a Hugging Face configuration (config.json), or a folder with one"
    )
    what.add_argument("--hidden", type=int, metavar="H", help="channels of a token, instead of the model's")
    what.add_argument("--top-k", type=int, metavar="K", help="experts that a token chooses")
    what.add_argument("--experts", type=int, metavar="E", help="routed experts of a layer")
    what.add_argument("--ranks", default="8", metavar="R[,R]", help="ranks of a group (default: 8)")
    what.add_argument(
        "--mode",
        default=",".join(MODES),
        metavar="M[,M]",
        help="ht: high throughput, ll: low latency (default: both)",
    )
    what.add_argument(
        "--formats",
        default="bf16,fp8",
        metavar="F[,F]",
        help=f"rows of a dispatch: {', '.join(FORMATS)}; the last three only in ll (default: bf16,fp8)",
    )
    what.add_argument(
        "--recorded", type=Path, metavar="FILE", help="kernels of a run with WEFT_RECORD_KERNELS=FILE"
    )
    where = parser.add_argument_group("for what, and where to")
    where.add_argument(
        "--arch",
        action="append",
        metavar="SM",
        help="GPU architecture, as sm_90a; may be repeated (default: the GPUs here, or the recorded ones)",
    )
    where.add_argument("--cache", type=Path, metavar="DIR", help="folder to fill (default: WEFT_CACHE_DIR)")
    where.add_argument(
        "--for-image",
        action="store_true",
        help="make the folder readable by every user and writable by none, to be shipped",
    )
    where.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per core)")
    where.add_argument("--list", action="store_true", help="print the kernels, compile nothing")


def run(args: argparse.Namespace) -> int:
    """Compile what the options ask for; return 1 if some kernel could not be compiled."""
    jobs = list(_jobs(args))
    if args.list:
        for job in jobs:
            print(job.text())
        return 0
    cache = Path(args.cache or _core.config().cache_dir).expanduser().absolute()
    began = time.monotonic()
    compiled, failed = _compile(jobs, cache, args.jobs or len(os.sched_getaffinity(0)))
    for job, error in failed:
        print(f"failed: {job.text()}: {str(error).splitlines()[0]}")
    if args.for_image:
        _open_for_all(cache)
    known = len(jobs) - compiled - len(failed)
    took = time.monotonic() - began
    print(f"{cache}: {compiled} compiled in {took:.1f} s, {known} were there, {len(failed)} failed")
    return 1 if failed else 0


def read_model(path: Path, **given: int | None) -> Model:
    """Return the numbers of a Hugging Face configuration; those given stand instead of the file's.

    Raises: weft.Error where the file lacks one, with the names that were looked for.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise invalid("model", file, f"a configuration in JSON ({error})") from None
    if not isinstance(config, dict):
        raise invalid("model", file, "a configuration: a JSON object")
    # Models that also see or hear keep the language model's numbers one level down.
    levels = [config, *(config[name] for name in ("text_config", "llm_config") if name in config)]
    return _model(
        {
            name: given.get(name) or _first(levels, names, file)
            for name, names in (("hidden", _HIDDEN), ("top_k", _TOP_K), ("experts", _EXPERTS))
        }
    )


def _first(levels: list[dict[str, Any]], names: tuple[str, ...], file: Path) -> int:
    for level in levels:
        for name in names:
            if isinstance(value := level.get(name), int):
                return value
    raise invalid(
        "model", f"{file} without any of {', '.join(names)}", "the model's configuration, or an option"
    )


def _model(numbers: dict[str, int]) -> Model:
    for name, value in numbers.items():
        if value < 1:
            raise invalid(f"--{name.replace('_', '-')}", value, "1 or more")
    return Model(**numbers)


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield every kernel once."""
    seen = set()
    for job in (*_of_model(args), *_of_record(args)):
        if job.identity() not in seen:
            seen.add(job.identity())
            yield job


def _of_model(args: argparse.Namespace) -> list[Job]:
    given = {"hidden": args.hidden, "top_k": args.top_k, "experts": args.experts}
    if args.model:
        model = read_model(Path(args.model), **given)
    elif all(given.values()):
        model = _model(given)
    elif any(given.values()) or not args.recorded:
        raise invalid("model", "none", "a config.json; or --hidden, --top-k and --experts; or --recorded")
    else:
        return []
    modes = _words("--mode", args.mode, MODES)
    formats = _words("--formats", args.formats, FORMATS)
    jobs = []
    for target in _architectures(args):
        for ranks in _numbers("--ranks", args.ranks):
            if "ht" in modes:
                jobs += [Job(key, target) for key in _high_throughput(model, ranks, formats, target)]
            if "ll" in modes:
                jobs += [Job(key, target) for key in _low_latency(model, ranks, formats, target)]
    return jobs


def _high_throughput(model: Model, ranks: int, formats: list[str], target: str) -> Iterator[Any]:
    """Yield kernels of dispatches and combines, also of those that carry no ids and weights."""
    for name in formats:
        if name not in ("bf16", "fp8"):
            continue
        is_fp8 = name == "fp8"
        for top_k in (model.top_k, 0):
            yield from _core.high_throughput_keys(
                ranks=ranks,
                row_bytes=model.hidden * (1 if is_fp8 else 2),
                scale_words=model.hidden // _SCALE_GROUP if is_fp8 else 0,
                top_k=top_k,
                element=1 if is_fp8 else 2,
                combine_row_bytes=model.hidden * 2,
                architecture=target,
            )


def _low_latency(model: Model, ranks: int, formats: list[str], target: str) -> Iterator[Any]:
    from weft.moe.low_latency_formats import find_format

    for name in formats:
        form = find_format(
            model.hidden,
            use_fp8=name in ("fp8", "ue8m0"),
            round_scale=name == "ue8m0",
            use_ue8m0=name == "ue8m0",
            use_mxfp8=name == "mxfp8",
            use_nvfp4=name == "nvfp4",
        )
        yield from _core.low_latency_keys(
            ranks=ranks,
            experts=model.experts,
            top_k=model.top_k,
            payload=form.payload,
            row_bytes=form.row_bytes,
            scale_bytes=form.scale_bytes,
            has_weights=False,
            reply=int(_core.REPLY_REDUCED),
            architecture=target,
        )


def _of_record(args: argparse.Namespace) -> Iterator[Job]:
    """Yield the kernels of a record: for each --arch those of GPUs; those that came with Weft need nothing."""
    if not args.recorded:
        return
    for number, line in enumerate(args.recorded.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            target = row.pop("target")
            row["shape"] = [(name, value) for name, value in row["shape"]]
            key = _core.KernelKey(**row)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise invalid(
                "--recorded", f"line {number} of {args.recorded}", "lines of WEFT_RECORD_KERNELS"
            ) from None
        if target != "cpu":
            yield from (Job(key, arch) for arch in args.arch or [target])
        elif key.prelude:
            yield Job(key, target)


def _architectures(args: argparse.Namespace) -> list[str]:
    for arch in args.arch or ():
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise invalid("--arch", arch, "as sm_80, sm_90a or sm_100a")
    if args.arch:
        return list(dict.fromkeys(args.arch))
    try:
        found = {_core.architecture(*map(int, gpu["compute_capability"].split("."))) for gpu in _core.gpus()}
    except Error as error:
        found, why = set(), f": {error}"
    else:
        why = ""
    if not found:
        raise Error(f"--arch: got none, and there is no GPU here to ask{why}; allowed: as sm_90a")
    return sorted(found)


def _words(option: str, given: str, allowed: Iterable[str]) -> list[str]:
    words = [word for word in given.split(",") if word]
    if not words or not set(words) <= set(allowed):
        raise invalid(option, given, f"{', '.join(allowed)}, with commas between")
    return words


def _numbers(option: str, given: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", given):
        raise invalid(option, given, "numbers of ranks, with commas between")
    return [int(number) for number in given.split(",")]


def _compile(jobs: list[Job], cache: Path, workers: int) -> tuple[int, list[tuple[Job, Error]]]:
    """Compile all jobs, some at a time; return how many were not there, and which failed."""
    compiled, failed = 0, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(max(1, workers)) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("compiling kernels", total=len(jobs))
        _core.keep_off_terminal()
        running = {pool.submit(_compile_one, job, cache): job for job in jobs}
        for done in as_completed(running):
            try:
                compiled += done.result()
            except Error as error:
                failed.append((running[done], error))
            bar.advance(task)
    return compiled, failed


def _compile_one(job: Job, cache: Path) -> bool:
    """Return whether the kernel had to be compiled. The GIL is free meanwhile."""
    if job.target == "cpu":
        return bool(_core.compile_host_kernel(job.key, str(cache)))
    return not _core.compile_kernel(job.key, job.target, str(cache)).is_cached


def _open_for_all(cache: Path) -> None:
    """Readable by everybody, writable by nobody."""
    for file in cache.iterdir():
        if file.suffix in (".cubin", ".so"):
            file.chmod(0o555 if file.suffix == ".so" else 0o444)
    cache.chmod(0o555)
