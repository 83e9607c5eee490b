"""``python -m muster.backends.slurm.batch``: the program that the job's script executes on the first node.

One step per node, so that each is lost, ended and restarted separately; then it waits. The run does not depend on it:
when its node is lost the steps on the others survive (measured: with --no-kill Slurm removes the node from the
allocation and leaves the rest alone, the batch node too), and another node takes the supervisor's lease.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from muster.backends.slurm import locate
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.container import inside, make_places, step_environment, step_options
from muster.backends.slurm.resubmit import resubmit
from muster.backends.slurm.script import program, python_of
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.protocol.client import AskStatus, StopRun
from muster.storage import run_output, run_registry
from muster.transport.secure_session import run_token

#: Where the controllers listen, for nodes that need to know whether they are cut off.
CONTROLLERS = "controllers.json"
#: Wait after the run's result: steps of nodes that are cut off do not end by themselves.
LINGER_S = 14.0
#: The request before the time limit: save, exit, run again.
TIME_LIMIT_STOP = StopRun(again=True, source="Slurm's time limit")
#: A step that ended although the run continues is started this often at most.
STEP_STARTS = 4
STEP_PAUSE_S = 10.0


@dataclass(kw_only=True)
class Step:
    """One node's step, and its ``srun`` process."""

    host: str
    node: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    ended_s: float = 0.0


@dataclass
class Batch:
    """One job of one run, seen from its first node."""

    run_dir: Path
    run_id: str
    environ: Mapping[str, str]
    slurm: Slurm = field(default_factory=Slurm)
    notice: bool = False
    """The notice before the time limit has come."""
    stop_sent: bool = False

    def __post_init__(self) -> None:
        self.spec = RunSpec.model_validate_json(resolved_file.read(self.run_dir, patient=True))
        self.job_id = self.environ["SLURM_JOB_ID"]
        self.began_wall_ns = time.time_ns()

    def run(self) -> int:
        """Start a step on every node; return the run's exit code when it has ended."""
        steps = self._steps()
        make_places(self.spec, self.environ)
        names = {step.host: step.node for step in steps}
        run_registry.replace_text(self.run_dir / f"hosts-{self.job_id}.json", json.dumps(names) + "\n")
        with contextlib.suppress(MusterError):
            run_registry.replace_text(self.run_dir / CONTROLLERS, json.dumps(self.slurm.controllers()) + "\n")
        with wake_on_signals(signal.SIGUSR1, self._on_notice, ignored=[signal.SIGTERM]) as wake:
            for step in steps:
                self._start(step)
            verdict = self._wait(steps, wake)
        if verdict is None:
            _log("the run recorded no result; see logs/ and events/")
            return 1
        _log(f"{verdict.outcome}: {verdict.reason}")
        to_resubmit = self.notice and verdict.exit_code == 75
        if to_resubmit and resubmit(self.spec, self.run_dir, self.run_id, self.environ, self.slurm, _log):
            return 0  # for Slurm this job succeeded
        return verdict.exit_code

    # ------------------------------------------------------------ steps

    def _steps(self) -> list[Step]:
        nodes = self.slurm.hostnames(self.environ["SLURM_JOB_NODELIST"])
        return [Step(host=f"host-{index}", node=node) for index, node in enumerate(nodes)]

    def _start(self, step: Step) -> None:
        argv = [*srun(self.spec, str(self.run_dir), step.node, self.environ), *self._node_program(step)]
        step.starts += 1
        if step.starts == 1:
            _log(f"{step.host} on {step.node}: {shlex.join(argv)}")
        else:
            _log(f"{step.host} on {step.node}: its step ended, restarting it")
        own = step_environment(self.spec, self.run_id, str(self.run_dir))
        step.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**self.environ, **own})

    def _node_program(self, step: Step) -> list[str]:
        container = self.spec.slurm.container
        python = container.python if container is not None else python_of(self.spec)
        common = program("backends.slurm.node", python, run_id=self.run_id, run_dir=str(self.run_dir))
        return inside(self.spec, str(self.run_dir), [*common, "--host", step.host], self.environ)

    def _wait(self, steps: list[Step], wake: socket.socket) -> run_output.Verdict | None:
        """Wait until the run has a result and the steps have ended (or linger), or until no step is left."""
        seen_s: float | None = None
        while True:
            select.select([wake], [], [], 1.0)
            with contextlib.suppress(BlockingIOError):
                wake.recv(256)
            if self.notice and not self.stop_sent:
                self.stop_sent = self._send_stop()
            for step in steps:
                self._reap(step)
            living = [step for step in steps if step.process is not None]
            verdict = run_output.verdict(self.run_dir, self.began_wall_ns) if len(living) < len(steps) else None
            if verdict is None:
                if not self._restart(steps) and not living:
                    return None
                continue
            seen_s = seen_s if seen_s is not None else time.monotonic()
            if not living or time.monotonic() - seen_s > LINGER_S:
                return verdict

    def _reap(self, step: Step) -> None:
        if step.process is not None and step.process.poll() is not None:
            _log(f"{step.host} on {step.node}: its step ended with code {step.process.returncode}")
            if step.process.returncode == UsageError.exit_code:
                step.starts = STEP_STARTS  # it would say the same again
            step.process, step.ended_s = None, time.monotonic()

    def _restart(self, steps: list[Step]) -> bool:
        """Restart steps that ended too early; False where none may be restarted any more."""
        restartable = [step for step in steps if step.process is None and step.starts < STEP_STARTS]
        for step in restartable:
            if time.monotonic() - step.ended_s > STEP_PAUSE_S * step.starts:
                self._start(step)
        return bool(restartable)

    # ------------------------------------------------------------ the time limit

    def _on_notice(self, _number: int, _frame: FrameType | None) -> None:
        """USR1 is the notice before the time limit. TERM goes to every node, where the supervisor handles it."""
        self.notice = True

    def _send_stop(self) -> bool:
        """Ask the supervisor to save and exit with 75; False: it could not be reached, ask again."""
        _log("the time limit is near: asking the run to save and exit")
        return send_to_supervisor(self.run_dir, TIME_LIMIT_STOP)


@contextlib.contextmanager
def wake_on_signals(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None], *, ignored: Iterable[signal.Signals]
) -> Iterator[socket.socket]:
    """A socket that becomes readable at every signal: ``number``, the ``ignored`` ones, or the end of a child."""
    wake_r, wake_w = socket.socketpair()
    wake_r.setblocking(False)
    wake_w.setblocking(False)
    signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
    signal.signal(number, handler)
    for other in (signal.SIGCHLD, *ignored):
        signal.signal(other, lambda _number, _frame: None)
    try:
        yield wake_r
    finally:
        signal.set_wakeup_fd(-1)


def srun(spec: RunSpec, run_dir: str, node: str, environ: Mapping[str, str]) -> list[str]:
    """The command of one node's step."""
    # --cpu-bind=none: a site's autobind gives a step of one task one core, and the ranks are that task's children.
    argv = [
        "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill", "--kill-on-bad-exit=0",
        "--mpi=none", "--cpu-bind=none", "--export=ALL", f"--chdir={run_dir}",
    ]  # fmt: skip
    if spec.slurm.cpus_per_host is not None:
        argv.append(f"--cpus-per-task={spec.slurm.cpus_per_host}")
    return [*argv, *step_options(spec, run_dir, environ)]


def send_to_supervisor(run_dir: Path, request: StopRun) -> bool:
    """Send the supervisor a stop request, unless it is stopping already; False: it did not answer."""
    record = locate.lease(run_dir)
    if record is None or record.address is None:
        return False
    token = run_token(run_dir)
    status = locate.request(record.address, token, AskStatus())
    if status is None:
        return False
    if status.phase in ("stopping", "ended"):  # a second stop would make it exit without saving
        return True
    return locate.request(record.address, token, request) is not None


def _log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} muster: {text}", flush=True)


def main() -> None:
    """Run one job; exit with the run's code (0 where a further job continues the run)."""
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description="one Slurm job of a Muster run, on its first node")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    arguments = parser.parse_args()
    environ = environment.inherited()
    if "SLURM_JOB_ID" not in environ:
        print("error: not inside a Slurm job\nhint: run `sbatch job.sh` or `muster submit`", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(Batch(arguments.run_dir, arguments.run_id, environ).run())
    except MusterError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
