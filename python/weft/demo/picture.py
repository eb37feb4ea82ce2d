# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: both loss curves, and which rank's rows went to which expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: Path, losses: Mapping[str, Sequence[float]], rows: Sequence[Sequence[int]], experts_per_rank: int
) -> None:
    """Write a PNG.

    Args:
        losses: label -> nats per byte, by step.
        rows: per source rank, rows that chose each expert.
        experts_per_rank: where the lines between the ranks that own the experts are drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, heat) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for (label, values), style in zip(losses.items(), ("-", "--"), strict=False):
        curves.plot(values, style, label=label, linewidth=1)
    curves.set(xlabel="step", ylabel="loss (nats per byte)", title="The same model, the same seed")
    curves.legend()
    image = heat.imshow(rows, aspect="auto", cmap="viridis")
    for border in range(experts_per_rank, len(rows[0]), experts_per_rank):
        heat.axvline(border - 0.5, color="white", linewidth=1)
    heat.set(
        xlabel="expert (lines divide the ranks that own them)",
        ylabel="rank that holds the token",
        title="Rows from rank to expert, all steps",
    )
    heat.set_yticks(range(len(rows)))
    figure.colorbar(image, ax=heat, label="rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
