"""This machine as a back end: detached processes, found again by their label."""

from __future__ import annotations

from muster.backends.backend import Backend, Capabilities, Checks
from muster.backends.local import run_file_rules
from muster.backends.protocols import Launcher


def _launcher() -> Launcher:
    """The launcher, with the machine's own clock, store and environment."""
    from muster.backends.local.launcher import LocalLauncher

    return LocalLauncher()


BACKEND = Backend(
    name="local",
    launcher=_launcher,
    capabilities=Capabilities(
        ships_code=True, uses_this_machine=True, trains_on_tpus=True, supervised_in_terminal=True
    ),
    checks=Checks(
        rules=run_file_rules.rules,
        on_this_machine=run_file_rules.host_checks,
        unused=run_file_rules.unused_settings,
    ),
)
