"""The workers of a custom job, as they come and go: what a container sees, and what is done to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SHM = (64 << 20, 32 << 30, 0)
"""Sizes of /dev/shm that a container may meet: nothing says which."""


@dataclass(frozen=True)
class Variant:
    """How the cluster's description is written. Documented is a dictionary as ``job``; the others were all seen."""

    prefix: str = "cmle-training-"
    job: str = "text"
    """``text`` (JSON in a string), ``object`` or ``missing``."""
    trial: bool = False
    open_ports: tuple[int, ...] = (3333,)
    on_one_replica: bool = False
    """Whether a job of one replica has a description at all."""


VARIANTS = (
    Variant(),
    Variant(prefix="", job="object", trial=True, open_ports=(), on_one_replica=True),
    Variant(prefix="training-", job="missing"),
)


@dataclass
class Worker:
    """One replica: its name never changes, everything else does when it starts on another machine."""

    pool: int
    index: int
    host: str
    """Name by which the others find it."""
    machine: str
    starts: int = 0
    boots: int = 0
    """Machines that it has had."""
    restarts: int = 0
    """Restarts for errors that count towards the five."""
    address: str = ""
    boot_id: str = ""
    """Of the machine: a memory or disk that is gone shows in it."""
    disk: dict[str, bytes] = field(default_factory=dict)
    shm_bytes: int = SHM[0]
    running: bool = False
    done: bool = False
    """Ended with 0 and is not started again; its machine is billed until the job's end."""
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"workerpool{self.pool}-{self.index}"

    @property
    def primary(self) -> bool:
        return self.name == "workerpool0-0"

    def boot(self, number: int) -> None:
        """Another machine: nothing of the old one is left."""
        self.boots += 1
        self.disk = {}
        self.address = f"10.{128 + number // 62500}.{number // 250 % 250}.{2 + number % 250}"
        self.boot_id = f"boot-{number:08x}"


def roster(spec: dict[str, Any], number: str, variant: Variant) -> list[Worker]:
    """Every replica of every pool that is not empty."""
    return [
        Worker(
            pool, index, f"{variant.prefix}workerpool{pool}-{number[-10:]}-{index}", of["machineSpec"]["machineType"]
        )
        for pool, of in enumerate(spec["workerPoolSpecs"])
        if of
        for index in range(int(of.get("replicaCount", "1")))
    ]


def environment(
    worker: Worker,
    workers: list[Worker],
    spec: dict[str, Any],
    variant: Variant,
    *,
    number: str,
    region: str,
    project: str,
) -> dict[str, str]:
    """What the container's process is told. ``project`` is the project's number."""
    container = spec["workerPoolSpecs"][worker.pool].get("containerSpec", {})
    found = {row["name"]: row.get("value", "") for row in container.get("env", [])}
    found |= {"CLOUD_ML_PROJECT_ID": project, "CLOUD_ML_JOB_ID": number, "CLOUD_ML_REGION": region}
    if prefix := spec.get("baseOutputDirectory", {}).get("outputUriPrefix"):
        folder = prefix.rstrip("/")
        found |= {"AIP_MODEL_DIR": f"{folder}/model/", "AIP_CHECKPOINT_DIR": f"{folder}/checkpoints/"}
        found["AIP_TENSORBOARD_LOG_DIR"] = f"{folder}/logs/"
    if len(workers) == 1 and not variant.on_one_replica:
        return found
    cluster: dict[str, list[str]] = {}
    for one in workers:
        cluster.setdefault(f"workerpool{one.pool}", []).append(f"{one.host}:2222")
    task: dict[str, Any] = {"type": f"workerpool{worker.pool}", "index": worker.index}
    described: dict[str, Any] = {"cluster": cluster, "environment": "cloud", "task": task}
    if variant.trial:
        task["trial"] = ""
    # The whole request stands in it: whatever was in args or env can be read by every process of every worker.
    job = {"python_module": "", "package_uris": [], "job_args": [], "worker_pool_specs": spec["workerPoolSpecs"]}
    if variant.job != "missing":
        described["job"] = json.dumps(job) if variant.job == "text" else job
    if variant.open_ports:
        described["open_ports"] = list(variant.open_ports)
    found["CLUSTER_SPEC"] = json.dumps(described)
    for one in workers:
        key = one.host.upper().replace("-", "_")
        found |= {f"{key}_SERVICE_PORT_TF_PORT": "2222", f"{key}_SERVICE_PORT_STATUSZ": "6000"}
    return found


@dataclass
class Stop:
    """How one container was ended: SIGTERM this long before SIGKILL; None where SIGKILL was all."""

    worker: str
    grace_s: float | None


@dataclass
class Programs:
    """What runs in the containers; without it they do nothing and wait to be told how they end."""

    start: Callable[[Worker, dict[str, str]], None] = lambda worker, environment: None
    stop: Callable[[Worker, float | None], None] = lambda worker, grace_s: None
