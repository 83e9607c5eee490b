"""Machines that are reached by SSH: their programs are started there, nothing is rented."""

from __future__ import annotations

from muster.backends.backend import Backend, Capabilities, Checks, Market, Provisioning
from muster.backends.cluster import Cluster
from muster.backends.protocols import Launcher
from muster.backends.ssh.placement import notes, rules
from muster.config.spec import RunSpec


def _launcher() -> Launcher:
    from muster.backends.ssh.launcher import SshLauncher

    return SshLauncher()


def _move(run_id: str, host: str, spec: RunSpec) -> str:
    from muster.backends.ssh.launcher import SshLauncher

    return SshLauncher().move(run_id, host, spec)


def _cluster(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> Cluster:
    from muster.backends.ssh.provision import SshCluster

    return SshCluster(spec=spec)


BACKEND = Backend(
    name="ssh",
    launcher=_launcher,
    capabilities=Capabilities(ships_code=True),
    checks=Checks(rules=rules, fixed_keys=("ssh",)),
    market=Market(notes=notes),
    provisioning=Provisioning(cluster=_cluster),
    move=_move,
)
