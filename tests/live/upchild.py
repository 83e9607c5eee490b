"""The other end of a pseudo-terminal: ``muster`` with a Google Cloud in memory behind it.

``python upchild.py quick|stuck ARGUMENTS...``: quick ends soon, stuck never gets its cluster. The terminal is its
standard error, and becomes its controlling one, so that a typed Ctrl-C reaches it as it would a person's program.
"""

import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "golden" / "gke")]

from fakes import discovery  # noqa: E402
from fakes.gcp import FakeGoogleCloud  # noqa: E402

from muster.backends.gke.provision.cluster import GkeCluster  # noqa: E402
from muster.backends.google.session import Session  # noqa: E402
from muster.cli.main import main  # noqa: E402
from muster.core.clock import SystemClock  # noqa: E402


class Hurried(SystemClock):
    """Pauses are a twentieth of what was asked for."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 20)


os.close(os.open(os.ttyname(2), os.O_RDWR))  # the first terminal that a new session opens is its own
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever was started in the background has it switched off
kind, sys.argv[1:] = sys.argv[1], sys.argv[2:]
google = FakeGoogleCloud(discovery.Discovery(discovery.folder()), looks=3)
if kind == "stuck":
    google.slow["clusters/muster"] = 10**9
GkeCluster.session = lambda self: Session(http=google, clock=Hurried())  # type: ignore[method-assign]
main()
