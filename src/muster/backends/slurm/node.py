"""``python -m muster.backends.slurm.node``: a node's step: its agent, and the supervisor where the lease is ours.

Every node is a candidate. The first one starts the supervisor at once; the others watch its lease, and one takes over
when the holder is silent for longer than a limit that grows with the node's number. A holder that cannot be reached
while Slurm's controller can is deposed by a conditional write to the lease: it exits at its next renewal, wherever it
runs. A node that reaches neither is cut off: it ends its own ranks, which could only hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from muster.backends.slurm import locate
from muster.backends.slurm.batch import CONTROLLERS, LINGER_S, TIME_LIMIT_STOP, send_to_supervisor, wake_on_signals
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.nccl_settings import with_nccl_settings
from muster.backends.slurm.resubmit import resubmit
from muster.backends.slurm.script import program
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.errors import ConflictError, MusterError
from muster.protocol.client import StopRun
from muster.protocol.lease import LeaseRecord, read_lease, write_lease
from muster.storage import run_output
from muster.storage.store import open_store

#: How often the lease's holder is checked; less often beyond the first few nodes, to limit the load on it.
CHECK_EVERY_S = 1.0
FAR_CHECK_EVERY_S = 5.0
#: How long the second node waits for a silent holder, and how much longer each further node does.
SILENCE_S = 4.0
STAGGER_S = 3.0
#: Time for the first node to start the first supervisor.
FIRST_START_S = 60.0
#: A supervisor that exits without a result is restarted after a pause that doubles, this often within LIVED_S.
SUPERVISOR_FAILURES = 6
LOST_RACE = 1
"""Exit code of a supervisor that found the lease held, among other causes."""
LIVED_S = 600.0
#: Time for the agent to exit after the result: trackers get ``trackers.main.END_S`` of it.
LEAVE_S = 12.0
#: By then a living batch program has ended the job.
BATCH_LEAVES_S = LINGER_S + 3.0


@dataclass
class Node:
    """One node of one job."""

    run_dir: Path
    run_id: str
    host: str
    environ: Mapping[str, str]
    slurm: Slurm = field(default_factory=Slurm)

    def __post_init__(self) -> None:
        self.spec = RunSpec.model_validate_json(resolved_file.read(self.run_dir, patient=True))
        self.index = int(self.host.rpartition("-")[2])
        self.began_wall_ns = _job_began_wall_ns(self.run_dir, self.environ["SLURM_JOB_ID"])
        self.began_s = time.monotonic()
        self.agent: subprocess.Popen[bytes] | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.starts = self.failures = 0
        self.took_over_s = 0.0
        self.not_before_s = 0.0
        self.term = self.noticed = self.cut_off = False
        self.ends_s: float | None = None
        """Where this node replaces the batch node: when the notice before the time limit is due."""
        self.reached_s = time.monotonic()
        """When the holder of the lease was last reached."""
        self.checked_s = 0.0
        self.agent_ended_s = 0.0

    @property
    def silence_limit_s(self) -> float:
        return SILENCE_S + STAGGER_S * max(0, self.index - 1)

    def run(self) -> int:
        """Serve until the run has ended; return the agent's or the supervisor's code."""
        with wake_on_signals(signal.SIGTERM, self._on_term, ignored=[signal.SIGUSR1, signal.SIGINT]) as wake:
            self._start_agent()
            if self.index == 0:
                self._take_over("the first node")
            while not self._done():
                select.select([wake], [], [], 0.5)
                with contextlib.suppress(BlockingIOError):
                    wake.recv(256)
                self._check_children()
                self._watch_lease()
                if self.term and self.supervisor is not None:
                    self._forward_term()
                elif self.term and not self._has_supervisor():
                    return self._give_up()
                if self.ends_s is not None and time.time() > self.ends_s and not self.noticed:
                    self._notice()
        self._end_children()
        verdict = self._verdict()
        code = verdict.exit_code if verdict is not None else 1
        if self.starts and self.index:
            self._replace_batch(code)
        _log("exited")
        return code if self.starts else 0

    def _give_up(self) -> int:
        """Slurm ends the job and there is no supervisor (yet): there is nothing to save, so nothing to wait for."""
        _log("ended by Slurm before the run had a supervisor")
        if self.agent is not None:
            self.agent.kill()
        end_labelled(self.run_id, self.host, spared={os.getpid()})
        return 128 + signal.SIGTERM

    def _replace_batch(self, code: int) -> None:
        """The batch node was probably lost: do what its program would have done at the end of the run."""
        if self.noticed and code == 75:
            resubmit(self.spec, self.run_dir, self.run_id, self.environ, self.slurm, _log)
        time.sleep(BATCH_LEAVES_S)  # where it lives after all, it ends the job and with it this step
        _log("the job has not been ended: ending it to release its nodes")
        with contextlib.suppress(MusterError):
            self.slurm.cancel(self.environ["SLURM_JOB_ID"])

    # ------------------------------------------------------------ children

    def _start_agent(self) -> None:
        own = ["--host", self.host, "--no-metadata-server"]
        argv, variables = with_nccl_settings(self.spec, [*self._program("agent.watchdog"), *own], self.environ)
        self.agent = self._start(f"agent-{self.host}", argv, variables)

    def _take_over(self, reason: str) -> None:
        """Start a supervisor; it takes the lease, or exits because another one holds it."""
        self.starts += 1
        self.took_over_s = time.monotonic()
        self.not_before_s = self.took_over_s + 2.0 ** min(self.failures + 1, 5)
        _log(f"starting the supervisor here: {reason}")
        self.supervisor = self._start("supervisor", self._program("app.supervisor"), {})
        self.reached_s = time.monotonic()

    def _program(self, module: str) -> list[str]:
        return program(module, sys.executable, run_id=self.run_id, run_dir=str(self.run_dir))

    def _start(self, name: str, argv: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with processes.open_log(self.run_dir / "logs" / f"{name}.log") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self.run_dir,
                env={**self.environ, **variables},
            )  # fmt: skip

    def _check_children(self) -> None:
        now = time.monotonic()
        if self.agent is not None and self.agent.poll() is not None:
            _log(f"the agent ended with code {self.agent.returncode}")
            self.agent, self.agent_ended_s = None, now
        elif self.agent is None and now - self.agent_ended_s > 3.0 and self._in_touch() and self._verdict() is None:
            self._start_agent()  # it exited without a supervisor, or was cut off: it can be a spare
        if self.supervisor is not None and self.supervisor.poll() is not None:
            code, pid = self.supervisor.returncode, self.supervisor.pid
            self.supervisor, self.reached_s = None, now
            _log(f"the supervisor ended with code {code}")
            if code == LOST_RACE and self._held_by_another_than(pid):
                return  # it was no failure: the run has its supervisor
            self.failures = self.failures + 1 if now - self.took_over_s < LIVED_S else 1
            if code < 0 and self.failures < SUPERVISOR_FAILURES and self._verdict() is None:
                self._take_over("the previous one was killed")  # its lease is free at once: it was on this machine

    def _end_children(self) -> None:
        until = time.monotonic() + LEAVE_S
        for child in (self.agent, self.supervisor):
            if child is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, until - time.monotonic()))
            child.kill()

    def _in_touch(self) -> bool:
        return time.monotonic() - self.reached_s < 2 * FAR_CHECK_EVERY_S or self.supervisor is not None

    def _done(self) -> bool:
        if self.supervisor is not None:
            return False
        if self.agent is not None and time.monotonic() - self.checked_s < CHECK_EVERY_S:
            return False
        return self._verdict() is not None

    def _verdict(self) -> run_output.Verdict | None:
        return run_output.verdict(self.run_dir, self.began_wall_ns)

    # ------------------------------------------------------------ the lease

    def _has_supervisor(self) -> bool:
        record = locate.lease(self.run_dir)
        return record is not None and record.address is not None

    def _held_by_another_than(self, pid: int) -> bool:
        record = locate.lease(self.run_dir)
        if record is None or record.address is None or record.expires_wall_ns <= time.time_ns():
            return False
        return (record.machine, record.pid) != (socket.gethostname(), pid)

    def _watch_lease(self) -> None:
        now = time.monotonic()
        every_s = CHECK_EVERY_S if self.index <= 3 else FAR_CHECK_EVERY_S
        if self.supervisor is not None or now - self.checked_s < every_s or now < self.not_before_s:
            return
        self.checked_s = now
        if self._verdict() is not None or self.failures >= SUPERVISOR_FAILURES:
            return
        record = locate.lease(self.run_dir)
        if record is None or record.address is None:
            # It was not taken yet, or the previous job released it.
            if self.index == 0 or now - self.began_s > FIRST_START_S + self.silence_limit_s:
                self._take_over("the run's lease is free")
            return
        address = record.address
        if locate.connects(address):
            self.reached_s, self.cut_off = time.monotonic(), False
            return
        silent_s = time.monotonic() - self.reached_s
        if silent_s < self.silence_limit_s:
            return
        if not self._reaches_a_controller():
            if silent_s > self.spec.recovery.timing.cut_off_after_s:
                self._cut_off(silent_s)
            self.cut_off = True
        elif self.cut_off:  # reachable again: the holder may well live, so wait again from now
            self.cut_off, self.reached_s = False, time.monotonic()
        elif not locate.connects(address) and self._vacate(record):
            self._take_over(f"its holder at {address[0]} has been silent for {silent_s:.1f} s")
            self.ends_s = self._notice_due()

    def _reaches_a_controller(self) -> bool:
        """Whether this node is on Slurm's side of a network cut; True where no controller is known."""
        try:
            known = json.loads((self.run_dir / CONTROLLERS).read_text())
        except (OSError, ValueError):
            known = []
        return not known or any(locate.connects((str(host), int(port))) for host, port in known)

    def _vacate(self, record: LeaseRecord) -> bool:
        """Expire the lease of a holder that cannot be reached: its renewals fail from then on, and it exits."""
        store, uri = open_store(), str(self.run_dir / "lease.json")
        try:
            stored = store.get(uri)
            current = read_lease(stored.data, me="this job")
            if current.term != record.term:
                return False  # another node was faster
            store.put_if(uri, write_lease(replace(current, expires_wall_ns=0)), stored.generation)
        except (ConflictError, FileNotFoundError, ValueError):
            return False  # it was just renewed: check again
        return True

    def _cut_off(self, silent_s: float) -> None:
        """Neither supervisor nor controller answers: the ranks here are of an attempt that continues without them."""
        if self.agent is None:
            return
        _log(f"cut off for {silent_s:.1f} s: ending this node's ranks")
        self.agent.kill()
        end_labelled(self.run_id, self.host, spared={os.getpid()})
        self.agent.wait()

    # ------------------------------------------------------------ signals

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        """Slurm ends the job (scancel, requeue, preemption, time limit). USR1 is for the batch program."""
        self.term = True

    def _notice_due(self) -> float | None:
        """When the batch node's notice would have come, since that is lost with it."""
        before_s = self.spec.slurm.signal_before_timeout_s
        with contextlib.suppress(MusterError):
            for job in self.slurm.jobs(self.run_id):
                if job.id == self.environ["SLURM_JOB_ID"] and job.end_s is not None and before_s:
                    return job.end_s - before_s
        return None

    def _notice(self) -> None:
        self.noticed = send_to_supervisor(self.run_dir, TIME_LIMIT_STOP)

    def _forward_term(self) -> None:
        """The supervisor ignores SIGTERM itself: on some sites it reaches every process, on others only the step's own.

        One that is saving already (the notice before the limit came first) is left alone: a second stop would end it.
        """
        if send_to_supervisor(self.run_dir, StopRun(again=True, source="SIGTERM from Slurm")):
            self.term = False


def end_labelled(run_id: str, host: str, *, spared: set[int]) -> None:
    """SIGKILL to every process of this host of the run, whatever its session."""
    labels = {f"MUSTER_RUN_ID={run_id}".encode(), f"MUSTER_HOST={host}".encode()}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        with contextlib.suppress(OSError):
            if labels <= set(Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")):
                os.kill(int(entry.name), signal.SIGKILL)


def _job_began_wall_ns(run_dir: Path, job_id: str) -> int:
    """When this job's batch program began: an earlier result is an older job's."""
    try:
        return int((run_dir / f"hosts-{job_id}.json").stat().st_mtime_ns)
    except OSError:
        return time.time_ns()


def _log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} node: {text}", flush=True)


def _peers(run_dir: Path, environ: Mapping[str, str]) -> list[str]:
    """What a route must lead to: the other nodes, then the node that started the step, then the submit host."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        nodes = json.loads((run_dir / f"hosts-{environ['SLURM_JOB_ID']}.json").read_text()).values()
        names = [node for node in nodes if node != environ.get("SLURMD_NODENAME")][:2]
    return [*names, *(environ[key] for key in ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SUBMIT_HOST") if environ.get(key))]


def main() -> None:
    """Serve one node; its output goes to the run's own logs, since the batch node may be lost."""
    processes.forgive_outputs()
    parser = argparse.ArgumentParser(description="one node of a Muster run in a Slurm job")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", required=True)
    arguments = parser.parse_args()
    environ = environment.inherited()
    job_log = os.dup(2)
    with processes.open_log(arguments.run_dir / "logs" / f"node-{arguments.host}.log") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        spec = RunSpec.model_validate_json(resolved_file.read(arguments.run_dir, patient=True))
        address = locate.address_of_this_node(_peers(arguments.run_dir, environ), interface=spec.slurm.interface)
        environ |= {"MUSTER_BIND": address, "MUSTER_HOST": arguments.host, **locate.place_of_this_node(environ)}
        _log(f"{arguments.host} is {environ.get('SLURMD_NODENAME', socket.gethostname())} at {address}")
        sys.exit(Node(arguments.run_dir, arguments.run_id, arguments.host, environ).run())
    except MusterError as error:
        text = f"error: {error}" + (f" (hint: {error.hint})" if error.hint else "")
        _log(text)
        os.write(job_log, f"{arguments.host}: {text}\n".encode())
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
