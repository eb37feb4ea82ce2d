# SPDX-License-Identifier: Apache-2.0
"""Writes the API reference from docstrings: one Markdown page per public module.

Usage: python tools/api_reference.py FOLDER. Everything without a leading underscore that a module itself
defines, and for the package ``weft`` what it exports, is printed with its signature and docstring.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

SKIPPED = ("weft.__main__", "weft._core")


def modules() -> list[ModuleType]:
    """Return ``weft`` and its importable public modules, in order of their names."""
    import weft

    found = [weft]
    for info in pkgutil.walk_packages(weft.__path__, "weft."):
        if info.name in SKIPPED or any(part.startswith("_") for part in info.name.split(".")[1:]):
            continue
        found.append(importlib.import_module(info.name))
    return found


def members(module: ModuleType) -> list[tuple[str, object]]:
    """Return the public classes and functions that belong on a module's page."""
    exported = getattr(module, "__all__", None)
    names = exported if exported is not None else [name for name in vars(module) if not name.startswith("_")]
    chosen = []
    for name in names:
        value = getattr(module, name)
        is_own = exported is not None or getattr(value, "__module__", None) == module.__name__
        if is_own and (inspect.isclass(value) or inspect.isroutine(value)):
            chosen.append((name, value))
    return chosen


def entry(name: str, value: object, depth: int) -> list[str]:
    """Return the lines of one class or function; a class brings its public methods, inherited ones too."""
    try:
        signature = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        signature = "(...)" if callable(value) else ""
    kind = "class " if inspect.isclass(value) else ""
    lines = [
        f"{'#' * depth} {kind}`{name}`",
        "",
        f"    {name}{signature}",
        "",
        inspect.getdoc(value) or "",
        "",
    ]
    if inspect.isclass(value):
        own = [base for base in value.__mro__ if base.__module__.split(".")[0] == "weft"]
        for method in dict.fromkeys(name for base in own for name in vars(base) if not name.startswith("_")):
            function = getattr(value, method)
            if inspect.isroutine(function):
                lines += entry(f"{name}.{method}", function, depth + 1)
    return lines


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    index = ["# API reference", ""]
    for module in modules():
        lines = [f"# {module.__name__}", "", inspect.getdoc(module) or "", ""]
        for name, value in members(module):
            lines += entry(name, value, 2)
        (folder / f"{module.__name__}.md").write_text("\n".join(lines))
        summary = (inspect.getdoc(module) or "").splitlines()
        index.append(f"* [{module.__name__}]({module.__name__}.md): {summary[0] if summary else ''}")
    (folder / "index.md").write_text("\n".join(index) + "\n")
    print(f"wrote {len(index) - 2} pages to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
