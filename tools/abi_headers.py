# SPDX-License-Identifier: Apache-2.0
"""Writes what Weft uses of libraries that it opens at run time, from their own headers: one header for each library.

Usage: python tools/abi_headers.py [--check] [NAME[=FOLDER]]...

NAME is a row of LIBRARIES (default: all), FOLDER has its headers where the compiler does not look:
fabric=libfabric/include, of github.com/ofiwg/libfabric at v2.6.0, as 1.17 lacks two options that Weft asks for. --check
writes nothing, and returns 1 where a header is not current. Needs clang.

What Weft uses is what its sources name: constants, functions, structs; and the structs that those hold, or point to by
a member that the sources name, too. Names, layouts and the licence on top are upstream's. An enum is an int, as it is
between a program and a library. tests/unit/test_abi_headers.py compares each header with the release that is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import check_layers

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110
Node = dict[str, Any]


@dataclass(frozen=True)
class Library:
    """Where a library's declarations come from, and where Weft's part of them stands."""

    product: str
    written: str  # the header in this tree
    headers: tuple[str, ...]
    names: str  # pattern of upstream's names
    release: tuple[str, ...] = ()  # C expressions; none: rdma-core's
    folders: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    has_licence: bool = (
        True  # that lets its declarations stand here, in the first comment of its first header
    )


def cuda_folders() -> tuple[Path, ...]:
    """Return where cuda.h may lie: in PyPI's packages, and in a toolkit."""
    packages = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"), reverse=True)
    return (*packages, Path("/usr/local/cuda/include"))


LIBRARIES = {
    "fabric": Library(
        "libfabric",
        "src/providers/fabric/abi.h",
        (
            "rdma/fabric.h",
            *(f"rdma/fi_{part}.h" for part in ("cm", "domain", "endpoint", "eq", "errno", "rma")),
        ),
        r"fid|(?:fid|fi|FI)_\w+",
        ("FI_MAJOR_VERSION", "FI_MINOR_VERSION", "FI_REVISION_VERSION"),
    ),
    "verbs": Library(
        "libibverbs",
        "src/providers/verbs/abi.h",
        ("infiniband/verbs.h",),
        r"_?ibv_\w+|IBV_\w+",
    ),
    "mlx5": Library(
        "libmlx5",
        "src/transports/ibgda/mlx5_abi.h",
        ("infiniband/mlx5dv.h",),
        r"mlx5dv_\w+|MLX5DV_\w+|mlx5_wqe_av",
    ),
    "cuda": Library(
        "the CUDA driver",
        "src/base/cuda_abi.h",
        ("cuda.h",),
        r"CU\w+|cu[A-Z]\w+|cuuint\d+_t",
        ("CUDA_VERSION / 1000", "CUDA_VERSION % 1000 / 10"),
        cuda_folders(),
        ("-D__CUDA_API_VERSION_INTERNAL",),  # every version of a function under its own name
        has_licence=False,
    ),
}
# Types of C, and of the kernel's headers, by their names here.
TYPES = {"_Bool": "bool"} | {
    f"__{kind}{bits}": f"uint{bits}_t" for kind in ("be", "u") for bits in (8, 16, 32, 64)
}
CLANG = next(filter(None, map(shutil.which, ["clang", *(f"clang-{n}" for n in range(30, 13, -1))])), None)


def run(command: list[str], text: str = "") -> str:
    """Return what a command prints. Raises: FileNotFoundError, with its first words, where it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FileNotFoundError(done.stderr.strip().split("\n")[0])
    return done.stdout


class Upstream:
    """What the headers of a library declare."""

    def __init__(self, library: Library) -> None:
        """Parse them. Raises: FileNotFoundError where they, or clang, are not here."""
        self.library = library
        self.structs: dict[str, Node] = {}
        self.others: dict[str, Node] = {}  # typedefs and functions
        self.enums: dict[str, str] = {}  # enumerator -> its enum
        self.source = "".join(f"#include <{name}>\n" for name in library.headers)
        self.macros = set(re.findall(r"#define (\w+) .", self.compile("-E", "-dM")))
        for node in json.loads(self.compile("-fsyntax-only", "-Xclang", "-ast-dump=json"))["inner"]:
            self._take(node)

    def compile(self, *flags: str, text: str = "") -> str:
        """Return what clang prints about the headers, and ``text`` after them."""
        if CLANG is None:
            raise FileNotFoundError("no clang")
        folders = [f"-I{folder}" for folder in self.library.folders]
        return run([CLANG, "-x", "c", "-w", *folders, *self.library.flags, *flags, "-"], self.source + text)

    def has(self, name: str) -> bool:
        return bool(re.fullmatch(self.library.names, name)) and (
            name in self.structs or name in self.others or name in self.enums or name in self.macros
        )

    def evaluate(self, names: list[str]) -> dict[str, tuple[str, int]]:
        """Return type and value of C expressions."""
        kinds = {"int": "int", "unsigned": "unsigned", "long": "int64_t", "unsigned long": "uint64_t"}
        kinds |= {"long long": "int64_t", "unsigned long long": "uint64_t"}
        cases = ", ".join(f'{kind}: "{name}"' for kind, name in kinds.items())
        shown = "".join(f'printf("%s %lld\\n", _Generic(({x}), {cases}), (long long)({x}));\n' for x in names)
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/values"
            self.compile("-o", program, text=f"#include <stdio.h>\nint main(void) {{\n{shown}return 0;\n}}\n")
            lines = run([program]).splitlines()
        return {
            name: (line.split()[0], int(line.split()[1])) for name, line in zip(names, lines, strict=True)
        }

    def release(self) -> str:
        """Return the release of the headers. libibverbs says 1.14.44.0 in rdma-core 44."""
        if not self.library.release:
            return "of rdma-core " + run(["pkg-config", "--modversion", "libibverbs"]).split(".")[2]
        return ".".join(str(value) for _, value in self.evaluate(list(self.library.release)).values())

    def licence(self) -> str:
        """Return the first comment of the first header."""
        path = re.findall(rf'^# \d+ "([^"]+/{self.library.headers[0]})"', self.compile("-E"), re.MULTILINE)[0]
        comment = Path(path).read_text().split("*/")[0].split("/*")[1]
        return re.sub(r"^ ?\* ?", "", comment.strip(), flags=re.MULTILINE)

    def _take(self, node: Node) -> None:
        kind, name = node["kind"], node.get("name", "")
        if kind == "EnumDecl":
            self.enums |= {item["name"]: name for item in node.get("inner", ()) if "name" in item}
        elif kind == "RecordDecl" and node.get("completeDefinition"):
            self.structs[name] = node
        elif kind in ("TypedefDecl", "FunctionDecl") and not node.get("inline"):
            self.others.setdefault(name, node)


@dataclass
class Uses:
    """What sources name of a library, and the members that those files name."""

    names: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)


def uses_of(upstream: Upstream) -> Uses:
    """Read all sources of this tree."""
    found = Uses()
    kinds = ["*.h", "*.cc", "*.cuh"]
    files = run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *kinds]
    ).split()
    for file in sorted(set(files) - {library.written for library in LIBRARIES.values()}):
        path = ROOT / file
        text = path.read_text() if path.exists() else ""  # removed, but for the commit
        code = check_layers.TEXT.sub('""', check_layers.COMMENT.sub("", text))
        names = {name for name in re.findall(r"(?<![.>\w])[A-Za-z_]\w+", code) if upstream.has(name)}
        if names:
            found.names |= names
            found.members |= set(re.findall(r"(?:\.|->)(\w+)", code))
    found.names -= {name[:-3] for name in found.names if re.search(r"_v\d$", name)}  # named for the other
    return found


class Header:
    """The text of a header: declarations in the order in which they need each other."""

    def __init__(self, upstream: Upstream, uses: Uses) -> None:
        self.upstream, self.uses = upstream, uses
        self._declare(sorted(uses.names), is_followed=True)
        # Again in an order that does not depend on which of them sources name.
        self._declare([*sorted(self.written), *sorted(uses.names)], is_followed=False)

    def _declare(self, names: list[str], is_followed: bool) -> None:
        """Write structs and types, and what they need; and what they point to, where that is followed."""
        self.aliases: dict[str, str] = {}
        self.written: dict[str, list[str]] = {}  # structs
        self.is_followed = is_followed
        for name in names:
            self._write(name)
            self._alias(name)

    def spell(self, kind: str) -> str:
        """Return a C type as C++ has it, and see to it that what it names is declared."""
        kind = re.sub(r"\b[a-z_]\w*\b", lambda word: TYPES.get(word[0], word[0]), kind)
        for tag in re.findall(r"\benum (\w+)", kind):
            self.aliases[tag] = "int"
        for name in re.findall(r"(?<!struct )(?<!union )\b[A-Za-z_]\w+", kind):
            self._alias(name)
        return re.sub(r"(?<=\*)\(\*", " (*", re.sub(r" (?=\*)", "", kind.replace("enum ", "")))

    def _is_its(self, name: str) -> bool:
        return bool(re.fullmatch(self.upstream.library.names, name))

    def _alias(self, name: str) -> None:
        """Declare what upstream calls a type by, and what it stands for."""
        node = self.upstream.others.get(name, {})
        if node.get("kind") != "TypedefDecl" or not self._is_its(name) or name in self.aliases:
            return
        kind = node["type"]["qualType"]
        kind = "int" if kind.startswith("enum ") else self.spell(kind)
        self._write_held(kind)
        self.aliases[name] = kind

    def _write_held(self, kind: str) -> None:
        """Write the struct that a type is, or that an alias stands for."""
        while kind in self.aliases:
            kind = self.aliases[kind]
        if held := re.fullmatch(r"(?:const )?(?:struct|union) (\w+)(?:\[.*)?", kind):
            self._write(held[1])

    def _write(self, tag: str) -> None:
        """Write a struct, those that it holds before it, and those that it points to after it."""
        node = self.upstream.structs.get(tag)
        if node is None or tag in self.written or not self._is_its(tag):
            return
        pointed: list[str] = []
        lines = [f"{node['tagUsed']} {tag} {{", *self._members(node, "  ", pointed), "};"]
        self.written[tag] = lines
        for other in pointed:
            self._write(other)

    def _members(self, record: Node, indent: str, pointed: list[str]) -> list[str]:
        """Return the fields of a struct. What it points to, and Weft looks into, is added to ``pointed``."""
        lines: list[str] = []
        unnamed: Node = {}
        last = ""  # the type that the last line has fields of
        for node in record["inner"]:
            if node["kind"] == "RecordDecl":
                unnamed = node
            if node["kind"] != "FieldDecl":
                continue
            kind, name = node["type"]["qualType"], node.get("name", "")
            count = "".join(re.findall(r"\[\d+\]", kind))
            if "(unnamed" in kind or "(anonymous" in kind:
                inner = self._members(unnamed, indent + "  ", pointed)
                end = f"}} {name}{count};" if name else "};"
                lines += [f"{indent}{unnamed['tagUsed']} {{", *inner, indent + end]
                last = ""
                continue
            kind = self.spell(kind).split("[")[0]
            self._write_held(kind)
            if self.is_followed and name in self.uses.members and kind.endswith("*"):
                pointed += re.findall(r"struct (\w+)", kind)
            name += count + (f" : {node['inner'][0]['value']}" if node.get("isBitfield") else "")
            if "(*)" in kind:
                lines += wrapped(f"{kind.replace('(*)', f'(*{name})', 1)};", indent)
            elif last == kind and "*" not in kind and len(lines[-1]) + len(name) + 8 < WIDTH:
                lines[-1] = f"{lines[-1][:-1]}, {name};"
            else:
                lines.append(f"{indent}{kind} {name};")
            last = "" if "(*)" in kind else kind
        return lines

    def functions(self) -> list[str]:
        lines: list[str] = []
        for name in sorted(self.uses.names):
            node = self.upstream.others.get(name, {})
            if node.get("kind") != "FunctionDecl":
                continue
            taken = [one for one in node.get("inner", ()) if one["kind"] == "ParmVarDecl"]
            parameters = [
                f"{self.spell(one['type']['qualType'])} {one.get('name', '')}".strip() for one in taken
            ]
            result = self.spell(node["type"]["qualType"].split("(")[0].strip())
            lines += wrapped(f"{result} {name}({', '.join(parameters)});", "")
        return lines

    def constants(self) -> list[str]:
        """Return the constants, each enum's together and by value; macros first."""
        enums = self.upstream.enums
        names = [name for name in self.uses.names if name in enums or name in self.upstream.macros]
        values = self.upstream.evaluate(sorted(names))
        rows = sorted((enums.get(name, ""), value, name, kind) for name, (kind, value) in values.items())
        lines: list[str] = []
        last = ""
        for enum, value, name, kind in rows:
            if enum and enum != last:
                lines.append(f"// {enum}")
            last = enum
            shown = f"{value:#x}" if 0 <= value < 2**63 and kind.endswith("64_t") else str(value)
            shown = f"{value % 2**64:#x}" if kind == "uint64_t" else shown
            lines.append(f"constexpr {kind} {name} = {shown};")
        return lines

    def text(self) -> str:
        functions = self.functions()  # they may need more aliases
        aliases = [f"using {name} = {kind};" for name, kind in self.aliases.items()]
        structs = [line for lines in self.written.values() for line in (*lines, "")]
        body = "\n".join([*aliases, "", *self.constants(), "", *structs, *functions])
        library = self.upstream.library
        release = self.upstream.release()
        notes = f"""SPDX-License-Identifier: Apache-2.0

What Weft uses of {library.product} {release}: names and layouts of its headers.
Written by tools/abi_headers.py, not to be edited. Functions are declared for their types alone: the library is opened
at run time (docs/decisions/0008-providers-open-their-libraries-at-run-time.md)."""
        if library.has_licence:
            notes += f"\n\n{self.upstream.licence()}"
        top = "\n".join(f"// {line}".rstrip() for line in notes.split("\n"))
        needs = {
            "<pthread.h>": "pthread_",
            "<sys/types.h>": r"\bssize_t|\boff_t",
            "<sys/uio.h>": "struct iovec",
        }
        includes = [f"#include {name}" for name, what in needs.items() if re.search(what, body)]
        includes += ["", "#include <cstddef>", "#include <cstdint>"]
        parts = [top, "#pragma once", "", *includes, "", "namespace weft {", "// clang-format off", "", body]
        return re.sub(
            r"\n{3,}", "\n\n", "\n".join([*parts, "", "// clang-format on", "}  // namespace weft", ""])
        )


def wrapped(line: str, indent: str) -> list[str]:
    """Return a declaration in lines that are not too long, broken behind parameters."""
    lines = [indent]
    for part in re.split(r"(?<=,) ", line):
        if len(lines[-1]) + len(part) >= WIDTH:
            lines.append(indent + "    ")
        lines[-1] += part if lines[-1].isspace() or not lines[-1] else f" {part}"
    return lines


def header_of(library: Library) -> str:
    """Return the text of a library's header. Raises: FileNotFoundError where upstream's, or clang, are not here."""
    upstream = Upstream(library)
    return Header(upstream, uses_of(upstream)).text()


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    failed = False
    for argument in arguments or LIBRARIES:
        name, _, folder = argument.partition("=")
        library = LIBRARIES[name]
        if folder:
            library = replace(library, folders=(Path(folder),))
        text, path = header_of(library), ROOT / library.written
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            print(
                f"{library.written}: not what {library.product}'s headers say; run tools/abi_headers.py {argument}"
            )
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
