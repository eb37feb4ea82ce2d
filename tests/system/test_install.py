# SPDX-License-Identifier: Apache-2.0
"""Installing Weft beside DeepEP: neither touches the other, and a program chooses."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pip
import pytest
from programs import PYTHON, ROOT, run_program

WHEELS = sorted((ROOT / "build" / "wheel").glob("weft-*.whl"))
THEIRS = {"deep_ep/__init__.py": "name = 'DeepEP'\n", "deep_ep_cpp.py": "name = 'DeepEP, compiled'\n"}

needs_wheel = pytest.mark.skipif(not WHEELS, reason="no wheel in build/wheel: run tools/setup wheel")


def run_pip(command: Sequence[str | Path], arguments: Sequence[str | Path]) -> None:
    command = [*command, "--disable-pip-version-check", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


def wheel_of(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a wheel of ``files`` as pip would build it from a pure Python project."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    wheel = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return wheel


@dataclass
class Environment:
    """A virtual environment with a copy of this one's pip: venv brings one only where ensurepip is packaged."""

    root: Path

    @staticmethod
    def made_in(folder: Path) -> Environment:
        subprocess.run([*PYTHON, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        # In a folder of its own: a pip that runs from our packages takes them for those of the environment.
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(pip.__file__).parent, folder / "pip" / "pip", ignore=leave)
        return Environment(folder)

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def packages(self) -> Path:
        return next((self.root / "venv" / "lib").glob("python3.*")) / "site-packages"

    def pip(self, *arguments: str | Path) -> None:
        run_pip([self.python, self.root / "pip" / "pip"], arguments)

    def run(self, *arguments: str, path: str = "") -> str:
        """Return what its Python prints, with ``path`` as PYTHONPATH."""
        command = [self.python, *arguments]
        return subprocess.run(
            command, env={"PYTHONPATH": path}, cwd=self.root, capture_output=True, text=True, check=True
        ).stdout.strip()

    def theirs(self) -> dict[str, str]:
        """Return DeepEP's files as they are now."""
        return {path: (self.packages / path).read_text() for path in THEIRS}


@needs_wheel
def test_weft_leaves_an_installed_deep_ep_alone(tmp_path: Path) -> None:
    env = Environment.made_in(tmp_path)
    env.pip("install", "--no-deps", "--no-index", wheel_of(tmp_path, "deep_ep", THEIRS))
    env.pip("install", "--no-deps", "--no-index", WHEELS[-1])
    assert env.theirs() == THEIRS
    drop_in = Path(env.run("-m", "weft.deep_ep_path"))
    assert {path.name for path in drop_in.iterdir()} == {"deep_ep", "deep_ep_cpp"}
    # Torch is not in this environment: where a module would come from is all there is to ask.
    where = (
        "import importlib.util as u; print(u.find_spec('deep_ep').origin, u.find_spec('deep_ep_cpp').origin)"
    )
    for path, folder in (("", env.packages), (str(drop_in), drop_in)):
        origins = env.run("-c", where, path=path).split()
        assert all(
            Path(origin).relative_to(folder).parts[0] in ("deep_ep", "deep_ep_cpp", "deep_ep_cpp.py")
            for origin in origins
        )
    env.pip("uninstall", "--yes", "weft")
    assert env.theirs() == THEIRS
    assert not list(env.packages.rglob("weft/**/*.py"))


def test_the_distribution_weft_deep_ep_holds_the_drop_in_alone(tmp_path: Path) -> None:
    source = ROOT / "compat" / "deep_ep"
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path]
    run_pip([*PYTHON, "-m", "pip"], ["wheel", *options, source])
    (wheel,) = tmp_path.glob("weft_deep_ep-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {path for path in archive.namelist() if ".dist-info/" not in path}
    modules = [*(source / "deep_ep").rglob("*.py"), *(source / "deep_ep_cpp").rglob("*.py")]
    assert packed == {path.relative_to(source).as_posix() for path in modules}


def test_every_file_has_one_version() -> None:
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "python/weft/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "conda/meta.yaml": r'version = "(.+)"',
    }
    versions = {
        path: re.findall(form, (ROOT / path).read_text(), re.MULTILINE) for path, form in places.items()
    }
    assert list(versions.values()) == [versions["pyproject.toml"]] * len(places), versions


def conda_recipe() -> Any:
    """Return conda/meta.yaml as conda-build reads it on Linux: a template of Jinja, then YAML."""
    jinja2, yaml = pytest.importorskip("jinja2"), pytest.importorskip("yaml")
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(
        (ROOT / "conda" / "meta.yaml").read_text()
    )
    return yaml.safe_load(template.render(PYTHON="python", compiler=lambda language: f"{language} compiler"))


def test_the_conda_recipe_says_what_pyproject_says() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    recipe, pyproject = conda_recipe(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = pyproject["project"], pyproject["project"]["optional-dependencies"]
    needs = recipe["requirements"]
    python = f"python {project['requires-python']}"
    conda_names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}

    def of_pypi(requirements: list[str]) -> set[str]:
        parts = [re.fullmatch(r"([\w-]+)(.*)", requirement) for requirement in requirements]
        return {f"{conda_names.get(part[1], part[1])} {part[2]}".strip() for part in parts if part}

    assert recipe["package"] == {"name": project["name"], "version": project["version"]}
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]["text"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()
    assert (ROOT / "conda" / recipe["source"]["path"] / "pyproject.toml").is_file()
    assert recipe["build"]["entry_points"] == [
        f"{name} = {call}" for name, call in project["scripts"].items()
    ]
    assert set(needs["run"]) == {python, *of_pypi(project["dependencies"])}
    assert set(needs["host"]) == {python, "pip", *of_pypi(pyproject["build-system"]["requires"])}
    compiled = of_pypi(pyproject["dependency-groups"]["build"]) - set(needs["host"])
    assert set(needs["build"]) == {"cxx compiler", *compiled}
    optional = of_pypi([*extras["torch"], *extras["plot"], *extras["metrics"]])
    assert set(needs["run_constrained"]) == optional - set(needs["host"])


def test_both_distributions_have_one_version() -> None:
    weft, drop_in = (
        re.findall(r'^version = "(.+)"$|^dependencies = \["weft==(.+)"\]$', path.read_text(), re.MULTILINE)
        for path in (ROOT / "pyproject.toml", ROOT / "compat" / "deep_ep" / "pyproject.toml")
    )
    ((version, _),) = weft
    assert drop_in == [(version, ""), ("", version)]


def test_a_program_chooses_the_drop_in_by_its_path(tmp_path: Path) -> None:
    path = run_program([*PYTHON, "-m", "weft.deep_ep_path"], tmp_path).stdout.strip()
    program = "import deep_ep; print(deep_ep.Buffer.__module__)"
    ran = run_program([*PYTHON, "-c", program], tmp_path, more={"PYTHONPATH": path})
    assert ran.stdout == "weft.moe.buffer\n", ran.stderr
