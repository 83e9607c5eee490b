"""A spare that says it cannot start is no spare, though its agent is there and was ready once."""

import pytest
from fakes.virtual_run import cluster, kinds, spec

from muster.protocol.to_supervisor import HostReady, StartFailed


@pytest.mark.parametrize(("comes_back", "replacement"), [(False, "host-3"), (True, "host-2")])
def test_a_spare_that_cannot_start_is_not_taken_until_it_can(comes_back, replacement):
    found = cluster(spec(hosts=2, spare_hosts=2), steps=300)

    def say(message):
        found.receive_from(found.hosts["host-2"], message)

    found.at(20.0, lambda: say(StartFailed(reason="the fork server died with code -9")))
    if comes_back:
        found.at(25.0, lambda: say(HostReady(store=("127.0.0.1", 1), memory=("127.0.0.1", 2))))
    found.at(40.0, lambda: found.kill_host("host-1"))
    end = found.run()
    decisions = [log for _, log in kinds(found, "incident.decided")]
    assert end.exit_code == 0 and [log.detail["action"] for log in decisions] == ["swap"]
    assert decisions[0].detail["replacement"] == replacement
    ((_, aside),) = kinds(found, "host.set_aside")
    assert aside.host == "host-2" and not aside.detail["needed"]
