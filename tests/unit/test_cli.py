# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import cli
from weft.errors import Error


def test_only_installed_commands_are_offered() -> None:
    assert cli.is_installed("weft.bench.report")
    assert not cli.is_installed("weft.bench.no_such_benchmark")
    parser = cli.make_parser(["--help"])
    offered = {line.split()[0] for line in parser.format_help().splitlines() if line.startswith("    ")}
    assert "bench" in offered
    for name, (module, _) in cli.COMMANDS.items():
        assert (name in offered) == cli.is_installed(module), name


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["unravel"])
    assert stopped.value.code == 2
    assert "unravel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        (["top", "--nonsense"], "weft top"),
        (["bench", "moe", "-x"], "weft bench moe"),
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
    monkeypatch.setattr(cli, "is_installed", lambda module: True)
    assert cli.main(["refuse", "--ranks", "0"]) == 1
    assert capsys.readouterr().err == "weft: ranks: got 0, allowed: 1 or more\n"
    assert issubclass(Error, ValueError)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("numpy", ["compile", "--list"]),
        ("torch", ["tune"]),
        ("torch", ["bench", "collective", "--device", "cpu"]),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line(missing: str, command: list[str]) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None; from weft.cli import main; sys.exit(main({command}))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 1 and not ran.stdout
    assert ran.stderr == f"weft: {missing} is not installed, which this command needs\n"


def test_the_command_itself_needs_no_torch() -> None:
    script = "import sys, weft.cli; weft.cli.make_parser(['--help']); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
