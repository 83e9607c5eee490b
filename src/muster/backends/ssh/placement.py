"""What a run file says of machines that are reached by SSH, checked and completed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.config.sections.ssh import FOLDER
from muster.config.spec import RunSpec
from muster.config.validation import is_remote
from muster.core.errors import Problem
from muster.storage import uris


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One run's."""

    spec: RunSpec
    home: str
    """Its URI: a bucket's, or ``ssh://``, the first host and the run's id."""

    @property
    def keeper(self) -> str | None:
        """The host through which the home is read; None: it is in a bucket."""
        return uris.bucket_and_key(self.home)[0] if self.home.startswith("ssh://") else None

    @property
    def is_shared(self) -> bool:
        """The home is in a folder that every host sees."""
        return self.keeper is not None and self.spec.run_dir is not None

    @property
    def hosts(self) -> list[str]:
        """All, with the keeper first."""
        return sorted(self.spec.ssh.hosts, key=lambda host: host != self.keeper)

    @property
    def least(self) -> int:
        """Hosts without which it does not begin."""
        return self.spec.resources.min_hosts or self.spec.resources.hosts

    def risks(self, copier: str | None, run_id: str = "RUN") -> Iterator[str]:
        """What the loss of a host may cost. ``copier``: the host that keeps a copy of the home."""
        if self.keeper is not None and not self.is_shared:
            copy = f"muster recover {run_id} --from {copier} continues from its copy" if copier else "there is no copy"
            lost = f"the run's home is on {self.keeper}: if it is lost the run stops, and {copy}"
            yield f"{lost} (run_dir: gs://BUCKET/RUN, or a folder that hosts share, outlives it)"

    def filled_in(self, spec: RunSpec) -> RunSpec:
        """``spec`` as hosts read it: checkpoints go to the home unless it says otherwise."""
        directory = spec.checkpoint.uri(self.home)
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"dir": directory})})


def place(spec: RunSpec, run_id: str, home: str | None = None) -> Placement:
    """``home``: where it is since ``muster recover --from``. Nothing is checked (``rules`` does)."""
    given = spec.run_dir
    first = given.rstrip("/") if given and is_remote(given) else f"ssh://{spec.ssh.hosts[0]}/{run_id}"
    return Placement(spec=spec, home=home or first)


def notes(spec: RunSpec, _step_s: float, _usd_per_hour: float | None) -> Iterator[str]:
    """What a plan says of the place."""
    yield from place(spec, "RUN").risks(next(iter(spec.ssh.hosts[1:]), None))


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold on any hosts."""
    hosts, more = spec.ssh.hosts, len(spec.ssh.hosts) - spec.resources.hosts
    if more < 0:
        message = f"{len(hosts)} for resources.hosts {spec.resources.hosts}"
        yield Problem(key="ssh.hosts", message=message, hint="[gpu1, me@10.0.0.7:22]")
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        yield Problem(key="ssh.hosts", message="is there twice", value=host)
    if more >= 0 and spec.resources.spare_hosts not in (0, more):
        message = f"ssh.hosts has {more} beyond resources.hosts"
        yield Problem(key="resources.spare_hosts", message=message, value=spec.resources.spare_hosts)
    if spec.run_dir is not None and not re.fullmatch(rf"(gs|s3)://.*|{FOLDER}", spec.run_dir):
        hint = "leave it out: the run's home is on the first host's disk"
        message = "must be a bucket's, or a folder that all hosts share"
        yield Problem(key="run_dir", message=message, value=spec.run_dir, hint=hint)
