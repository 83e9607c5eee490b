"""Slurm's commands without Slurm: scripts run here unchanged, so that a job takes seconds.

It answers what ours ask, in their format, from a queue in a file; it knows nothing of nodes. ``trouble`` makes the next
call of a program fail, or lose its answer. The real one is in ``tests/live/slurm_cluster.py``.

As there, ``scancel`` returns at once: a running job gets SIGTERM, is shown as COMPLETING until its processes are gone
and the nodes have cleared up, and what is left after ``KillWait`` gets SIGKILL (scancel(1), slurm.conf(5)).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.protocols import Completed

NODES = (
    ("n1", "main", "idle", "gpu:h100:8(S:0-1)", "208", "1900000", "a3mega,ib4", "7-00:00:00", "up", "1-infinite"),
    ("n2", "main", "allocated", "gpu:h100:8(S:0-1)", "208", "1900000", "a3mega,ib4", "7-00:00:00", "up", "1-infinite"),
    ("n3", "main", "drained*", "gpu:h100:8(S:0-1)", "208", "1900000", "a3mega,ib4", "7-00:00:00", "up", "1-infinite"),
    ("c1", "cpu", "idle", "(null)", "64", "250000", "(null)", "1-00:00:00", "up", "1-4"),
    ("c2", "cpu", "mixed", "(null)", "64", "250000", "(null)", "1-00:00:00", "up", "1-4"),
)
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes={most} MaxTime={limit} "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes={nodes} PriorityJobFactor=1 PriorityTier=1 RootOnly=NO "
    "ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=8 TotalNodes={count} "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED"
)
"""A line of ``scontrol show partition --oneliner`` of 22.05."""


#: So long nodes clear up after a job's processes (the epilog).
EPILOG_S = 0.3
#: What ``scancel`` has been taken for.
LEAVING = ("COMPLETING", "CANCELLED")


@dataclass
class FakeJob:
    id: str
    name: str
    folder: str
    process: subprocess.Popen[bytes] | None
    state: str = "RUNNING"
    reason: str = "None"
    end_s: int | None = None
    start_s: int = field(default_factory=lambda: int(time.time()))
    cancelled_s: float = 0.0
    """When ``scancel`` was taken, on the monotonic clock."""


@dataclass
class FakeSlurm:
    """A ``Shell`` whose programs are Slurm's."""

    jobs: dict[str, FakeJob] = field(default_factory=dict)
    trouble: dict[str, tuple[bool, str]] = field(default_factory=dict)
    """Program -> (whether it does its work nevertheless, its stderr); used once."""
    asked: list[tuple[str, ...]] = field(default_factory=list)
    hostnames: str = ""
    nodes: Sequence[tuple[str, ...]] = NODES
    configuration: str = "KillWait                = 5 sec\n"
    accounts: str = ""
    """Rows of the accounting, as ``sacct --parsable2`` prints them."""
    held: bool = False
    """New jobs wait instead of starting."""
    partitions: list[str] = field(
        default_factory=lambda: [
            PARTITION.format(name="main", default="YES", most="UNLIMITED", limit="7-00:00:00", nodes="n[1-3]", count=3),
            PARTITION.format(name="cpu", default="NO", most="4", limit="1-00:00:00", nodes="c[1-2]", count=2),
        ]
    )
    users: str | None = None
    """Rows of ``sacctmgr show user ... withassoc``; None: there is no accounting, and it says so."""
    qualities: str = ""
    """Rows of ``sacctmgr show qos``."""
    given: str = ""
    """Standard input of the last call."""
    immortal: bool = False
    """``scancel`` is taken, and jobs go on: nodes that do not answer."""

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        self.asked.append(tuple(argv))
        self.given = stdin or ""
        works, complaint = self.trouble.pop(argv[0], (True, ""))
        said = getattr(self, f"_{argv[0]}")(list(argv[1:])) if works else ""
        if isinstance(said, Completed):
            return said
        if complaint:
            return Completed(argv=tuple(argv), returncode=1, stdout="", stderr=complaint)
        return Completed(argv=tuple(argv), returncode=0, stdout=said, stderr="")

    def _sbatch(self, words: list[str]) -> str | Completed:
        test = words == ["--test-only"]  # of a script on standard input
        if refused := self._refused(self.given if test else Path(words[-1]).read_text()):
            return Completed(argv=("sbatch", *words), returncode=1, stdout="", stderr=refused)
        if test:  # which is said on standard error
            told = "Job 7 to start at 2026-11-27T09:00:00 using 416 processors on nodes n[1-2] in partition main"
            return Completed(argv=("sbatch", *words), returncode=0, stdout="", stderr=f"sbatch: {told}\n")
        path = Path(words[-1])
        name = next(word.partition("=")[2] for word in words if word.startswith("--job-name="))
        number = str(len(self.jobs) + 1)
        job = FakeJob(id=number, name=name, folder=str(path.parent), process=None, state="PENDING", reason="Resources")
        self.jobs[number] = job
        if not self.held:
            with open(path.parent / "logs" / f"slurm-{number}.log", "ab") as output:
                job.process = subprocess.Popen(
                    ["bash", str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, cwd=path.parent,
                )  # fmt: skip
            job.state, job.reason = "RUNNING", "None"
        return f"{number}\n"

    def _refused(self, script: str) -> str:
        """As the controller does, of what it looks at here: the partition's name, and how many nodes it has."""
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
        rows = {row.split()[0].removeprefix("PartitionName="): row for row in self.partitions}
        name = options.get("partition") or next((one for one, row in rows.items() if "Default=YES" in row), "")
        if name not in rows:
            return (
                f"sbatch: error: invalid partition specified: {name}\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            )
        there = re.search(r"TotalNodes=(\d+)", rows[name])
        if there and int(options.get("nodes", "1")) > int(there[1]):
            return "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"
        return ""

    def _squeue(self, words: list[str]) -> str:
        wanted = next(word.partition("=")[2] for word in words if word.startswith("--format="))
        return "".join(_filled(wanted, self._row(job)) + "\n" for job in self.jobs.values())

    def _row(self, job: FakeJob) -> dict[str, str]:
        self._settle(job)
        start = str(job.start_s) if job.state != "PENDING" else "N/A"
        return {
            "%A": job.id, "%j": job.name, "%T": job.state, "%r": job.reason, "%N": "n1", "%D": "1", "%S": start,
            "%e": str(job.end_s or "N/A"), "%Z": job.folder, "%P": "main", "%B": "n1",
        }  # fmt: skip

    def _scancel(self, words: list[str]) -> str:
        job = self.jobs[words[-1]]
        if self.immortal:
            return ""
        if job.state == "PENDING":
            job.state = "CANCELLED"
        elif job.state == "RUNNING":
            job.state, job.cancelled_s = "COMPLETING", time.monotonic()
            _signal(job, signal.SIGTERM)
        return ""

    def _settle(self, job: FakeJob) -> None:
        """What has become of a job since somebody looked."""
        ended = job.process is None or job.process.poll() is not None
        if job.state == "RUNNING" and job.process is not None and ended:
            job.state = "COMPLETED" if job.process.returncode == 0 else "FAILED"
        elif job.state == "COMPLETING" and job.cancelled_s:
            waited_s = time.monotonic() - job.cancelled_s
            if ended and waited_s > EPILOG_S:
                _signal(job, signal.SIGKILL)  # the cgroup's rest
                job.state = "CANCELLED"
            elif not ended and waited_s > self._kill_wait_s():
                _signal(job, signal.SIGKILL)

    def _kill_wait_s(self) -> float:
        found = re.search(r"^KillWait\s*= (\d+)", self.configuration, re.M)
        return float(found[1]) if found else 30.0

    def _scontrol(self, words: list[str]) -> str:
        if words[:2] == ["show", "hostnames"]:
            return self.hostnames
        if words[:2] == ["show", "partition"]:
            return "".join(f"{row}\n" for row in self.partitions)
        if words[:2] == ["show", "node"]:
            return f"NodeName={words[2]} NodeAddr=10.0.0.{words[2][1:]} NodeHostName={words[2]} State=IDLE\n"
        return self.configuration if words == ["show", "config"] else ""

    def _sacctmgr(self, words: list[str]) -> str | Completed:
        if self.users is None:
            told = "You are not running a supported accounting_storage plugin\n"
            return Completed(argv=("sacctmgr", *words), returncode=1, stdout="", stderr=told)
        return self.qualities if "qos" in words else self.users

    def _sacct(self, words: list[str]) -> str:
        return "JobID|State|ExitCode|End\n" + self.accounts

    def _sinfo(self, words: list[str]) -> str:
        wanted = next(word.partition("=")[2] for word in words if word.startswith("--format="))
        codes = ("%n", "%R", "%T", "%G", "%c", "%m", "%f", "%l", "%a", "%s")
        return "".join(_filled(wanted, dict(zip(codes, row, strict=True))) + "\n" for row in self.nodes)


def _signal(job: FakeJob, number: int) -> None:
    """To all processes of a job."""
    if job.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, number)


def _filled(wanted: str, values: Mapping[str, str]) -> str:
    for code, value in values.items():
        wanted = wanted.replace(code, value)
    return wanted
