"""The table of back ends: names that a run file may give as ``backend``, and where each one's value is.

A value is a ``muster.backends.backend.Backend``. Only what concerns the run file is used here (``rules``,
``host_checks``, ``image``, ``unused_settings``), and it is imported when a run file names it. Another package adds a
back end by an entry point of the group ``muster.backends`` that names such a value.
"""

from __future__ import annotations

from typing import Any

from muster.core.registry import Registry

#: Name -> its value. (``Any``: the value's class is above this package.)
BACKENDS: Registry[Any] = Registry(
    family="back end",
    group="muster.backends",
    shipped={name: f"muster.backends.{name}:BACKEND" for name in ("local", "ssh", "slurm", "gke", "vertex", "gce")},
)
