"""What only machines that are reached by SSH need (``backend: ssh``)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muster.config.sections.section import Section

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
#: No part begins with a hyphen, as options do.
HOST = rf"^({_NAME}@)?{_NAME}(:[0-9]{{1,5}})?$"
#: A path that every login shell reads as one plain word.
FOLDER = r"^/[A-Za-z0-9_./+-]+$"


class Ssh(Section):
    """The machines, and how they reach each other."""

    hosts: list[Annotated[str, Field(pattern=HOST)]] = Field([])
    """Names of ``~/.ssh/config``, or ``[USER@]HOST[:PORT]``. Those beyond ``resources.hosts`` are spares. The first one
    keeps the run's home where ``run_dir`` names no bucket."""
    venv: Annotated[str, Field(pattern=FOLDER)] | None = None
    """A virtual environment with Muster that every host has; default: ``muster up`` makes one."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29411
    """Of the home on the first host's disk, where the other hosts connect."""
