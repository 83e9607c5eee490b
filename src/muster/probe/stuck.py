"""What ranks of the network test do that hang: the kernel's words about them, and their stacks by ``py-spy``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from muster.core.processes import program
from muster.core.typed_json import Unreadable
from muster.health.hang import stacks
from muster.health.hang.evidence import NO_SPY, RankEvidence
from muster.health.hang.process_state import GONE, ProcessState, parse_stat
from muster.probe.programs import output_of

#: For all of a host's ranks; an answer takes 0.02 to 0.06 s each.
LIMIT_S = 5.0
_MOST_FRAMES = 40


def evidence(ranks: Mapping[int, int], proc: Path = Path("/proc")) -> tuple[RankEvidence, ...]:
    """Of rank -> pid, within ``LIMIT_S``."""
    until = time.monotonic() + LIMIT_S
    return tuple(_of(rank, pid, until, proc) for rank, pid in ranks.items())


def _of(rank: int, pid: int, until: float, proc: Path) -> RankEvidence:
    found = RankEvidence(rank=rank, pid=pid, process=_process(proc / str(pid)))
    spy = program("py-spy")
    if spy is None:
        return replace(found, missing=(NO_SPY,))
    command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        output, code = output_of(command, limit_s=max(0.0, until - time.monotonic()))
    except OSError as error:
        return replace(found, missing=(f"py-spy cannot be started: {error.strerror}",))
    if code is None:
        return replace(found, missing=(f"py-spy did not answer within {LIMIT_S:g} s",))
    try:
        main = stacks.main_thread(stacks.parse(output.decode(errors="replace")))
    except Unreadable:
        return replace(found, missing=("py-spy shows no stack: it needs to be root's, or CAP_SYS_PTRACE",))
    return found if main is None else replace(found, threads=(replace(main, frames=main.frames[:_MOST_FRAMES]),))


def _process(folder: Path) -> ProcessState:
    wchan = ""
    with contextlib.suppress(OSError):
        wchan = (folder / "wchan").read_text(errors="replace").strip()
    try:
        return parse_stat((folder / "stat").read_text(errors="replace"), wchan, os.sysconf("SC_CLK_TCK"))
    except (OSError, Unreadable):
        return ProcessState(state=GONE)
