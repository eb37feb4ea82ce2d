# SPDX-License-Identifier: Apache-2.0
"""Checks that the layers of the library depend one way, and the rules that go with them.

Usage: python tools/check_layers.py [ROOT]. Prints one line per breach and returns 1 if there is any.

* An #include points to the same layer or a lower one (``STANDS_ON``); a transport or provider
  never includes another. Folders of kernels are layers, too, and so is each folder of compat.
* ``measure`` is a house of its own: its C++ and its Python may use all, and nothing of the library includes it, or
  imports it when it is read.
* A Python module imports the same room or a lower one when it is read (``MAY_IMPORT``). What a function imports when it
  runs does not count: commands of a room may use what stands above it.
* No two headers, and no two Python modules, need each other to be read.
* A transport's mesh is named in its folder and in the list alone; mapped memory, which kernels ask for by its
  abilities, is the exception.
* The environment is read in ``src/base/config.cc`` alone; launcher variables in the Python bootstrap alone.
* Inline assembly stands in ``kernels/target`` alone.
* Nothing below ``python/weft`` knows torch; nothing in the library prints, aborts or exits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("*.h", "*.cc", "*.cuh")

# Layer -> those that it stands on. It may include them, what they stand on, and so on down: no arrow points up.
STANDS_ON: dict[str, set[str]] = {
    "include": set(),
    "src/no_measure": set(),  # where a build's additions to the library's lists stand; measure/extra in its place
    "src/base": {"include", "src/no_measure"},
    "src/topology": {"src/base"},
    "src/bootstrap": {"src/topology"},
    "src/memory": {"src/bootstrap"},
    "src/providers": {"src/memory"},
    "src/transfer": {"src/providers"},
    "src/transports": {"src/transfer", "kernels/moe", "kernels/collective"},
    "src/comm": {"src/transports"},
    "src/jit": {"src/comm"},
    "src/plan": {"src/bootstrap", "kernels/moe", "kernels/collective"},  # pure
    "src/moe": {"src/jit", "src/plan"},
    "src/collective": {"src/jit", "src/plan"},
    "src/bind": {"src/moe", "src/collective"},
    "measure": {"src/bind"},  # may use all
    "kernels/target": set(),
    "kernels/core": {"kernels/target"},
    "kernels/moe": {"kernels/core"},
    "kernels/collective": {"kernels/core"},
    "compat/nccl": {"src/collective"},
    "compat/nccl_rma": {"src/transports"},
}
# Layers of ways to others, a folder for each. What stands in a folder is known there and to the layer's own list, and
# above to those that open one way alone: loops of benchmarks, what Python asks of a library, and a NIC whose queues
# kernels write, which is opened as the provider for it does. A transport's device part is a type that kernels are
# compiled with, so all above may include that.
WAYS = ("src/providers", "src/transports")
OPEN_ONE_WAY = {"src/transports", "src/bind", "measure", "compat/nccl_rma"}
DEVICE_PART = {"channel.cuh", "wire.h"}

# Room of python/weft -> the rooms that it may import when it is read. Below all: ``_core`` and ``errors``.
LIBRARY = {"runtime", "collectives", "moe", "transfer", "ops"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "runtime": set(),
    "transfer": {"runtime"},
    "moe": {"runtime"},
    "collectives": {"runtime"},
    "ops": {"runtime"},
    "demo": LIBRARY,
}
# The C++ of the house.
HOUSE = ("measure/extra", "measure/jitter", "measure/kernels", "measure/loops")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
TEXT = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.DOTALL)

RULES: list[tuple[str, re.Pattern[str], str]] = [
    # What is forbidden, how it looks, and where it is allowed (a prefix of the path).
    ("reads the environment", re.compile(r"\b(?:secure_)?getenv\s*\("), "src/base/config.cc"),
    (
        "inline assembly",
        re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__|\()"),
        "kernels/target/",
    ),
    ("knows torch", re.compile(r"#\s*include\s*[<\"](?:torch|ATen|c10)/"), "python/"),
    ("ends the process", re.compile(r"(?<![\w.>:])(?:std::)?(?:abort|exit|_Exit)\s*\("), "none"),
    ("prints", re.compile(r"\b(?:printf|puts|std::cout|std::cerr)\b"), "none"),
]
PYTHON_ENVIRONMENT = re.compile(r"\bos\.(?:environ|getenv)\b")
PYTHON_ENVIRONMENT_ALLOWED = (
    "python/weft/runtime/bootstrap",
    "measure/python/",
    "python/weft/cli.py",  # a shell that asks for completion says so there
)


def layer_of(path: str) -> str | None:
    """Return the layer that a path relative to the root belongs to, or None outside the library."""
    parts = path.split("/")
    if parts[0] in ("include", "measure"):
        return parts[0]
    return "/".join(parts[:2]) if parts[0] in ("src", "kernels", "compat") and len(parts) > 2 else None


def way_of(path: str) -> str | None:
    """Return the folder of one transport or provider that a path lies in, or None."""
    parts = path.split("/")
    return "/".join(parts[:3]) if layer_of(path) in WAYS and len(parts) > 3 else None


def below(layer: str) -> set[str]:
    """Return all layers that one stands on, itself or through others."""
    return STANDS_ON.get(layer, set()).union(*(below(other) for other in STANDS_ON.get(layer, ())))


def resolve(root: Path, includer: str, name: str) -> str | None:
    """Return the path, relative to the root, of an included file of the library; None for anything else."""
    for folder in (str(Path(includer).parent), "src", ".", "include", "kernels", "src/no_measure"):
        if (root / folder / name).is_file():
            return (root / folder / name).resolve().relative_to(root.resolve()).as_posix()
    return None


def check_include(includer: str, included: str) -> str | None:
    """Return why ``includer`` may not include ``included``, or None when it may."""
    source, target = layer_of(includer), layer_of(included)
    if source is None or target is None:
        return None
    way = way_of(included)
    if source == target:
        is_other = way and way_of(includer) not in (None, way)
        return f"folders of {source} include each other" if is_other else None
    if target not in below(source):
        return f"{source} may not include {target}"
    is_private = way and source not in OPEN_ONE_WAY and Path(included).name not in DEVICE_PART
    return f"{source} may not include what is in {way}" if is_private else None


def named_meshes(root: Path, path: str, code: str) -> list[str]:
    """Return the transports whose mesh ``code`` names without being theirs, or the list."""
    if path == "src/transports/list.h" or path.startswith("measure/"):
        return []
    folders = [entry.name for entry in sorted((root / "src/transports").glob("*")) if entry.is_dir()]
    others = [name for name in folders if name != "mapped" and not path.startswith(f"src/transports/{name}/")]
    return [name for name in others if re.search(rf"\b{name.title().replace('_', '')}Mesh\b", code)]


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every C++ file of the library."""
    for top in ("include", "src", "kernels", "compat", *HOUSE):
        for pattern in SOURCES:
            for path in sorted((root / top).rglob(pattern)):
                yield path.relative_to(root).as_posix(), path.read_text()


def module_file(root: Path, name: str) -> str | None:
    """Return the file of a module of weft, relative to the root; None for anything else."""
    if not name.startswith("weft."):
        return None
    # The house's come first: a build in place has links to them among the library's.
    places = [root / top / name.replace(".", "/") for top in ("measure/python", "python")]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file.relative_to(root).as_posix() for file in files if file.is_file()), None)


def modules(root: Path) -> Iterator[Path]:
    """Yield every Python module of the library and of the house; links are those of a build in place."""
    for top in ("measure/python/weft", "python/weft"):
        for path in sorted((root / top).iterdir()) if (root / top).is_dir() else ():
            if path.suffix == ".py":
                yield path
            elif path.is_dir() and not path.is_symlink():
                yield from sorted(path.rglob("*.py"))


def imported(root: Path, path: Path) -> set[str]:
    """Return the modules of weft that a Python module imports when it is read, as paths relative to the root."""
    found: set[str | None] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {module_file(root, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:  # a module of the package, or a name in it
                whole = module_file(root, f"{node.module}.{alias.name}")
                found.add(whole or module_file(root, node.module))
    return {file for file in found if file is not None}


def room_of(module: str) -> str:
    """Return the room of a Python module: its folder below python/weft, or its name where it stands there itself."""
    return "measure" if module.startswith("measure/") else module.split("/")[2].removesuffix(".py")


def check_import(importer: str, module: str) -> str | None:
    """Return why ``importer`` may not import ``module``, or None when it may."""
    source, target = room_of(importer), room_of(module)
    if source == target or target == "errors":
        return None
    if target != "measure" and target in MAY_IMPORT.get(source, {target}):
        return None
    return f"{source} may not import {target} when it is read"


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return a sentence for each circle of files that need each other."""
    found: list[str] = []
    done: set[str] = set()

    def follow(file: str, way: list[str]) -> None:
        if file in way:
            found.append(f"{file}: needs itself: {' -> '.join([*way[way.index(file) :], file])}")
        elif file not in done:
            for other in sorted(graph.get(file, ())):
                follow(other, [*way, file])
            done.add(file)

    for file in sorted(graph):
        follow(file, [])
    return found


def needs(root: Path) -> dict[str, set[str]]:
    """Return each file, by its path from the root, with the files that it includes, or imports when it is read."""
    found: dict[str, set[str]] = {}
    for path, text in sources(root):
        included = (resolve(root, path, name) for name in INCLUDE.findall(COMMENT.sub("", text)))
        found[path] = {other for other in included if other and other != path}
    for module in modules(root):
        found[module.relative_to(root).as_posix()] = imported(root, module)
    return found


def breaches(root: Path) -> list[str]:
    """Return every breach in the tree, one sentence each."""
    found: list[str] = []
    graph = needs(root)
    for path, text in sources(root):
        bare = COMMENT.sub("", text)
        for name in INCLUDE.findall(bare):
            included = resolve(root, path, name)
            why = check_include(path, included) if included else None
            if why:
                found.append(f"{path}: includes {name}: {why}")
        code = TEXT.sub('""', bare)
        # An include of torch may stand in quotes, so that rule looks at the text with its strings.
        for what, pattern, allowed in RULES:
            if not path.startswith(allowed) and pattern.search(bare if what == "knows torch" else code):
                found.append(f"{path}: {what}; allowed in: {allowed}")
        found += [
            f"{path}: names the mesh of {name}; allowed in: src/transports/{name}/, src/transports/list.h"
            for name in named_meshes(root, path, code)
        ]
    for module in modules(root):
        name = module.relative_to(root).as_posix()
        for other in sorted(graph.get(name, ())):
            why = check_import(name, other)
            if why:
                found.append(f"{name}: imports {other}: {why}")
        if PYTHON_ENVIRONMENT.search(module.read_text()) and not name.startswith(PYTHON_ENVIRONMENT_ALLOWED):
            found.append(
                f"{name}: reads the environment; allowed in: {', '.join(PYTHON_ENVIRONMENT_ALLOWED)}"
            )
    return found + circles(graph)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    found = breaches(root)
    for line in found:
        print(line)
    print(f"layers: {len(found)} breaches" if found else "layers: include one way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
