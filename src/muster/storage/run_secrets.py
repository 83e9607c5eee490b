"""Values of a run's secrets, as its hosts find them: ``secrets.json`` in the run's folder, its owner's alone.

Next to ``token``, and of the same kind: it is in no event, no log and no bucket. Where hosts see another folder (pods),
the back end hands the values over by the place's own means and the file stays where the run was submitted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from muster.core.errors import AccessError
from muster.core.processes import read_plain, replace_text

NAME = "secrets.json"


def write(run_dir: Path, values: Mapping[str, str]) -> None:
    """Keep ``values``; none: the file goes. Raises OSError."""
    if values:
        replace_text(run_dir / NAME, json.dumps(dict(values)) + "\n")
    else:
        (run_dir / NAME).unlink(missing_ok=True)


def read(run_dir: Path) -> dict[str, str]:
    """Name -> value; empty where there is no file.

    Raises:
        AccessError: others can read it, or it is damaged.
    """
    path = run_dir / NAME
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise AccessError(f"others can read {path}: its secrets are not used", hint=f"chmod 600 {path}")
        found = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise AccessError(f"cannot read {path}", hint="submit the run again: that rewrites it") from error
    if not isinstance(found, dict):
        raise AccessError(f"{path} is damaged", hint="submit the run again: that rewrites it")
    return {str(name): str(value) for name, value in found.items()}
