"""Processor time of a healthy run by kind of process, and how often each wakes up: what fault tolerance costs.

Exact (the scheduler's nanoseconds, ``/proc/PID/task/TID/schedstat``) and hardly affected by other work on the machine,
unlike step times. Linux only.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: A thread's processor seconds and voluntary waits, by kind of process, pid and thread.
Reading = Mapping[tuple[str, int, int], tuple[float, int]]

LINK = "rank's link"
"""The thread in each rank that speaks with its agent."""
RANK = "rank"
PROGRAMS = {
    "muster.agent.watchdog": "watchdog",
    "muster.agent.host_agent": "agent",
    "muster.agent.replicator.main": "replicator",
    "muster.rank.fork_server": "fork server",
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one kind of process took."""

    cpu_s: float
    wakes: int


def shares(before: Reading, after: Reading) -> dict[str, Share]:
    """By kind, between two readings; a thread that began in between counts from its beginning."""
    result: dict[str, Share] = {}
    for thread, (cpu_s, wakes) in after.items():
        was_s, had = before.get(thread, (0.0, 0))
        sofar = result.get(thread[0], Share(cpu_s=0.0, wakes=0))
        result[thread[0]] = Share(cpu_s=sofar.cpu_s + cpu_s - was_s, wakes=sofar.wakes + wakes - had)
    return result


def beside_the_ranks(found: Mapping[str, Share]) -> float:
    """Processor time of everything but the ranks' own threads, as a share of the ranks'."""
    own = found[RANK].cpu_s + found[LINK].cpu_s
    return sum(share.cpu_s for kind, share in found.items() if kind != RANK) / own


def read(kinds: Mapping[int, str]) -> Reading:
    """Every thread of these processes now."""
    result = {}
    for pid, kind in kinds.items():
        for tid in _numbers(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # it has ended
                task = Path(f"/proc/{pid}/task/{tid}")
                is_link = kind == RANK and (task / "comm").read_text().strip() == "muster-link"
                cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
                words = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                result[LINK if is_link else kind, pid, tid] = (cpu_s, int(words["voluntary_ctxt_switches"]))
    return result


def kinds_of(run: Any) -> dict[int, str]:
    """Pid -> kind, of every process of a ``LiveRun``."""
    ranks = {pid for pid, _ in run.ranks().values()}
    result = {run.supervisor.pid: "supervisor"}
    for pid in {pid for name in run.names for pid in run.host_pids(name)}:
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            kind = next((kind for module, kind in PROGRAMS.items() if module in argv), " ".join(argv[:4]))
            if kind == "fork server" and _parent_runs(pid, "muster.rank.fork_server"):
                kind = RANK if pid in ranks else "standby"
            result[pid] = kind
    return result


def measure(spec: Any, seconds: float, *, settle_steps: int, during: Callable[[Mapping[int, str]], None] | None = None):
    """Of one healthy run, from its step ``settle_steps`` on; printed, and as JSON values."""
    from cluster import LiveRun

    with tempfile.TemporaryDirectory() as name, LiveRun(Path(name), spec) as run:
        run.start()
        run.wait_for_step(settle_steps, 300)
        kinds = kinds_of(run)
        first, before, began_s = run.step(), read(kinds), time.monotonic()
        if during is not None:
            during(kinds)
        time.sleep(max(0.0, seconds - (time.monotonic() - began_s)))
        after, watched_s = read(kinds), time.monotonic() - began_s
        steps = run.step() - first
        incidents = run.events("incident.detected")
        if incidents or kinds_of(run) != kinds:
            raise SystemExit(f"the run was not healthy:\n{run.story()}")
    found = shares(before, after)
    own_s = found[RANK].cpu_s + found[LINK].cpu_s
    result = {
        "heartbeat_timeout_s": spec.recovery.heartbeat_timeout_s, "seconds": round(watched_s, 1), "steps": steps,
        "rank_cpu_s_a_step": round(own_s / steps / len(run.ranks()), 4),
        "beside_the_ranks": round(beside_the_ranks(found), 6),
        "by_kind": {
            kind: {
                "cpu_ms_a_step": round(1e3 * share.cpu_s / steps, 3),
                "of_the_ranks": round(share.cpu_s / own_s, 6),
                "of_one_core": round(share.cpu_s / watched_s, 6),
                "wakes_a_s": round(share.wakes / watched_s, 1),
            }
            for kind, share in sorted(found.items())
        },
    }  # fmt: skip
    show(result)
    return result


def show(result: Mapping[str, Any]) -> None:
    print(
        f"heartbeat limit {result['heartbeat_timeout_s']:g} s: {result['steps']} steps in {result['seconds']} s, "
        f"{result['rank_cpu_s_a_step']:.3f} s of processor time a step and rank"
    )
    for kind, row in result["by_kind"].items():
        print(
            f"  {kind:12} {row['cpu_ms_a_step']:9.3f} ms a step  {row['of_the_ranks']:9.4%} of the ranks  "
            f"{row['of_one_core']:8.3%} of a core  {row['wakes_a_s']:7.1f} wakes/s"
        )
    print(f"  everything but the ranks' own threads: {result['beside_the_ranks']:.3%} of the ranks' time", flush=True)


def _numbers(directory: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(directory)]
    return []


def _parent_runs(pid: int, module: str) -> bool:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return module in Path(f"/proc/{parent}/cmdline").read_bytes().decode().split("\0")
