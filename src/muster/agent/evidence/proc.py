"""A rank's process and its limits, as the kernel tells them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from muster.core.typed_json import Unreadable
from muster.health.hang.process_state import GONE, CgroupState, ProcessState, parse_cgroup, parse_stat


def process_state(pid: int, proc: Path = Path("/proc")) -> ProcessState:
    """Now; a process that is gone is a result, no error."""
    folder = proc / str(pid)
    try:
        return parse_stat(_read(folder / "stat"), _read(folder / "wchan").strip(), os.sysconf("SC_CLK_TCK"))
    except Unreadable:
        return ProcessState(state=GONE)


def cgroup_state(pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> CgroupState:
    """Of the process's group, of version 1 where the controller is there, else of version 2; else unknown."""
    rows = [line.split(":", 2) for line in _read(proc / str(pid) / "cgroup").splitlines() if line.count(":") >= 2]
    paths = {name: path for _, names, path in rows for name in names.split(",")}

    def folder(controller: str) -> Path:
        if controller in paths:
            return root / controller / paths[controller].lstrip("/")
        return root / paths.get("", "").lstrip("/")

    memory = folder("memory")
    events = _read(memory / "memory.events") or _read(memory / "memory.oom_control")
    return parse_cgroup(events, _read(folder("cpu") / "cpu.stat"))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
