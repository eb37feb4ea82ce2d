# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft import cli
from weft.errors import Error, NotInstalled

needs_house = pytest.mark.skipif(
    importlib.util.find_spec("weft.bench") is None, reason="needs weft.bench, which this build is without"
)


def test_every_command_is_offered() -> None:
    parser = cli.make_parser(["--help"])
    offered = {line.split()[0] for line in parser.format_help().splitlines() if line.startswith("    ")}
    assert offered >= cli.COMMANDS.keys() | cli.GROUPS.keys()


@pytest.mark.parametrize(
    ("command", "missing"),
    [("bench", "bench"), ("profile", "profile"), ("chaos", "chaos"), ("tune", "testing")],
)
def test_a_build_without_the_house_says_what_is_missing(command: str, missing: str) -> None:
    script = (
        "import sys; from importlib.machinery import PathFinder as finder; find = finder.find_spec\n"
        f"hidden = lambda name, *rest: None if name == 'weft.{missing}' else find(name, *rest)\n"
        f"finder.find_spec = hidden; from weft.cli import main; sys.exit(main(['{command}']))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"weft: weft.{missing}, which this command needs, is no part of this build (WEFT_MEASURE=OFF; in a "
        "checkout: run tools/dev-build)\n"
    )


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["unravel"])
    assert stopped.value.code == 2
    assert "unravel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        (["top", "--nonsense"], "weft top"),
        pytest.param(["bench", "moe", "-x"], "weft bench moe", marks=needs_house),
        (["-x", "top"], "weft"),
    ],
)
def test_an_unknown_option_is_refused_by_its_command(
    arguments: list[str], who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {who} [-h]")
    assert f"{who}: error: unrecognized arguments: " in said


def test_error_is_one_line_and_status_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refusing.py").write_text(
        "from weft.errors import invalid\n"
        "def add_arguments(parser): parser.add_argument('--ranks', type=int)\n"
        "def run(args): raise invalid('ranks', args.ranks, '1 or more')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cli, "COMMANDS", {"refuse": ("refusing", "refuses")})
    assert cli.main(["refuse", "--ranks", "0"]) == 1
    assert capsys.readouterr().err == "weft: ranks: got 0, allowed: 1 or more\n"
    assert issubclass(Error, ValueError)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("numpy", ["compile", "--list"]),
        ("torch", ["tune"]),
        pytest.param("torch", ["bench", "collective", "--device", "cpu"], marks=needs_house),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line(missing: str, command: list[str]) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None; from weft.cli import main; sys.exit(main({command}))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 1 and not ran.stdout
    assert ran.stderr == f"weft: {NotInstalled('this command', missing)}\n"
    assert f"{missing} is not installed, which this command needs: pip install {missing}" in ran.stderr


@pytest.mark.parametrize(
    "name", ["Buffer", "ElasticBuffer", "HybridEPBuffer", "P2PAllToAll", "EventHandle", "ops"]
)
def test_a_name_that_needs_torch_says_so_and_is_an_import_error(name: str) -> None:
    script = f"import sys; sys.modules['torch'] = None\ntry:\n    from weft import {name}\n"
    script += (
        "except ImportError as error:\n    import weft; assert isinstance(error, weft.Error); print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == f"torch is not installed, which weft.{name} needs: pip install torch numpy\n"


@pytest.mark.parametrize("arguments", [[], pytest.param(["bench"], marks=needs_house)])
def test_without_a_command_the_help_is_printed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: {' '.join(['weft', *arguments])} ") and "collective" in said.out
    assert not said.err


@pytest.mark.parametrize("given", ["0", "-2", "two"])
@pytest.mark.parametrize(
    ("command", "option", "least"),
    [
        pytest.param(["bench", "collective"], "--ranks", 1, marks=needs_house),
        pytest.param(["bench", "moe"], "--ranks", 1, marks=needs_house),
        pytest.param(["bench", "moe"], "--iterations", 1, marks=needs_house),
        pytest.param(["bench", "floor"], "--ranks", 2, marks=needs_house),
        (["tune"], "--ranks", 2),
        (["demo"], "--ranks", 1),
        (["demo"], "--steps", 1),
        (["compile", "allgather_ring"], "--ranks", 1),
        (["compile", "allgather_ring"], "--instances", 1),
        (["show", "allgather_ring"], "--ranks", 1),
    ],
)
def test_a_number_that_there_cannot_be_is_refused(
    command: list[str], option: str, least: int, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, option, given])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{option}: got {given}, allowed: a whole number, {least} or more\n" in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weft s", ["show", "synthesise"]),
        pytest.param(
            "weft bench ",
            ["--help", "-h", "channel", "collective", "floor", "moe", "transfer", "transfer-gpu"],
            marks=needs_house,
        ),
        pytest.param("weft bench moe --mode ", ["ht", "ll", "p2p"], marks=needs_house),
        pytest.param(
            "weft profile ",
            ["--help", "-h", "constants", "first-use", "host", "nccl", "phases", "sides"],
            marks=needs_house,
        ),
        ("weft show --mach", ["--machine "]),
    ],
)
def test_a_shell_is_told_what_may_come_next(line: str, expected: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    script = "import sys; sys.argv[0] = 'weft'; from weft.cli import main; main()"
    subprocess.run([sys.executable, "-c", script], env=os.environ | asked, check=True, timeout=60)
    assert sorted(answer.read_text().split("\n")) == expected


def test_the_command_itself_needs_no_torch() -> None:
    script = "import sys, weft.cli; weft.cli.make_parser(['--help']); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
