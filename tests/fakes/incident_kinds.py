"""Incident kinds of another package, added by entry points as its installation would."""

from muster.core import incidents
from muster.core.incidents import IncidentTraits, Treatment

LINK_FLAP = IncidentTraits(
    kind="link_flap", meaning="a link loses packets", blames_host=True, may_be_ignored=True,
    treatment=Treatment.REPLACE, quarantine_expires=True,
)  # fmt: skip


def install(folder, monkeypatch, **targets):
    """Install a distribution into ``folder`` whose entry points are ``targets``: kind -> ``module:attribute``."""
    metadata = folder / "detectors-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: detectors\nVersion: 1.0\n")
    lines = [f"{kind} = {target}" for kind, target in targets.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[muster.incident_kinds]", *lines]))
    incidents.KINDS.names()  # fills the cache that is put back afterwards
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(vars(incidents.KINDS), "_added")
