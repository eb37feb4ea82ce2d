# SPDX-License-Identifier: Apache-2.0
"""``weft chaos``: every call in random order, size and form, while a seeded adversary hurts ranks; all is judged.

operations.py      the calls, each against the oracle (connected_engine.py: those of the transfer engine)
adversary.py       the faults: what they do, where they can be had, how a round with one may end
attacker.py        a stranger beside the ranks, who attacks their doors
rounds.py          one round: drawn from a seed and a number, run on ranks of its own
judge.py           what is wrong with a round: results, blame, errors, leaks
command.py         the command: rounds until the time is over, a table, JSON
clock_shift.c      preloaded, so that a rank's clock can be set
"""

from weft.chaos.command import add_arguments, run

__all__ = ["add_arguments", "run"]
