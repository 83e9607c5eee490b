"""The chains of all event files of a folder."""

from pathlib import Path

from muster.core.event_log import Verdict, verify
from muster.core.event_log.names import event_files


def check_directory(directory: str | Path, *, run_id: str) -> dict[str, Verdict]:
    """File name -> verdict."""
    return {path.name: verify(path.read_bytes(), run_id=run_id, name=path.name) for path in event_files(directory)}
