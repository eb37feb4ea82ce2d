# SPDX-License-Identifier: Apache-2.0
"""What became of the variables of a library that a drop-in stands in for: one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weft import _core
from weft.runtime import logs


def say(whose: str, log: logging.Logger, made: Sequence[tuple[str, bool]]) -> None:
    """Log in one line what was made of each variable; a warning if one of them is not used.

    Args:
        whose: the library. made: (what to say, whether it is used) of each variable that is set.
    """
    if made:
        logs.follow(_core.config().log)
        level = logging.INFO if all(is_used for _, is_used in made) else logging.WARNING
        log.log(level, "%s's variables: %s", whose, "; ".join(text for text, _ in made))


def understand_deep_ep() -> None:
    """Say what DEEP_EP_BACKEND, EP_DISABLE_GIN and NCCL_GIN_TYPE come to here."""
    say("DeepEP", logging.getLogger("weft.deep_ep"), _core.deep_ep_variables())
