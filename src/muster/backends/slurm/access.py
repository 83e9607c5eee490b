"""What stands in a run's way on a cluster, asked of Slurm without submitting anything."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
from collections.abc import Iterator, Mapping

from muster.backends.rehearsal import small
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
    limits.check_partition(row, want, groups=_groups())
    there = [kind for kind in kinds(slurm.nodes(), spec) if kind.gpus.count or spec.resources.device != "cuda"]
    nodes = sum(kind.nodes for kind in there if kind.partition == name)
    if not nodes:
        raise CapacityError(f"no usable node in partition {name}", hint="sinfo -o '%P %a %D %G %t' shows what there is")
    at_most = f"jobs of {row.get('MaxNodes', 'UNLIMITED')} nodes and {row.get('MaxTime', 'UNLIMITED')} at most"
    yield f"partition {name}: {nodes} usable nodes of the kind, {at_most}"
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield _accounting(slurm, want, name, config)
    else:
        yield "no accounting, so no account"


def _accounting(slurm: Slurm, want: limits.Asked, partition: str, config: Mapping[str, str]) -> str:
    enforced = {word.strip() for word in config.get("AccountingStorageEnforce", "").lower().split(",")}
    if not enforced & {"associations", "limits", "qos", "safe"}:
        return "the accounting enforces nothing"
    # Limits and QOS imply associations (man slurm.conf, AccountingStorageEnforce).
    user = _user()
    rows = slurm.associations(user, config.get("ClusterName", ""))
    found = limits.account_of(rows, want, partition, user=user, qos_enforced="qos" in enforced)
    if enforced & {"limits", "safe"}:
        limits.check_limits(f"account {found['account']}", found, want)
        if want.qos is not None and (qos := slurm.qos(want.qos)):
            limits.check_limits(f"QOS {want.qos}", qos, want)
    return f"account {found['account']}, QOS {want.qos or found['qos'] or '(none)'}"


def asked(spec: RunSpec) -> limits.Asked:
    """What a run's job asks for."""
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
