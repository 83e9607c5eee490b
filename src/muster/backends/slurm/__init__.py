"""Slurm: what a cluster offers, the job that is sent, the programs that run in the allocation."""

from __future__ import annotations

from muster.backends.backend import Backend
from muster.backends.protocols import Launcher


def _launcher() -> Launcher:
    """The launcher, over the Slurm commands of this machine."""
    from muster.backends.slurm.launcher import SlurmLauncher

    return SlurmLauncher()


BACKEND = Backend(name="slurm", launcher=_launcher)
