# SPDX-License-Identifier: Apache-2.0
"""Guests for the tests of this folder; make test-rdma runs them. Elsewhere they are skipped, for one reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from guests import MENDED, Cluster, Guest, Image

REASON = "two guests with software RoCE: make test-rdma runs these"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the folder of what guests boot."""
    parser.addoption("--rdma-image", type=Path, metavar="FOLDER", help="what tools/rdma-image made")
    parser.addoption(
        "--suite-rounds", type=int, default=1, help="how often a process runs the engine's suites"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much of each suite passed: docs/reliability.md has a table of it."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for said in sorted(said for report in reports for key, said in report.user_properties if key == "suite"):
        terminalreporter.write_line(f"suite over {said}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip this folder's tests where no guests are to be had. Those that end a guest run last: it boots again."""
    if config.getoption("--rdma-image", None) is not None:
        items.sort(key=lambda item: item.get_closest_marker("last") is not None)
    else:
        for item in items:
            if Path(item.path).parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def image(pytestconfig: pytest.Config) -> Image:
    """Return what guests boot."""
    return Image(pytestconfig.getoption("--rdma-image").resolve())


@pytest.fixture(scope="session")
def cluster(image: Image, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Boot two guests with two NICs each, for as long as the tests run."""
    made = Cluster(image, cards=2)
    try:
        if any(item.get_closest_marker("torch") for item in request.session.items):
            for guest in made.guests:  # for minutes, while other tests wait for time to pass
                guest.warm("ranks")
        yield made
    finally:
        made.close()


@pytest.fixture
def guests(cluster: Cluster) -> list[Guest]:
    """Return both guests, with cables in place; one that a test has ended is booted again."""
    for guest in cluster.guests:
        if not guest.is_up():
            cluster.again(guest.number)
    jobs = [guest.start(MENDED) for guest in cluster.guests]
    for job in jobs:
        job.wait(240)  # a busy machine may let it stand still for minutes
    return cluster.guests


@pytest.fixture(scope="session")
def python() -> str:
    """Return the line that starts this Python, with this Weft, in a guest."""
    return f"PYTHONPATH={os.pathsep.join(path for path in sys.path if path)} {sys.executable}"
