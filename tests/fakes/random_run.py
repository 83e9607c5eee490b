"""A run in virtual time in which anything may go wrong, by a seed; its log as a supervisor that takes over would read
it."""

import functools
import random
from dataclasses import dataclass, field, replace

from fakes import incident_kinds
from fakes.virtual_run import machine, spec

from muster.core.events import Event
from muster.core.types import Topology
from muster.policy.builtin import SHIPPED, DefaultPolicy
from muster.protocol.client import HealthReport
from muster.protocol.to_supervisor import HostReady, StartFailed
from muster.protocol.values import LastWords
from muster.simulate import fault_schedule
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.inputs import RestartRequest, StopRequest
from muster.supervise.recovery.phases import Ended, Held
from muster.supervise.replay.rebuild_state import rebuild_state

#: What a rank may say when it fails.
LAST_WORDS = (
    LastWords(exception="ValueError", message="bad row 17"),
    LastWords(exception="MemoryError"),
    LastWords(exception="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"),
    LastWords(exception="NotFinite", message="step 12: loss is nan", not_finite=True),
)
LOST_PEER = LastWords(exception="RuntimeError", message="Connection reset by peer")


@dataclass
class RandomRun(Cluster):
    """``events``: the log so far, each event a nanosecond after the one before. ``after_input`` is called whenever the
    supervisor has handled an input and its events are in the log."""

    events: list[Event] = field(default_factory=list)
    unheard: bool = False
    """A host wrote an event after its supervisor had read the log and before they were connected."""
    _seen: tuple[int, int] = (0, 0)

    def after_input(self):
        """Nothing, but for whom it interests."""

    def give(self, given):
        self._take_written()  # a host's event is in its log before anybody is told of it
        super().give(given)
        if self._acting:
            return
        self._take_logged()
        if self.supervised:
            self.after_input()

    def start_supervisor(self, machine):
        super().start_supervisor(machine)
        self._take_logged()
        self.unheard = False
        self.after_input()

    def whole_log(self):
        """The events, with the hosts' newest step."""
        self.report_newest_step()
        self._take_written()
        return self.events

    def _write(self, host, event):
        self.unheard = self.unheard or (self.supervised and not host.linked)
        super()._write(host, event)

    def _take_written(self):
        logged, written = self._seen
        for host, event in self.written[written:]:
            self._append(event, host, event.attempt)
        self._seen = logged, len(self.written)

    def _take_logged(self):
        logged, written = self._seen
        for _, log in self.log[logged:]:
            self._append(log, log.host or "supervisor", self.machine.state.attempt)
        self._seen = len(self.log), written

    def _append(self, said, host, attempt):
        at_ns = max(self.now_ns, self.events[-1].wall_ns + 1 if self.events else 0)
        names = ("kind", "rank", "step", "phase", "detail")
        self.events.append(
            Event(run_id="r", attempt=attempt, seq=len(self.events), mono_ns=at_ns, wall_ns=at_ns, host=host,
                  **{name: vars(said)[name] for name in names})
        )  # fmt: skip


def random_run(seed, kind=RandomRun):
    """Not started; ``run()`` ends it. The same seed is the same run."""
    rng = random.Random(seed)
    hosts = rng.randint(1, 4)
    recovery = {
        "keep_hosts_after_failure_s": rng.choice((0.0, 20.0)),
        "on_nonfinite_step": rng.choice(("skip", "stop")),
        "grace_s": 5.0,
    }
    resources = {"hosts": hosts, "min_hosts": rng.randint(1, hosts), "spare_hosts": rng.randint(0, 2)}
    of = spec(**resources, recovery=recovery)
    if hosts % 2 == 0 and rng.random() < 0.4:
        of = of.model_copy(update={"parallelism": of.parallelism.model_copy(update={"dp_replicate": hosts})})
    policy = rng.choice((DefaultPolicy(max_wait_s=15.0), Adjusting(max_wait_s=15.0), SHIPPED["conservative"]))

    def supervisor(state=None):
        made = machine(of, policy, state)
        made._ctx.settings = replace(made.settings, host_failure_window_s=40.0)
        return made

    names = [f"host-{number}" for number in range(hosts + of.resources.spare_hosts)]
    racks = {name: Topology(rack=str(number // 2)) for number, name in enumerate(names)}
    found = kind(
        machine=supervisor(), names=names, places=racks, total_steps=rng.choice((60, 150)),
        disk_takes=rng.random() < 0.6, reset_works=rng.random() < 0.5, ranks_obey=rng.random() < 0.9,
    )  # fmt: skip
    for second in range(0, 60, 3) if rng.random() < 0.6 else ():
        found.at(second, lambda: user_restarts(found))
    found.on_end = lambda end: again(found, supervisor)
    for _ in range(rng.randint(2, 9)):
        at_s, own = rng.uniform(5.0, 60.0), random.Random(rng.random())
        act = functools.partial(rng.choice(FAULTS), found, rng.choice(names), own, supervisor)
        found.at(at_s, act)
    return found


class Adjusting(DefaultPolicy):
    """The learning rate follows the number of hosts."""

    def adjust(self, world):
        return {"learning_rate_scale": world.num_hosts / world.wanted_hosts}


def successor(found, supervisor):
    """A supervisor that knows what the log says at this moment."""
    return supervisor(rebuild_state(found.whole_log(), now_wall_ns=found.now_ns))


def again(found, supervisor):
    """The run has ended, and is started once more."""
    if len([event for event in found.events if event.kind == "run.finished"]) > 1 or found.now_s > 60.0:
        return False
    found.after(2.0, lambda: found.resume(successor(found, supervisor)))
    return True


# ---------------------------------------------------------------- what may happen: to a host, by a random stream


def rank_is_killed(found, name, rng, _):
    ranks = found.hosts[name].ranks
    found.kill_rank(rng.choice(ranks) if ranks else -1)


def rank_fails(found, name, rng, _):
    """Perhaps again and again."""
    last = rng.choice(LAST_WORDS)
    for number in range(rng.choice((1, 1, 3))):
        found.after(
            1.0 * number, lambda: [found.kill_rank(rank, code=1, last=last) for rank in found.hosts[name].ranks[:1]]
        )


def two_ranks_end(found, name, rng, _):
    """The second is the cause of the first one's end, or each has its own."""
    host, first, last = found.hosts[name], rng.choice((LOST_PEER, LOST_PEER, None)), rng.choice((*LAST_WORDS, None))
    victims = list(found.machine.state.ranks)
    if len(victims) < 2 or not found.kill_rank(victims[0], code=1 if first else -9, last=first):
        return
    other = found.running(victims[1])
    if other is not None:
        message = found.exit_of(host, victims[1], 1 if last else -9, last)
        found.after(found.stages.detect_exit_s + 0.001, lambda: found.receive_from(other, message))


def rank_hangs(found, name, rng, _):
    for rank in found.hosts[name].ranks[:1]:
        fault_schedule.hang_rank(found, rank, detect_s=rng.uniform(0.1, 3.0))


def false_alarm(found, name, rng, _):
    for rank in found.hosts[name].ranks[:1]:
        fault_schedule.false_alarm(found, rank)


def snapshot_rots(found, name, rng, _):
    """Of one rank; and then its host fails."""
    for rank in found.hosts[name].ranks[:1]:
        fault_schedule.rot_snapshot(found, rank, rng.choice(("memory", "peer")), versions=rng.choice((1, 2)))
        found.kill_rank(rank)


def host_is_lost(found, name, rng, _):
    """Perhaps it returns, perhaps several are lost together."""
    lost = [name, *(other for other in found.hosts if other != name and rng.random() < 0.2)]
    for other in lost:
        found.kill_host(other, silent=rng.random() < 0.3)
        if rng.random() < 0.7:
            found.after(rng.uniform(1.0, 20.0), lambda other=other: found.return_host(other))


def host_gets_notice(found, name, rng, _):
    fault_schedule.notice(found, name, grace_s=5.0)
    found.after(5.0, lambda: found.kill_host(name))
    if rng.random() < 0.7:
        found.after(rng.uniform(6.0, 20.0), lambda: found.return_host(name))


def detector_reports(found, name, rng, _):
    kind = rng.choice(("host_unhealthy", "host_unhealthy", "straggler", "link_flap", "gpu_program_error"))
    resettable = (0,) if rng.random() < 0.5 else ()
    found.receive_from(found.hosts[name], HealthReport(host=name, kind=kind, evidence="odd", resettable=resettable))


def host_cannot_start(found, name, rng, _):
    found.receive_from(found.hosts[name], StartFailed(reason="no torch here", exit_code=2))
    if rng.random() < 0.5:
        found.after(2.0, lambda: found.receive_from(found.hosts[name], HostReady()))


def save_fails(found, name, rng, _):
    rank_event(found, name, "checkpoint.failed", {"reason": "no space left on device"})


def checkpoint_is_committed(found, name, rng, _):
    rank_event(found, name, "checkpoint.committed", {"tier": "disk", "uri": "disk", "bytes": 1})


def rank_event(found, name, kind, detail):
    host = found.hosts[name]
    if 0 in host.ranks:
        found.receive_from(host, found.event(kind, host.attempt, found._step, detail))


def user_stops(found, name, rng, _):
    for number in range(rng.choice((1, 1, 2))):
        request = StopRequest(source="muster stop", exit_code=rng.choice((75, 130)), save=rng.random() < 0.7)
        found.after(0.2 * number, lambda request=request: found.give(request))


def user_restarts(found):
    if isinstance(found.machine.state.phase, Held):
        found.give(RestartRequest(settings=found.machine.settings))


def supervisor_is_lost(found, name, rng, supervisor):
    """At once, or between two effects of the next input."""
    if rng.random() < 0.3:
        found.dies_at_send = True
    else:
        found.lose_supervisor()
    apart_s, gap_s = rng.choice((0.0, 0.0, 0.5)), rng.choice((0.0, 0.0, 3.0))

    def replaced():
        if isinstance(found.machine.state.phase, Ended):
            found.lose_supervisor()  # its agents have left too: ``again`` starts both
            return
        found.replace_supervisor(successor(found, supervisor), apart_s=apart_s)

    found.after(gap_s, replaced)


def everything_is_lost(found, name, rng, supervisor):
    """A power cut."""
    found.lose_supervisor()
    for other in found.hosts:
        found.kill_host(other)
        found.after(1.0, lambda other=other: found.return_host(other))
    found.after(2.0, lambda: found.replace_supervisor(successor(found, supervisor)))


FAULTS = (
    rank_is_killed, rank_is_killed, rank_fails, rank_fails, rank_fails, two_ranks_end, rank_hangs, false_alarm,
    snapshot_rots, snapshot_rots,
    host_is_lost, host_is_lost, host_gets_notice, detector_reports, detector_reports, host_cannot_start, save_fails,
    checkpoint_is_committed, user_stops, supervisor_is_lost, supervisor_is_lost,
    everything_is_lost,
)  # fmt: skip


def install_incident_kinds(folder, monkeypatch):
    """Those of another package, which detectors report too."""
    targets = {kind: f"fakes.incident_kinds:{kind.upper()}" for kind in ("straggler", "link_flap")}
    incident_kinds.install(folder, monkeypatch, **targets)
