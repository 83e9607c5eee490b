"""A spare that says it cannot start is no spare, though its agent is there and was ready once."""

import pytest

from muster.config.spec import RunSpec
from muster.policy.builtin import SHIPPED
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.state import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine


@pytest.mark.parametrize(("comes_back", "replacement"), [(False, "host-3"), (True, "host-2")])
def test_a_spare_that_cannot_start_is_not_taken_until_it_can(comes_back, replacement):
    spec = RunSpec.model_validate(
        {
            "name": "test",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 300},
            "resources": {"ranks_per_host": 1, "hosts": 2, "spare_hosts": 2},
        }
    )
    settings = Settings(spec=spec, run_id="r", run_dir="/r", ranks_per_host=1)
    names = [f"host-{number}" for number in range(4)]
    found = Cluster(
        machine=RecoveryStateMachine(settings=settings, policy=SHIPPED["default"]), names=names, total_steps=300
    )

    def say(**message):
        found.receive_from(found.hosts["host-2"], message)

    found.at(20.0, lambda: say(t="failed", reason="the fork server died with code -9", exit_code=1))
    if comes_back:
        found.at(25.0, lambda: say(t="ready", store=["127.0.0.1", 1], memory=["127.0.0.1", 2]))
    found.at(40.0, lambda: found.kill_host("host-1"))
    end = found.run()
    decisions = [log for _, log in found.log if log.kind == "incident.decided"]
    assert end.exit_code == 0 and [log.detail["action"] for log in decisions] == ["swap"]
    assert decisions[0].detail["replacement"] == replacement
    assert any("cannot start" in str(log.detail.get("text")) for _, log in found.log)
