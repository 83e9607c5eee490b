"""What prevents a run on a cluster, asked of Slurm without submitting anything."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster.backends.cluster import small
from muster.backends.slurm import parse
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.offers import kinds
from muster.backends.slurm.script import SCRIPT, gres_of, reservation_of, time_limit
from muster.backends.slurm.trial import limits
from muster.config.spec import RunSpec
from muster.core.errors import CapacityError
from muster.core.types import JobRequest

PREFLIGHT_LIMIT = "30"
"""Minutes, as sbatch takes them."""
_STARTS = re.compile(r"to start at (\S+) using .* on nodes (\S+)(?: in partition (\S+))?")


def look(spec: RunSpec, request: JobRequest, slurm: Slurm | None = None) -> list[str]:
    """The partition's limits, the accounting's where there is one, then Slurm's own verdict on the run's script: when
    and where its job would start.

    Raises:
        UsageError, AccessError, CapacityError, BackendError: what is in its way, in one sentence.
    """
    slurm = slurm or Slurm()
    found = list(_limits(spec, slurm))
    said = slurm.test(request.files[SCRIPT])
    starts = _STARTS.search(said)
    if starts is None:
        return [*found, f"sbatch --test-only: {said}"]
    where = f" of {starts[3]}" if starts[3] else ""
    return [*found, f"the job would start at {starts[1]} on {starts[2]}{where} (sbatch --test-only)"]


def _limits(spec: RunSpec, slurm: Slurm) -> Iterator[str]:
    config, want = slurm.configuration(), asked(spec)
    yield f"Slurm {config.get('SLURM_VERSION', 'of an unknown version')}"
    row = limits.partition_of(slurm.partitions(), want)
    name = row["PartitionName"]
    account = _account(slurm, want, row, config)
    limits.check_partition(row, want, groups=_groups(), flags=account.flags)
    there = [kind for kind in kinds(slurm.nodes(), spec) if kind.gpus.count or spec.resources.device != "cuda"]
    nodes = sum(kind.nodes for kind in there if kind.partition == name)
    if not nodes:
        raise CapacityError(f"no usable node in partition {name}", hint="sinfo -o '%P %a %D %G %t' shows what there is")
    at_most = f"jobs of {row.get('MaxNodes', 'UNLIMITED')} nodes and {row.get('MaxTime', 'UNLIMITED')} at most"
    yield f"partition {name}: {nodes} usable nodes of the kind, {at_most}"
    limits.check_limits(account.limits, want)
    yield account.said


@dataclass(frozen=True, kw_only=True)
class _Account:
    """What the accounting says of a run's jobs."""

    said: str
    limits: tuple[tuple[str, limits.Row], ...] = ()
    flags: frozenset[str] = frozenset()


def _account(slurm: Slurm, want: limits.Asked, partition: limits.Row, config: Mapping[str, str]) -> _Account:
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        return _Account(said="no accounting, so no account")
    enforced = {word.strip() for word in config.get("AccountingStorageEnforce", "").lower().split(",")}
    if not enforced & {"associations", "limits", "qos", "safe"}:
        return _Account(said="the accounting enforces nothing")
    # Limits and QOS imply associations (man slurm.conf, AccountingStorageEnforce).
    user, name = _user(), partition["PartitionName"]
    rows = slurm.associations(user, config.get("ClusterName", ""))
    found = limits.account_of(rows, want, name, user=user, qos_enforced="qos" in enforced)
    qos = limits.qos_of(found, want)
    said = f"account {found['account']}, QOS {qos or found['qos'] or '(none)'}"
    own = slurm.qos(qos) if qos else {}
    over = partition.get("QoS", "N/A")
    above = [
        ("QOS " + name, row) for name, row in ((over, slurm.qos(over) if over != "N/A" else {}), (qos, own)) if row
    ]
    flags = frozenset(own.get("flags", "").split(","))
    if "OverPartQOS" in flags:
        above.reverse()
    if not enforced & {"limits", "safe"} or (not qos and found["qos"]):  # which of several it is cannot be known
        above, found = [], {}
    return _Account(
        said=said, flags=flags, limits=(*above, *([(f"account {found['account']}", found)] if found else []))
    )


def asked(spec: RunSpec) -> limits.Asked:
    nodes = spec.resources.hosts + spec.resources.spare_hosts
    gpus = sum(one.count for one in parse.gpus(gres_of(spec) or ""))
    return limits.Asked(
        partition=spec.resources.queue, nodes=nodes, gpus=nodes * gpus, time=time_limit(spec),
        account=spec.slurm.account, qos=spec.slurm.qos, reservation=reservation_of(spec),
    )  # fmt: skip


def rehearse(spec: RunSpec, *, machine: str | None = None, mode: str | None = None) -> RunSpec:
    """The run file of a preflight: one rank without a GPU on one node; ``machine``: of that partition."""
    found = small(spec, {"device": "cpu", "queue": machine or spec.resources.queue, "usd_per_host_hour": None})
    changes: dict[str, object] = {
        "gres": None, "exclusive": False, "cpus_per_host": None, "time_limit": PREFLIGHT_LIMIT, "resubmit": "no",
    }  # fmt: skip
    return found.model_copy(update={"slurm": found.slurm.model_copy(update=changes)})


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _groups() -> list[str] | None:
    """None: root, whom no group keeps out."""
    if os.geteuid() == 0:
        return None
    names = []
    for number in {os.getgid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return names
