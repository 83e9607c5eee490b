"""Where copies of models from the hub lie that several machines read: ``COPIES/NAME/COMMIT/FILE``.

``COPIES/NAME/complete`` names the commit, and is written last; a copy without it is none.
"""

from __future__ import annotations

import json
from pathlib import Path

COMPLETE = "complete"


def copy_name(source: str, revision: str | None) -> str:
    """Of ``ORG/NAME`` at a revision (a branch is what it was when it was copied)."""
    return f"{source.replace('/', '--')}@{(revision or 'main').replace('/', '--')}"


def find_copy(copies: Path, source: str, revision: str | None) -> Path | None:
    """The folder with the files of a complete copy; None where there is none."""
    folder = copies / copy_name(source, revision)
    try:
        return folder / str(json.loads((folder / COMPLETE).read_bytes())["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
