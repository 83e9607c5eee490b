"""Google Kubernetes Engine: what is sent (render), why a run is where it is (explain), and the hardware (provision)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.backends.protocols import Launcher


def launcher() -> Launcher:
    """The back end, with Google's credentials looked for when they are first needed."""
    from muster.backends.gke.launcher import GkeLauncher

    return GkeLauncher()
