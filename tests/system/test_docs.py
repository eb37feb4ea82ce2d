# SPDX-License-Identifier: Apache-2.0
"""What the documents show is true: programs run, commands and files exist. The guides have test_guides.py."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
from programs import PYTHON, run_program, torchrun

from weft import cli, transfer

ROOT = Path(__file__).parents[2]
FOLDERS = ["bench", "compat", "docs", "examples", "kernels", "python", "src", "tests", "tools"]
FOLDERS += ["src/providers", "src/transports", "measure"]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench/results").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in FOLDERS if folder != "docs"),
]
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks() -> list[tuple[str, str]]:
    pages = [page for page in PAGES if page.parent.name != "guides"]
    return [(page.name, text) for page in pages for text in PYTHON_BLOCK.findall(page.read_text())]


def numbered_blocks() -> list[object]:
    counts: Counter[str] = Counter()
    found = []
    for page, text in blocks():
        counts[page] += 1
        found.append(pytest.param(text, id=f"{page}-{counts[page]}"))
    return found


@pytest.mark.parametrize("text", numbered_blocks())
def test_python_blocks_run(text: str, tmp_path: Path) -> None:
    """A block that starts a process group is a program for torchrun, of 3 ranks if it does not say; others are one
    process."""
    (tmp_path / "program.py").write_text(text)
    if "init_process_group" not in text:
        if '"fabric:shm"' in text and not any(nic.is_usable for nic in transfer.nics("fabric:shm")):
            pytest.skip("libfabric's shm provider is not usable here: apt install libfabric1")
        ran = run_program([*PYTHON, "program.py"], tmp_path)
        assert ran.returncode == 0, ran.stderr[-4000:]
        return
    ranks = int((re.findall(r"# torchrun --nproc-per-node (\d)", text) or ["3"])[0])
    ran = run_program([*torchrun(ranks), "program.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    # Ranks share a pipe, and a line's end may come apart from it.
    assert sorted(re.findall(r"rank (\d): ", ran.stdout)) == [str(rank) for rank in range(ranks)]


# A command of a block, without what only the shell reads; and the names of commands and options in a sentence.
COMMAND = re.compile(r"^(?: {4}|\$ )?(?:[A-Z_]+=\S+ )*weft ((?!info: ).*?)(?: +#.*)?$", re.MULTILINE)
MENTION = re.compile(r"`weft ([a-z][^`]*)`")
PLACEHOLDERS = {"SEED": "1", "TRANSPORT": "mapped"}


def found_in_pages(pattern: re.Pattern[str]) -> list[str]:
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    return sorted({" ".join(found.split()) for text in texts for found in pattern.findall(text)})


def parse(words: list[str]) -> int:
    """Return the status with which ``weft`` would leave before it does anything; 0 where it would begin."""
    if words[0] in ("bench", "chaos", "profile"):
        pytest.importorskip(f"weft.{words[0]}", reason=f"needs weft.{words[0]}, which this build is without")
    try:
        cli.make_parser(words).parse_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("line", [line for line in found_in_pages(COMMAND) if "ht|ll" not in line])
def test_commands_of_the_documents_are_understood(line: str) -> None:
    assert parse([PLACEHOLDERS.get(word, word) for word in shlex.split(line)]) == 0


@pytest.mark.parametrize("line", found_in_pages(MENTION))
def test_what_sentences_call_weft_with_exists(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = line.split()
    commands = [
        word
        for word in words[:2]
        if not word.startswith("-") and (word == words[0] or words[0] in cli.GROUPS)
    ]
    assert parse([*commands, "--help"]) == 0
    helped = capsys.readouterr().out
    assert [word for word in words if word.startswith("-") and word not in helped] == []


def run_example(name: str, folder: Path) -> str:
    ran = run_program(
        [*torchrun(2), str(ROOT / "examples" / name)], folder, more={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def test_the_example_of_collectives_runs(tmp_path: Path) -> None:
    assert run_example("collectives.py", tmp_path) == "average 0.50, ranks [0, 1], to rank 0 [0, 10]\n"


def test_the_training_examples_have_the_same_losses(tmp_path: Path) -> None:
    ddp, fsdp2 = (
        {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}
        for printed in (run_example("ddp.py", tmp_path), run_example("fsdp2.py", tmp_path))
    )
    assert list(ddp) == [5, 10, 15, 20]
    assert fsdp2 == pytest.approx(ddp, rel=1e-4)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\* \[(\d+)\. .*\]\((0.*\.md)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name in listed] == sorted(path.name for path in folder.glob("0*.md"))
    for number, name in listed:
        text = (folder / name).read_text()
        assert text.startswith(f"# {number}. "), name
        assert sum(bool(re.search(r"\w", word)) for word in text.split()) <= 200, name


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    pytest.importorskip("weft.bench", reason="needs weft.bench, which this build is without")
    sys.path.insert(0, str(ROOT / "tools"))
    import readme_picture

    readme = (ROOT / "README.md").read_text()
    for figure in readme_picture.figures():
        row = next(line for line in readme.splitlines() if line.endswith(f"| {figure.ratio:.1f}x |"))
        for us in (figure.weft_us, figure.peer_us):
            assert any(text in row for text in (f"{us:.3g} us", f"{us / 1e3:.2f} ms")), (row, us)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_may_be_changed_and_how_it_is_tested(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    assert all(head in text for head in ("What may be changed.", "How it is tested.", "A good first change."))
    assert f"({folder}/README.md)" in (ROOT / "CONTRIBUTING.md").read_text()


def test_pre_commit_runs_the_checks_of_lint() -> None:
    named = re.findall(r'^check "([^"]+)"', (ROOT / "tools/lint").read_text(), re.MULTILINE)
    hooks = re.findall(r"^ +name: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert hooks == named
