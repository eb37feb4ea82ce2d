# SPDX-License-Identifier: Apache-2.0
"""What litmus tests show on a GPU is what the weak machine of tests/weak allows; else it proves too much.

    python -m pytest tests/gpu/test_litmus_gpu.py
    python tests/gpu/test_litmus_gpu.py [--seconds 50] [--json FILE]   # needs nvcc, g++ and no more

Builds litmus.cu, which runs each shape of tests/weak/shapes.h on one GPU, and asks tools/weak-order what each may show.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build/weak/litmus"
SEEDS = 20_000
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def build() -> None:
    """Compile litmus.cu."""
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O2", "-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90", "-Itests"]
    command = [NVCC, *flags, "tests/gpu/litmus.cu", "-o", str(PROGRAM)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


def observed(seconds: float, part: str) -> dict[str, Any]:
    """Return what the GPU showed, and with how many runs."""
    command = [str(PROGRAM), str(seconds), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    assert done.returncode == 0, f"litmus ended with {done.returncode}: {done.stderr}\n{done.stdout[-2000:]}"
    return dict(json.loads(done.stdout))


def allowed() -> dict[str, Any]:
    """Return what the weak machine shows of each shape."""
    command = [sys.executable, str(ROOT / "tools/weak-order"), "--allowed", str(SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def judged(shapes: dict[str, Any], rules: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what was observed and is not allowed, and what PTX allows though the machine never shows it.

    Where the machine reports a race, it allows any outcome.
    """
    wrong: list[str] = []
    gaps: list[str] = []
    for name, seen in shapes.items():
        rule = rules[name]
        for outcome, count in seen["outcomes"].items():
            if rule["races"] or outcome in rule["allowed"]:
                continue
            sentence = f"{name}: [{outcome}], {count} of {seen['instances']} times"
            (gaps if outcome in rule["gaps"] else wrong).append(sentence)
    return wrong, gaps


def compare(seconds: float, part: str = "", kept: Path | None = None) -> list[str]:
    """Run both, print what was seen, and return what the machine does not allow."""
    rules = allowed()
    build()
    found = observed(seconds, part)
    if kept:
        kept.write_text(json.dumps(found, indent=1) + "\n")
    for name, seen in found["shapes"].items():
        outcomes = "  ".join(f"[{outcome}] {count}" for outcome, count in seen["outcomes"].items())
        unseen = [] if rules[name]["races"] else sorted(set(rules[name]["allowed"]) - set(seen["outcomes"]))
        print(f"{name}: {outcomes}" + (f"  allowed, not seen: {unseen}" if unseen else ""))
    wrong, gaps = judged(found["shapes"], rules)
    missing = {name for name, rule in rules.items() if rule["on_gpu"] and part in name} - set(found["shapes"])
    print(f"{found['device']}, {found['seconds']} s, seed {found['seed']}")
    print("PTX allows it, the machine never shows it:", *(gaps or ["nothing seen"]), sep="\n  ")
    return wrong + [f"{name}: did not run" for name in sorted(missing)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--part", default="", help="only shapes whose names have this")
    parser.add_argument("--json", type=Path, help="keep what the GPU showed here")
    options = parser.parse_args()
    wrong = compare(options.seconds, options.part, options.json)
    print("not allowed by the weak machine:", *(wrong or ["nothing"]), sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

import pytest  # noqa: E402  the program above needs none


@pytest.mark.one_gpu
@pytest.mark.skipif(not Path(NVCC).exists(), reason="nvcc is not installed")
def test_a_gpu_shows_nothing_that_the_weak_machine_does_not_allow() -> None:
    wrong = compare(seconds=40)
    assert not wrong, "\n".join(wrong)
