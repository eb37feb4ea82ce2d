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


# Of a module: ranks of other files' tests are forked, and no thread must be left then.
@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[Any]]]:
    """Start the jobs of all selected tests of the file, in their order."""
    mine = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    parameters = (item.callspec.params for item in mine if hasattr(item, "callspec"))
    is_thorough = request.config.getoption("--thorough")
    jobs = [given["compiling"] for given in parameters if "compiling" in given]
    jobs = [job for job in jobs if is_thorough or not getattr(job, "is_thorough", False)]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        yield {job: workers.submit(job.run) for job in jobs}
        workers.shutdown(cancel_futures=True)


@pytest.fixture
def compiling(request: pytest.FixtureRequest, compilations: dict[Job, Future[Any]]) -> Future[Any]:
    """Return the future of the test's job. One whose ``is_thorough`` says so runs with --thorough alone."""
    if request.param not in compilations:
        pytest.skip("--thorough: compiled with everything else of its kind")
    return compilations[request.param]
