# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed, as its wheel has them, with "weft" where they say "gloo".

    tools/torch-tests                  every test that is not listed; the last lines count what passed and failed
    tools/torch-tests all_gather ddp   those whose name holds one of these words
    tools/torch-tests --sample         what CI runs

The tests are torch/testing/_internal/distributed/distributed_test.py. Nothing of it is kept here: it is read from the
installed torch, and the backend's name is replaced in what is run. torch_own_tests.toml lists what is not run and why.
Ranks are forked from this process; with CUDA devices, which outlive no fork, they are spawned.
Variables: WORLD_SIZE, how many ranks (4); TORCH_TESTS_AS, the backends that weft stands in for ("gloo mpi": MPI is the
one of torch's that has all_to_all on the CPU).
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

import torch

import weft  # noqa: F401 - registers the backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCE = "torch.testing._internal.distributed.distributed_test"
LIST = Path(__file__).with_suffix(".toml")
STANDS_FOR = os.environ.get("TORCH_TESTS_AS", "gloo mpi").split()
BARRIER_S = (
    120  # how long ranks wait for each other around a test; torch's 10 s are too few for a busy machine
)


def _settings() -> None:
    """Set what the tests read from the environment when they are imported."""
    os.environ["BACKEND"] = "weft"
    os.environ.setdefault("WORLD_SIZE", "4")
    os.environ.setdefault("INIT_METHOD", "file://")  # of that kind; run() says which file
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "180")


def _stand_in_for_expecttest() -> None:
    """torch's test helpers import expecttest, which none of these tests uses. Without it, a plain TestCase will do."""
    if importlib.util.find_spec("expecttest") is None:
        module: Any = types.ModuleType("expecttest")
        module.TestCase, module.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = module


def _load() -> Any:
    """Return torch's module with "weft" in place of other backends."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("plugin", "ddp", "subgroup", "gpu", "cuda"):
        DistTestCases.backend_feature[feature].add("weft")
    spec = importlib.util.find_spec(SOURCE)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    for backend in STANDS_FOR:
        text = text.replace(f'"{backend}"', '"weft"')
        text = text.replace(f"dist.Backend.{backend.upper()}", 'dist.Backend("weft")')
    # What only gloo has in DDP's logs is not asked of weft.
    text = text.replace('ddp_logging_data.get("backend_name") == "weft"', "False")
    module = types.ModuleType("weft_torch_own_tests")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    module.Barrier.sync.__func__.__defaults__ = (None, BARRIER_S)
    return module


_settings()
_stand_in_for_expecttest()
_module = _load()


class TestWeft(_module.TestDistBackend, _module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
    """What torch's test_distributed_spawn.py makes of the same two classes."""

    def setUp(self) -> None:
        super().setUp()
        Path(os.environ["INIT_METHOD"].removeprefix("file://")).unlink(missing_ok=True)
        spawned = torch.cuda.is_available()
        self._start_processes(multiprocessing.get_context("spawn" if spawned else "fork").Process)


def sample() -> list[str]:
    """Return what CI runs, of what this torch has."""
    return [name for name in tomllib.loads(LIST.read_text())["sample"] if hasattr(TestWeft, name)]


def not_run() -> dict[str, str]:
    """Return the reason of each test that torch_own_tests.toml names for this machine."""
    holds = {
        "always": True,
        "no CUDA": not torch.cuda.is_available(),
        "under 8 ranks": int(os.environ["WORLD_SIZE"]) < 8,
        "as gloo": "nccl" not in STANDS_FOR,
        "as nccl": "nccl" in STANDS_FOR,
    }
    groups = [group for group in tomllib.loads(LIST.read_text())["group"] if holds[group["when"]]]
    return {name: group["reason"] for group in groups for name in group["tests"]}


def names() -> list[str]:
    return unittest.TestLoader().getTestCaseNames(TestWeft)  # type: ignore[return-value]


def without_ranks() -> list[unittest.TestCase]:
    """Return torch's tests that need no ranks and no backend, such as those of DDP's sizes of buckets."""
    ours = [kind for kind in vars(_module).values() if getattr(kind, "__module__", "") == _module.__name__]
    kinds = [kind for kind in ours if isinstance(kind, type) and issubclass(kind, unittest.TestCase)]
    kinds = [kind for kind in kinds if kind is not _module.TestDistBackend]
    return [kind(name) for kind in kinds for name in unittest.TestLoader().getTestCaseNames(kind)]


def is_for_the_machine(reason: str) -> bool:
    """Say whether torch skips a test, for such a reason, only where there are too few devices or other ranks."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    kinds = ("small_worldsize", "odd_worldsize", "no_cuda", "no_accelerator", "no_peer_access")
    said = [
        skip.message for kind, skip in TEST_SKIPS.items() if kind in kinds or kind.startswith("multi-device-")
    ]
    said += ["Test requires world size of", "Test requires an exact world size of"]
    return any(words in reason for words in said)


class _Outcome(unittest.TextTestResult):
    """Prints one line per test, with its time."""

    passed = 0

    def startTest(self, test: unittest.TestCase) -> None:
        self._started = time.monotonic()
        unittest.TestResult.startTest(self, test)

    def _say(self, test: Any, what: str) -> None:
        print(f"{test._testMethodName}: {what}, {time.monotonic() - self._started:.1f} s", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.skipped.append((test, reason))
        self._say(test, f"skipped ({reason})")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        unittest.TestResult.addFailure(self, test, err)
        self._say(test, "FAILED")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        unittest.TestResult.addError(self, test, err)
        self._say(test, "FAILED")


def run(wanted: list[str], others: list[unittest.TestCase] | None = None) -> _Outcome:
    """Run tests of ranks by name, and others, one after the other, and return the outcome."""
    folder = Path(tempfile.mkdtemp(prefix="weft-torch-tests-"))
    os.environ["INIT_METHOD"] = _module.INIT_METHOD = f"file://{folder}/store"
    suite = unittest.TestSuite([*(TestWeft(name) for name in wanted), *(others or [])])
    result = unittest.TextTestRunner(resultclass=_Outcome, verbosity=0, stream=sys.stdout).run(suite)
    shutil.rmtree(folder)
    assert isinstance(result, _Outcome)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests of torch.distributed over backend weft")
    parser.add_argument("words", nargs="*", help="run the tests whose name holds one of these; default: all")
    parser.add_argument("--sample", action="store_true", help="run what CI runs")
    arguments = parser.parse_args()
    listed = not_run()
    asked = sample() if arguments.sample else names()
    words = arguments.words or [""]
    chosen = [name for name in asked if any(word in name for word in words)]
    others = [] if arguments.sample else without_ranks()
    others = [test for test in others if any(word in test._testMethodName for word in words)]
    result = run([name for name in chosen if name not in listed], others)
    failed = [test._testMethodName for test, _ in result.failures + result.errors]  # type: ignore[attr-defined]
    skips = {test._testMethodName: reason for test, reason in result.skipped}  # type: ignore[attr-defined]
    skipped = [name for name, reason in skips.items() if not is_for_the_machine(reason)]
    print(
        f"torch {torch.__version__}, {os.environ['WORLD_SIZE']} ranks: {result.passed} passed, {len(failed)} failed, "
        f"{len(listed.keys() & set(chosen))} not run ({LIST.name} has the reasons)"
    )
    for name in failed:
        print(f"failed: {name}")
    for name in sorted(skips.keys() - set(skipped)):
        print(f"skipped by torch on this machine: {name} ({skips[name]})")
    for name in skipped:
        print(f"skipped by torch and not in {LIST.name}: {name}")
    unknown = [] if arguments.sample else sorted(set(listed) - set(names()))
    for name in unknown:
        print(f"in {LIST.name} and not in torch: {name}")
    return 1 if failed or skipped or unknown else 0
