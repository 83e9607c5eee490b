"""``muster check --network`` between four hosts in network namespaces, one of them behind a link of 400 Mbit/s."""

import os
import subprocess
import time

import pytest
from cluster import Network, namespaces_work

from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import Place, reaching
from muster.health.verdicts import Verdict

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces"),
]
MIB = 1 << 20


@pytest.fixture
def network():
    net = Network([f"host-{number}" for number in range(4)])
    net.up()
    yield net
    net.down()


def slow_down(network, name):
    """Both directions: what leaves the host, and what the bridge sends it."""
    shaper = ["root", "tbf", "rate", "400mbit", "burst", "256kb", "latency", "50ms"]
    here = f"{network.tag}v{network.names.index(name)}"
    for argv in (
        ["tc", "-n", network.namespace(name), "qdisc", "add", "dev", "eth0", *shaper],
        ["tc", "qdisc", "add", "dev", here, *shaper],
    ):
        subprocess.run(argv, check=True)


def checked(network):
    """(the result, seconds): of 16 MiB between pairs, then up to 4 MiB together."""
    hosts = [Place(name=network.namespace(name), address=network.address(name)) for name in network.names]
    test = NetworkTest(pair_bytes=16 * MIB, largest_bytes=4 * MIB, collectives=("all_gather",))
    begun = time.monotonic()
    result = check_network(hosts, reaching("", "nsenter --net=/run/netns/{host}"), test)
    took = time.monotonic() - begun
    print(f"{took:.1f} s, {result.rounds} rounds, load {os.getloadavg()[0]:.1f}, {result.assessment}")
    return result, took


def test_a_host_behind_a_slow_link_is_named(network):
    slow_down(network, "host-2")
    result, took = checked(network)
    named = [one for one in result.findings if one.host]
    assert [one.host for one in named] == [network.namespace("host-2")], result
    assert named[0].verdict is Verdict.DRAIN and "slower than that of other pairs" in named[0].message
    assert len(result.tables) == 1, "the other three are measured together"
    assert took < 60


def test_of_four_sound_hosts_none_is_named(network):
    result, _ = checked(network)
    assert not [one for one in result.findings if one.verdict.faulty], result
