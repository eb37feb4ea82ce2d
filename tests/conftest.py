# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch._dynamo  # as torch.distributed.tensor: ranks inherit what each would import in a second of CPU
import torch.distributed.tensor

import summary
import workers
import zygote
from weft import deep_ep_path

sys.path.insert(0, str(deep_ep_path.folder()))  # as PYTHONPATH=$(python -m weft.deep_ep_path) does
torch.set_num_threads(1)  # ranks are forked from this process, and a fork inherits no OpenMP threads

# Tests start a hundred programs that import torch. Where Python may keep no compiled modules beside it
# (PYTHONDONTWRITEBYTECODE, a folder of the system), each would compile all of them anew, which takes seconds.
if not (Path(torch.__file__).parent / "__pycache__").is_dir():
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "pycache"))


HOUSE = ("bench", "chaos", "profile", "testing")  # packages of weft that stand in measure/
programs_cpu_s: Counter[str] = Counter()  # of programs that the zygote has forked, by the file of their tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpp-tests", metavar="PATH", help="the binary of the C++ tests; by default the newest")
    parser.addoption("--workers", type=int, default=1, help="how many tests run at once (workers.py)")
    parser.addoption("--cpu", type=int, default=0, help="list so many files with the CPU time that they took")
    parser.addoption("--update", action="store_true", help="rewrite golden files, not compare")
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="tests/kernels compiles every kernel for every mesh and GPU architecture, not one case of each",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="1000 random collective programs instead of 120; the largest library algorithm on up to 16 ranks; "
        "a million operations through NCCL's RMA interface; ElasticBuffer over more nodes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let workers run the tests, where more than one is asked for."""
    config.addinivalue_line("markers", "alone: no other tests run beside those of this file (workers.py)")
    config.addinivalue_line(
        "markers", "group(name): one worker takes these tests, others the rest of their file"
    )
    if config.option.workers > 1:
        config.pluginmanager.register(workers.Workers(config.option.workers), "workers")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Have torch imported once for the programs that tests start, where there are any."""
    starts_programs = "programs" in sys.modules and not session.config.option.collectonly
    with zygote.started(programs_cpu_s) if starts_programs else nullcontext():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran of those that this machine can run, and why the others did not."""
    stats = terminalreporter.stats
    ran = {
        report.nodeid
        for kind in ("passed", "failed", "error", "xfailed", "xpassed")
        for report in stats.get(kind, [])
    }
    reasons = Counter(skip_reason(report) for report in stats.get("skipped", []))
    if not ran and not reasons:
        return
    title, lines = summary.of(len(ran), reasons)
    terminalreporter.section(title)
    for line in lines:
        terminalreporter.line(line)
    runner = terminalreporter.config.pluginmanager.getplugin("workers")
    if runner is not None and terminalreporter.config.option.cpu:
        total = runner.cpu_s + programs_cpu_s
        terminalreporter.section(
            f"{total.total():.0f} s of CPU, {programs_cpu_s.total():.0f} of them in programs"
        )
        for file, seconds in total.most_common(terminalreporter.config.option.cpu):
            terminalreporter.line(f"{seconds:8.1f} {programs_cpu_s[file]:8.1f} {file}")


class Module(pytest.Module):
    """A file of tests; it is skipped where it needs measure/ and the build is without it (WEFT_MEASURE=OFF)."""

    def _getobj(self) -> object:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            if missing.removeprefix("weft.").partition(".")[0] not in HOUSE:
                raise
            pytest.skip(f"needs {missing}, which this build is without", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def skip_reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped, on one line and without what differs from test to test."""
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    return " ".join(reason.removeprefix("Skipped: ").split())[:200]
