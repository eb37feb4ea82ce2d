# SPDX-License-Identifier: Apache-2.0
"""Runs the C++ tests: each is one test here, so that one summary counts both languages, skips and reasons included.

A suite is run once, when the first of its tests is asked for. What GoogleTest writes about each test is what counts:
its exit status is 0 also where tests were skipped.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "kernels", "include", "compat", "tests")
TIMEOUT_S = 280  # of a suite; below pytest's own limit of a test


def newest_source() -> Path:
    """Return the C++ file that was changed last."""
    files = (
        path for top in SOURCES for path in (ROOT / top).rglob("*") if path.suffix in (".h", ".cc", ".cuh")
    )
    return max(files, key=lambda path: path.stat().st_mtime)


def why_not(binary: Path | None) -> str | None:
    """Return why the binary cannot be run or would not test this tree; None where it can."""
    if binary is None or not binary.is_file():
        return "C++ tests are not built: apt-get install libgtest-dev libgmock-dev, then tools/run-tests"
    source = newest_source()
    if source.stat().st_mtime > binary.stat().st_mtime:
        return f"{binary.relative_to(ROOT)} is older than {source.relative_to(ROOT)}: run tools/run-tests"
    return None


def listed(binary: Path) -> list[tuple[str, str]]:
    """Return (suite, test) of every test of the binary, as --gtest_filter takes them."""
    ran = subprocess.run([binary, "--gtest_list_tests"], capture_output=True, text=True, check=True)
    tests, suite = [], ""
    for line in ran.stdout.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  "):
            tests.append((suite, name))
        elif name.endswith("."):
            suite = name[:-1]
    return tests


class Outcome:
    """What GoogleTest wrote about one test."""

    def __init__(self, case: ElementTree.Element) -> None:
        self.failures = [failure.get("message", "") for failure in case.findall("failure")]
        skip = case.find("skipped")
        # "path:line" comes first; the reason is the rest.
        message = "" if skip is None else skip.get("message", "")
        self.skipped = (
            None if skip is None else message.partition("\n")[2].strip() or message or "no reason given"
        )
        if case.get("status") == "notrun":
            self.skipped = "disabled"


@functools.cache
def run_suite(binary: Path, suite: str) -> tuple[dict[str, Outcome], str]:
    """Run a suite; return the outcome of each test that ended, and how the program ended and what it printed last."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [f"--gtest_filter={suite}.*", "--gtest_brief=1", f"--gtest_output=xml:{report}"]
        try:
            ran = subprocess.run([binary, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
            how = f"exit status {ran.returncode}\n{ran.stdout[-8000:]}{ran.stderr[-2000:]}"
        except subprocess.TimeoutExpired as late:
            how = f"still running after {late.timeout} s\n{(late.stdout or b'')[-8000:]!r}"
        if not report.is_file():  # it crashed
            return {}, how
        cases = ElementTree.parse(report).iter("testcase")
        return {case.get("name", ""): Outcome(case) for case in cases}, how


def judge(outcomes: dict[str, Outcome], test: str, how: str) -> None:
    """Pass, fail or skip as GoogleTest says."""
    assert test in outcomes, f"{test} did not end: {how}"
    outcome = outcomes[test]
    assert not outcome.failures, "\n".join(outcome.failures)
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is not test_cpp:
        return
    binary = chosen_binary(metafunc.config)
    reason = why_not(binary)
    if reason:
        skip = pytest.param("", "", marks=pytest.mark.skip(reason=reason), id="not-built")
        metafunc.parametrize(("suite", "test"), [skip])
    else:
        assert binary is not None
        tests = [
            pytest.param(suite, test, marks=pytest.mark.group(suite), id=f"{suite}.{test}")
            for suite, test in listed(binary)
        ]
        metafunc.parametrize(("suite", "test"), tests)


def chosen_binary(config: pytest.Config) -> Path | None:
    """Return what --cpp-tests names; without it the newest that is built without a sanitizer."""
    named = config.getoption("--cpp-tests")
    if named:
        return ROOT / named
    built = [
        path for path in (ROOT / "build").glob("*/weft_tests") if not path.parent.name.startswith("san-")
    ]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def test_cpp(suite: str, test: str, request: pytest.FixtureRequest) -> None:
    binary = chosen_binary(request.config)
    assert binary is not None
    outcomes, how = run_suite(binary, suite)
    judge(outcomes, test, how)


FAKE = """#!/bin/sh
for option in "$@"; do case $option in --gtest_output=xml:*) report=${option#*:} ;; esac; done
cat >"$report" <<END
<testsuites><testsuite name="Suite">
  <testcase name="Good" status="run" result="completed"/>
  <testcase name="Bad" status="run" result="completed"><failure message="a.cc:1&#x0A;1 is not 2"/></testcase>
  <testcase name="Elsewhere" status="run" result="skipped"><skipped message="a.cc:7&#x0A;no card"/></testcase>
  <testcase name="Off" status="notrun" result="suppressed"/>
</testsuite></testsuites>
END
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """Return a program that answers as GoogleTest does, and ends with 0."""
    path = tmp_path / "weft_tests"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("test", "says", "raised"),
    [
        ("Bad", "1 is not 2", AssertionError),
        ("Elsewhere", "^no card$", pytest.skip.Exception),
        ("Off", "disabled", pytest.skip.Exception),
        ("Crashed", "Crashed did not end: exit status 0", AssertionError),
    ],
)
def test_what_did_not_pass_does_not_count_as_passed(
    fake: Path, test: str, says: str, raised: type[BaseException]
) -> None:
    outcomes, how = run_suite(fake, "Suite")
    judge(outcomes, "Good", how)
    with pytest.raises(raised, match=says):
        judge(outcomes, test, how)


def test_a_crash_fails_its_tests(tmp_path: Path) -> None:
    path = tmp_path / "weft_tests"
    path.write_text("#!/bin/sh\necho about to\nkill -SEGV $$\n")
    path.chmod(0o755)
    outcomes, how = run_suite(path, "Suite")
    with pytest.raises(AssertionError, match=r"exit status -11\s+about to"):
        judge(outcomes, "Any", how)


def test_an_old_binary_is_not_run(tmp_path: Path) -> None:
    assert "not built" in str(why_not(tmp_path / "weft_tests"))
    old = ROOT / "build" / f"test-cpp-{tmp_path.parent.name}-{tmp_path.name}"
    old.parent.mkdir(exist_ok=True)
    old.touch()
    try:
        assert why_not(old) is None
        os.utime(old, (0, 0))
        assert "is older than" in str(why_not(old))
    finally:
        old.unlink()
