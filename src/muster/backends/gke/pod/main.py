"""The first program of a pod: starts the agent or the supervisor, and maps its end to what Kubernetes acts on.

Run as ``python -m muster.backends.gke.pod.main ROLE --run-dir DIR [--host NAME] [--leave-after-s N] -- PROGRAM...``.

* ``host``: a pod that is removed (drained, preempted, deleted) ends with 75, so that its Job creates another one, and
  so does one whose agent failed: whether the run goes on is the supervisor's decision, never the Job's; an agent that
  left because no supervisor connected is restarted for the lifetime of the pod.
* ``supervisor``: a pod that is removed ends at once and the agents continue training: the next one adopts them once
  the old one's lease has expired (10 s). Where the old one is alive (its node was only unreachable), it waits.
  When the run itself saved and wants to run again (75: the allocation ends, or too little of it is left), the rest of
  it is queued as a new JobSet, which goes through the queue to a new allocation and goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from muster.backends.gke.pod.log_forwarder import LogForwarder
from muster.core import environment
from muster.core.clock import SystemClock
from muster.core.errors import MusterError

AGAIN = 75
"""Saved, asks to be continued. As a pod's exit code it is free: the Job creates a new pod and does not count it."""
BACK_END_FAULT = 6
REFUSED = 1
"""One of the causes: another supervisor holds the run."""
STAND_BY_S = 0.5
LONELY = "no supervisor and no work"
"""The reason in ``agent.ended`` of an agent that left because no supervisor connected."""
SHORTEST_RUN_S = 60.0
"""A run that asks to be continued sooner than this would be requeued forever without a step."""


@dataclass(kw_only=True)
class Pod:
    """One program, its signals, and its end."""

    argv: Sequence[str]
    role: str
    lonely: Callable[[], bool] = lambda: False
    held: Callable[[], bool] = lambda: False
    """Whether another supervisor holds the run."""
    requeue: Callable[[], str] | None = None
    """Queues the rest of the run; returns the name of what was made."""
    leave_after_s: float | None = None
    _child: int | None = None
    _taken: bool = False
    _started: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """The pod's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)
        signal.signal(signal.SIGALRM, self._leave)
        if self.leave_after_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self.leave_after_s)
        if self.role == "supervisor":
            return self._supervise()
        code = self._wait()
        while code == 0 and not self._taken and self.lonely():
            print("no supervisor connected; waiting again", file=sys.stderr, flush=True)
            code = self._wait()
        return AGAIN if self._taken or code else 0

    def _supervise(self) -> int:
        """A supervisor that disappeared holds the run until its lease expires; its successor waits."""
        code: int | None = None
        while code is None and not self._taken:
            if self.held():
                time.sleep(STAND_BY_S)
                continue
            code = self._wait()
            if code == REFUSED and self.held():
                code = None  # another one was faster
        if self._taken or code is None:
            return AGAIN
        return self._requeued() if code == AGAIN else code

    def _wait(self) -> int:
        """Start the program and wait for its end; everything else that ends is collected, as process 1 has to."""
        self._child = os.posix_spawnp(self.argv[0], list(self.argv), environment.inherited())
        if self._taken:  # while it was being started
            self._send(signal.SIGTERM)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._child:
                self._child = None
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code

    def _signal(self, number: int, _frame: FrameType | None) -> None:
        self._taken = True
        # To a supervisor SIGTERM means: the whole run is preempted. Only its pod is, so it is killed: its state is
        # in its log, and agents wait for its successor.
        self._send(signal.SIGKILL if self.role == "supervisor" else number)

    def _leave(self, _number: int, _frame: FrameType | None) -> None:
        print("the allocation is about to end: saving", file=sys.stderr, flush=True)
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _requeued(self) -> int:
        lived_s = time.monotonic() - self._started
        if self.requeue is None or lived_s < SHORTEST_RUN_S:
            reason = "but this pod may not queue it" if self.requeue is None else f"after only {lived_s:.0f} s"
            print(f"error: the run asks to be continued {reason}\nhint: muster submit continues it", file=sys.stderr)
            return BACK_END_FAULT
        try:
            print(f"continuation queued: {self.requeue()}", file=sys.stderr)
        except MusterError as error:
            print(f"error: cannot queue the rest of the run: {error}\nhint: muster submit", file=sys.stderr)
            return BACK_END_FAULT
        return 0


def name_after_pod(host: str, argv: Sequence[str], pod: str) -> tuple[str, list[str]]:
    """The host's name with the pod's own suffix, also in the program's arguments.

    A pod that replaces another is usually on another machine: a notice or a quarantine of the old one does not
    apply to it.
    """
    if not host or not pod:
        return host, list(argv)
    own = f"{host}-{pod.rpartition('-')[2]}"
    return own, [own if word == host else word for word in argv]


def lease_held(run_dir: Path) -> bool:
    """Whether the run's lease is held now, by this pod's clock."""
    try:
        record = json.loads((run_dir / "lease.json").read_text())
        return time.time_ns() < int(record.get("expires_wall_ns", 0))
    except (OSError, ValueError, AttributeError):
        return False


def left_unsupervised(run_dir: Path, host: str) -> bool:
    """Whether the host's newest event says that its agent left because no supervisor connected."""
    files = sorted((run_dir / "events").glob(f"{host}.*.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in files[-1:]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            last = json.loads(path.read_bytes().splitlines()[-1])
            return bool(last.get("kind") == "agent.ended" and last.get("detail", {}).get("reason") == LONELY)
    return False


def main() -> int:
    own, argv = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, argv = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["host", "supervisor"])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", default="")
    parser.add_argument("--leave-after-s", type=float, default=0.0, help="save then, and queue the rest; 0: never")
    parser.add_argument("--requeue", metavar="NAMESPACE/JOBSET", help="what to queue the rest of the run after")
    parser.add_argument("--at-most", type=int, default=0, help="allocations in all; 0: as many as it takes")
    given = parser.parse_args(own)
    host, argv = name_after_pod(given.host, argv, environment.current().pod)
    pod = Pod(
        argv=argv,
        role=given.role,
        lonely=lambda: left_unsupervised(given.run_dir, host),
        held=lambda: lease_held(given.run_dir),
        requeue=(lambda: _requeue(given.requeue, given.at_most)) if given.requeue else None,
        leave_after_s=given.leave_after_s or None,
    )
    if not host:
        return pod.run()
    forwarder = LogForwarder(run_dir=given.run_dir, host=host)
    forwarder.start()
    try:
        return pod.run()
    finally:
        forwarder.stop()


def _requeue(which: str, at_most: int) -> str:
    from muster.backends.gke.kubernetes.config import own_cluster
    from muster.backends.gke.pod.continuation import queue_continuation

    namespace, _, name = which.partition("/")
    cluster = own_cluster(SystemClock(), environment.inherited())
    return queue_continuation(cluster, namespace, name, at_most=at_most)


if __name__ == "__main__":
    raise SystemExit(main())
