"""What a run file says of machines that are reached by SSH, checked and completed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.config.spec import RunSpec
from muster.config.validation import is_remote
from muster.core.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One run's."""

    spec: RunSpec
    home: str
    """Its URI: a bucket's, or ``ssh://``, the first host and the run's id."""

    @property
    def hosts(self) -> list[str]:
        return self.spec.ssh.hosts

    @property
    def is_on_first_host(self) -> bool:
        return self.home.startswith("ssh://")

    def filled_in(self, spec: RunSpec) -> RunSpec:
        """``spec`` as hosts read it: checkpoints go to the home unless it says otherwise."""
        directory = spec.checkpoint.uri(self.home)
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"dir": directory})})


def place(spec: RunSpec, run_id: str) -> Placement:
    """Nothing is checked (``rules`` does)."""
    given = spec.run_dir
    return Placement(
        spec=spec, home=given.rstrip("/") if given and is_remote(given) else f"ssh://{spec.ssh.hosts[0]}/{run_id}"
    )


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold, whatever the hosts are."""
    hosts, more = spec.ssh.hosts, len(spec.ssh.hosts) - spec.resources.hosts
    if more < 0:
        message = f"{len(hosts)} for resources.hosts {spec.resources.hosts}"
        yield Problem(key="ssh.hosts", message=message, hint="[gpu1, me@10.0.0.7:22]")
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        yield Problem(key="ssh.hosts", message="is there twice", value=host)
    if more >= 0 and spec.resources.spare_hosts not in (0, more):
        message = f"ssh.hosts has {more} beyond resources.hosts"
        yield Problem(key="resources.spare_hosts", message=message, value=spec.resources.spare_hosts)
    if spec.run_dir is not None and not spec.run_dir.startswith(("gs://", "s3://")):
        hint = "leave it out: the run's home is on the first host's disk"
        yield Problem(key="run_dir", message="must be a folder of a bucket", value=spec.run_dir, hint=hint)
