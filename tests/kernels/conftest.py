# SPDX-License-Identifier: Apache-2.0
"""Compilers run for all tests of a file at once, on every core; each test asks for its own result.

A test that is parametrized with ``compiling`` (indirect) names a Job and gets its future: what the job's ``run``
returned, or raised, a skip included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pytest


class Job(Protocol):
    """A hashable description of one run of a compiler. ``str`` of it is the test's name."""

    def run(self) -> Any: ...


def is_wanted(job: Job, config: pytest.Config) -> bool:
    """Return whether a job runs: its ``is_thorough`` asks for --thorough, its ``is_in_sample``, if false, for less."""
    if config.getoption("--thorough"):
        return True
    in_sample = getattr(job, "is_in_sample", True)
    return not getattr(job, "is_thorough", False) and (in_sample or config.getoption("--every-kernel"))


# Of a module: ranks of other files' tests are forked, and no thread must be left then.
@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[Any]]]:
    """Start the jobs of all selected tests of the file, in their order."""
    mine = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    parameters = (item.callspec.params for item in mine if hasattr(item, "callspec"))
    jobs = [given["compiling"] for given in parameters if "compiling" in given]
    jobs = [job for job in jobs if is_wanted(job, request.config)]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        yield {job: workers.submit(job.run) for job in jobs}
        workers.shutdown(cancel_futures=True)


@pytest.fixture
def compiling(request: pytest.FixtureRequest, compilations: dict[Job, Future[Any]]) -> Future[Any]:
    """Return the future of the test's job."""
    if request.param not in compilations:
        option = "--thorough" if getattr(request.param, "is_thorough", False) else "--every-kernel"
        pytest.skip(f"{option}: compiled with everything else of its kind")
    return compilations[request.param]
