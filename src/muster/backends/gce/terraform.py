"""``muster render --format terraform`` for plain machines: what ``up`` makes. Hosts are made by ``submit``. Pure."""

from __future__ import annotations

from muster.backends.gce.inventory import resources, sites
from muster.backends.gce.placement import Placement
from muster.backends.google.project import terraform


def rendered(placement: Placement) -> dict[str, str]:
    """File name -> text, for the run file's first region.

    Raises:
        UsageError: data networks that cannot be in all of its zones.
    """
    where = sites(placement)[0]
    about = (
        f"Written by `muster render --format terraform` for runs on {where.machine.name} in {where.region}.\n"
        "`muster submit` makes the machines. It was never applied: read `terraform plan`."
    )
    values = {"services": [*where.services.names]}
    return terraform.rendered(
        resources(where), where="gce", project=where.project, zone=where.zone, values=values, about=about
    )
