"""The sbatch script: a pure function of the run file. What is printed is what runs.

Its body is one ``exec``: all decisions are made in Python (``batch``), so that no value of a run file is ever quoted
into a shell program, except as whole words by ``shlex``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from muster.backends.slurm.commands import name_of
from muster.config.spec import RunSpec

SCRIPT = "job.sh"


def script(spec: RunSpec, *, run_id: str, run_dir: str) -> str:
    """The text of ``job.sh``; the same for every submission of the run, and for every job of one."""
    batch = program("backends.slurm.batch", python_of(spec), run_id=run_id, run_dir=run_dir)
    return around(batch, spec, run_id=run_id, run_dir=run_dir)


def around(argv: Sequence[str], spec: RunSpec, *, run_id: str, run_dir: str) -> str:
    """The script that becomes ``argv``, with a run's options, modules and variables."""
    slurm = spec.slurm
    lines = [f"#!/bin/bash{' -l' if slurm.modules else ''}"]
    lines += [f"#SBATCH {_quoted(option)}" for option in options(spec, run_id, run_dir)]
    lines.append("")
    lines += [f"module load {shlex.quote(module)}" for module in slurm.modules]
    for name, value in environment(spec, run_id, run_dir).items():
        lines.append(f"export {name}={shlex.quote(value)}")
    lines.append(f"exec {shlex.join(argv)}")
    return "\n".join(lines) + "\n"


def options(spec: RunSpec, run_id: str, run_dir: str) -> Iterator[str]:
    """sbatch's options, one per line."""
    slurm, resources = spec.slurm, spec.resources
    yield f"--job-name={name_of(run_id)}"
    yield f"--comment=muster run {run_id}"
    yield f"--chdir={run_dir}"
    yield "--output=logs/slurm-%j.log"
    yield "--open-mode=append"
    yield f"--nodes={resources.hosts + resources.spare_hosts}"
    yield "--ntasks-per-node=1"
    if slurm.exclusive:
        yield "--exclusive"
    if slurm.cpus_per_host is not None:
        yield f"--cpus-per-task={slurm.cpus_per_host}"
    yield f"--mem={slurm.memory}"
    if gres := gres_of(spec):
        yield f"--gres={gres}"
    if limit := time_limit(spec):
        yield f"--time={limit}"
    # A lost node ends neither the job nor the steps on other nodes: its work moves to a spare.
    yield "--no-kill"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    if slurm.signal_before_timeout_s:  # also before the partition's own limit
        yield f"--signal=B:USR1@{slurm.signal_before_timeout_s}"
    for name, value in (
        ("partition", resources.queue),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("reservation", reservation_of(spec)),
    ):
        if value is not None:
            yield f"--{name}={value}"
    yield from slurm.options


def environment(spec: RunSpec, run_id: str, run_dir: str) -> dict[str, str]:
    """Variables of every process of the run, in addition to the submitter's environment."""
    variables = {"MUSTER_RUN_ID": run_id, "MUSTER_RUN_DIR": run_dir}
    if spec.slurm.scratch is not None:
        variables |= {"TMPDIR": spec.slurm.scratch, "MUSTER_MEMORY_DIR": spec.slurm.scratch}
    if spec.slurm.container is not None:  # its default is in the home, which a container does not have
        variables["TRITON_CACHE_DIR"] = f"{spec.slurm.scratch or '/tmp'}/{run_id}/triton"
    # Slurm ends a job by SIGTERM to every process; only the supervisor reacts, by saving (see `node`).
    return {**variables, "MUSTER_TERM": "ignored", **spec.slurm.environment}


def program(module: str, python: str, *, run_id: str, run_dir: str) -> list[str]:
    """The argument list of one of our programs. -P: a module in the folder never shadows the library's."""
    return [python, "-P", "-m", f"muster.{module}", "--run-dir", run_dir, "--run-id", run_id]


def agent_program(python: str, *, run_id: str, run_dir: str, host: str) -> list[str]:
    """Nodes need not look for a cloud's metadata server: Slurm announces the end of a job."""
    agent = program("agent.watchdog", python, run_id=run_id, run_dir=run_dir)
    return [*agent, "--host", host, "--no-metadata-server"]


def python_in_step(spec: RunSpec) -> str:
    """The Python of a node's step: the container's, where the run has one."""
    return spec.slurm.container.python if spec.slurm.container is not None else python_of(spec)


def python_of(spec: RunSpec) -> str:
    """The Python on the nodes, outside any container."""
    return f"{spec.slurm.venv.rstrip('/')}/bin/python" if spec.slurm.venv else sys.executable


def gres_of(spec: RunSpec) -> str | None:
    """Generic resources per node; none for a run on CPUs."""
    if spec.slurm.gres is not None:
        return spec.slurm.gres
    if spec.resources.device == "cuda":
        return f"gpu:{spec.resources.ranks_per_host or 1}"
    return None


def reservation_of(spec: RunSpec) -> str | None:
    """Slurm's reservation. On a cluster of one's own in Google Cloud the name is Google's: the nodes were bought by it,
    and Slurm knows none."""
    bought = spec.resources.provisioning_model in ("reservation", "calendar") and spec.resources.project is not None
    return None if bought else spec.resources.reservation


def time_limit(spec: RunSpec) -> str | None:
    """As sbatch takes it; None: the partition's own."""
    if spec.slurm.time_limit is not None:
        return spec.slurm.time_limit
    if spec.limits.max_hours is None:
        return spec.slurm.default_time_limit
    minutes = max(1, round(spec.limits.max_hours * 60))
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"


def _quoted(option: str) -> str:
    """An option as sbatch's parser of #SBATCH lines reads it: unlike in a shell, backslash escapes inside quotes."""
    name, equals, value = option.partition("=")
    if not equals or shlex.quote(value) == value:
        return option
    return f"{name}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
