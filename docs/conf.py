# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the site from docs/ and the docstrings: ``make docs``, and decisions/0020 for why this generator."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import docstrings

import weft

project = "Weft"
copyright = "the authors of Weft"
version = release = weft.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["README.md", "**/_*"]  # docs/README.md is for those who change documents

html_theme = "furo"
html_title = f"Weft {weft.__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.xref_missing",
    "myst.header",
]  # links to files of the repository that are not pages
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

# What a class inherits from Python says nothing about Weft.
FOREIGN = "object, ValueError, RuntimeError, Exception, BaseException, Protocol, Enum, int, tuple, dict"
autodoc_default_options = {
    "members": True,
    "inherited-members": FOREIGN,
    "member-order": "bysource",
}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88


def read_docstring(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring, as Sphinx asks for it, by reStructuredText."""
    lines[:] = docstrings.to_rst(inspect.cleandoc("\n".join(lines)))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", read_docstring)
