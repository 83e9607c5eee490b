"""The table of transitions is what happens: each row occurs here, and no other one in any test (``conftest``)."""

from fakes.recovery_page import PICTURE, TABLE
from fakes.virtual_run import cluster, events_of, machine, spec

from muster.policy.builtin import SHIPPED
from muster.protocol.to_supervisor import RankExit, StartFailed
from muster.protocol.values import LastWords
from muster.supervise.recovery.inputs import FromHost, RestartRequest, StopRequest
from muster.supervise.recovery.phases import Adopting, Draining, Held, Running, Starting, Stopping, Waiting
from muster.supervise.replay.rebuild_state import rebuild_state

OWN = LastWords(exception="ValueError", message="bad row 17")
HOLD = {"keep_hosts_after_failure_s": 50.0}
LATER_S = 8.0


class Played:
    """A run, and what is done to it."""

    def __init__(self, *, policy=None, **resources):
        self.of = spec(**{"hosts": 2, **resources})
        self.found = cluster(self.of, policy=policy)

    def at(self, at_s, act):
        self.found.at(at_s, act)
        return self

    def rank_fails(self, last=OWN):
        return self.at(10.0, lambda: self.found.kill_rank(0, code=1, last=last))

    def host_dies(self, name="host-1", at_s=10.0):
        return self.at(at_s, lambda: self.found.kill_host(name))

    def host_returns(self, at_s):
        return self.at(at_s, lambda: self.found.return_host("host-1"))

    def supervisor_is_replaced(self, at_s=12.0):
        return self.at(at_s, lambda: self.found.replace_supervisor(machine(self.of, state=self.rebuilt()), apart_s=0.1))

    def rebuilt(self):
        return rebuild_state(events_of(self.found))

    def everything_dies(self, at_s=10.0):
        def dies():
            for host in self.found.hosts.values():
                host.forget()
                host.attempt, host.boots = 0, host.boots + 1
            self.found.replace_supervisor(machine(self.of, state=self.rebuilt()))

        return self.at(at_s, dies)

    def stop(self, **more):
        self.found.give(StopRequest(source="muster stop", exit_code=130, **more))

    def cannot_start(self):
        self.found.give(FromHost(host="host-0", message=StartFailed(reason="no rows.jsonl", exit_code=2)))

    def restart(self):
        self.found.give(RestartRequest(settings=self.found.machine.settings))

    def when(self, phase, act, *, from_s=LATER_S):
        """Do it as soon as the run is in ``phase``."""

        def look():
            if isinstance(self.found.machine.state.phase, phase):
                act(self)
            elif self.found.result is None:
                self.found.after(0.01, look)

        return self.at(from_s, look)


class OwnErrorsStop:
    """Ends the run for what a rank says, and restarts for what it does not."""

    max_wait_s, adjust = 60.0, None

    def decide(self, situation, incident):
        return SHIPPED["none" if "signature" in incident.detail else "default"].decide(situation, incident)


def force(played):
    played.stop(force=True)


def the_cause_follows(played):
    message = RankExit(attempt=1, rank=1, pid=1, code=1, step=3, last=OWN)
    played.found.give(FromHost(host="host-1", message=message))


def everything_that_can_happen():
    held = {"recovery": HOLD, "policy": SHIPPED["none"]}
    yield Played()
    yield Played().when(Starting, Played.stop, from_s=1.0)
    yield Played().rank_fails()
    yield Played(policy=SHIPPED["none"]).rank_fails()
    for act in (Played.stop, force):
        yield Played().when(Running, act)
        yield Played().rank_fails().when(Draining, act)
        yield Played().host_dies().when(Waiting, act)
        yield Played(**held).rank_fails().when(Held, act)
        yield Played().supervisor_is_replaced().when(Adopting, act, from_s=12.01)
    yield Played().when(Running, Played.stop).host_dies(at_s=LATER_S + 0.01)
    yield Played(**held).rank_fails().when(Held, Played.restart)
    yield Played().host_dies().host_returns(20.0)
    yield Played(hosts=3).host_dies("host-2").host_dies("host-1", 20.0)
    yield Played().host_dies(at_s=4.0).host_returns(300.0)
    yield Played(**held).host_dies(at_s=2.0).when(Starting, Played.cannot_start, from_s=6.0)
    yield Played(recovery=HOLD).host_dies(at_s=4.0).when(Waiting, Played.cannot_start)
    lost_a_peer = LastWords(exception="RuntimeError", message="Connection reset by peer")
    yield Played(recovery=HOLD, policy=OwnErrorsStop()).rank_fails(lost_a_peer).when(Draining, the_cause_follows)
    yield Played().everything_dies()
    yield Played(min_hosts=1).host_dies().everything_dies(20.0).when(Starting, Played.stop)
    yield Played(policy=SHIPPED["none"]).rank_fails().supervisor_is_replaced(10.2)
    yield Played().rank_fails().when(Draining, lambda played: played.supervisor_is_replaced(played.found.now_s))
    yield (
        Played()
        .when(Running, Played.stop)
        .when(Stopping, lambda played: played.supervisor_is_replaced(played.found.now_s))
    )


def test_every_row_occurs(transitions):
    for played in everything_that_can_happen():
        played.found.run(until_s=10_000.0)
    missing = set(TABLE) - transitions
    assert transitions == set(TABLE), [f"{source.__name__} -> {target.__name__}" for source, target in missing]


def test_the_table_says_each_way_once_and_the_picture_is_the_table():
    assert len(set(TABLE)) == len(TABLE) == len(PICTURE) and set(PICTURE) == set(TABLE)
