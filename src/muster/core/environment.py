"""Environment variables that Muster reads: the one list, and the one place that reads them.

Entry points (``cli``, programs with a ``main``) call ``current`` and pass on what it returns; functions whose default
comes from the environment (the home folder, the root of snapshots) call it too, so that no other module of theirs reads
``os.environ``. ``docs/reference/environment.md`` is generated from ``VARIABLES``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.core.types import Topology


@dataclass(frozen=True)
class Variable:
    """One variable, for the documentation."""

    name: str
    meaning: str
    set_by: str
    default: str = ""


USER, GKE = "you", "the GKE back end, in its pods"
HOSTED = f"{GKE}; the Vertex AI back end, on its hosts"
PLACED = "the Slurm back end, where its topology plugin tells; you, on other machines"
VARIABLES = (
    Variable("MUSTER_HOME", "Folder of runs, prices and calibration.", USER, "`~/.muster`"),
    Variable(
        "MUSTER_MEMORY_DIR", "Folder on tmpfs for snapshots and the agents' sockets.",
        "you; the Slurm back end (`slurm.scratch`)", "`/dev/shm`, else `/tmp`",
    ),
    Variable("MUSTER_BILLING_API_KEY", "Key for Google's price list (`muster prices update`).", USER),
    Variable(
        "MUSTER_METADATA", "URL of a metadata server to ask for preemption notices.", "you, in tests", "the cloud's own"
    ),
    Variable(
        "MUSTER_RUN_ID", "The run that a process belongs to: `stop` and `down` find processes by it.",
        "back ends, for every process of a run",
    ),
    Variable("MUSTER_RUN_DIR", "That run's folder.", "back ends, for every process of a run"),
    Variable("MUSTER_HOST", "Name of the host of an agent.", "the Slurm back end"),
    Variable("MUSTER_BLOCK", "Block (racks with a network of their own) of a host.", PLACED),
    Variable("MUSTER_RACK", "Rack of a host: copies of its state leave it.", PLACED),
    Variable("MUSTER_PART", "Number of a requeued job's part.", "the Slurm back end"),
    Variable(
        "MUSTER_BIND", "Address on which the supervisor and the agents listen.",
        "the Slurm, GKE and Vertex AI back ends", "`127.0.0.1`",
    ),
    Variable(
        "MUSTER_TERM", "`ignored`: SIGTERM comes to every process of a job; only the supervisor acts on it.",
        "the Slurm back end",
    ),
    Variable("MUSTER_WATCHDOG", "Process id of the watchdog that started the agent.", "the watchdog"),
    Variable("MUSTER_NICE", "Niceness that ranks and data programs go back to.", "the watchdog", "0"),
    Variable("MUSTER_ATTEMPT", "Number of the attempt of a rank.", "the fork server"),
    Variable("MUSTER_DRILL", "`1`: ranks accept injected faults.", "`muster drill`"),
    Variable("MUSTER_STORE", "`ADDRESS PORT` of the host with the run's home on its disk.", "the SSH back end"),
    Variable(
        "MUSTER_TOKEN_FILE", "File with the run's token.", f"{GKE}; the SSH back end", "`token` in the run's folder"
    ),
    Variable("MUSTER_MODEL_COPIES", "Folder of models copied from the hub (`model.weights: bucket`).", GKE),
    Variable("MUSTER_NAMESPACE", "Namespace of the pod.", GKE),
    Variable("MUSTER_JOBSET", "JobSet of the pod; mark of the custom job's request.", HOSTED),
    Variable("MUSTER_HOST_INDEX", "Index of the host's Job.", GKE),
    Variable("MUSTER_POD", "Name of the pod; of the host with the mark of its start.", HOSTED),
    Variable("MUSTER_NODE", "Name of the node.", GKE),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the variables say, checked and with defaults."""

    home: Path
    memory_root: Path
    metadata_url: str | None
    bind: str
    term_ignored: bool
    watchdog_pid: int | None
    nice: int
    drill: bool
    pod: str
    place: Topology
    """Of this host."""
    node: str
    jobset: str
    model_copies: Path | None
    """A folder of complete copies of models from the hub (``storage.model_copies``)."""
    token_file: Path | None
    """A Secret's file: the token is in no folder of the run."""
    store: tuple[str, int] | None
    """Address of the host that has the run's home (``storage.store.ssh``)."""
    storage_emulator: bool
    """Google's own variable STORAGE_EMULATOR_HOST: the bucket is an emulator's, without credentials."""


def current() -> Environment:
    """This process's environment, as it is now."""
    return read(os.environ)


def inherited() -> dict[str, str]:
    """Every variable of this process, for the programs that it starts."""
    return dict(os.environ)


def read(environ: Mapping[str, str]) -> Environment:
    """The variables of ``environ``; empty ones count as unset. Raises ValueError for a number that is none."""
    memory = environ.get("MUSTER_MEMORY_DIR") or ("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")
    watchdog = environ.get("MUSTER_WATCHDOG")
    store = environ.get("MUSTER_STORE", "").split()
    return Environment(
        home=Path(environ.get("MUSTER_HOME") or "~/.muster").expanduser().absolute(),
        memory_root=Path(memory).absolute(),
        metadata_url=environ.get("MUSTER_METADATA") or None,
        bind=environ.get("MUSTER_BIND") or "127.0.0.1",
        term_ignored=environ.get("MUSTER_TERM") == "ignored",
        watchdog_pid=int(watchdog) if watchdog else None,
        nice=int(environ.get("MUSTER_NICE") or 0),
        drill=environ.get("MUSTER_DRILL") == "1",
        pod=environ.get("MUSTER_POD", ""),
        node=environ.get("MUSTER_NODE", ""),
        place=Topology(block=environ.get("MUSTER_BLOCK", ""), rack=environ.get("MUSTER_RACK", "")),
        jobset=environ.get("MUSTER_JOBSET", ""),
        model_copies=Path(environ["MUSTER_MODEL_COPIES"]) if environ.get("MUSTER_MODEL_COPIES") else None,
        token_file=Path(environ["MUSTER_TOKEN_FILE"]) if environ.get("MUSTER_TOKEN_FILE") else None,
        store=(store[0], int(store[1])) if len(store) == 2 else None,
        storage_emulator=bool(environ.get("STORAGE_EMULATOR_HOST")),
    )


def allocator_is_set() -> bool:
    """Whether the environment sets glibc's own variables for its heap (``MALLOC_MMAP_THRESHOLD_`` and the like)."""
    return any(name.startswith("MALLOC_") for name in os.environ)
