"""``python -m muster.backends.slurm.node``: a node's step: its agent, and the supervisor where the lease is ours.

Every node is a candidate. The first one starts the supervisor at once; the others watch the lease (``holder``), and one
takes over when the holder is silent for longer than a limit that grows with the node's number. ``backends/host``
decides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Program
from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, NEVER, RESUME, SUPERVISOR, Exit, Lease, Looked, Outcome, Rules, State
from muster.backends.slurm import locate
from muster.backends.slurm.batch import LINGER_S
from muster.backends.slurm.job_place import CONTROLLERS, TIME_LIMIT, JobPlace, log
from muster.backends.slurm.locate import Holder
from muster.backends.slurm.nccl_settings import with_nccl_settings
from muster.backends.slurm.script import agent_program, program
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.errors import MusterError
from muster.transport.secure_session import run_token

NEAR_LOOK_S, FAR_LOOK_S = 1.0, 5.0
"""Between two looks at the holder; beyond the first few nodes fewer, to limit the load on it."""
LEAVE_S = 12.0
"""For the agent to exit after the result: trackers get ``trackers.main.END_S`` of it."""
BATCH_LEAVES_S = LINGER_S + 3.0
"""By then a living batch program has ended the job."""


def rules(rank: int) -> Rules:
    """SIGTERM comes to every node; the one that supervises passes it on, until it is answered. The rest of a run that
    saved is another job's."""
    return Rules(
        rank=rank,
        notice_scope="run",
        insists=True,
        everyone_is_notified=True,
        longest_look_s=NEAR_LOOK_S if rank <= 3 else FAR_LOOK_S,
        leave=((None, LEAVE_S), (signal.SIGKILL, 5.0)),
    )


@dataclass(kw_only=True)
class NodePlace(JobPlace):
    rank: int
    holder: Holder

    def look(self, ended_pid: int | None) -> Looked:
        """The run's result counts under any lease holder: its supervisor's node may be lost after it."""
        if (verdict := self.verdict()) is not None:
            return Looked(lease=Lease(kind="free"), end=verdict.exit_code)
        return self.holder.look(ended_pid)

    def time_left_s(self) -> float:
        """Until the batch node's notice would come, since that is lost with it."""
        before_s = self.spec.slurm.signal_before_timeout_s
        for job in self.slurm.jobs(self.run_id):
            if job.id == self.job_id and job.end_s is not None and before_s:
                return job.end_s - before_s - time.time()
        return NEVER

    def end_here(self) -> None:
        spared = processes.ancestors()
        living = processes.labelled(self.run_id, host=f"host-{self.rank}")
        processes.send([one for one in living if one.pid not in spared], signal.SIGKILL)

    def leave(self, ended: Exit, state: State) -> int:
        """0 where another node supervised. The node that took over from the batch node does what that would have
        done."""
        if ended.outcome is not Outcome.RUN_ENDED:
            return ended.code
        if not state.child(SUPERVISOR).starts:
            return 0
        if self.rank:
            if state.time_was_asked and ended.code == RESUME and self.resubmit() == self.job_id:
                return ended.code  # requeued: what ends it now would end its next start
            time.sleep(BATCH_LEAVES_S)  # where it lives after all, it ends the job and with it this step
            log("the job has not been ended: ending it to release its nodes")
            with contextlib.suppress(MusterError):
                self.slurm.cancel(self.job_id)
        return ended.code

    def host_program(self) -> HostProgram:
        host, where = f"host-{self.rank}", {"run_id": self.run_id, "run_dir": str(self.run_dir)}
        agent = agent_program(sys.executable, host=host, **where)
        argv, variables = with_nccl_settings(self.spec, agent, self.environ)
        logs = self.run_dir / "logs"
        return HostProgram(
            place=self,
            rules=rules(self.rank),
            programs={
                AGENT: Program(argv=argv, env={**self.environ, **variables}, log=logs / f"agent-{host}.log"),
                SUPERVISOR: Program(
                    argv=program("app.supervisor", sys.executable, **where),
                    env=self.environ,
                    log=logs / "supervisor.log",
                ),
            },
            ignored=[signal.SIGUSR1, signal.SIGINT],  # USR1 is for the batch program
            notices=[signal.SIGTERM],
            say=log,
        )


def prepared(run_dir: Path, run_id: str, host: str) -> NodePlace:
    """Raises MusterError: this node cannot serve, and why."""
    spec = RunSpec.model_validate_json(resolved_file.read(run_dir, patient=True))
    environ = environment.inherited()
    job = run_dir / f"hosts-{environ['SLURM_JOB_ID']}.json"
    address = locate.address_of_this_node(_peers(job, environ), interface=spec.slurm.interface)
    environ |= {"MUSTER_BIND": address, "MUSTER_HOST": host, **locate.place_of_this_node(environ)}
    log(f"{host} is {environ.get('SLURMD_NODENAME', socket.gethostname())} at {address}")
    home, rank = RunState(run_dir=run_dir), int(host.rpartition("-")[2])
    return NodePlace(
        home=home,
        token=run_token(run_dir),
        reasons={"notice": "SIGTERM from Slurm", "time": TIME_LIMIT},
        run_dir=run_dir,
        run_id=run_id,
        rank=rank,
        environ=environ,
        spec=spec,
        began_wall_ns=job.stat().st_mtime_ns if job.exists() else time.time_ns(),
        holder=Holder(
            home=home,
            controllers=run_dir / CONTROLLERS,
            rank=rank,
            cut_off_after_s=spec.recovery.timing.cut_off_after_s,
            say=log,
        ),
    )


def _peers(job: Path, environ: Mapping[str, str]) -> list[str]:
    """What a route must lead to: the other nodes, then the node that started the step, then the submit host."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        nodes = json.loads(job.read_text()).values()
        names = [node for node in nodes if node != environ.get("SLURMD_NODENAME")][:2]
    return [*names, *(environ[key] for key in ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_HOST") if environ.get(key))]


def main() -> None:
    """Serve one node; its output goes to the run's own logs, since the batch node may be lost."""
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description="one node of a Muster run in a Slurm job")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", required=True)
    given = parser.parse_args()
    job_log = os.dup(2)
    with processes.open_log(given.run_dir / "logs" / f"node-{given.host}.log") as node_log:
        os.dup2(node_log.fileno(), 1)
        os.dup2(node_log.fileno(), 2)
    try:
        os.chdir(given.run_dir)
        place = prepared(given.run_dir, given.run_id, given.host)
        place.end_here()  # what an earlier start left: not every site's Slurm ends all of a step with its first process
        sys.exit(place.host_program().run())
    except MusterError as error:
        text = f"error: {error}" + (f" (hint: {error.hint})" if error.hint else "")
        log(text)
        os.write(job_log, f"{given.host}: {text}\n".encode())
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
