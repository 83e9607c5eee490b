"""How a program is started on a node: the step, and the container it runs in: what of the node it must see, and the
options of pyxis and apptainer."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from muster.backends.slurm.nccl_settings import fabric_mounts
from muster.backends.slurm.script import environment
from muster.config.sections.sources import glob_of
from muster.config.spec import RunSpec
from muster.config.validation import is_remote


def srun(node: str, run_dir: str, *options: str) -> list[str]:
    """What comes before a program that is started on a node; from outside the job with the option ``--jobid``."""
    # --cpu-bind=none: a site's autobind gives a step of one task one core, and the ranks are that task's children.
    return [
        "srun", *options, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill",
        "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--export=ALL", f"--chdir={run_dir}",
    ]  # fmt: skip


def step(
    spec: RunSpec, run_dir: str, node: str, argv: Sequence[str], environ: Mapping[str, str], *options: str
) -> list[str]:
    """The command that runs ``argv`` on a node as a run's job does: in its container, with its processors."""
    processors = [f"--cpus-per-task={spec.slurm.cpus_per_host}"] if spec.slurm.cpus_per_host is not None else []
    return [
        *srun(node, run_dir, *options), *processors, *step_options(spec, run_dir, environ),
        *inside(spec, run_dir, argv, environ),
    ]  # fmt: skip


def step_options(spec: RunSpec, run_dir: str, environ: Mapping[str, str]) -> list[str]:
    """``srun``'s options for pyxis; none for any other runtime."""
    container = spec.slurm.container
    if container is None or container.runtime != "pyxis":
        return []
    # Else a variable of the image wins over the run's own of the same name.
    names = [*environment(spec, "", run_dir), *(["HOME"] if "HOME" in environ else [])]
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts(spec, run_dir, environ))}",
        f"--container-env={','.join(names)}",
    ]


def inside(spec: RunSpec, run_dir: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The program of a node's step as ``srun`` gets it: within apptainer where the run file says so."""
    container = spec.slurm.container
    if container is None or container.runtime != "apptainer":
        return list(argv)
    binds = [word for mount in mounts(spec, run_dir, environ) for word in ("--bind", mount)]
    gpus = ["--nv"] if spec.resources.device == "cuda" else []
    return ["apptainer", "exec", *gpus, *binds, container.image, *argv]


def step_environment(spec: RunSpec, run_id: str, run_dir: str) -> dict[str, str]:
    """Variables for ``srun`` itself: apptainer's way to say that the run's own win over the image's."""
    if spec.slurm.container is None or spec.slurm.container.runtime != "apptainer":
        return {}
    return {f"APPTAINERENV_{name}": value for name, value in environment(spec, run_id, run_dir).items()}


def mounts(
    spec: RunSpec, run_dir: str, environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> list[str]:
    """``SOURCE:TARGET`` of everything that the step must see: the run's folder, what the run file names on disk, node
    scratch, the user's caches, the fabric's libraries; then the user's own mounts, which take precedence over a place
    that they lead to."""
    given = list(spec.slurm.container.mounts) if spec.slurm.container is not None else []
    targets = [mount.split(":")[1 if ":" in mount else 0] for mount in given]
    own: list[str] = []
    scratch = [spec.slurm.scratch] if spec.slurm.scratch else []
    named = [path for path in (*places(spec), *_caches(environ)) if exists(path)]
    for path in [run_dir, *scratch, *fabric_mounts(spec, environ, exists=exists), *sorted(set(named))]:
        if not any(_within(path, other) for other in (*own, *targets)):
            own.append(path)
    return [*(f"{path}:{path}" for path in own), *given]


def make_places(spec: RunSpec, environ: Mapping[str, str]) -> None:
    """Make the folders that the run writes to: what is not there cannot be mounted."""
    if spec.slurm.container is None:
        return
    data = spec.data.cache_dir if spec.data is not None else None
    for folder in (spec.checkpoint.dir, data, *_caches(environ)):
        if folder is not None and not is_remote(folder):
            with contextlib.suppress(OSError):  # the step says what cannot be written, and why
                os.makedirs(folder, exist_ok=True)


def places(spec: RunSpec) -> Iterator[str]:
    """Folders outside the run's own that the run file names, as seen on the machine that submitted."""
    if spec.checkpoint.dir is not None and not is_remote(spec.checkpoint.dir):
        yield spec.checkpoint.dir
    files = [spec.recovery.policy] if spec.recovery.policy.endswith(".py") else []
    if spec.command and spec.command[0] != "-m":
        files.append(spec.command[0])
    if spec.model is not None:
        folders = [name for name in (spec.model.source, spec.model.tokenizer) if isinstance(name, str)]
        yield from (folder for folder in folders if folder.startswith("/"))
        if isinstance(spec.model.config, str):
            files.append(spec.model.config)
    if spec.data is not None:
        if spec.data.cache_dir is not None:
            yield spec.data.cache_dir
        files += [glob_of(path) for source in spec.data.sources for path in source.files.values()]
    for file in files:
        if file.startswith("/"):
            yield _folder_of(file)


def _caches(environ: Mapping[str, str]) -> list[str]:
    """Where data, weights and tokenizers are kept between runs: a container's root can be read only."""
    home = [f"{environ['HOME']}/.cache"] if environ.get("HOME") else []
    return [*home, *(path for name in ("XDG_CACHE_HOME", "HF_HOME") if (path := environ.get(name, "")).startswith("/"))]


def _folder_of(file: str) -> str:
    """The folder of a file, or the deepest one that holds every file of a pattern."""
    parent = Path(file).parent
    while glob.has_magic(str(parent)):
        parent = parent.parent
    return str(parent)


def _within(path: str, other: str) -> bool:
    return Path(path).is_relative_to(other)
