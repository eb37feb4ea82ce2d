# SPDX-License-Identifier: Apache-2.0
"""Draws the rooms of the tree, what each does, and which others its includes and imports use: docs/assets/rooms.svg.

Usage: python tools/rooms.py [--check]. With --check it writes nothing and returns 1 if the picture is not current.
A room stands above all that it uses. What it uses only through another one is left out, and so is what a Python
function imports when it runs. tools/check_layers.py says what may be used, this what is.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import check_layers

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/assets/rooms.svg"
# A room, or the first part of its name -> color of its box.
COLORS = {
    "measure": "#eeeeee",
    "weft": "#dbe9f6",
    "compat": "#dbe9f6",
    "src": "#e4f2e0",
    "src/transports": "#fdf0d5",
    "src/providers": "#fdf0d5",
    "kernels": "#f6dede",
}
# A room -> what it does, in a few words.
DOES = {
    "measure": "measures, tries and tests the library",
    "weft.demo": "trains a small model through Weft",
    "weft.collectives": "all_reduce and others; programs; tuning",
    "weft.moe": "dispatch and combine: Buffer, P2PAllToAll",
    "weft.ops": "operators for torch.compile",
    "weft.transfer": "TransferEngine; resharding of tensors",
    "weft.runtime": "communicators, memory, the machine, reports",
    "compat/nccl": "libnccl.so.2, served by Weft",
    "compat/nccl_rma": "a network for NCCL's GIN",
    "src/bind": "Python to C++ and back",
    "src/collective": "runs collectives; words of their faults",
    "src/moe": "runs dispatch, combine; words of faults",
    "src/jit": "compiles, keeps and launches kernels",
    "src/comm": "who reaches whom; windows",
    "src/transports": "ways to peers: mapped memory, ports, signals",
    "src/transfer": "moves bytes between processes, over networks",
    "src/providers": "networks under the transfer engine",
    "src/memory": "memory that processes share",
    "src/plan": "pure: grids and sizes of calls",
    "src/bootstrap": "ranks find and watch each other",
    "src/topology": "GPUs, NICs and links here",
    "src/base": "status, log, settings, deadlines, processes",
    "src/no_measure": "empty lists, where measure is absent",
    "kernels/moe": "kernels of dispatch, combine",
    "kernels/collective": "kernels of collectives",
    "kernels/core": "channels, waits, faults, copies, lines",
    "kernels/target": "the platform: loads, atomics, groups, time",
}
LEGEND = "weft.x is python/weft/x"
WIDTH, BOX_HEIGHT, GAP, LINE = 760, 63, 8, 13
LETTER = 6  # width of a letter of the small text, at most


def room_of(path: str) -> str | None:
    """Return the room of a file, by its path from the root; None for a file that is in none."""
    parts = path.split("/")
    if parts[0] == "measure":
        return parts[0]
    if parts[0] == "python":
        return f"weft.{check_layers.room_of(path)}" if len(parts) > 3 else None
    return check_layers.layer_of(path)


def uses(root: Path) -> dict[str, set[str]]:
    """Return the rooms, each with those that its files include or import."""
    found: dict[str, set[str]] = {}
    for path, others in check_layers.needs(root).items():
        room = room_of(path)
        if room:
            found.setdefault(room, set()).update(other for other in map(room_of, others) if other)
    for path in check_layers.modules(root):
        room = room_of(path.relative_to(root).as_posix())
        if room and "_core" in path.read_text():
            found.setdefault(room, set()).add("src/bind")
    for room in {other for others in found.values() for other in others}:
        found.setdefault(room, set())
    return {room: others - {room} for room, others in found.items()}


def reached(room: str, graph: dict[str, set[str]]) -> set[str]:
    """Return all that a room uses, itself or through others. Raises: ValueError where rooms use each other."""
    found: set[str] = set()
    ahead = list(graph[room])
    while ahead:
        other = ahead.pop()
        if other == room:
            raise ValueError(f"{room} uses itself through others: there is no picture of that")
        if other not in found:
            found.add(other)
            ahead += graph[other]
    return found


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without what is used through others, too."""
    far = {room: reached(room, graph) for room in graph}
    return {
        room: {o for o in others if not any(o in far[p] for p in others)} for room, others in graph.items()
    }


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms in rows, from the top: each as low as what it uses lets it be."""
    height: dict[str, int] = {}

    def measure(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((measure(other) for other in graph[room]), default=-1)
        return height[room]

    for room in graph:
        measure(room)
    order = list(COLORS)
    levels: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for room in sorted(graph, key=lambda name: (order.index(family(name)), name)):
        levels[height[room]].append(room)
    return levels[::-1]


def family(room: str) -> str:
    """Return what a room's color goes by: its name, or the first part of it."""
    return room if room in COLORS else room.replace(".", "/").split("/")[0]


def draw(graph: dict[str, set[str]]) -> str:
    """Return the picture: a row of boxes for each level, as wide as all others."""
    levels, shown = rows(graph), direct(graph)
    height = GAP + len(levels) * (BOX_HEIGHT + GAP) + LINE
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, level in enumerate(levels):
        y, wide = GAP + number * (BOX_HEIGHT + GAP), (WIDTH - GAP) // len(level) - GAP
        for place, room in enumerate(level):
            x = GAP + place * (wide + GAP)
            out.append(
                f'<rect x="{x}" y="{y}" width="{wide}" height="{BOX_HEIGHT}" rx="4" fill="{COLORS[family(room)]}" '
                'stroke="#888888"/>'
            )
            out.append(f'<text x="{x + 8}" y="{y + 16}" font-size="13" font-weight="bold">{room}</text>')
            names = f"uses {', '.join(sorted(shown[room]))}" if shown[room] else ""
            lines = [
                line for text in (DOES[room], names) for line in textwrap.wrap(text, (wide - 16) // LETTER)
            ]
            for line, text in enumerate(lines):
                out.append(f'<text x="{x + 8}" y="{y + 30 + line * LINE}" font-size="11">{text}</text>')
    out.append(f'<text x="{GAP}" y="{height - GAP // 2}" font-size="11">{LEGEND}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    picture = draw(uses(ROOT))
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(picture)
        return 0
    is_current = PICTURE.is_file() and PICTURE.read_text() == picture
    print("rooms: the picture is current" if is_current else f"{PICTURE}: not current; run tools/rooms.py")
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
