"""What the supervisor tells ranks about failures: the interval of saves rests on it (core.intervals)."""

from muster.config.spec import RunSpec
from muster.policy.builtin import SHIPPED
from muster.protocol.ranks import RankContext
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.start_message import start_message
from muster.supervise.recovery.state import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def test_ranks_hear_how_often_the_run_has_failed_and_over_what_time():
    spec = RunSpec.model_validate(
        {
            "name": "test",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 100},
            "resources": {"ranks_per_host": 1, "hosts": 2},
            "recovery": {"start_timeout_s": 60.0},
        }
    )
    settings = Settings(spec=spec, run_id="r", run_dir="/r", ranks_per_host=1)
    found = Cluster(
        machine=RecoveryStateMachine(settings=settings, policy=SHIPPED["default"]),
        names=["host-0", "host-1"],
        total_steps=200,
    )
    told = []

    def look():
        told.append(RankContext.from_json(start_message(found.machine._ctx, "host-0", None, {})["contexts"][0]))

    for at_s, act in ((8.0, look), (10.0, lambda: found.kill_rank(1)), (20.0, look), (30.0, lambda: found.kill_rank(0)),
                      (40.0, look)):  # fmt: skip
        found.at(at_s, act)
    assert found.run().exit_code == 0
    assert [context.failures for context in told] == [0, 1, 2]
    seconds = [context.observed_s for context in told]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= 40


def test_a_step_that_was_heard_of_late_and_is_taken_again_counts_as_redone():
    spec = RunSpec.model_validate(
        {
            "name": "test",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 100},
            "resources": {"ranks_per_host": 1, "hosts": 2},
        }
    )
    settings = Settings(spec=spec, run_id="r", run_dir="/r", ranks_per_host=1)
    found = Cluster(
        machine=RecoveryStateMachine(settings=settings, policy=SHIPPED["default"]),
        names=["host-0", "host-1"],
        total_steps=200,
    )

    def heard_late(log):
        if (
            log.kind == "incident.detected"
        ):  # the survivor's word on its last step was on the way when its peer's end was heard
            late = found.machine.state.last_applied_step + 1
            event = {"kind": "step", "attempt": found.machine.state.attempt, "step": late}
            found.after(0.0, lambda: found.receive_from(found.hosts["host-0"], {"t": "event", "event": event}))

    found.on_log = heard_late
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0
    (recovered,) = [log for _, log in found.log if log.kind == "incident.resolved"]
    assert recovered.detail["redone_steps"] == 1
