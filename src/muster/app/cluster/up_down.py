"""Use cases of ``muster up``, ``muster image`` and ``muster down RUN.yaml``: the cluster of a run file."""

from __future__ import annotations

from muster import backends
from muster.backends.cluster import Cluster, Down
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import Json


def cluster_of(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> Cluster:
    """The cluster of a run file; ``adopt``: one of that name that is not ours may be used. Touches nothing.

    Raises:
        UsageError: the back end has no clusters, or the run file names no project, zone or machine.
    """
    open_cluster = backends.get(spec.backend).provisioning.cluster
    if open_cluster is None:
        able = backends.names_where(lambda backend: backend.provisioning.cluster is not None)
        raise UsageError(
            f"this run file's backend is {spec.backend!r}, where Muster creates and removes no machines",
            hint=f"backend: {able}; muster down RUN ends a run",
        )
    return open_cluster(spec, zone=zone, adopt=adopt)


def down_to_json(cluster: Cluster, down: Down) -> dict[str, Json]:
    """What is left after ``down``, for programs."""
    rows = [
        {"kind": row.kind, "name": row.name, "kept": row.kept, "bills": row.bills, "usd_per_day": row.usd_per_day}
        for row in down.leftovers
    ]
    return {
        "project": cluster.project,
        "clean": down.clean,
        "not_removed": list(down.troubles),
        "left": rows,
        "usd_per_day": sum(row.usd_per_day or 0.0 for row in down.leftovers),
        "prices_not_known": sum(row.bills is not None and row.usd_per_day is None for row in down.leftovers),
    }
