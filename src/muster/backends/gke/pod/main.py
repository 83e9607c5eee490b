"""The first program of a pod: starts the agent or the supervisor, and maps its end to what Kubernetes acts on.

Run as ``python -m muster.backends.gke.pod.main ROLE --run-dir DIR [--host NAME] [--leave-after-s N] -- PROGRAM...``.
``backends/host`` decides; this is what it cannot know.

* ``host``: a pod that is removed (drained, preempted, deleted) ends with 75, so that its Job creates another one, and
  so does one whose agent failed. An agent that left because no supervisor connected is started again in the same pod.
* ``supervisor``: two pods have this role, and one works; the other one stands by until the run's lease is out (10 s).
  Where a pod alone is removed its supervisor is killed at once: agents continue training, and the other pod's adopts
  them. Where all pods are removed at the same time (the queue evicts the run), it saves with them first.
  When the run saved and wants to run again (75: the allocation ends, or too little of it is left), the rest of it is
  queued as a new JobSet, which goes through the queue to a new allocation and goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.pod.continuation import API, AllocationsUsedUp, JobSetGone
from muster.backends.google.http import Unreachable
from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Place, Program, Service
from muster.backends.host.run_state import RunState
from muster.backends.host.state import (
    AGENT,
    CONFIG_ERRORS,
    RESUME,
    STOPPED,
    SUPERVISOR,
    Exit,
    LeaveAt,
    Outcome,
    Requeued,
    Rules,
    Scope,
    State,
)
from muster.backends.log_forwarder import LogForwarder
from muster.core import environment, processes
from muster.core.clock import SystemClock
from muster.core.errors import BusyError, MusterError
from muster.core.typed_json import JsonObject, at, child, children, text
from muster.storage.store.patient import start_thread

BACK_END_FAULT = 6
COUNTED = 70
"""No result, and not free: the Job's backoff limit counts it, so what fails forever ends. 75 is not counted."""
OTHERS_REQUEUE_S = 60.0
"""The pod whose supervisor asks to be continued has this time to queue the rest; then the other pod does it."""
ANSWER_S = 5.0
"""What the API server may take to say whether all pods go."""
AGE_S = 30.0
"""What it may take to say since when the run has its allocation."""
SHORTEST_RUN_S = 60.0
"""A run whose allocation is younger than this would be requeued forever without a step."""

HOST = Rules(reads_end=False, leaves_on_notice=True, moves=True, released_host_ends=True)
#: A sub-block is a group of hosts with their switches within one rack (Compute Engine, "VM topology").
LABELS = {
    "MUSTER_BLOCK": "cloud.google.com/gce-topology-block",
    "MUSTER_RACK": "cloud.google.com/gce-topology-subblock",
}


def supervisor_rules(*, reads_end: bool, grace_s: float) -> Rules:
    """A notice is for this pod or for all: the API server knows."""
    return Rules(
        rank=0,
        reads_end=reads_end,
        continues="requeue",
        requeue_after_s=OTHERS_REQUEUE_S,
        notice_scope=None,
        leaves_on_notice=True,
        moves=True,
        saves_by_signal=True,
        grace_s=grace_s,
    )


@dataclass(kw_only=True)
class PodPlace(Place):
    """A pod of one program."""

    all_go: Callable[[], bool | None] = lambda: False
    """Whether all pods of the run are removed; None: one cannot know."""
    age_s: Callable[[], float | None] = lambda: 0.0
    """For how long the run has had its allocation, if longer than this pod's age; None: not known."""
    queue: Callable[[], str] | None = None
    """Queues the rest of the run; returns the name of what was made."""
    started_s: float = field(default_factory=time.monotonic)

    def notice_scope(self) -> Scope | None:
        answer = self.all_go()
        return None if answer is None else "run" if answer else "host"

    def requeue(self) -> Requeued:
        age_s, own_s = self.age_s(), time.monotonic() - self.started_s
        wants, hint = "error: the run asks to be continued", "\nhint: muster submit continues it"
        if self.queue is None:
            return Requeued(text=f"{wants} but this pod may not queue it{hint}", code=BACK_END_FAULT)
        if own_s < SHORTEST_RUN_S and age_s is None:
            text = "the run asks to be continued; the API server does not answer yet"
            return Requeued(text=text, code=RESUME, again=True)
        if (lived_s := max(own_s, age_s or 0.0)) < SHORTEST_RUN_S:
            return Requeued(text=f"{wants} after only {lived_s:.0f} s{hint}", code=BACK_END_FAULT)
        try:
            return Requeued(text=f"continuation queued: {self.queue()}")
        except AllocationsUsedUp as error:  # by condition, so that the other pod queues nothing
            self.home.end_instead(RESUME, STOPPED, str(error))
            return Requeued(text=f"the run has reached its limit: {error}\nhint: {error.hint}", code=STOPPED)
        except JobSetGone as error:
            return Requeued(text=f"{wants}: {error}{hint}", code=BACK_END_FAULT)
        except (Unreachable, BusyError, OSError) as error:
            return Requeued(text=f"cannot queue the rest of the run yet: {error}", code=RESUME, again=True)
        except MusterError as error:  # a refusal may be one of a moment: a webhook that is down, a role that is new
            return Requeued(text=f"cannot queue the rest of the run: {error}", code=COUNTED, again=True)

    def leave(self, ended: Exit, state: State) -> int:
        gave_up = ended.outcome is Outcome.GIVEN_UP and ended.code not in CONFIG_ERRORS
        return COUNTED if gave_up else ended.code


def host_program(
    place: PodPlace,
    argv: Sequence[str],
    rules: Rules,
    *,
    writer: str = "",
    services: Sequence[Service] = (),
    leave_after_s: float | None = None,
) -> HostProgram:
    """``leave_after_s``: from the allocation's start; this pod may be a later one's."""
    name = AGENT if rules.rank is None else SUPERVISOR
    home = place.home if writer else None
    run = HostProgram(
        place=place,
        rules=rules,
        services=services,
        programs={name: Program(argv=argv, env=environment.inherited(), home=home, writer=writer)},
    )
    if leave_after_s is not None:
        run.post(LeaveAt(at_s=run.now_s() + leave_after_s))

        def correct() -> None:
            age_s = place.age_s()
            if age_s is not None and age_s > time.monotonic() - place.started_s:
                run.post(LeaveAt(at_s=run.now_s() + max(1.0, leave_after_s - age_s)))

        start_thread(correct, "allocation")
    return run


def name_after_pod(host: str, argv: Sequence[str], pod: str) -> tuple[str, list[str]]:
    """The host's name with the pod's own suffix, also in the program's arguments.

    A pod that replaces another is usually on another machine: a notice or a quarantine of the old one does not
    apply to it.
    """
    if not host or not pod:
        return host, list(argv)
    own = f"{host}-{pod.rpartition('-')[2]}"
    return own, [own if word == host else word for word in argv]


def main() -> int:
    processes.forgive_outputs()
    own, argv = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, argv = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["host", "supervisor"])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", default="")
    parser.add_argument("--node-labels", action="store_true", help="learn the node's place from its labels")
    parser.add_argument("--leave-after-s", type=float, default=0.0, help="save then, and queue the rest; 0: never")
    parser.add_argument("--requeue", metavar="NAMESPACE/JOBSET", help="what to queue the rest of the run after")
    parser.add_argument("--at-most", type=int, default=0, help="allocations in all; 0: as many as it takes")
    parser.add_argument("--grace-s", type=float, default=30.0, help="what the pod has between SIGTERM and SIGKILL")
    given = parser.parse_args(own)
    return (_supervisor(given, argv) if given.role == "supervisor" else _host(given, argv)).run()


def _supervisor(given: argparse.Namespace, argv: Sequence[str]) -> HostProgram:
    state = RunState(run_dir=given.run_dir, job=(given.requeue or "").partition("/")[2], brings_events=True)
    place = PodPlace(home=state)
    if given.requeue:
        jobset = OwnJobSet(which=given.requeue, connect=_own_cluster)
        place.queue = lambda: _requeue(given.requeue, given.at_most)
        place.all_go = lambda: jobset.goes(ANSWER_S)
        place.age_s = lambda: jobset.age_s(AGE_S, datetime.datetime.now(datetime.UTC))
    rules = supervisor_rules(reads_end=state.says_how_it_ended, grace_s=given.grace_s)
    return host_program(place, argv, rules, writer=SUPERVISOR, leave_after_s=given.leave_after_s or None)


def _host(given: argparse.Namespace, argv: Sequence[str]) -> HostProgram:
    own_name = environment.current().pod
    host, argv = name_after_pod(given.host, argv, own_name)
    state, node = RunState(run_dir=given.run_dir), environment.current().node
    if not host:
        return host_program(PodPlace(home=state), argv, HOST)
    if given.node_labels and node:
        os.environ.update(place_of_node(node, _own_cluster, ANSWER_S))
    writer = host if state.home.is_folder else own_name or host
    forwarder = LogForwarder(run_dir=given.run_dir, host=host, writer=writer)
    return host_program(PodPlace(home=state), argv, HOST, writer=writer, services=[forwarder])


def _own_cluster() -> Cluster:
    from muster.backends.gke.kubernetes.config import own_cluster

    return own_cluster(SystemClock(), environment.inherited())


def _requeue(which: str, at_most: int) -> str:
    from muster.backends.gke.pod.continuation import queue_continuation

    namespace, _, name = which.partition("/")
    return queue_continuation(_own_cluster(), namespace, name, at_most=at_most)


def place_of_node(node: str, connect: Callable[[], Cluster], timeout_s: float) -> dict[str, str]:
    """``MUSTER_BLOCK`` and ``MUSTER_RACK``, as far as the node has such labels and its account may read them; waits no
    longer than ``timeout_s``, and says on stderr why there is no answer."""
    found: dict[str, str] = {}
    failed = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        try:
            held = connect().get({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            labels: JsonObject = child(held or {}, "metadata", "labels")
            found.update({name: value for name, label in LABELS.items() if (value := text(labels, label))})
            failed.clear()
        except (MusterError, OSError) as error:
            failed[:] = [str(error)]

    thread = threading.Thread(target=ask, name="own-node", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        print(f"the labels of node {node} are not known, so copies may stay in its rack: {failed[0]}", file=sys.stderr)
        return {}
    return dict(found)


@dataclass(kw_only=True)
class OwnJobSet:
    """Named ``NAMESPACE/NAME``."""

    which: str
    connect: Callable[[], Cluster]
    _cluster: Cluster | None = field(default=None)

    def goes(self, timeout_s: float) -> bool | None:
        """Whether all of its pods are taken away (the queue evicts it, or it was deleted); None: no answer."""
        answer = self._look(timeout_s)
        return None if answer is None else all_pods_go(answer[0])

    def age_s(self, timeout_s: float, now: datetime.datetime) -> float | None:
        """Seconds since it was allowed to run; None: no answer."""
        answer = self._look(timeout_s)
        since = runs_since(answer[0]) if answer is not None else None
        return None if since is None else (now - since).total_seconds()

    def _look(self, timeout_s: float) -> tuple[JsonObject | None] | None:
        """(the object or None where it is gone); None: no answer in time."""
        answers: list[tuple[JsonObject | None]] = []

        def ask() -> None:
            namespace, _, name = self.which.partition("/")
            with contextlib.suppress(MusterError, OSError):
                self._cluster = self._cluster or self.connect()
                metadata: JsonObject = {"name": name, "namespace": namespace}
                answers.append((self._cluster.get({"apiVersion": API, "kind": "JobSet", "metadata": metadata}),))

        thread = threading.Thread(target=ask, name="own-jobset", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return answers[0] if answers else None


def all_pods_go(jobset: JsonObject | None) -> bool:
    """Absent, being deleted, or suspended."""
    if jobset is None or text(jobset, "metadata", "deletionTimestamp"):
        return True
    return at(jobset, "spec", "suspend") is True


def runs_since(jobset: JsonObject | None) -> datetime.datetime | None:
    """When it was last resumed, else made: an allocation counts from before that."""
    if jobset is None:
        return None
    resumed = [
        text(row, "lastTransitionTime")
        for row in children(child(jobset, "status"), "conditions")
        if (text(row, "type"), text(row, "status")) == ("Suspended", "False")
    ]
    found = next(iter(resumed), "") or text(jobset, "metadata", "creationTimestamp")
    try:
        return datetime.datetime.fromisoformat(found.replace("Z", "+00:00"))
    except ValueError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
