"""This machine as a back end: detached processes, found again by their label."""

from muster.backends.local.launcher import LocalLauncher


def launcher() -> LocalLauncher:
    """The back end, with the machine's own clock, store and environment."""
    return LocalLauncher()
