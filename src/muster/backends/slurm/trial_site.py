"""``Site`` for Slurm: its commands are asked, then a small job on processors, then one that holds a run's nodes."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster import __version__
from muster.backends.site import HeldHost, Looked, Wait
from muster.backends.slurm import parse
from muster.backends.slurm.commands import Slurm, name_of
from muster.backends.slurm.container import inside, make_places, step_options
from muster.backends.slurm.launcher import step
from muster.backends.slurm.script import SCRIPT, gres_of, python_of, reservation_of, time_limit
from muster.backends.slurm.trial import limits
from muster.backends.slurm.trial.see import WORD
from muster.backends.slurm.trial_job import STARTS_WITHIN_S, SmallJob, SmallJobs
from muster.backends.slurm.trial_node import LOOK, SPEC, WITHIN, log_of, program
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject, parse_object, text
from muster.core.types import JobRequest
from muster.storage import run_registry

TIME_LIMIT = "1:00:00"
"""Of a trial's jobs where the run file has none: short jobs start sooner, and end where all of ours is dead."""
SMALL_TIME_LIMIT = "0:30:00"
LOOKS = 12
"""For what a node wrote: a network file system shows a new file within a minute."""


@dataclass
class SlurmSite:
    """One acceptance's."""

    slurm: Slurm = field(default_factory=Slurm)

    def __post_init__(self) -> None:
        self.jobs = SmallJobs(self.slurm)

    def trial(self, spec: RunSpec) -> RunSpec:
        if spec.slurm.time_limit is not None:
            return spec
        return spec.model_copy(update={"slurm": spec.slurm.model_copy(update={"time_limit": TIME_LIMIT})})

    def python(self, spec: RunSpec) -> str:
        return python_of(spec)

    # ------------------------------------------------------------ by asking

    def access(self, spec: RunSpec) -> Sequence[str]:
        """The controller, the partition, and what the accounting allows where there is one."""
        config = self.slurm.configuration()
        want = asked(spec)
        row = limits.partition_of(self.slurm.partitions(), want)
        name = row["PartitionName"]
        limits.check_partition(row, want, groups=_groups())
        said = [
            f"Slurm {config.get('SLURM_VERSION', '(no version told)')}",
            f"partition {name} of {row.get('TotalNodes', '?')} nodes, jobs of {row.get('MaxTime', '?')} at most",
        ]
        if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
            return [*said, "no accounting, so no account"]
        return [*said, self._accounting(want, name, config)]

    def _accounting(self, want: limits.Asked, partition: str, config: Mapping[str, str]) -> str:
        enforced = {word.strip() for word in config.get("AccountingStorageEnforce", "").lower().split(",")}
        user = _user()
        if not enforced & {"associations", "limits", "qos", "safe"}:
            return "accounting enforces nothing"
        rows = self.slurm.associations(user, config.get("ClusterName", ""))
        # Limits and QOS imply associations (man slurm.conf, AccountingStorageEnforce).
        found = limits.account_of(rows, want, partition, user=user, enforced={*enforced, "associations"})
        if found is None:
            return "accounting enforces nothing"
        if enforced & {"limits", "safe"}:
            limits.check_limits(f"account {found['account']}", found, want)
            if want.qos is not None and (qos := self.slurm.qos(want.qos)):
                limits.check_limits(f"QOS {want.qos}", qos, want)
        return f"account {found['account']}, QOS {want.qos or found['qos'] or 'none named'}"

    # ------------------------------------------------------------ by a job

    def preflight(self, spec: RunSpec, request: JobRequest, wait: Wait) -> Looked:
        """``sbatch --test-only`` of the run's script, then a job that looks from every node."""
        small = _small(spec)

        def body(folder: Path) -> list[str]:
            return program(python_of(spec), LOOK, str(folder))

        word = secrets.token_hex(8)
        with self.jobs.folder(small) as job:
            run_registry.replace_text(job.folder / "run.sh", request.files[SCRIPT])
            taken = self.slurm.test_only(str(job.folder / "run.sh"), name=name_of(request.run_id))
            run_registry.replace_text(job.folder / WORD, word)
            with self.jobs.sent(job, small, body, wait):
                wait(job.ended, f"end of job {job.id}", STARTS_WITHIN_S, job.why)
                seen = _seen(job, spec.resources.hosts, wait)
        for one in seen:
            if text(one, "word") != word:
                raise MusterError(f"{text(one, 'node')} sees another folder than this machine at {job.folder.parent}")
        others = sorted({text(one, "muster") for one in seen} - {__version__})
        versions = f", Muster {', '.join(others)} there and {__version__} here" if others else ""
        where = " in the container" if spec.slurm.container is not None else ""
        names = ", ".join(text(one, "node") for one in seen)
        return Looked(
            said=f"{taken}; {names} import Muster{where} and share the folder{versions}", played=_played(seen)
        )

    @contextlib.contextmanager
    def held(self, spec: RunSpec, wait: Wait) -> Iterator[Mapping[str, HeldHost]]:
        """With the run's own options. Programs have NCCL's settings as agents have."""
        environ = environment.inherited()
        container = spec.slurm.container
        python = container.python if container is not None else python_of(spec)
        held = _without_notice(spec)
        with self.jobs.folder(held) as job, self.jobs.sent(job, held, lambda folder: ["sleep", "infinity"], wait):
            wait(job.started, f"start of job {job.id}", STARTS_WITHIN_S, job.why)
            make_places(spec, environ)
            fabric = program(python, WITHIN, str(job.folder / SPEC))
            hosts = {}
            for node in job.nodes[: spec.resources.hosts]:
                other = next((one for one in job.nodes if one != node), node)
                words = [*step(job.id, node, str(job.folder)), *step_options(spec, str(job.folder), environ)]
                words += inside(spec, str(job.folder), fabric, environ)
                hosts[node] = HeldHost(words=tuple(words), python=python, peer=self.slurm.node_address(other))
            yield hosts

    def left(self) -> list[str]:
        return self.jobs.left()


def asked(spec: RunSpec) -> limits.Asked:
    """What a run's job asks for."""
    nodes = spec.resources.hosts + spec.resources.spare_hosts
    gpus = sum(one.count for one in parse.gpus(gres_of(spec) or ""))
    return limits.Asked(
        partition=spec.resources.queue, nodes=nodes, gpus=nodes * gpus, time=time_limit(spec),
        account=spec.slurm.account, qos=spec.slurm.qos, reservation=reservation_of(spec),
    )  # fmt: skip


def _small(spec: RunSpec) -> RunSpec:
    """Its options on processors alone: as many nodes, a task each, a short limit."""
    limit = spec.slurm.time_limit or TIME_LIMIT
    if limits.seconds(limit) > limits.seconds(SMALL_TIME_LIMIT):
        limit = SMALL_TIME_LIMIT
    changes = {"exclusive": False, "cpus_per_host": 1, "gres": None, "time_limit": limit}
    resources = spec.resources.model_copy(update={"device": "cpu", "spare_hosts": 0})
    slurm = _without_notice(spec).slurm.model_copy(update=changes)
    return spec.model_copy(update={"resources": resources, "slurm": slurm})


def _without_notice(spec: RunSpec) -> RunSpec:
    changes = {"signal_before_timeout_s": 0, "requeue": False}
    return spec.model_copy(update={"slurm": spec.slurm.model_copy(update=changes)})


def _seen(job: SmallJob, hosts: int, wait: Wait) -> list[JsonObject]:
    """What every node of an ended job wrote.

    Raises:
        MusterError: one wrote nothing; with the last line of its log.
    """

    def written() -> list[Path]:
        return sorted(job.folder.glob("seen-*.json"))

    looks = iter(range(LOOKS))
    wait(lambda: len(written()) >= hosts or next(looks, None) is None, "word of the nodes", 600.0)
    seen = [parse_object(path.read_bytes()) for path in written()]
    if len(seen) >= hosts:
        return seen
    there = {text(one, "node") for one in seen}
    for node in job.nodes:
        if node not in there and (line := _last_line(log_of(job.folder, node))):
            raise MusterError(f"{node} cannot start a run's programs: {line}", hint="slurm.venv, slurm.container")
    ended = job.last.state if job.last is not None else "no more known"
    line = _last_line(job.folder / "logs" / f"slurm-{job.id}.log")
    if line:
        raise MusterError(f"job {job.id} is {ended}: {line}", hint="slurm.venv names the nodes' Python")
    missing = ", ".join(node for node in job.nodes if node not in there) or "its nodes"
    raise MusterError(
        f"job {job.id} is {ended}, and nothing of {missing} is in {job.folder.parent}: do the nodes share that folder?",
        hint="run_dir, or MUSTER_HOME, in a file system that all nodes see",
    )


def _played(seen: Sequence[JsonObject]) -> str | None:
    """Each kernel has a number of its own since it started, whatever it says its name is: nodes with one number are one
    machine, as no cluster's are."""
    boots: dict[str, list[str]] = {}
    for one in seen:
        boots.setdefault(text(one, "boot_id"), []).append(text(one, "node"))
    one_machine = next((nodes for boot, nodes in boots.items() if len(nodes) > 1 or not boot), None)
    return None if one_machine is None else f"a Slurm whose nodes {', '.join(one_machine)} are one machine"


def _last_line(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    own = [line for line in lines if not line.startswith("srun: ")]  # which says that a task ended, after why
    return (own or lines or [""])[-1][:300]


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
