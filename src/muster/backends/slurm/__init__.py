"""Slurm: what a cluster offers, the job that is sent, the programs that run in the allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.backends.slurm.launcher import SlurmLauncher


def launcher() -> SlurmLauncher:
    """The back end, over the Slurm commands of this machine."""
    from muster.backends.slurm.launcher import SlurmLauncher

    return SlurmLauncher()
