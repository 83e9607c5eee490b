"""``muster up``, ``muster down RUN.yaml`` and the audit for plain machines. Hosts themselves are made by ``submit``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.cluster import Began, Down, Image, Leftover, Planned, Progress, Said, silent
from muster.backends.gce.compute import Compute
from muster.backends.gce.inventory import NEEDED, Site, elsewhere, resources, sites
from muster.backends.gce.placement import place
from muster.backends.gce.run_file_rules import rules
from muster.backends.gce.teardown import disk_usd_per_day, gigabytes, machine_usd_per_day
from muster.backends.google.http import Call, GoogleHttp, Http
from muster.backends.google.project.access import billing, check_billing, granted, permissions_of
from muster.backends.google.project.reconcile import ensure, remove, survey
from muster.backends.google.project.resources import Resource, RestResource
from muster.backends.google.session import Session
from muster.backends.protocols import Lease
from muster.catalog import gke as catalogue
from muster.config.spec import RunSpec
from muster.config.tpu_rules import not_submitted
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, ConflictError, RunFileError, UsageError
from muster.core.protocols import Clock
from muster.core.typed_json import text

SHARED = ("networks/", "firewalls/", "buckets/", "serviceAccounts/", "roles/", "grants/")
"""Of several regions they go with the last."""
OF_RUNS = "labels.muster-run:*"


@dataclass(frozen=True, kw_only=True)
class GceProject:
    """What runs need in every region that the run file names; ``backends.cluster.Cluster`` says what each call does."""

    sites: tuple[Site, ...]
    adopt: bool = False
    http: Http = field(default_factory=lambda: GoogleHttp())
    clock: Clock = field(default_factory=SystemClock)

    @property
    def project(self) -> str:
        return self.sites[0].project

    def dry_run(self, manifests: Path | None) -> tuple[Sequence[Call], Sequence[str]]:
        calls = {call.shown(): call for call in (billing(self.project), permissions_of(self.project, NEEDED))}
        for site in self.sites:
            calls |= {call.shown(): call for resource in resources(site) for call in resource.requests()}
        return [*calls.values()], []

    def look(self) -> list[str]:
        self._check_access(self._session())
        return ["billing is on, and no permission is missing; quota is seen when machines are asked for"]

    def pin(self, manifests: Path | None) -> tuple[Mapping[str, str], Path]:
        raise UsageError("nothing is installed on plain machines by up", hint="muster up RUN.yaml, without --pin")

    def up(self, manifests: Path | None, *, token: str | None = None, progress: Progress = silent) -> Lease:
        session, first = self._session(), self.sites[0]
        progress(Said(text=f"{self.project}: billing and permissions"))
        self._check_access(session)
        if foreign := elsewhere(first):
            progress(Said(text=f"{' and '.join(foreign)}: another project's, so its owner makes it and gives it roles"))
        made: dict[str, None] = {}
        for site in self.sites:
            wanted = resources(site)
            title = f"making what is missing in {site.region}"
            progress(Began(title=title, making=True, nodes=_planned(wanted)))
            survey(wanted, session, adopt=self.adopt, progress=progress)
            ensure(wanted, session, adopt=self.adopt, progress=progress)
            made |= dict.fromkeys(one.key for one in wanted)
        return Lease(run_id=first.network, resources=tuple(made), labels={"managed-by": "muster", "zone": first.zone})

    def down(self, *, keep_data: bool = False, progress: Progress = silent) -> Down:
        """See ``Cluster``. Raises ConflictError: machines of runs are there, which need what would be removed."""
        session = self._session()
        if machines := [row for row in self._of_runs(session) if row.kind == "instances"]:
            names = ", ".join(one.name for one in machines[:5]) + (", ..." if len(machines) > 5 else "")
            raise ConflictError(
                f"machines of runs are there: {names}", hint="muster down RUN, of each run, comes before"
            )
        kept = {f"buckets/{name}" for site in self.sites for name in site.buckets} if keep_data else set[str]()
        troubles: dict[str, None] = {}
        for number, site in enumerate(self.sites, start=1):
            last, wanted = number == len(self.sites), resources(site)
            progress(Began(title=f"removing in {site.region}", making=False, nodes=_planned(wanted)))

            def keep(resource: Resource, last: bool = last) -> bool:
                return resource.key in kept or (not last and resource.key.startswith(SHARED))

            troubles |= dict.fromkeys(remove(wanted, session, keep=keep, progress=progress))
        progress(Said(text=f"looking at project {self.project} for what is left"))
        return Down(troubles=tuple(troubles), leftovers=tuple(self._left(session, kept)))

    def image(self, *, base: str | None = None, torch: str | None = None, torch_index: str | None = None) -> Image:
        raise UsageError("hosts are machines, not containers", hint="docs/how-to/gce.md says how gce.bundle is made")

    def _check_access(self, session: Session) -> None:
        services = self.sites[0].services
        check_billing(services, session)
        held = granted(NEEDED, services, session)
        if missing := [name for name in NEEDED if name not in held]:
            lines = "\n".join(f"  {name} (in {NEEDED[name]})" for name in missing)
            raise AccessError(
                f"{len(missing)} permissions are missing in project {self.project}:\n{lines}",
                hint="grant " + ", ".join(sorted({NEEDED[name] for name in missing})),
            )

    def _left(self, session: Session, kept: set[str]) -> Iterator[Leftover]:
        """What of ours is there: that of the run file, each looked at again, and machines and disks of any run."""
        seen = set[str]()
        for site in self.sites:
            for resource in resources(site):
                if not isinstance(resource, RestResource) or resource.url in seen:
                    continue
                seen.add(resource.url)
                found = resource.look(session)
                if found.state != "absent" and found.ours:
                    kind, _, name = resource.key.partition("/")
                    prices = catalogue.leftovers().get(kind)
                    yield Leftover(
                        kind=kind, name=name, bills=resource.bills, kept=resource.key in kept,
                        usd_per_day=prices.usd_per_day if prices and resource.bills else None,
                    )  # fmt: skip
        yield from self._of_runs(session)

    def _of_runs(self, session: Session) -> Iterator[Leftover]:
        compute = Compute(session=session, project=self.project)
        for _, row in compute.everywhere("instances", OF_RUNS):
            bills = f"a {text(row, 'machineType').rpartition('/')[2]} ({text(row, 'status')})"
            usd = machine_usd_per_day(row)
            yield Leftover(kind="instances", name=text(row, "name"), bills=bills, usd_per_day=usd)
        for _, row in compute.everywhere("disks", OF_RUNS):
            bills = f"{gigabytes(row) or '?'} GB"
            yield Leftover(kind="disks", name=text(row, "name"), bills=bills, usd_per_day=disk_usd_per_day(row))

    def _session(self) -> Session:
        return Session(http=self.http, clock=self.clock)


def open_project(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> GceProject:
    """What the run file's runs need, at ``zone``'s region alone where given. Touches nothing.

    Raises:
        RunFileError: rules of the back end are broken: accounts, project, zones; TPUs, which are rendered alone.
        UsageError: data networks that cannot be in all of its zones.
    """
    if (problem := not_submitted(spec)) is not None:
        raise RunFileError([problem])
    # The bundle is put into the bucket that is made here.
    if problems := [one for one in rules(spec) if one.key != "gce.bundle"]:
        raise RunFileError(problems)
    placement = place(spec, run_id="run", run_dir=None)
    return GceProject(sites=tuple(sites(placement, zone=zone)), adopt=adopt)


def _planned(wanted: Sequence[Resource]) -> tuple[Planned, ...]:
    return tuple(Planned(key=one.key, needs=one.needs, usd_per_hour=one.usd_per_hour) for one in wanted)
