# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: both loss curves, and which rank's rows went to which expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.demo.agreement import last_loss

_MOST_NUMBERS = 160  # cells that still have room for their number
_WHY_ALIKE = (
    "Right: 1 is an even share. Rows of the map look alike because all ranks read the same text; "
    "columns differ because the router prefers some experts."
)


def draw(
    path: Path,
    losses: Mapping[str, Sequence[float]],
    rows: Sequence[Sequence[int]],
    experts_per_rank: int,
    settings: str = "",
) -> None:
    """Write a PNG.

    Args:
        losses: label -> nats per byte, by step.
        rows: per source rank, rows that chose each expert.
        experts_per_rank: where the lines between the ranks that own the experts are drawn.
        settings: the line under the title.
    """
    from weft.bench.pictures import COLORS, footnote, picture

    path.parent.mkdir(parents=True, exist_ok=True)
    title = "One model, one seed: trained on one rank and through Weft"
    with picture(path, title, settings, (1, 2), (6.8, 4.6)) as (figure, axes):
        curves, heat = axes[0]
        styles = (("-", COLORS["raw"], 3.0), ("--", COLORS["weft"], 1.2))
        for (label, values), (line, color, width) in zip(losses.items(), styles, strict=False):
            end = f"{label}: {last_loss(values)} over the last fifth"
            curves.plot(range(1, len(values) + 1), values, line, color=color, label=end, linewidth=width)
        curves.set(xlabel="step", ylabel="loss, nats per byte")
        curves.set_title("The losses agree", loc="left", fontweight="bold")
        curves.legend()
        _draw_map(figure, heat, rows, experts_per_rank)
        footnote(figure, _WHY_ALIKE)


def _draw_map(figure: Any, heat: Any, rows: Sequence[Sequence[int]], experts_per_rank: int) -> None:
    from matplotlib.colors import TwoSlopeNorm

    shares = [[count * len(row) / max(sum(row), 1) for count in row] for row in rows]
    most = max(max(row) for row in shares)
    scale = TwoSlopeNorm(vmin=0, vcenter=1, vmax=max(most, 1.1))
    image = heat.imshow(shares, aspect="auto", cmap="RdBu_r", norm=scale)
    for border in range(experts_per_rank, len(rows[0]), experts_per_rank):
        heat.axvline(border - 0.5, color="#111111", linewidth=1.2)
    if len(rows) * len(rows[0]) <= _MOST_NUMBERS:
        for rank, row in enumerate(shares):
            for expert, share in enumerate(row):
                color = "white" if abs(float(scale(share)) - 0.5) > 0.35 else "black"
                heat.text(expert, rank, f"{share:.2f}", ha="center", va="center", fontsize=7, color=color)
    heat.set(xlabel="expert (lines divide the ranks that own them)", ylabel="rank that holds the token")
    heat.set_title("Where each rank's rows went", loc="left", fontweight="bold")
    heat.set_yticks(range(len(rows)))
    heat.set_xticks(range(0, len(rows[0]), max(len(rows[0]) // 16, 1)))
    heat.grid(False)
    figure.colorbar(image, ax=heat, label="rows, as a multiple of an even share")
