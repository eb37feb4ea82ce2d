# SPDX-License-Identifier: Apache-2.0
"""The last calls of a process as torch's flight recorder writes them, for its analyser.

    weft.runtime.call_record.write("/tmp/calls_", counted, rank)      # then: torchfrtrace --prefix calls_ /tmp -j
    WEFT_CALL_RECORD=/tmp/calls_ torchrun ... train.py                # at a lost peer, and at the end
    weft top --record /tmp/calls_                                     # of a job that runs, or hangs

Only groups of all ranks are written: of smaller ones a process does not know who their members are in the whole job.
The analyser knows the names of torch's collectives alone: calls of other kinds, such as dispatch, stand as all_to_all,
and their frame has the name. On a GPU "scheduled" says that the host has enqueued a call, not that it has run.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

from weft import _core
from weft.runtime.files import write_file

_log = logging.getLogger("weft.calls")
_VERSION = "2.10"  # of the dump
_TYPES = (
    *("Float", "Half", "BFloat16", "Float8_e4m3fn", "Float8_e5m2", "Double"),
    *("Char", "Byte", "Int", "UInt32", "Long", "UInt64"),
)  # by Element
_KNOWN = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
_OF_SIZES = (1 << 64) - 1  # elements of a call whose sizes differ from rank to rank


def record(counted: dict[str, Any], rank: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return the rank and the dump of what ``_core.tally`` or ``_core.tally_from`` returned."""
    groups = {group["key"]: group for group in counted["groups"]}
    size = max((group["size"] for group in groups.values()), default=1)
    whole = {key: group for key, group in groups.items() if group["size"] == size}
    if rank is None:
        rank = next((int(group["rank"]) for group in whole.values()), 0)
    configuration = {
        _name(group): {"name": _name(group), "desc": group["what"], "ranks": str(list(range(size)))}
        for group in whole.values()
    }
    calls = [call for call in counted["calls"] if call["group_key"] in whole and call["group_call"]]
    offset_ns = counted["wall_minus_monotonic_ns"]
    entries = [_entry(call, whole[call["group_key"]], offset_ns) for call in calls]
    return rank, {"version": _VERSION, "pg_config": configuration, "pg_status": {}, "entries": entries}


def write(prefix: str, counted: dict[str, Any], rank: int | None = None) -> str:
    """Write the dump to ``prefix`` with the rank behind it; return the path. Raises: OSError."""
    rank, dump = record(counted, rank)
    path = f"{prefix}{rank}"
    write_file(Path(path), pickle.dumps(dump))
    return path


def write_if_asked() -> None:
    """Write to WEFT_CALL_RECORD, if it is set and something was called. Never raises: it may run after an error."""
    prefix = _core.config().call_record
    if not prefix or not _core.has_tally():
        return
    try:
        _log.info("the last calls are in %s", write(prefix, _core.tally()))
    except OSError as error:
        _log.warning("WEFT_CALL_RECORD: %s", error)


def _name(group: dict[str, Any]) -> str:
    return f"{group['key']:x}"


def _entry(call: dict[str, Any], group: dict[str, Any], offset_ns: int) -> dict[str, Any]:
    operation = str(call["operation"])
    shown = operation if operation in (*_KNOWN, "barrier") else "all_to_all"
    elements = 0 if call["elements"] == _OF_SIZES else int(call["elements"])
    is_known = operation in _KNOWN
    dtype = _TYPES[call["element"]] if 0 <= call["element"] < len(_TYPES) else "Byte"
    many = elements * int(group["size"])
    sent = many if shown == "reduce_scatter" and is_known else elements
    came = many if shown == "all_gather" and is_known else elements
    is_over = call["ended_ns"] > 0 and not call["is_failed"]
    on_gpu = str(group["device"]) != "cpu"
    ended_ns = call["ended_ns"] + offset_ns if is_over and not on_gpu else None
    began_ns = call["began_ns"] + offset_ns
    return {
        "record_id": call["number"],
        "pg_id": group["place"],
        "process_group": (_name(group), group["what"]),
        "collective_seq_id": call["group_call"],
        "p2p_seq_id": 0,
        "op_id": call["group_call"],
        "profiling_name": f"weft:{shown}",
        "is_p2p": False,
        "time_created_ns": began_ns,
        "time_discovered_started_ns": None if on_gpu else began_ns,
        "time_discovered_completed_ns": ended_ns,
        "duration_ms": None if ended_ns is None else (ended_ns - began_ns) / 1e6,
        "input_sizes": [[sent]],
        "input_dtypes": [dtype],
        "output_sizes": [[came]],
        "output_dtypes": [dtype],
        "state": "scheduled" if on_gpu else "completed" if is_over else "started",
        "timeout_ms": 0,
        "retired": is_over,
        "frames": [{"name": operation, "filename": f"weft, over {call['transport']}", "line": 0}],
    }


__all__ = ["record", "write"]
