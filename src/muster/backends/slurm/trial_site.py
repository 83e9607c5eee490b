"""``Site`` for Slurm: its commands are asked, then a small job on processors, then one that holds a run's nodes."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from muster import __version__
from muster.backends.backend import HeldHost, Looked, Wait
from muster.backends.slurm import reason_text
from muster.backends.slurm.commands import Job, Slurm, name_of
from muster.backends.slurm.container import make_places, step
from muster.backends.slurm.script import SCRIPT, around, python_in_step, python_of
from muster.backends.slurm.trial import limits
from muster.backends.slurm.trial_node import LOOK, SPEC, WITHIN, log_of, program
from muster.config.spec import RunSpec
from muster.core import environment, processes
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import JsonObject, parse_object, text
from muster.storage import run_registry
from muster.storage.run_registry import replace_text

TIME_LIMIT = "1:00:00"
"""Of a trial's jobs where the run file has none: short jobs start sooner, and end where all of ours is dead."""
SMALL_TIME_LIMIT = "0:30:00"
LOOKS = 12
"""For what a node wrote: a network file system shows a new file within a minute."""


STARTS_WITHIN_S, ENDS_WITHIN_S = 1800.0, 120.0


@dataclass
class SmallJob:
    """One, with a folder where runs have theirs."""

    slurm: Slurm
    name: str
    folder: Path
    id: str = ""
    last: Job | None = None
    """As it was seen last."""
    nodes: tuple[str, ...] = ()

    def look(self) -> Job | None:
        """None: Slurm has forgotten it."""
        found = self.slurm.jobs(self.name)
        self.last = found[-1] if found else None
        if self.last is not None and self.last.nodes and not self.nodes:
            self.nodes = tuple(self.slurm.hostnames(self.last.nodes))
        return self.last

    def started(self) -> bool:
        job = self.look()
        if job is None or job.ended:
            raise MusterError(f"job {self.id} ended as {job.state if job else 'nothing'} before it could be used")
        return job.state == "RUNNING"

    def ended(self) -> bool:
        job = self.look()
        return job is None or job.ended

    def why(self) -> str:
        """Why it waits, or what it does."""
        if self.last is None:
            return f"job {self.id} is unknown"
        if self.last.state == "PENDING":
            return f"job {self.id} waits: {reason_text.waits(self.last.reason)}"
        return f"job {self.id} is {self.last.state}"


@dataclass
class SlurmSite:
    slurm: Slurm = field(default_factory=Slurm)
    names: list[str] = field(default_factory=list)
    """Of its small jobs."""

    def trial(self, spec: RunSpec) -> RunSpec:
        if spec.slurm.time_limit is not None:
            return spec
        return spec.model_copy(update={"slurm": spec.slurm.model_copy(update={"time_limit": TIME_LIMIT})})

    def python(self, spec: RunSpec) -> str:
        return python_of(spec)

    # ------------------------------------------------------------ by a job

    def look(self, spec: RunSpec, wait: Wait) -> Looked:
        """By a job without accelerators, from every node."""
        small, word = _small(spec), secrets.token_hex(8)
        with self.folder(small) as job:
            run_registry.replace_text(job.folder / WORD, word)
            with self.sent(job, small, program(python_of(spec), LOOK, str(job.folder)), wait):
                wait(job.ended, f"end of job {job.id}", STARTS_WITHIN_S, job.why)
                seen = _seen(job, spec.resources.hosts, wait)
        for one in seen:
            if text(one, "word") != word:
                raise MusterError(f"{text(one, 'node')} sees another folder than this machine at {job.folder.parent}")
        others = sorted({text(one, "muster") for one in seen} - {__version__})
        versions = f", Muster {', '.join(others)} there and {__version__} here" if others else ""
        where = " in the container" if spec.slurm.container is not None else ""
        names = ", ".join(text(one, "node") for one in seen)
        said = f"{names} import Muster{where} and share the folder{versions}"
        return Looked(said=said, kernels=tuple(text(one, "boot_id") for one in seen))

    @contextmanager
    def held(self, spec: RunSpec, wait: Wait) -> Iterator[Mapping[str, HeldHost]]:
        """With the run's own options. Programs have NCCL's settings as agents have."""
        environ = environment.inherited()
        python = python_in_step(spec)
        held = _without_notice(spec)
        with self.folder(held) as job, self.sent(job, held, ["sleep", "infinity"], wait):
            wait(job.started, f"start of job {job.id}", STARTS_WITHIN_S, job.why)
            make_places(spec, environ)
            fabric = program(python, WITHIN, str(job.folder / SPEC))
            hosts = {}
            for node in job.nodes[: spec.resources.hosts]:
                other = next((one for one in job.nodes if one != node), node)
                words = step(spec, str(job.folder), node, fabric, environ, f"--jobid={job.id}")
                hosts[node] = HeldHost(words=tuple(words), python=python, peer=self.slurm.node_address(other))
            yield hosts

    # ------------------------------------------------------------ small jobs

    @contextmanager
    def folder(self, spec: RunSpec) -> Iterator[SmallJob]:
        """The trial's folder, next to those of runs; removed in the end.

        Raises:
            UsageError: it cannot be made.
        """
        name = f"accept-{secrets.token_hex(4)}"
        folder = run_registry.place(name, spec.run_dir).parent / f".{name}"
        try:
            run_registry.make_folder(folder / "logs")
            run_registry.replace_text(folder / SPEC, spec.model_dump_json())
        except OSError as error:
            raise UsageError(f"{folder.parent} cannot be written: {error.strerror}", hint="run_dir") from error
        try:
            yield SmallJob(slurm=self.slurm, name=name, folder=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def sent(self, job: SmallJob, spec: RunSpec, argv: Sequence[str], wait: Wait) -> Iterator[None]:
        """Submitted, as a script that becomes ``argv``; in the end it is cancelled and waited for.

        Raises:
            MusterError: Slurm refuses.
        """
        path = job.folder / SCRIPT
        run_registry.replace_text(path, around(argv, spec, run_id=job.name, run_dir=str(job.folder)))
        self.names.append(job.name)
        try:
            job.id = self.slurm.submit(str(path), name=name_of(job.name))
            yield
        finally:
            self._end(job.name, wait)

    def _end(self, name: str, wait: Wait) -> None:
        """By its name: a submission's answer may have been lost. What does not end is among ``left``."""
        with contextlib.suppress(MusterError):
            living = [job for job in self.slurm.jobs(name) if not job.ended]
            for job in living:
                self.slurm.cancel(job.id)
            if living:
                wait(lambda: not self._living(name), "end of the small job", ENDS_WITHIN_S)

    def _living(self, name: str) -> list[Job]:
        return [job for job in self.slurm.jobs(name) if not job.ended and job.state != "COMPLETING"]

    def left(self) -> list[str]:
        """Those that have not ended, which are asked to once more."""
        found = [job for name in self.names for job in self._living(name)]
        for job in found:
            self.slurm.cancel(job.id)
        return [f"job {job.id} ({job.state})" for name in self.names for job in self._living(name)]


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


def _last_line(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    own = [line for line in lines if not line.startswith("srun: ")]  # which says that a task ended, after why
    return (own or lines or [""])[-1][:300]


# ----------------
# ``python -m muster.backends.slurm.trial_site --folder FOLDER``: what one node sees of what a run needs, in the run's
# container where it has one: Muster itself, and the folder that the submitting machine wrote to.


WORD = "word"


def main() -> None:
    """Write ``seen-NODE.json`` into the folder."""
    parser = argparse.ArgumentParser(description="what this node sees")
    parser.add_argument("--folder", required=True, type=Path)
    folder = parser.parse_args().folder
    node = environment.inherited().get("SLURMD_NODENAME") or socket.gethostname()
    seen = {
        "node": node,
        "word": (folder / WORD).read_text(),
        "boot_id": processes.boot_id(),
        "muster": __version__,
        "python": platform.python_version(),
    }
    replace_text(folder / f"seen-{node}.json", json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
