"""Slurm's programs, run by argument list; their refusals become our errors, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.backends.slurm import parse, reason_text
from muster.core.clock import SystemShell
from muster.core.errors import BackendError, BusyError
from muster.core.protocols import Completed, Shell

#: Prefix of every job's name; the run's id and the submission's number follow.
PREFIX = "muster-"
#: A controller under load answers late; sbatch itself gives up after MessageTimeout.
TIMEOUT_S = 60.0
_JOB_FIELDS = {
    "id": "%A", "name": "%j", "state": "%T", "reason": "%r", "nodes": "%N", "count": "%D", "start_s": "%S",
    "end_s": "%e", "folder": "%Z", "partition": "%P",
}  # fmt: skip
_NODE_FIELDS = {
    "node": "%n", "partition": "%R", "state": "%T", "gres": "%G", "cpus": "%c", "memory": "%m", "features": "%f",
    "limit": "%l", "up": "%a", "size": "%s",
}  # fmt: skip
#: Epoch seconds, not local time in a format of the user's choice.
_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True, kw_only=True)
class Job:
    id: str
    name: str
    state: str
    reason: str
    nodes: str
    count: int
    start_s: int | None
    end_s: int | None
    folder: str
    partition: str

    @property
    def ended(self) -> bool:
        return self.state in parse.ENDED


@dataclass(frozen=True)
class Slurm:
    """The commands. Each is called once; nothing is retried."""

    shell: Shell = field(default_factory=lambda: SystemShell(own_group=True))
    user: str = field(default_factory=lambda: str(os.getuid()))
    timeout_s: float = TIMEOUT_S

    def nodes(self) -> list[dict[str, str]]:
        """A row per node and partition: node, partition, state, gres, cpus, memory, features, limit, up, size."""
        done = self._ask(
            "sinfo", "--noheader", "--Node", "--exact", f"--format={parse.format_of([*_NODE_FIELDS.values()])}"
        )
        return list(parse.records(done.stdout, [*_NODE_FIELDS]))

    def jobs(self, run_id: str, submission: int | None = None) -> list[Job]:
        """This user's jobs of the run that Slurm still knows (ended ones for some minutes), oldest first."""
        fields = parse.format_of([*_JOB_FIELDS.values()])
        done = self._ask("squeue", "--noheader", "--states=all", f"--user={self.user}", f"--format={fields}")
        jobs = [_job(row) for row in parse.records(done.stdout, [*_JOB_FIELDS])]
        return sorted((job for job in jobs if is_of(job.name, run_id, submission)), key=lambda job: int(job.id))

    def submit(self, script: str, *, name: str, variables: Mapping[str, str] | None = None) -> str:
        """Submit a script under ``name``; return the job's id.

        Raises:
            UsageError, AccessError, CapacityError: refused.
            NoAnswer: the job may exist nevertheless.
        """
        try:
            done = self._run("sbatch", "--parsable", f"--job-name={name}", script, env=variables)
        except BusyError as error:  # it was ended because it took too long
            raise NoAnswer(str(error)) from error
        job_id = parse.job_id(done.stdout) if done.returncode == 0 else None
        if job_id is not None:
            return job_id
        if reason_text.NO_ANSWER.search(done.stderr) or done.returncode == 0:
            raise NoAnswer(str(reason_text.refusal("sbatch", done.stderr or f"answered {done.stdout[:80]!r}")))
        raise reason_text.refusal("sbatch", done.stderr)

    def test(self, script: str) -> str:
        """Ask when and where a job of this text would start; nothing is submitted. Raises as ``submit``."""
        done = self._run("sbatch", "--test-only", stdin=script, env={"SLURM_TIME_FORMAT": "standard"})
        if done.returncode:
            raise reason_text.refusal("sbatch", done.stderr)
        return " ".join((done.stderr or done.stdout).split()).removeprefix("sbatch: ")

    def cancel(self, job_id: str) -> None:
        """End a job; gone is success."""
        done = self._run("scancel", job_id)
        if done.returncode and not reason_text.is_gone(done.stderr):
            raise reason_text.refusal("scancel", done.stderr)

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue."""
        self._ask("scontrol", "requeue", job_id)

    def show(self, job_id: str) -> dict[str, str]:
        """Everything about one job; empty where Slurm no longer knows it."""
        done = self._run("scontrol", "show", "job", job_id, "--oneliner")
        if done.returncode:
            if reason_text.is_gone(done.stderr):
                return {}
            raise reason_text.refusal("scontrol", done.stderr)
        return next(parse.pairs(done.stdout), {})

    def node_state(self, node: str) -> str:
        """As Slurm has it: ``IDLE``, ``ALLOCATED+DRAIN``, ``DOWN*``..."""
        return self._node(node).get("State", "")

    def node_address(self, node: str) -> str:
        """Where Slurm reaches it: an address, or a name."""
        return self._node(node).get("NodeAddr") or node

    def _node(self, node: str) -> dict[str, str]:
        return next(parse.pairs(self._ask("scontrol", "show", "node", node, "--oneliner").stdout), {})

    def partitions(self) -> list[dict[str, str]]:
        """``scontrol show partition``, a row each; hidden ones too where this user may use them."""
        return list(parse.pairs(self._ask("scontrol", "show", "partition", "--oneliner").stdout))

    def configuration(self) -> dict[str, str]:
        """``scontrol show config``."""
        lines = self._ask("scontrol", "show", "config").stdout.splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}

    def associations(self, user: str, cluster: str) -> list[dict[str, str]]:
        """The user's accounts on a cluster, a row per account and partition: default_account, account, partition, qos,
        default_qos, max_tres, max_wall. Raises BackendError, AccessError: the accounting does not tell."""
        fields = "DefaultAccount,Account,Partition,QOS,DefaultQOS,MaxTRES,MaxWall"
        names = ("default_account", "account", "partition", "qos", "default_qos", "max_tres", "max_wall")
        rows = self._accounting("user", user, "withassoc", f"cluster={cluster}", f"format={fields}")
        return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names) and row[1]]

    def qos(self, name: str) -> dict[str, str]:
        """A QOS's max_tres, max_wall and flags; empty where there is none of that name."""
        names = ("name", "max_tres", "max_wall", "flags")
        rows = self._accounting("qos", name, "format=Name,MaxTRES,MaxWall,Flags")
        found = (dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names))
        return next((row for row in found if row["name"] == name), {})

    def _accounting(self, *words: str) -> list[list[str]]:
        shown = self._ask("sacctmgr", "--noheader", "--parsable2", "show", *words).stdout
        return [line.split("|") for line in shown.splitlines()]

    def drain(self, node: str, reason: str) -> str:
        """Give ``node`` no new jobs; those that run there go on. Returns what is so now. One that is drained or down
        stays as it is: it has a reason already.

        Raises:
            AccessError: this user may not (operators and administrators may).
            BackendError: Slurm does not answer, knows no such node, or has no commands here.
        """
        state = self.node_state(node)
        if any(word in state for word in ("DRAIN", "DOWN", "FAIL")):
            return f"Slurm has {node} as {state.lower()} already"
        self._ask("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
        return f"Slurm gives {node} no new jobs: it drains (scontrol update nodename={node} state=resume ends that)"

    def accounted(self, job_id: str) -> Mapping[str, str]:
        """The job in the accounting; empty where there is none (many clusters have no slurmdbd)."""
        try:
            done = self._run("sacct", "--parsable2", "-X", "--format=JobID,State,ExitCode,End", "-j", job_id)
        except BackendError:
            return {}
        rows = parse.accounting(done.stdout) if done.returncode == 0 else []
        return rows[-1] if rows else {}

    def hostnames(self, nodes: str) -> list[str]:
        """``node[1-3]`` -> its nodes, by Slurm's own rules."""
        return self._ask("scontrol", "show", "hostnames", nodes).stdout.split()

    def kill_wait_s(self) -> int:
        """From SIGTERM to SIGKILL when a job is ended: ``30 sec``, Slurm's own default too."""
        try:
            return int(self.configuration()["KillWait"].split()[0])
        except (BackendError, KeyError, ValueError, IndexError):
            return 30

    def controllers(self) -> list[tuple[str, int]]:
        """Where the controllers listen: for programs without Slurm commands (in a container)."""
        config = self.configuration()
        hosts = [value for key, value in config.items() if key.startswith("SlurmctldHost[")]  # head(10.0.0.5)
        port = config.get("SlurmctldPort", "").split("-")[0]
        return [(host.rstrip(")").split("(")[-1], int(port)) for host in hosts] if port.isdecimal() else []

    def _ask(self, *argv: str) -> Completed:
        done = self._run(*argv)
        if done.returncode:
            raise reason_text.refusal(argv[0], done.stderr)
        return done

    def _run(self, *argv: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Completed:
        try:
            return self.shell.run(argv, env={**_ENVIRONMENT, **(env or {})}, stdin=stdin, timeout_s=self.timeout_s)
        except BackendError as error:
            if "not found" in str(error):
                raise BackendError(
                    f"no {argv[0]} on this machine", hint="submit from a login node of the cluster"
                ) from error
            raise


class NoAnswer(BusyError):
    """No answer came to a submission: it may have been accepted."""


def name_of(run_id: str, submission: int | None = None) -> str:
    """A job's name, by which a run is found. The number is given at submission, not in the script."""
    return f"{PREFIX}{run_id}" + (f".{submission}" if submission is not None else "")


def is_of(name: str, run_id: str, submission: int | None = None) -> bool:
    """Whether a job of this name is one of the run (of this submission)."""
    if submission is not None:
        return name == name_of(run_id, submission)
    head, _, number = name.rpartition(".")
    return name == name_of(run_id) or (head == name_of(run_id) and number.isdigit())


def _job(row: Mapping[str, str]) -> Job:
    job_id, count, start_s, end_s = (
        int(row[key]) if row[key].isdigit() else None for key in ("id", "count", "start_s", "end_s")
    )
    words = {key: row[key] for key in ("name", "state", "reason", "nodes", "folder", "partition")}
    return Job(id=str(job_id or 0), count=count or 0, start_s=start_s, end_s=end_s, **words)
