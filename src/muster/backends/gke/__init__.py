"""Google Kubernetes Engine: what is sent (render), why a run is where it is (explain), and the hardware (provision)."""

from __future__ import annotations

from muster.backends.backend import Backend
from muster.backends.protocols import Launcher


def _launcher() -> Launcher:
    """The launcher, with Google's credentials looked for when they are first needed."""
    from muster.backends.gke.launcher import GkeLauncher

    return GkeLauncher()


BACKEND = Backend(name="gke", launcher=_launcher)
