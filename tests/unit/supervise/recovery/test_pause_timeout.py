"""How long kept ranks may take to stand still: it follows the steps. Through the machine in virtual time."""

from dataclasses import replace

import pytest
from test_surviving_ranks import attempts, replicated

from muster.core.events import Event
from muster.policy.builtin import SHIPPED
from muster.protocol.values import RankEvent
from muster.simulate.cluster import Cluster
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.attempts import PAUSE_S, pause_s
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state import State
from muster.supervise.recovery.state_machine import RecoveryStateMachine
from muster.supervise.replay.rebuild_state import rebuild_state

STEP_S = 20.0
#: Of steps of 20 s: half as much again, and a second. Then a host has 3 s to say so.
PAUSE = 31.0
BLOW_S = 200.0


class Standing(Cluster):
    """Hosts whose kept ranks take ``stand_s`` to stand still, and which say what a step takes."""

    stand_s = 0.0
    mute = ""

    def end_ranks(self, host, order):
        if host.name == self.mute:
            host.ranks = []
            return
        before = self._ending
        if order.keep:
            self._ending = (order.attempt, self.stand_s)
        super().end_ranks(host, order)
        if order.keep:
            self._ending = before

    def receive_from(self, host, message):
        if isinstance(message, RankEvent) and message.kind == "step":
            message = replace(message, detail={**message.detail, "step_ns": int(self.step_s * 1e9)})
        super().receive_from(host, message)


def two_by_two(stand_s=0.0, *, of=None, step_s=STEP_S, **resources):
    of = of or replicated(4, 2, 2, **resources)
    machine = RecoveryStateMachine(
        settings=Settings(spec=of, run_id="r", run_dir="/r", ranks_per_host=1), policy=SHIPPED["default"]
    )
    names = [f"host-{number}" for number in range(4)]
    found = Standing(
        machine=machine,
        names=names,
        total_steps=int(1200 / step_s),
        stages=Stages(step_s=step_s),
    )
    found.stand_s = stand_s
    found.at(BLOW_S, lambda: found.kill_rank(0))
    return found


def lost(found):
    return {log.host: at for at, log in found.log if log.kind == "host.lost"}


def limited(**recovery):
    of = replicated(4, 2, 2)
    return of.model_copy(update={"recovery": of.recovery.model_copy(update=recovery)})


def test_ranks_in_the_middle_of_a_long_step_are_waited_for_and_kept():
    found = two_by_two(PAUSE - 1.0)
    assert found.run().exit_code == 0
    assert attempts(found)[1]["kept"] == [2, 3] and not lost(found)


def test_short_steps_leave_the_floor():
    found = two_by_two(PAUSE_S + 2.0, step_s=0.5)
    assert found.run().exit_code == 0
    assert attempts(found)[1]["kept"] == [2, 3]
    found = two_by_two(PAUSE_S + 4.0, step_s=0.5)
    found.run()
    assert set(lost(found)) == {"host-2", "host-3"}


def test_a_host_that_does_not_answer_in_that_time_is_lost():
    found = two_by_two(PAUSE + 4.0)
    found.run()
    assert set(lost(found)) == {"host-2", "host-3"}
    assert all(BLOW_S + PAUSE + 3.0 <= at < BLOW_S + PAUSE + 5.0 for at in lost(found).values())


def test_a_host_without_kept_ranks_is_not_given_that_time():
    found = two_by_two(PAUSE - 1.0)
    found.mute = "host-1"
    found.run(BLOW_S + 20.0)
    assert list(lost(found)) == ["host-1"] and lost(found)["host-1"] < BLOW_S + 9.0


def test_a_host_lost_meanwhile_is_noticed_at_once():
    found = two_by_two(PAUSE - 1.0)
    found.at(BLOW_S + 10.0, lambda: found.kill_host("host-3"))
    found.run(BLOW_S + 12.0)
    incidents = [(at, log.detail["incident"]) for at, log in found.log if log.kind == "incident.detected"]
    assert [kind for _, kind in incidents] == ["rank_exit", "host_lost"] and incidents[1][0] < BLOW_S + 12.0


def test_an_agent_that_begins_anew_meanwhile_is_asked_again():
    found = two_by_two(PAUSE - 1.0)

    def agent_restarts():
        found.hosts["host-1"].boots += 1
        found.hosts["host-2"].boots += 1
        for name in ("host-1", "host-2"):
            found.join(name)

    found.at(BLOW_S + found.stages.detect_exit_s + 0.01, agent_restarts)
    assert found.run().exit_code == 0 and not lost(found)


@pytest.mark.parametrize(("limit", "expected"), [(None, PAUSE), (10.0, 10.0), (2.0, PAUSE_S)])
def test_a_steps_limit_is_the_limit_here_too_but_for_the_floor(limit, expected):
    state = State()
    for seconds in (3.0, STEP_S, 5.0):
        state.add_step(1, {"step_ns": int(seconds * 1e9)})
    of = limited(step_timeout_s=limit)
    made = Settings(spec=of, run_id="r", run_dir="/r", ranks_per_host=1)
    assert pause_s(SupervisorContext(settings=made, policy=SHIPPED["default"], state=state)) == expected


def test_the_first_step_of_an_attempt_counts_until_there_is_another():
    state = State()
    state.add_step(1, {"step_ns": 90 * 10**9})
    state.add_step(2, {"step_ns": None})  # a loop of one's own
    assert list(state.steps.recent_s) == [90.0]
    for step in range(3, 23):
        state.add_step(step, {"step_ns": 2 * 10**9})
    state.begin_attempt(2, state.current, 0)
    state.add_step(23, {"step_ns": 90 * 10**9})
    assert set(state.steps.recent_s) == {2.0}


def test_a_new_supervisor_knows_the_steps_from_the_log():
    steps = [
        Event(run_id="r", attempt=1, seq=number, mono_ns=0, wall_ns=number, host="host-0", kind="step", rank=0,
              step=number, detail={"step_ns": 9 * 10**9})
        for number in (1, 2)
    ]  # fmt: skip
    world = {"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}}
    started = replace(steps[0], wall_ns=0, kind="attempt.started", host="supervisor", detail=world)
    assert list(rebuild_state([started, *steps]).steps.recent_s) == [9.0, 9.0]


def test_8_bit_moments_keep_nobody():
    """They come back from a snapshot within a code: a kept replica and a restored one would be two states."""
    of = replicated(4, 2, 2)
    training = of.training.model_copy(
        update={"optimizer": of.training.optimizer.model_copy(update={"name": "adamw_8bit"})}
    )
    found = two_by_two(of=of.model_copy(update={"training": training}))
    assert found.run().exit_code == 0
    assert len(attempts(found)) == 2 and "kept" not in attempts(found)[1]
