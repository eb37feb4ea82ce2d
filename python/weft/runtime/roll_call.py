# SPDX-License-Identifier: Apache-2.0
"""Ranks find each other in a torch key-value store and name their processes there, so that a death ends the wait at
once.

    roll = RollCall(store, rank=0)          # says at once who this rank is
    ranks = Gathering(store, roll, rank=0, size=4)
    everyone = ranks.all_gather(b"...", timeout_s=100)

A store knows keys, not processes: a rank that waits for the key of a dead rank would wait for ever. So each rank first
says which process it is, and those of its host look after it while they wait. What a rank gives carries that too, so
who has met once knows everybody. Processes are held from a quarter of a second of waiting on, and until the wait ends.

A question to a store may last for ever, too. torch's FileStore loops at a record whose writer died in the middle, and
keeps the file's lock; a TCPStore whose server is stopped does not answer. So questions are asked on a thread of their
own, which is left behind when the deadline passes.

A store may hold what a group of the same name left, as torchrun's does where a program destroys its process group and
makes it anew. So what a rank gives carries a digest of all that it was given the round before; what was given in other
company is not given yet.
Threads: one call at a time per object.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from weft import _core
from weft.errors import Error, PeerLost

_LOOK_EVERY_S = 0.25
_LAST_WORDS_S = 0.5  # what a rank gave just before it ended may still be on its way
_AT_ONCE = 16  # keys asked for, and processes looked up: a thousand ranks share one store
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0005, 0.05  # between two questions to the store
_NAME_BYTES = len(_core.this_process_name())
_COMPANY_BYTES = 16
_MOST_FATES = 4  # told of in one message
_SILENT_S = (
    2.0  # a store that answers nothing for so long is taken for broken by who misses a dead rank, or is late
)

_SILENT = "the store of the process group does not answer"

_Found = TypeVar("_Found")


class _StoreIsSilentError(Exception):
    """The store of a process group has not answered in time."""


def lost_message(rank: int, timeout_s: float, missing: list[int]) -> str:
    """Return the sentence for ranks that stayed away past the deadline."""
    names = ", ".join(f"rank {peer}" for peer in missing)
    return f"rank {rank}, bootstrap.all_gather, waited {timeout_s:.3g} s for {names}"


class RollCall:
    """Which process each rank is, as far as they have said so."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._names: dict[int, bytes] = {}
        self.mark = os.urandom(_COMPANY_BYTES)  # the same when this group meets again, and no other group's
        limit_s = _core.config().timeout_s
        until = time.monotonic() + limit_s

        def give_up() -> None:
            if time.monotonic() >= until:
                raise _StoreIsSilentError(f"no answer in {limit_s:g} s")

        try:
            ask(lambda: store.set(f"who/{rank}", _core.this_process_name()), give_up)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise Error(
                f"rank {rank}, bootstrap: torch's store does not take what this rank gives ({reason})"
            ) from error

    def learn(self, rank: int, name: bytes) -> None:
        """Note which process a rank is."""
        self._names[rank] = name

    def watch(self, missing: Iterable[int], watched: dict[int, Any]) -> None:
        """Add a core NamedProcess to ``watched`` for every known rank, and for those of ``missing`` that said who."""
        for rank in missing:
            if rank not in self._names and self._store.check([f"who/{rank}"]):
                self._names[rank] = bytes(self._store.get(f"who/{rank}"))
        for rank, name in self._names.items():
            if rank not in watched:
                watched[rank] = _core.NamedProcess(name)


class Gathering:
    """all_gather over a store: names the ranks that stay away or have died, and needs no device."""

    def __init__(self, store: Any, roll: RollCall, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._roll = store, roll
        self._round = 0
        self._company = bytes(_COMPANY_BYTES)  # of the round before
        self._given: dict[int, bytes] = {}
        self._missing: list[int] = []
        self._watched: dict[int, Any] = {}
        self._answered_at = 0.0  # when the store last did
        self._is_over = False  # nobody waits for the thread that asks any more

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """See Bootstrap.all_gather. Useless once a thread was left with a question."""
        if self._is_over:
            raise PeerLost(f"rank {self.rank}, bootstrap.all_gather: {_SILENT}")
        self._missing, self._watched = list(range(self.size)), {}
        self._answered_at = time.monotonic()
        until = self._answered_at + timeout_s
        return ask(
            lambda: self._gather(data, timeout_s),
            lambda: self._raise_if_silent(until, timeout_s),
            self._leave_thread,
        )

    def _leave_thread(self) -> None:
        self._is_over = True

    def _raise_if_silent(self, until: float, timeout_s: float) -> None:
        """Raise PeerLost where the store answers no more and a rank is dead, or the deadline has passed."""
        now = time.monotonic()
        if now - self._answered_at < _SILENT_S:
            return
        watched, missing = dict(self._watched), list(self._missing)
        ended = {rank: watched[rank] for rank in missing if rank in watched and watched[rank].has_ended}
        if ended:
            fates = _dead(ended) or _words(ended)
            raise PeerLost(f"rank {self.rank}, bootstrap.all_gather: {fates}, and {_SILENT}")
        if now >= until + _SILENT_S:
            others = [rank for rank in missing if rank != self.rank] or missing
            raise PeerLost(f"{lost_message(self.rank, timeout_s, others)}: {_SILENT}")

    def _gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        keys = [self._key(self._round, rank) for rank in range(self.size)]
        self._store.set(keys[self.rank], _core.this_process_name() + self._company + self._roll.mark + data)
        self._answered_at = time.monotonic()
        self._given = {}
        self._wait(keys, timeout_s)
        everyone = [self._given[rank] for rank in range(self.size)]
        for rank, given in enumerate(everyone):
            self._roll.learn(rank, given[:_NAME_BYTES])
        self._company = hashlib.sha256(b"".join(everyone)).digest()[:_COMPANY_BYTES]
        if self._round > 0:  # everyone is in this round, so everyone has read the last one
            self._store.delete_key(self._key(self._round - 1, self.rank))
        self._round += 1
        return [given[_NAME_BYTES + 2 * _COMPANY_BYTES :] for given in everyone]

    def _wait(self, keys: list[str], timeout_s: float) -> None:
        """Wait for all keys. By questions, as torch's store writes a warning for each wait that ends without them."""
        began = time.monotonic()
        missing, watched = self._missing, self._watched
        look_at = began + _LOOK_EVERY_S
        while missing:
            first = self._absent(keys, missing[:_AT_ONCE], watched)
            if self._is_over:
                raise _StoreIsSilentError
            missing = self._missing = first + missing[_AT_ONCE:]
            self._answered_at = time.monotonic()
            if not first:
                continue
            now = time.monotonic()
            if now >= began + timeout_s:
                self._raise_late(keys, missing, watched, timeout_s)
            if now >= look_at:
                self._raise_if_dead(keys, first, watched)
                look_at = time.monotonic() + _LOOK_EVERY_S
            nap_s = min(max(0.05 * (now - began), _SHORTEST_NAP_S), _LONGEST_NAP_S)
            time.sleep(max(min(nap_s, began + timeout_s - now), 0))

    def _absent(self, keys: list[str], ranks: list[int], watched: dict[int, Any]) -> list[int]:
        """Return those who have given nothing yet. Raises: PeerLost where the store itself is gone."""
        try:
            has_all = self._store.check([keys[rank] for rank in ranks])
            has = {rank for rank in ranks if has_all or self._store.check([keys[rank]])}
            return [rank for rank in ranks if not (rank in has and self._take(rank, keys[rank]))]
        except Exception as error:
            time.sleep(_LOOK_EVERY_S)  # its process may only be ending
            why = _dead(watched) or f"the store of the process group is gone ({str(error).splitlines()[0]})"
            raise PeerLost(f"rank {self.rank}, bootstrap.all_gather: {why}") from error

    def _take(self, rank: int, key: str) -> bool:
        """Keep what a rank has given; return whether it is of this round, and not of a group before."""
        given = bytes(self._store.get(key))
        if given[_NAME_BYTES : _NAME_BYTES + _COMPANY_BYTES] != self._company:
            return False
        self._given[rank] = given
        return True

    def _raise_if_dead(self, keys: list[str], missing: list[int], watched: dict[int, Any]) -> None:
        """Raise PeerLost where one of ``missing`` has ended, naming those that took the others along."""
        self._roll.watch(missing, watched)
        ended = [rank for rank in missing if rank in watched and watched[rank].has_ended]
        if not ended:
            return
        time.sleep(_LAST_WORDS_S)
        if ended := self._absent(keys, ended, watched):
            words = _dead(watched) or _words({rank: watched[rank] for rank in ended})
            raise PeerLost(f"rank {self.rank}, bootstrap.all_gather: {words}")

    def _raise_late(
        self, keys: list[str], missing: list[int], watched: dict[int, Any], timeout_s: float
    ) -> None:
        missing = self._absent(keys, missing, watched)
        some = missing[:_MOST_FATES]
        self._roll.watch(some, watched)
        known = _words({rank: watched[rank] for rank in some if rank in watched})
        silent = [f"rank {rank} has not come" for rank in some if rank not in watched]
        if missing:
            fates = ", ".join(filter(None, [known, *silent]))
            raise PeerLost(lost_message(self.rank, timeout_s, missing) + f": {fates}")

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"{number}/{rank}"


def ask(
    question: Callable[[], _Found], give_up: Callable[[], None], on_leave: Callable[[], None] = lambda: None
) -> _Found:
    """Return, or raise, what ``question`` does on a thread of its own.

    ``give_up`` is called now and then; what it raises ends the wait, and leaves the thread behind, as a signal does.
    ``on_leave`` is called then.
    """
    found: list[_Found] = []
    failed: list[BaseException] = []
    is_over = threading.Event()

    def answer() -> None:
        try:
            found.append(question())
        except BaseException as error:
            failed.append(error)
        finally:
            is_over.set()

    threading.Thread(target=answer, name="weft-store", daemon=True).start()
    began = time.monotonic()
    try:
        while not is_over.wait(_LOOK_EVERY_S):
            if time.monotonic() - began < 4 * _LOOK_EVERY_S:  # who was stopped meanwhile looks once more
                give_up()
            began = time.monotonic()
    except BaseException:
        on_leave()
        raise
    if failed:
        raise failed[0]
    return found[0]


def _dead(processes: dict[int, Any]) -> str:
    """Return who of them died, in words: the ones that a signal killed, where there are any; "" for nobody.

    Others may have ended because of the first death, or well.
    """
    ended = {rank: process for rank, process in processes.items() if process.has_ended}
    killed = {rank: process for rank, process in ended.items() if process.was_killed}
    badly = {rank: process for rank, process in ended.items() if process.fate != "exited with status 0"}
    return _words(killed or badly)


def _words(processes: dict[int, Any]) -> str:
    words = []
    for rank, process in list(processes.items())[:_MOST_FATES]:
        words.append(f"rank {rank} ({process.who}) {process.fate}".rstrip())
    return ", ".join(words)
