"""What machines and clusters cost by the hour while they exist, from the catalogue's rows; None where not known."""

from __future__ import annotations

from functools import cache

from muster.catalog import gke as catalogue
from muster.catalog import offers as catalogue_of_offers


@cache
def machine_usd_per_hour(machine: str, mode: str, region: str) -> float | None:
    """By the row for the machine, the way it is bought and the region nearest to hand; the dearest of those left."""
    small = catalogue.leftovers()["instances"].usd_per_hour.get(machine)
    if small is not None:
        return small
    offers = [row.offer for row in catalogue_of_offers.catalogue() if row.offer.machine == machine and row.price]
    fitting = [offer for offer in offers if offer.mode == mode] or offers
    near = [offer for offer in fitting if offer.location == region] or fitting
    return max(offer.usd_per_node_hour or 0.0 for offer in near) if near else None


def cluster_usd_per_hour(machine: str, region: str) -> float | None:
    """The management fee and one small machine."""
    node = machine_usd_per_hour(machine, "on_demand", region)
    fee = catalogue.leftovers()["clusters"].usd_per_day
    return None if node is None or fee is None else fee / 24 + node
