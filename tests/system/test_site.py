# SPDX-License-Identifier: Apache-2.0
"""The site: docstrings become text that Sphinx reads, the reference is complete, and it builds.

Only names are looked for in what Sphinx wrote: how it marks them up is its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from programs import PYTHON, ROOT, run_program

import weft.collectives
import weft.ops
import weft.transfer

DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)$", re.MULTILINE)
sys.path.insert(0, str(DOCS))

import docstrings  # noqa: E402


def documented() -> list[str]:
    """Return every name that the reference documents."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [name for page in pages for _kind, name in DIRECTIVE.findall(page.read_text())]


def test_the_reference_has_every_public_name_once() -> None:
    public = [f"weft.{name}" for name in weft.__all__ if name[0] != "_" and not is_module(f"weft.{name}")]
    public += [f"weft.collectives.{name}" for name in weft.collectives.__all__]
    public += [f"weft.transfer.{name}" for name in weft.transfer.__all__]
    public += [f"weft.ops.{name}" for name in weft.ops.__all__]
    counts = Counter(documented())
    assert [name for name in public if counts[name] != 1] == []


def is_module(name: str) -> bool:
    path = ROOT / "python" / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_what_the_reference_names_exists_and_is_documented() -> None:
    for name in documented():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert value.__doc__, f"{name} has no docstring"


def test_sections_become_fields_and_entries_definitions() -> None:
    text = """Send rows.

Args:
    x, y: bf16[T, *shape],
        contiguous.
    op: ``sum`` or max_.
Returns: (rows: all of them;
    handle).
Raises: Error.

Use:

    a = f(*x)
    b = 1
"""
    assert [line for line in docstrings.to_rst(text) if line] == [
        "Send rows.",
        ":Args:",
        "    ``x``, ``y``",
        "        bf16[T, \\*shape],",
        "        contiguous.",
        "    ``op``",
        "        ``sum`` or max\\_.",
        ":Returns:",
        "    (rows: all of them;",
        "    handle).",
        ":Raises:",
        "    Error.",
        "Use:",
        "::",
        "    a = f(*x)",
        "    b = 1",
    ]


def test_a_hanging_line_goes_on_with_its_paragraph() -> None:
    assert docstrings.to_rst("Errors here: a\n    and b") == ["Errors here: a", "and b"]


def test_a_section_goes_on_to_the_end_of_its_paragraph() -> None:
    text = "Streams: calls run\non one.\nThreads: one.\n\nMore."
    wanted = [":Streams:", "    calls run", "    on one.", ":Threads:", "    one.", "More."]
    assert [line for line in docstrings.to_rst(text) if line] == wanted


def test_names_of_an_entry_may_take_two_lines() -> None:
    text = "Args:\n    x: one.\n    y, z,\n        w: more.\n"
    wanted = [":Args:", "    ``x``", "        one.", "    ``y``, ``z``, ``w``", "        more."]
    assert [line for line in docstrings.to_rst(text) if line] == wanted


def test_code_and_bullets_stay_what_they_are() -> None:
    assert docstrings.escape("* a*b ``c*d_`` e_") == "* a\\*b ``c*d_`` e\\_"


def test_the_site_builds_with_search_and_every_page(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: tools/setup docs")
    ran = run_program([*PYTHON, "-m", "sphinx", "-q", "-b", "html", str(DOCS), "site"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    site = tmp_path / "site"
    assert (site / "search.html").is_file()
    assert "low_latency_dispatch" in (site / "searchindex.js").read_text()
    pages = [
        page.relative_to(DOCS).with_suffix(".html")
        for page in DOCS.rglob("*.md")
        if page.parent != DOCS or page.stem != "README"
    ]
    assert [str(page) for page in pages if not (site / page).is_file()] == []
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for name in ("weft.Buffer.low_latency_dispatch", "weft.Communicator.all_gather"):
        assert reference.count(f'id="{name}"') == 1, name
