"""What a cluster decides and a run file does not: namespace, names of secrets and pools, how networks are attached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muster.core.typed_json import Record

SUPERVISOR_PRIORITY = "muster-supervisor"


@dataclass(frozen=True, kw_only=True)
class Options(Record):
    """Settings of the rendering; every one has a default that ``muster up`` makes true."""

    namespace: str = "default"
    service_account: str = "muster"
    """Kubernetes service account, bound to the bucket by Workload Identity."""
    supervisor_pool: str = "muster-cpu"
    """Node pool of small CPU nodes (``cloud.google.com/gke-nodepool``) for the supervisor."""
    supervisors: Literal[1, 2] = 2
    """The second one stands by, on another node where there is one: a node that hangs is otherwise answered in ten
    minutes."""
    supervisor_priority: str | None = SUPERVISOR_PRIORITY
    """PriorityClass of supervisors; None: the cluster's default."""
    kueue: bool = True
    """False: no queue; the JobSet starts at once (a cluster without Kueue)."""
    network: Literal["auto", "annotations", "claims"] = "auto"
    """Data NICs by annotations and Network objects, or by resource claims (DRANET); auto: the family's."""
    nccl: Literal["node", "catalogue"] = "node"
    """NCCL's environment: sourced from Google's script on the node, or the catalogue's values."""
    hugging_face_secret: str = "muster-hugging-face"
    """Secret with key ``token``; absent is allowed."""
    network_prefix: str = "muster"
    """First part of the names of VPCs and subnets."""
    run_claim: str | None = None
    """A ReadWriteMany volume claim (Filestore, NFS) for run folders, in place of a mounted bucket."""
    nodes_in_quota: int | None = None
    """Nodes that the cluster queue admits; default: what this run file asks for."""
