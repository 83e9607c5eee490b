"""Connections: a supervisor that is killed and replaced, agents that restart, reports that are repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.simulate import agent_model
from muster.simulate.host_time import VirtualHost
from muster.simulate.virtual_cluster import VirtualCluster
from muster.supervise.recovery.state import FromHost, HostUp, Phase
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def report(cluster: VirtualCluster, host: VirtualHost, message: Mapping[str, Any]) -> None:
    """An agent sends a report. Without a supervisor it keeps reports of exits, and acts on a notice itself."""
    kind = message["t"]
    if kind == "event":
        cluster.written.append((cluster.now_s, host.name, message["event"]))
    elif kind == "rank_exit" and message["attempt"] == host.attempt:
        host.exits[int(message["rank"])] = message
    if host.linked:
        cluster.give(FromHost(host=host.name, message=message))
    elif kind == "notice" and host.ranks:  # its ranks save and exit, and all others with them
        agent_model.handle_command(cluster, {"exit_code": 75, "save": True})
    elif kind == "notice":
        cluster.kill_host(host.name)


def connect(cluster: VirtualCluster, host: VirtualHost, step: int) -> None:
    """An agent connects to the supervisor: its hello, then earlier exits, and ranks that hang."""
    host.linked = cluster.supervised
    cluster.give(HostUp(host=host.name, hello=host.hello(step)))
    for message in list(host.exits.values()):
        cluster.give(FromHost(host=host.name, message=message))
    hung = host.hung
    if hung is not None:
        cluster.after(cluster.stages.detect_exit_s, lambda: cluster.receive_from(host, hung))


def lose_supervisor(cluster: VirtualCluster) -> None:
    """It is killed. Reports are not received until there is another; hosts continue with what they were sent."""
    cluster.supervised = cluster.dies_at_send = False
    for host in cluster.hosts.values():
        host.linked = False


def cut_off(cluster: VirtualCluster) -> bool:
    """Whether the supervisor is killed at this moment, between what it logged and what it was to send."""
    if cluster.dies_at_send and cluster.machine.state.phase is not Phase.ENDED:
        lose_supervisor(cluster)
        return True
    return False


def replace_supervisor(cluster: VirtualCluster, machine: RecoveryStateMachine, *, apart_s: float = 0.0) -> None:
    """It died; another one takes over from the log. Hosts connect to it ``apart_s`` after each other."""
    lose_supervisor(cluster)
    cluster.start_supervisor(machine)
    for index, host in enumerate(list(cluster.hosts.values())):
        if host.up and apart_s:
            cluster.after(index * apart_s, lambda name=host.name, boots=host.boots: cluster.join(name, boots=boots))  # type: ignore[misc]
        elif host.up:
            cluster.join(host.name)
