"""What only machines that are reached by SSH need (``backend: ssh``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from muster.config.sections.section import Section
from muster.core.processes import read_plain

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
#: No part begins with a hyphen, as options do.
HOST = rf"^({_NAME}@)?{_NAME}(:[0-9]{{1,5}})?$"
#: A path that every login shell reads as one plain word.
FOLDER = r"^/[A-Za-z0-9_./+-]+$"


def _read(hosts: object) -> object:
    """The lines of a file, where its path is given."""
    if not isinstance(hosts, str):
        return hosts
    try:
        lines = read_plain(Path(hosts).expanduser(), most=1 << 20).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {hosts}: {getattr(error, 'strerror', None) or error}") from error
    return [name for line in lines if (name := line.partition("#")[0].strip())]


class Ssh(Section):
    """The machines, and how they reach each other."""

    hosts: Annotated[list[Annotated[str, Field(pattern=HOST)]], BeforeValidator(_read)] = Field([])
    """Names of ``~/.ssh/config``, or ``[USER@]HOST[:PORT]``; or the path of a file with one a line. Those beyond
    ``resources.hosts`` are spares. The first one keeps the run's home where ``run_dir`` names none."""
    venv: Annotated[str, Field(pattern=FOLDER)] | None = None
    """A virtual environment with Muster that every host has; default: ``muster up`` makes one."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29411
    """Of the home on the first host's disk, where the other hosts connect."""
