# SPDX-License-Identifier: Apache-2.0
"""Draws docs/assets/overview.png from the kept results: how tokens flow, and three times beside peers.

Usage: .venv/bin/python tools/readme_picture.py. A test compares the README's figures with ``figures()``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.pictures import color_of, footnote, picture, time_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Figure:
    """One comparison of one run: a peer's median time and Weft's, in microseconds."""

    what: str
    peer: str
    weft_us: float
    peer_us: float

    @property
    def ratio(self) -> float:
        return self.peer_us / self.weft_us


def figures() -> list[Figure]:
    """Return the README's three figures, each from one file, the least favourable row of several."""
    moe = _rows("h200-x4-high-throughput-bf16", "ht_dispatch") + _rows(
        "h200-x4-high-throughput-bf16", "ht_combine"
    )
    gathers = [row for row in _rows("h200-x4-collective", "all_gather") if row["bytes"] == 1 << 16]
    pages = _rows("cpu-2core-transfer-tcp", "paged_write")
    return [
        Figure("dispatch + combine\nBF16, 4096 tokens, 4 H200", "nccl", *_sums(moe, "nccl")),
        Figure("all_gather\n64 KiB, 4 H200", "nccl", *_sums(gathers, "nccl")),
        Figure(
            "1000 KV pages of 4 KiB\nover TCP, 2 CPU cores",
            "nixl",
            *min((_sums([row], "nixl") for row in pages), key=lambda us: us[1] / us[0]),
        ),
    ]


def _rows(stem: str, call: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{stem}.json").read_text())["rows"]
    return [row for row in rows if row["call"] == call]


def _sums(rows: list[dict[str, Any]], peer: str) -> tuple[float, float]:
    return sum(row["us"] for row in rows), sum(row["baselines"][peer] for row in rows)


def draw_flow(axes: Any) -> None:
    """Two tokens of rank 0: a row goes once to each rank that owns one of its experts."""
    from matplotlib.patches import FancyBboxPatch

    def box(x: float, y: float, text: str, color: str, width: float = 0.22) -> None:
        shape = FancyBboxPatch(
            (x, y - 0.05), width, 0.1, boxstyle="round,pad=0.01", facecolor=color, edgecolor="none"
        )
        axes.add_patch(shape)
        axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9)

    def arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6})

    axes.set_axis_off()
    axes.set(xlim=(-0.03, 1.02), ylim=(0, 1))
    weft, muted = color_of("weft"), "#dfe7f5"
    ys = (0.74, 0.5, 0.26)
    for rank, y in enumerate(ys):
        box(0.0, y, f"rank {rank}: tokens", "#e9ecf1")
        box(0.4, y, f"rank {rank}: experts", muted)
        box(0.8, y, f"rank {rank}: sums", "#e9ecf1", 0.19)
    for start, end in ((0, 1), (0, 2), (1, 0), (2, 1)):
        arrow((0.235, ys[start]), (0.385, ys[end]), weft)
        arrow((0.635, ys[end]), (0.785, ys[start]), "#e8833a")
    axes.text(0.25, 0.9, "dispatch: a row once per rank", ha="center", color=weft, fontsize=10)
    axes.text(0.77, 0.9, "combine: summed in float32", ha="center", color="#b85c14", fontsize=10)
    axes.text(
        0.5,
        0.06,
        "GPUs store into each other's memory; no staging copy,\nno host in between.",
        ha="center",
        fontsize=9,
    )
    axes.set_title("How tokens flow", loc="left", fontweight="bold")


def draw_ratios(axes: Any, shown: list[Figure]) -> None:
    """A pair of bars per figure, as multiples of Weft's time."""
    for place, figure in enumerate(reversed(shown)):
        axes.barh(place + 0.19, 1, 0.34, color=color_of("weft"))
        axes.barh(place - 0.19, figure.ratio, 0.34, color=color_of(figure.peer))
        axes.text(1.06, place + 0.19, f"Weft {time_text(figure.weft_us)}", va="center", fontsize=9)
        peer = {"nccl": "NCCL", "nixl": "NIXL"}[figure.peer]
        text = f"{peer} {time_text(figure.peer_us)}: {figure.ratio:.1f}x"
        axes.text(figure.ratio + 0.06, place - 0.19, text, va="center", fontsize=9)
    axes.set_yticks(range(len(shown)), [figure.what for figure in reversed(shown)])
    axes.set_xlim(0, max(figure.ratio for figure in shown) * 1.32)
    axes.set_xlabel("time, as a multiple of Weft's (shorter is better)")
    axes.grid(False)
    axes.set_title("Beside peers, in the same run", loc="left", fontweight="bold")


def main() -> None:
    """Write the picture."""
    path = ROOT / "docs" / "assets" / "overview.png"
    path.parent.mkdir(exist_ok=True)
    subtitle = "GPU-initiated communication: expert parallelism, collectives, transfers"
    with picture(path, "Weft", subtitle, (1, 2), (6.4, 4.2)) as (figure, axes):
        draw_flow(axes[0][0])
        draw_ratios(axes[0][1], figures())
        footnote(
            figure,
            "Medians of runs in bench/results. NCCL dispatches and combines by an all-to-all and waits for counts.",
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
