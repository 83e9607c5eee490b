"""What Google says about capacity before anything is made: one score for each zone, for Spot and flex-start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.session import Session
from muster.core.typed_json import JsonObject, child, children, text

MODELS = {"spot": "SPOT", "flex_start": "FLEX_START", "flex_start_queued": "FLEX_START"}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One place. The score is coarse (0.1, 0.5, 0.9 were seen) and is no promise."""

    zone: str
    mode: str
    obtainability: float | None
    note: str = ""
    """Why there is no score, or for Spot how long most machines live."""

    def sentence(self) -> str:
        score = "no score" if self.obtainability is None else f"obtainability {self.obtainability:g}"
        return f"{self.zone} {self.mode}: {score}" + (f" ({self.note})" if self.note else "")


def capacity_advice(sites: Sequence[Site], session: Session) -> list[Advice]:
    """Ask for each place, in order; a refusal is a note, because advice is not needed to go on."""
    return [_one(site, session) for site in sites]


def advice_call(site: Site) -> Call:
    """The question: all hosts of the run in that one zone."""
    placement = site.placement
    body: JsonObject = {
        "size": placement.hosts,
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{site.zone}"}]},
        "instanceFlexibilityPolicy": {"instanceSelections": {"hosts": {"machineTypes": [placement.machine.name]}}},
        "instanceProperties": {"scheduling": {"provisioningModel": MODELS[placement.mode]}},
    }
    return Call(method="POST", url=f"{site.compute}/regions/{site.region}/advice/capacity", body=body)


def _one(site: Site, session: Session) -> Advice:
    mode = site.placement.mode
    if mode not in MODELS or not site.placement.machine.gpus:
        return Advice(zone=site.zone, mode=mode, obtainability=None, note="Google advises on Spot and flex-start alone")
    reply = session.send(advice_call(site))
    if reply.status >= 300:
        return Advice(zone=site.zone, mode=mode, obtainability=None, note=reply.message)
    for row in children(reply.body, "recommendations"):
        scores = child(row, "scores")
        if "obtainability" in scores:
            uptime = text(scores, "estimatedUptime")
            note = f"most machines live {uptime}" if uptime else ""
            return Advice(zone=site.zone, mode=mode, obtainability=float(text(scores, "obtainability")), note=note)
    return Advice(zone=site.zone, mode=mode, obtainability=None, note="the answer had none")
