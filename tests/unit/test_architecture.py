# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: what it names is there, and its picture is the tree's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import rooms  # noqa: E402

STOP = re.compile(r"^\| (first|\d+) \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
WALKS = re.split(r"^### ", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE)[1:]


def defines(path: Path, name: str) -> bool:
    """Whether a file has a function or class of that name, with a body; a call of one does not count."""
    text = path.read_text()
    if path.suffix == ".py":
        return bool(re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE))
    head = rf"^ *(?!return )(?:[\w:<>*&,]+ )+(?:\w+::)?{name}\("
    arguments = r"(?:[^;{}()]|\{\}|\([^()]*\))*"
    return bool(re.search(head + arguments + r"\) (?:const |override )*\{", text, re.MULTILINE))


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.split("\n")[0])
def test_every_stop_of_a_walk_is_there(walk: str) -> None:
    stops = STOP.findall(walk)
    rows = [line for line in walk.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(stops) == len(rows) >= 8
    numbers = [int(number) for number, *_ in stops if number != "first"]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, max(numbers) + 1))
    for _, path, name in stops:
        assert defines(ROOT / path, name), f"{path} has no {name}"


@pytest.mark.parametrize(
    ("name", "there"), [("notify_on_levels", True), ("launch", False), ("complete", False)]
)
def test_a_call_is_no_definition(name: str, there: bool) -> None:
    assert defines(ROOT / "src/moe/buffer_levels.cc", name) == there


def test_the_picture_of_the_rooms_is_current() -> None:
    assert rooms.PICTURE.read_text() == rooms.draw(rooms.uses(rooms.ROOT))


def test_each_box_says_what_its_room_does() -> None:
    graph = rooms.uses(rooms.ROOT)
    assert set(rooms.DOES) == set(graph)
    assert all(3 <= len(words.split()) <= 7 for words in rooms.DOES.values())
    assert "port" in rooms.DOES["src/transports"]


def test_a_room_stands_above_all_that_it_uses() -> None:
    graph = {"src/moe": {"src/plan", "src/base"}, "src/plan": {"src/base"}, "src/base": set[str]()}
    assert rooms.rows(graph) == [["src/moe"], ["src/plan"], ["src/base"]]
    assert rooms.direct(graph)["src/moe"] == {"src/plan"}
    graph["src/base"].add("src/moe")
    with pytest.raises(ValueError, match="uses itself"):
        rooms.direct(graph)
