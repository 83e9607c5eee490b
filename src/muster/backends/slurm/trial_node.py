"""The programs of a trial's small jobs on the nodes, before ``see``.

``python -m muster.backends.slurm.trial_node look FOLDER``: on a job's first node, starts ``see`` on every node as
a run's job starts its nodes: by ``srun``, in the run's container. Each writes what it sees into the folder, and its
errors into the folder's logs.

``python -m muster.backends.slurm.trial_node within SPEC PROGRAM...``: becomes a program, with NCCL's settings as a
run's agent has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.container import make_places, step, step_environment
from muster.backends.slurm.nccl_settings import with_nccl_settings
from muster.backends.slurm.script import python_in_step
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.errors import MusterError

SPEC = "spec.json"
LOOK, WITHIN = "look", "within"


def program(python: str, part: str, *words: str) -> list[str]:
    return [python, "-P", "-m", "muster.backends.slurm.trial_node", part, *words]


def log_of(folder: Path, node: str) -> Path:
    return folder / "logs" / f"see-{node}.log"


def look(folder: Path, slurm: Slurm, environ: Mapping[str, str]) -> int:
    """1 where a node could not look."""
    spec = RunSpec.model_validate_json((folder / SPEC).read_text())
    make_places(spec, environ)
    env = {**environ, **step_environment(spec, environ["MUSTER_RUN_ID"], str(folder))}
    see = [python_in_step(spec), "-P", "-m", "muster.backends.slurm.trial_site", "--folder", str(folder)]
    steps: list[subprocess.Popen[bytes]] = []
    for node in slurm.hostnames(environ["SLURM_JOB_NODELIST"]):
        with open(log_of(folder, node), "wb") as log:
            argv = step(spec, str(folder), node, see, environ)
            steps.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))
    codes = [one.wait() for one in steps]
    return 1 if any(codes) else 0


def within(spec: Path, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does not return, but where the node has no plugin for its fabric."""
    try:
        found = RunSpec.model_validate_json(spec.read_text())
        own = {**environ, **found.slurm.environment}
        argv, more = with_nccl_settings(found, argv, own)
    except MusterError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    os.execvpe(argv[0], argv, {**own, **more})


if __name__ == "__main__":
    if sys.argv[1] == LOOK:
        sys.exit(look(Path(sys.argv[2]), Slurm(), environment.inherited()))
    sys.exit(within(Path(sys.argv[2]), sys.argv[3:], environment.inherited()))
