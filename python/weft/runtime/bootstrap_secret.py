# SPDX-License-Identifier: Apache-2.0
"""The job's secret where nobody has set one: the launcher's, or with ``WEFT_JOB_SECRET=auto`` one that ranks agree on.

    settle_job_secret()     # before the first thing that asks for the secret; does nothing but for ``auto``

Ranks agree in the key-value store of torch, that of torchrun's agent or of the default process group: the first one
there puts random bytes into it. So who reaches that store can read the secret, or choose it.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from weft import _core
from weft.errors import Error

_KEY = "weft/job-secret"
_WITHOUT_LAUNCHER = (
    "WEFT_JOB_SECRET: got auto, but nothing is there over which processes agree, allowed: under torchrun, after "
    "init_process_group(), under mpirun of Open MPI, among ranks that `weft` starts; or a secret"
)


def launcher_secret(variables: Mapping[str, str]) -> bytes | None:
    """Return what only the processes of this launch know, where the launcher has given them such a thing.

    Open MPI makes up a key for each mpirun, torchrun --standalone an id. Slurm and MPICH give none: there
    WEFT_JOB_SECRET, which goes before, is to be set for all ranks. None: nothing.
    """
    if _core.config().job_secret:
        return None  # TcpAddress takes it
    key = variables.get("OMPI_MCA_orte_precondition_transports", "")
    if re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}", key):
        return key.encode()
    run = variables.get("TORCHELASTIC_RUN_ID", "")
    return run.encode() if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run) else None


def settle_job_secret() -> None:
    """Find or agree on the job's secret, where WEFT_JOB_SECRET is ``auto``. Not collective. Raises: weft.Error."""
    if not _core.awaits_job_secret():
        return
    secret = launcher_secret(os.environ)
    if secret is not None:
        _core.use_job_secret(secret.decode())
        return
    store = _store()
    if store is None:
        raise Error(_WITHOUT_LAUNCHER)
    agreed = bytes(store.compare_set(_KEY, "", secrets.token_hex(32)))
    if not re.fullmatch(rb"[0-9a-f]{64}", agreed):
        raise Error(f"WEFT_JOB_SECRET: auto, but torch's store has no secret of Weft's at {_KEY}", "system")
    _core.use_job_secret(agreed.decode())


def _store() -> Any:
    """Return the store that all processes of the job use, whenever they ask: the agent's before any other."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        distributed = importlib.import_module("torch.distributed")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=_core.config().timeout_s)
        return distributed.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    loaded: Any = sys.modules.get("torch.distributed")
    if loaded is None or not loaded.is_available() or not loaded.is_initialized():
        return None
    store_of = getattr(loaded.distributed_c10d, "_get_default_store", None)  # not public
    return store_of() if store_of is not None else None


__all__ = ["launcher_secret", "settle_job_secret"]
