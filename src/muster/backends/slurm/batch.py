"""``python -m muster.backends.slurm.batch``: the program that the job's script executes on the first node.

One step per node, so that each is lost, ended and restarted separately; ``backends/host`` decides. The run does not
depend on this program: when its node is lost the steps on the others survive (measured: with --no-kill Slurm removes
the node from the allocation and leaves the rest alone, the batch node too), and another node takes the supervisor's
lease.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Program
from muster.backends.host.run_state import RunState
from muster.backends.host.state import RESUME, Exit, Lease, Looked, Outcome, Rules, State
from muster.backends.slurm.container import make_places, step, step_environment
from muster.backends.slurm.job_place import CONTROLLERS, TIME_LIMIT, JobPlace, log
from muster.backends.slurm.script import program, python_in_step
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.errors import MusterError
from muster.storage import run_registry
from muster.transport.secure_session import run_token

LINGER_S = 14.0
"""After the run's result: steps of nodes that are cut off do not end by themselves."""
RULES = Rules(notice_scope="run", insists=True, most_starts=4, leave=((None, LINGER_S),))
"""The notice before the time limit goes to the supervisor, wherever it is, until it answers."""


@dataclass(kw_only=True)
class BatchPlace(JobPlace):
    """One job of one run, seen from its first node."""

    def look(self, ended_pid: int | None) -> Looked:
        """The run's result alone: who holds the lease is the nodes' business."""
        verdict = self.verdict()
        return Looked(lease=Lease(kind="free"), end=verdict.exit_code if verdict is not None else None)

    def leave(self, ended: Exit, state: State) -> int:
        verdict = self.verdict()
        if ended.outcome is not Outcome.RUN_ENDED or verdict is None:
            log("the run recorded no result; see logs/ and events/")
            return 1
        log(f"{verdict.outcome}: {verdict.reason}")
        if state.notice is not None and ended.code == RESUME and self.resubmit():
            return 0  # for Slurm this job succeeded
        return ended.code

    def host_program(self) -> HostProgram:
        """A step on every node; writes down which host is which node."""
        nodes = self.slurm.hostnames(self.environ["SLURM_JOB_NODELIST"])
        hosts = {f"host-{index}": node for index, node in enumerate(nodes)}
        make_places(self.spec, self.environ)
        run_registry.replace_text(self.run_dir / f"hosts-{self.job_id}.json", json.dumps(hosts) + "\n")
        with contextlib.suppress(MusterError):
            run_registry.replace_text(self.run_dir / CONTROLLERS, json.dumps(self.slurm.controllers()) + "\n")
        steps = {f"step of {host} on {node}": self._step(host, node) for host, node in hosts.items()}
        for name, one in steps.items():
            log(f"{name}: {shlex.join(one.argv)}")
        return HostProgram(
            place=self, rules=RULES, programs=steps, notices=[signal.SIGUSR1], ignored=[signal.SIGTERM], say=log
        )

    def _step(self, host: str, node: str) -> Program:
        run_dir = str(self.run_dir)
        argv = [*program("backends.slurm.node", python_in_step(self.spec), run_id=self.run_id, run_dir=run_dir)]
        return Program(
            argv=step(self.spec, run_dir, node, [*argv, "--host", host], self.environ),
            env={**self.environ, **step_environment(self.spec, self.run_id, run_dir)},
        )


def main() -> None:
    """Run one job; exit with the run's code (0 where a further job continues the run)."""
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description="one Slurm job of a Muster run, on its first node")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    given = parser.parse_args()
    environ = environment.inherited()
    if "SLURM_JOB_ID" not in environ:
        print("error: not inside a Slurm job\nhint: run `sbatch job.sh` or `muster submit`", file=sys.stderr)
        sys.exit(2)
    try:
        place = BatchPlace(
            home=RunState(run_dir=given.run_dir),
            token=run_token(given.run_dir),
            reasons={"notice": TIME_LIMIT},
            run_dir=given.run_dir,
            run_id=given.run_id,
            environ=environ,
            spec=RunSpec.model_validate_json(resolved_file.read(given.run_dir, patient=True)),
            began_wall_ns=time.time_ns(),
        )
        sys.exit(place.host_program().run())
    except MusterError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
