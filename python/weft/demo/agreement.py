# SPDX-License-Identifier: Apache-2.0
"""How far apart the losses of the two runs may be, and why.

Both runs compute the same sums. They differ in two ways only:

* Rounding. Rows are bf16 where they meet their experts, in both runs. One rank rounds a row's sum over its
  experts once; over ranks, each rank rounds its own part, and the sum of the parts is rounded again: with
  top-2, up to three roundings instead of one, each off by at most 2^-9 of the value. Gradients of rows,
  likewise.
* Order. float32 sums over a rank's sequences are added in another order: about 2^-24 a term.

So at the first step, before the runs have drifted, an output of a mixture of experts differs by at most about
3 * 2^-9 = 0.6 % of a row's value, with either sign. The loss averages over a thousand bytes, most of what
decides it passes beside the experts (the residual path), and the signs cancel: FIRST_STEP allows 2^-9 of the
loss.

After that, training itself amplifies any difference: Adam divides a gradient by its own size, so a small
gradient's sign matters, and a row near the border between two experts changes sides. In a run of 200 steps over
4 ranks the difference of single steps grew from 3e-5 to at most 1.7 %, and the means over the last fifth of the
steps differed by 0.17 %. LAST_STEPS bounds the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_STEP = 2.0**-9
LAST_STEPS = 0.03


@dataclass(frozen=True)
class Agreement:
    """Relative differences of the losses, and whether both are within what the arithmetic allows."""

    first_step: float
    last_steps: float

    @property
    def holds(self) -> bool:
        return self.first_step <= FIRST_STEP and self.last_steps <= LAST_STEPS

    def sentence(self) -> str:
        """Say both differences beside their limits."""
        return (
            f"losses differ by {self.first_step:.2e} at the first step (allowed {FIRST_STEP:.2e}) and by "
            f"{self.last_steps:.2%} over the last fifth (allowed {LAST_STEPS:.0%})"
        )


def last_mean(losses: Sequence[float]) -> float:
    """Return the mean over the last fifth of the steps, at least one."""
    count = max(1, len(losses) // 5)
    return sum(losses[-count:]) / count


def last_loss(losses: Sequence[float]) -> str:
    """Return last_mean() as the table and the picture both show it."""
    return f"{last_mean(losses):.4f}"


def compare(alone: Sequence[float], over_ranks: Sequence[float]) -> Agreement:
    """Compare two runs' losses, equally many, one or more."""
    return Agreement(
        abs(alone[0] - over_ranks[0]) / alone[0],
        abs(last_mean(alone) - last_mean(over_ranks)) / last_mean(alone),
    )
