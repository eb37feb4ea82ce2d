# SPDX-License-Identifier: Apache-2.0
"""Counters of what this process has done: ``weft.metrics()``, Prometheus text, and lines of the log.

    counts = weft.metrics()
    counts.operations[0]["calls"], counts.peers[0]["bytes"]
    print(counts)                                     # as tables
    print(counts.prometheus())                        # needs prometheus_client
    prometheus_client.REGISTRY.register(weft.runtime.metrics.Collector())     # beside a program's own

Counting is always on, and nothing is asked of other ranks. Threads: any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

from weft import _core
from weft.errors import NotInstalled

_log = logging.getLogger("weft.metrics")
_PORTS = 64  # tried after WEFT_METRICS_PORT, so that every process of a host finds one
_server: Any = None
_rank: int | None = None


@dataclass(frozen=True)
class Metrics:
    """Counts since the process began.

    Attributes:
        rank: of the first communicator that was made; None before.
        operations: a dict for each operation and transport, with ``operation``, ``transport``, ``calls`` and:
            ``bytes``: of payload, as far as the host knows. ``errors``: calls that failed.
            ``seconds``: of the host. On the CPU that is the whole call, on a GPU the time until it is enqueued. For
            transfers it is the time from submission to the end.
            ``waits``, ``wait_seconds``: calls in which the host waited for peers, and for how much of ``seconds``.
            ``took``: calls by time; see ``bounds``.
        peers: a dict for each peer and transport: ``peer``, ``transport``, ``messages``, ``bytes``, ``retries`` (paths
            that were left for another), ``faults`` (given up).
        bounds: upper bounds of ``took`` in seconds; the last place, which has none, counts what took longer.
    """

    rank: int | None
    operations: list[dict[str, Any]]
    peers: list[dict[str, Any]]
    bounds: tuple[float, ...]

    def prometheus(self) -> str:
        """Return these counts in Prometheus' text format. Raises: weft.Error without prometheus_client."""
        client = _client()
        registry = client.CollectorRegistry()
        registry.register(Collector(self))
        return str(client.generate_latest(registry).decode())

    def __str__(self) -> str:
        """Return a table of the calls and a table of the peers, without idle ones."""
        from rich.console import Console

        from weft.runtime.tables import WIDTH

        out = StringIO()
        for table in self._tables():
            if len(table):
                table.print(Console(file=out, width=WIDTH))
        return out.getvalue().rstrip() or "nothing was counted yet"

    def _tables(self) -> tuple[Any, Any]:
        from weft.runtime.tables import Column, Table, size_text

        who = "" if self.rank is None else f", rank {self.rank}"
        keys = [Column("operation", is_key=True, never_folds=True), Column("transport", is_key=True)]
        heads = ("calls", "bytes", "us each", "of it waiting us", "errors")
        calls = Table(f"Calls{who}", [*keys, *(Column(head, is_number=True) for head in heads)])
        for row in self.operations:
            if row["calls"] or row["errors"]:
                each, waiting = (f"{us:,.1f}" for us in _us_each(row))
                calls.add(
                    *(row["operation"], row["transport"], f"{row['calls']:,}", size_text(row["bytes"])),
                    *(each, waiting, str(row["errors"])),
                )
        keys = [Column("peer", is_key=True), Column("transport", is_key=True)]
        of_peers = ("messages", "bytes", "retries", "faults")
        peers = Table(f"Peers{who}", [*keys, *(Column(head, is_number=True) for head in of_peers)])
        for row in self.peers:
            if row["messages"] or row["faults"]:
                peers.add(
                    *(row["peer"], row["transport"], f"{row['messages']:,}", size_text(row["bytes"])),
                    *(str(row["retries"]), str(row["faults"])),
                )
        return calls, peers

    def lines(self) -> list[str]:
        """Return a line of the log for each operation and peer that had something to do."""
        from weft.runtime.tables import size_text

        who = "" if self.rank is None else f"rank {self.rank}: "
        found = []
        for row in self.operations:
            if row["calls"]:
                each_us, waiting_us = _us_each(row)
                line = f"{who}{row['operation']} over {row['transport']}: {row['calls']} calls, "
                line += (
                    f"{size_text(row['bytes'])}, {each_us:.1f} us each, {waiting_us:.1f} us of it waiting, "
                )
                found.append(f"{line}{row['errors']} errors")
        for row in self.peers:
            if row["messages"] or row["faults"]:
                line = f"{who}peer {row['peer']} over {row['transport']}: {size_text(row['bytes'])} sent"
                found.append(f"{line}, {row['retries']} retries, {row['faults']} faults")
        return found


def _us_each(row: dict[str, Any]) -> tuple[float, float]:
    """Return how long a call took on the host, and how much of that it waited for peers, in microseconds."""
    calls = max(row["calls"], 1)
    return row["seconds"] / calls * 1e6, row["wait_seconds"] / calls * 1e6


_BOUNDS = tuple(1024 * 2**bit / 1e9 for bit in range(23))


def metrics() -> Metrics:
    """Return what this process has counted so far: a snapshot. Threads: any; no other rank is asked."""
    counted = _core.tally() if _core.has_tally() else {"operations": [], "peers": []}
    return Metrics(_rank, counted["operations"], counted["peers"], _BOUNDS)


class Collector:
    """A collector for prometheus_client: of what is counted at each scrape, or of one snapshot."""

    def __init__(self, snapshot: Metrics | None = None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """Yield the families: ``weft_calls_total`` and its like, and ``weft_call_seconds``."""
        families = __import__("prometheus_client.core", fromlist=["core"])
        counts = self._snapshot or metrics()
        rank = "" if counts.rank is None else str(counts.rank)
        for rows, key, fields in (
            (counts.operations, "operation", _OPERATION_FAMILIES),
            (counts.peers, "peer", _PEER_FAMILIES),
        ):
            for name, (field, help_line) in fields.items():
                family = families.CounterMetricFamily(name, help_line, labels=["rank", key, "transport"])
                for row in rows:
                    family.add_metric([rank, row[key], row["transport"]], row[field])
                yield family
        yield self._times(families, counts, rank)

    @staticmethod
    def _times(families: Any, counts: Metrics, rank: str) -> Any:
        labels = ["rank", "operation", "transport"]
        help_line = "Host time of calls; of transfers, from submission to the end."
        family = families.HistogramMetricFamily("weft_call_seconds", help_line, labels=labels)
        for row in counts.operations:
            below, buckets = 0, []
            for bound, count in zip([*map(str, counts.bounds), "+Inf"], row["took"], strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric([rank, row["operation"], row["transport"]], buckets, row["seconds"])
        return family


_OPERATION_FAMILIES = {
    "weft_calls": ("calls", "Calls."),
    "weft_bytes": ("bytes", "Payload of calls, as far as the host knows it."),
    "weft_errors": ("errors", "Calls that failed."),
    "weft_waits": ("waits", "Times that the host waited for peers."),
    "weft_wait_seconds": ("wait_seconds", "How long it waited."),
}
_PEER_FAMILIES = {
    "weft_peer_messages": ("messages", "Messages to a peer."),
    "weft_peer_bytes": ("bytes", "Payload to a peer."),
    "weft_peer_retries": ("retries", "Paths to a peer that were left for another."),
    "weft_peer_faults": ("faults", "Times that a peer was given up."),
}


def begin(rank: int | None) -> None:
    """Note which rank this process is, and serve its counts if WEFT_METRICS_PORT asks for it."""
    global _rank, _server
    if _rank is None:
        _rank = rank
    config = _core.config()
    if config.metrics_port and _server is None:
        _server = _serve(config.metrics_host, config.metrics_port)


def log_at_end() -> None:
    """Say at the information level what was counted."""
    if _log.isEnabledFor(logging.INFO) and _core.has_tally():
        for line in metrics().lines():
            _log.info(line)


def _client() -> Any:
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        raise NotInstalled("metrics().prometheus()", "prometheus_client") from error
    return prometheus_client


def _serve(host: str, first: int) -> Any:
    try:
        client = _client()
    except NotInstalled:
        _log.warning("%s", NotInstalled("WEFT_METRICS_PORT", "prometheus_client"))
        return False
    registry = client.CollectorRegistry()
    registry.register(Collector())
    for port in range(first, min(first + _PORTS, 65536)):
        try:
            server = client.start_http_server(port, host, registry)
        except OSError as error:  # another process of this host has it
            why = error
            continue
        _log.info("metrics: served at http://%s:%d/metrics", host, port)
        return server
    _log.warning("WEFT_METRICS_PORT: no port of %d to %d at %s: %s", first, first + _PORTS - 1, host, why)
    return False


__all__ = ["Collector", "Metrics", "metrics"]
