# SPDX-License-Identifier: Apache-2.0
"""The guides are true: every program and every command of theirs runs, in order, and prints what the page shows.

A ``python`` block begins with ``# NAME.py`` and is that file. In a ``console`` block a line that begins with ``$ `` is
a command; the lines below it are what it prints, in any order of lines, where ``...`` stands for anything. A ``text``
block is for machines that the tests do not have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import PYTHON, ROOT, environment

from weft import transfer

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PATIENCE_S = 240


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines that it must print."""

    line: str
    printed: tuple[str, ...]


def commands(block: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *printed = part.strip().splitlines()
        found.append(Command(line, tuple(printed)))
    return found


def missing(command: Command, printed: str) -> list[str]:
    """Return the promised lines that are not among the printed ones."""
    patterns = {line: ".*".join(map(re.escape, line.split("..."))) for line in command.printed}
    # Ranks share a pipe, and a line's end may come apart from it: a line may stand anywhere.
    return [line for line, pattern in patterns.items() if not re.search(pattern, printed)]


@pytest.fixture(scope="module")
def commands_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the guides start: the Python of tests, and commands that it runs."""
    folder = tmp_path_factory.mktemp("bin")
    for name, starts in (("python", ""), ("weft", " -m weft"), ("torchrun", " -m torch.distributed.run")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {PYTHON[0]}{starts} "$@"\n')
        command.chmod(0o755)
    return folder


def run(command: Command, folder: Path, commands_folder: Path) -> None:
    path = os.pathsep.join(
        [str(commands_folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    settings = environment() | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
    ran = subprocess.run(
        command.line,
        shell=True,
        cwd=folder,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, f"{command.line}\n{ran.stdout[-6000:]}"
    assert missing(command, ran.stdout) == [], ran.stdout[-4000:]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_programs_and_commands_of_the_guide_do_what_it_shows(
    guide: Path, commands_folder: Path, tmp_path: Path
) -> None:
    text = guide.read_text()
    for provider in sorted(set(re.findall(r"fabric:(?:shm|tcp)", text))):
        if not any(nic.is_usable for nic in transfer.nics(provider)):
            pytest.skip(f"{provider} is not usable here: apt install libfabric1")
    for language, block in BLOCK.findall(text):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"{guide.name}: a python block begins with # NAME.py: {block[:60]!r}"
            (tmp_path / name[1]).write_text(block)
        elif language == "console":
            for command in commands(block):
                run(command, tmp_path, commands_folder)
        else:
            assert language == "text", f"{guide.name}: a block is python, console or text, not {language!r}"


def test_every_guide_is_listed() -> None:
    listed = (ROOT / "docs" / "guides" / "README.md").read_text()
    assert [guide.name for guide in GUIDES if f"({guide.name})" not in listed] == ["README.md"]
