"""How a struck run is judged: its history, its weights, and what it left behind."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import trials
from cluster import checkpoint_hash

from muster.core import processes
from muster.report.audit.invariants import broken, check

#: Longest wait for a run's processes to end after their supervisor.
SETTLE_S = 40.0
TEMPORARY = re.compile(r"\.(tmp|part)$")


class Traces:
    """Processes and listeners that a run had at some moment: none may outlive it."""

    def __init__(self) -> None:
        self._seen: dict[int, processes.Process] = {}
        self._listeners: dict[str, str] = {}

    def look(self, run_id: str) -> None:
        """Remember what is there now, and what it started that carries no label."""
        mine = {process.pid for process in processes.labelled(run_id)}
        parents = _parents()
        for pid in parents:
            line = [pid]
            while line[-1] in parents and line[-1] not in mine:
                line.append(parents[line[-1]])
            if line[-1] in mine:
                found = processes.look(pid)
                if found is not None:
                    self._seen[pid] = found
                    self._listeners.update(_listeners(pid))

    def living(self, run_id: str) -> list[processes.Process]:
        """Those that live: a zombie does not."""
        seen = [found for found in self._seen.values() if processes.lives(found.pid, found.start_ticks)]
        pids = {found.pid for found in seen}
        return [*seen, *(found for found in processes.labelled(run_id) if found.pid not in pids)]

    def settle(self, run_id: str) -> None:
        until = time.monotonic() + SETTLE_S
        while self.living(run_id) and time.monotonic() < until:
            time.sleep(0.1)

    def left(self, run_id: str) -> list[str]:
        problems = [f"left: process {found.pid} {' '.join(found.argv)[:120]}" for found in self.living(run_id)]
        listening = _tcp_listeners(Path("/proc/self/net"))
        return problems + [f"left: {self._listeners[inode]}" for inode in self._listeners.keys() & listening.keys()]


def _parents() -> dict[int, int]:
    """Process -> its parent, of every process here."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                found[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return found


def _listeners(pid: int) -> dict[str, str]:
    """Inode -> words, of the TCP sockets on which a process accepts connections."""
    held = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{pid}/fd/{name}")[len("socket:[") : -1])
    found = _tcp_listeners(Path(f"/proc/{pid}/net"))
    return {inode: f"the listener on {found[inode]} of process {pid}" for inode in held & found.keys()}


def _tcp_listeners(folder: Path) -> dict[str, str]:
    """Inode -> port, of a network namespace (proc(5), /proc/net/tcp)."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in (folder / table).read_text().splitlines()[1:]]
            found.update({row[9]: f"port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == "0A"})
    return found


def judge(run_dir: Path, reference: Path, applied: list[str]) -> list[str]:
    """What is wrong with the history and the final weights of an ended run."""
    problems = broken(check(run_dir, reference=reference))
    # What was broken and never read again stays broken: nobody can know.
    struck = set(re.findall(r"\(checkpoints/(?:commits/)?(step-\d+)\S* of ", " ".join(applied)))
    problems = [line for line in problems if not any(line.startswith(f"I5: {name}.json: ") for name in struck)]
    if any(line.split(":")[1].split(" (")[0].strip() in trials.LOGS for line in applied):
        # What a damaged file held is missing; of the rest only the results can be told.
        named = set(re.findall(r"\(events/(\S+\.jsonl) of ", " ".join(applied)))
        problems = [
            line
            for line in problems
            if (line.startswith(("I4", "I5")) and "in one alone" not in line)
            or (line.startswith("log") and not any(name in line for name in named))
        ]
    if checkpoint_hash(run_dir / "checkpoints") != checkpoint_hash(reference / "checkpoints"):
        problems.append("the final weights are not the undisturbed run's")
    return problems


def files_left(trial_dir: Path, memory_root: Path, temporary: Path) -> list[str]:
    """Files of an ended run that nobody needs, and folders in memory."""
    left = [*memory_root.iterdir(), *temporary.iterdir()]
    left += [path for path in trial_dir.rglob("*") if TEMPORARY.search(path.name)]
    return [f"left: {path}" for path in left]
