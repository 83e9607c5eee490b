"""What the run says of a preemption before there is one."""

import pytest

from muster.config.spec import RunSpec
from muster.supervise.recovery.attempts import expected_loss


def spec(hosts=2, spare_hosts=0, min_hosts=None, every_steps=50):
    return RunSpec.model_validate(
        {
            "name": "x",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "checkpoint": {"every_steps": every_steps},
            "resources": {"hosts": hosts, "spare_hosts": spare_hosts, "min_hosts": min_hosts, "ranks_per_host": 1},
            "recovery": {"grace_s": 15.0},
        }
    )


@pytest.mark.parametrize(
    "given, copied, expected",
    [
        ({"spare_hosts": 1}, True, "costs no applied step, and a spare takes over"),
        ({"min_hosts": 1}, True, "and the others go on"),
        ({}, True, "and the run waits for a host"),
        ({}, False, "a lost host costs the steps since the last save (every 50 steps)"),
        ({"hosts": 1}, False, "saved where a save fits into 15 s; else that costs the steps since"),
        ({"hosts": 1, "every_steps": 0}, False, "costs every step, since nothing is saved on the way"),
    ],
)
def test_it_says_what_would_be_lost(given, copied, expected):
    found = expected_loss(spec(**given), num_hosts=given.get("hosts", 2), copied=copied)
    assert expected in found
    assert "15 s" in found
