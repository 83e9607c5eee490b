"""What ``muster`` and ``muster.api`` export: adding or removing a name is a decision, written down here."""

import subprocess
import sys

import muster
from muster.app import api

VERBS = [
    "all_runs",
    "checkpoints",
    "damage_in_words",
    "down",
    "events",
    "execute",
    "export",
    "find_run",
    "load",
    "logs",
    "plan",
    "preview",
    "recover",
    "report",
    "restart",
    "status",
    "stop",
    "submit",
    "train",
    "watch",
]
TYPES = [
    "Backend",
    "Cluster",
    "Damage",
    "Event",
    "Loaded",
    "MusterError",
    "Problem",
    "RunDir",
    "RunFileError",
    "RunSpec",
    "RunView",
    "Sink",
    "Terminal",
    "UsageError",
    "redact",
]


def test_exports():
    assert muster.__all__ == ["__version__", "api"] and muster.api is api
    assert api.__all__ == sorted([*VERBS, *TYPES])
    assert all(callable(getattr(api, name)) for name in api.__all__)


def test_importing_costs_nothing():
    code = "import sys, muster.app.api; print(sorted(m for m in sys.modules if m.startswith('muster.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['muster.app', 'muster.app.api']"
