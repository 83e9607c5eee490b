"""Drill: start a run here, break it on purpose, and compare what happened with what had to happen.

The run is the user's own file on this machine's back end, in a folder of its own, ended when the drill is
over; neither the file's ``run_dir`` nor its ``checkpoint.dir`` is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.app.inspect.report import report
from muster.app.run import recover, stop, submit
from muster.app.run.remove import removal, remove
from muster.chaos import catalog
from muster.chaos.fault import Fault as Fault
from muster.chaos.network import Disk, Network
from muster.chaos.target import RunTarget
from muster.config import load
from muster.core.errors import BackendError, MusterError, UsageError
from muster.core.event_details.incidents import IncidentDecided, IncidentDetected
from muster.core.event_details.run import RunFinished
from muster.core.event_log import Damage
from muster.core.events import Event
from muster.core.typed_json import JsonObject
from muster.core.types import Action, JobRequest
from muster.report.audit.invariants import broken, check
from muster.storage.run_registry import RunDir

MENU = catalog.MENU

#: Steps beyond the fault that count as "it trains on".
SETTLE_STEPS = 5
#: What the user's file does first (data, imports, compile) must be over by then.
START_TIMEOUT_S = 900.0
#: A run that has to end does so within its grace and this: restarts before the verdict are in it.
END_TIMEOUT_S = 120.0
#: A drill replaces these in every file: its run is its own.
OWN = (
    "backend=local", "run_dir=null", "checkpoint.dir=null", "output.tracker=none", "evaluation.at_start=false",
    "training.epochs=null", "training.steps=1000000", "recovery.keep_hosts_after_failure_s=0",
    "recovery.policy=default",
)  # fmt: skip


@dataclass(kw_only=True)
class Outcome:
    fault: Fault
    run: RunDir
    seed: int
    overrides: tuple[str, ...]
    at_step: int = 0
    noticed: list[str] = field(default_factory=list)
    """Incident kinds, in order."""
    done: list[str] = field(default_factory=list)
    """Actions, in order, those that did nothing left out."""
    sentences: list[str] = field(default_factory=list)
    lost_s: float | None = None
    """L: from the injection to the end of the first step beyond the last one applied before it."""
    redone: int | None = None
    exit_code: int | None = None
    reached_step: int = 0
    invariants: list[str] = field(default_factory=list)
    """What is broken; empty: all hold."""
    damaged: Sequence[Damage] = ()
    """Places of the event log that were left out."""
    failures: list[str] = field(default_factory=list)
    """Where what was seen is not what was expected."""

    @property
    def as_expected(self) -> bool:
        return not self.failures

    def to_json(self) -> JsonObject:
        return {
            "fault": self.fault.name,
            "what": self.fault.text,
            "seed": self.seed,
            "run_id": self.run.run_id,
            "run_dir": str(self.run.path),
            "overrides": list(self.overrides),
            "at_step": self.at_step,
            "expected": expected(self.fault),
            "seen": {
                "noticed": self.noticed,
                "done": self.done,
                "redone_steps": self.redone,
                "exit_code": self.exit_code,
                "lost_s": self.lost_s,
                "reached_step": self.reached_step,
                "sentences": self.sentences,
            },
            "invariants_broken": self.invariants,
            "damaged": [damage.to_json() for damage in self.damaged],
            "failures": self.failures,
            "as_expected": self.as_expected,
        }


def expected(fault: Fault) -> JsonObject:
    """What has to happen, for programs."""
    return {
        "noticed": list(fault.noticed),
        "done": [list(kinds) for kinds in fault.done],
        "redone_steps": fault.redone,
        "exit_code": fault.exit_code,
    }


def menu_entry(fault: Fault) -> JsonObject:
    """A row of the menu, for programs."""
    return {
        "name": fault.name,
        "what": fault.text,
        "numbers": list(fault.numbers),
        **expected(fault),
        "needs_root": fault.needs_root,
        "own_loop_only": fault.own_loop,
    }


def drill(
    run_file: str,
    overrides: Sequence[str] = (),
    *,
    fault: str,
    at_step: int = 10,
    seed: int = 0,
    keep: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run one fault of the menu to its end. Blocks; no process of the run is left in any case.

    Its folder is left with ``keep``, or where the outcome is not as expected.

    Raises:
        UsageError, RunFileError: no such fault; the file does not hold; the fault needs root, or Muster's own loop.
        MusterError: the run never came to the step, or never came back.
    """
    chosen = catalog.find(fault)
    spec = load.load(run_file, [*overrides, *OWN]).spec
    needed = chosen.overrides(spec)
    for module in needed:
        tell(f"this drill sets {module}")
    loaded = load.load(run_file, [*overrides, *OWN, *needed])
    if chosen.own_loop and loaded.spec.command is not None:
        raise UsageError(
            f"{fault} happens inside Muster's training loop, and this file runs a command",
            hint="muster drill --list marks such faults",
        )
    hosts = loaded.spec.resources.hosts + loaded.spec.resources.spare_hosts
    network = Network(names=[f"host-{number}" for number in range(hosts)]) if chosen.network else None
    with contextlib.ExitStack() as made:
        if network is not None:
            made.callback(_undisturbed, network.down)
            network.up()
        intent = submit.begin(loaded, argv=["muster", "drill", run_file, "--fault", fault])
        disk = Disk(folder=intent.run.checkpoints) if chosen.disk else None
        if disk is not None:
            disk.up()
            made.callback(_undisturbed, disk.down)
        submit.start(intent, _armed(intent.request, network))
        tell(f"run {intent.run.run_id} in {intent.run.path}")
        target = RunTarget(run=intent.run, spec=intent.spec, random=random.Random(seed), network=network, disk=disk)
        outcome = Outcome(fault=chosen, run=intent.run, seed=seed, overrides=tuple(needed))
        try:
            _ready(target, chosen, at_step, tell)
            _play(target, chosen, outcome, tell)
        finally:
            _end(target, tell)
        _judge(target, outcome)
        outcome.damaged = tuple(target.damaged)
    if outcome.as_expected and not keep:
        try:
            _undisturbed(lambda: remove(removal(str(target.run.path))))
        except MusterError as error:
            tell(f"its folder is left: {error}")
    return outcome


def _armed(request: JobRequest, network: Network | None) -> JobRequest:
    """The job with ranks that obey ``muster.rank.fault_injection``, and its hosts in a network that can be broken."""
    tasks = tuple(dataclasses.replace(task, env={**task.env, "MUSTER_DRILL": "1"}) for task in request.tasks)
    request = dataclasses.replace(request, tasks=tasks)
    return request if network is None else network.place(request)


def _ready(target: RunTarget, fault: Fault, at_step: int, tell: Callable[[str], None]) -> None:
    tell(f"waiting for step {at_step}")
    target.wait(lambda: target.step() >= at_step, f"step {at_step}", START_TIMEOUT_S)
    if fault.spares:
        target.wait(lambda: len(target.spares()) >= fault.spares, "spare", START_TIMEOUT_S)
    if fault.checkpoint:
        target.wait(lambda: len(target.events("checkpoint.committed")) >= 2, "checkpoint", START_TIMEOUT_S)


def _play(target: RunTarget, fault: Fault, outcome: Outcome, tell: Callable[[str], None]) -> None:
    tell(f"step {target.step()}: {fault.text}")
    began_ns = time.time_ns()
    fault.inject(target)
    injected_ns = target.injected_ns
    before = [event for event in target.events("step") if event.wall_ns <= injected_ns]
    outcome.at_step = max((event.step or 0 for event in before), default=0)
    if fault.exit_code is not None:
        target.wait(lambda: _ended(target, began_ns), "end", target.spec.recovery.grace_s + END_TIMEOUT_S)
        outcome.exit_code = _ended(target, began_ns)[0].read(RunFinished).exit_code
    if fault.recover:
        time.sleep(0.5)  # dead processes must be seen dead, and a living trainer must be seen to continue
        tell(f"muster recover {target.run.run_id}")
        target.revived_ns = time.time_ns()
        recover.recover(target.run.run_id, argv=["muster", "recover", target.run.run_id])
        target.wait(
            lambda: _taken_over(target, began_ns), "supervisor that takes over", target.spec.recovery.start_timeout_s
        )
    if fault.exit_code is None or fault.recover:
        _train_on(target, fault, outcome, began_ns, tell)
    outcome.noticed = [event.read(IncidentDetected).incident for event in target.events(IncidentDetected.kind)]
    outcome.done = _actions(target, began_ns)


def _train_on(target: RunTarget, fault: Fault, outcome: Outcome, began_ns: int, tell: Callable[[str], None]) -> None:
    """Wait until everything that had to be done was done (or something else), and for steps beyond."""
    timeout_s = target.spec.recovery.start_timeout_s
    target.wait(lambda: _settled(fault, _actions(target, began_ns)), "end of what had to be done", timeout_s)
    goal = max(outcome.at_step, target.step() if not fault.recover else 0) + SETTLE_STEPS
    tell(f"waiting for step {goal}")
    target.wait(lambda: _stepping_beyond(target, goal), f"step {goal} after the fault", timeout_s)
    _measure(target, outcome)


def _settled(fault: Fault, done: list[str]) -> bool:
    """One of the right ways has been gone to its end, or none of them can be any more."""
    so_far = tuple(done)
    return so_far in fault.done or not any(way[: len(so_far)] == so_far for way in fault.done)


def _measure(target: RunTarget, outcome: Outcome) -> None:
    """L and the steps redone. Where a new attempt began, a step that the old one still finished is before the fault."""
    steps = sorted(target.events("step"), key=operator.attrgetter("wall_ns"))
    begun = [event.attempt for event in target.events("attempt.started") if event.wall_ns > target.injected_ns]
    newest = min(begun, default=0)
    if begun:
        outcome.at_step = max((event.step or 0 for event in steps if event.attempt < newest), default=0)
    after = [event for event in steps if event.wall_ns > target.injected_ns and event.attempt >= newest]
    first = next(event for event in after if (event.step or 0) > outcome.at_step)
    outcome.lost_s = (first.wall_ns - target.injected_ns) / 1e9
    outcome.redone = sum(1 for event in after if event.wall_ns < first.wall_ns)


def _taken_over(target: RunTarget, since_ns: int) -> bool:
    """A new supervisor found the ranks stepping, or began an attempt."""
    begun = any(event.wall_ns > since_ns for event in target.events("attempt.started"))
    return begun or any(event.wall_ns > since_ns for event in target.events("attempt.adopted"))


def _stepping_beyond(target: RunTarget, goal: int) -> bool:
    """The goal is reached, and by the newest attempt: an older one's last steps prove nothing."""
    newest = max((event.attempt for event in target.events("attempt.started")), default=0)
    return any((event.step or 0) >= goal and event.attempt == newest for event in target.events("step"))


def _actions(target: RunTarget, since_ns: int) -> list[str]:
    decisions = sorted(target.events(IncidentDecided.kind), key=operator.attrgetter("wall_ns"))
    actions = [event.read(IncidentDecided).action for event in decisions if event.wall_ns > since_ns]
    return [action.value for action in actions if action is not Action.IGNORE]


def _ended(target: RunTarget, since_ns: int) -> list[Event]:
    return [event for event in target.events(RunFinished.kind) if event.wall_ns > since_ns]


def _end(target: RunTarget, tell: Callable[[str], None]) -> None:
    """Let the run end as a user would; what does not end by itself is made to. Ctrl-C shortens it, no more."""
    tell("ending the run")
    try:
        stop.stop(target.run.run_id, save=False)
    except MusterError as error:
        tell(f"it could not be stopped ({error}); ending its processes")
    except KeyboardInterrupt:
        tell("ending its processes")
    try:
        _undisturbed(lambda: stop.down(target.run.run_id))
    except BackendError as error:
        tell(f"error: {error}")


def _undisturbed(remove: Callable[[], object]) -> None:
    """Call it without Ctrl-C for these seconds: what was begun here must not be left behind."""
    if threading.current_thread() is not threading.main_thread():
        remove()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        remove()
    finally:
        signal.signal(signal.SIGINT, before)


def _judge(target: RunTarget, outcome: Outcome) -> None:
    fault = outcome.fault
    outcome.reached_step = target.step()
    outcome.sentences = [incident.sentence for incident in report(str(target.run.path)).document.incidents]
    outcome.invariants = broken(check(target.run.path, bound_s=target.spec.recovery.start_timeout_s))
    if fault.noticed and (not outcome.noticed or outcome.noticed[0] not in fault.noticed):
        outcome.failures.append(f"noticed {outcome.noticed or 'nothing'}, expected {' or '.join(fault.noticed)}")
    if tuple(outcome.done) not in fault.done:
        expected = " or ".join(", ".join(kinds) or "nothing" for kinds in fault.done)
        outcome.failures.append(f"done: {', '.join(outcome.done) or 'nothing'}; expected {expected}")
    if fault.redone is not None and (outcome.redone or 0) > fault.redone:
        outcome.failures.append(f"{outcome.redone} steps were taken again, expected {fault.redone}")
    if fault.exit_code != outcome.exit_code:
        outcome.failures.append(f"exit code {outcome.exit_code}, expected {fault.exit_code}")
    outcome.failures += [f"invariant {invariant}" for invariant in outcome.invariants]
