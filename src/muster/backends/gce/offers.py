"""The catalogue's options as Compute Engine sells them: its own prices, without what Muster does not set up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.catalog import gce
from muster.catalog import gke as machines
from muster.catalog.offers import Option
from muster.core.errors import UsageError


def rents(options: Sequence[Option]) -> list[Option]:
    """Of ``options`` those that can be asked for here; TPUs are rendered alone."""
    found = []
    for option in options:
        try:
            family, machine = machines.find(option.offer.machine, None)
        except UsageError:  # what GKE has not
            continue
        if not machine.chips and option.offer.mode in gce.modes(machine) and gce.refusal(family) is None:
            found.append(replace(option, offer=replace(option.offer, backend="gce")))
    return found
