"""A made-up run that goes through most of what a run can go through, written with the real ``EventLog``.

Two hosts of two ranks and a spare: queue, start, warm-up, 60 steps with an evaluation and saves, a killed
rank, a lost host swapped for the spare, the end and an idle tail. The clocks of the hosts are not the
supervisor's. Times are made up but consistent; ``SETTLED`` holds what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.core.event_log import EventLog

SECOND = 1_000_000_000
RUN_ID = "made-up-20261121-101500-ab12"
WALL = 1_795_256_100 * SECOND
STEP_NS = 2 * SECOND
TOKENS = 65_536


@dataclass
class SetClock:
    """A clock that stands where it is put."""

    ns: int = 0

    def monotonic_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return WALL + self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


@dataclass
class Writer:
    """Writes events of any writer at any moment (seconds of the supervisor's clock)."""

    directory: Path
    logs: dict[str, EventLog] = field(default_factory=dict)
    offsets_ns: dict[str, int] = field(default_factory=dict)
    run_id: str = RUN_ID

    def add(self, writer: str, at_s: float, kind: str, *, term: int = 1, **given: Any) -> None:
        name = f"{writer}.{term}"
        if name not in self.logs:
            self.logs[name] = EventLog(self.run_id, self.directory, writer, term, SetClock())
        t = round(at_s * SECOND)
        self.logs[name].append(kind, mono_ns=t - self.offsets_ns.get(writer, 0), wall_ns=WALL + t, **given)

    def close(self) -> None:
        for log in self.logs.values():
            log.close()


def loss_at(step: int) -> float:
    return 0.4 + 5.6 * 0.985**step


def write(directory: Path, *, price: float | None = 24.0, finish: bool = True) -> Path:
    """Write the run under ``directory`` and return it."""
    w = Writer(directory, offsets_ns={"host-0": 5_000 * SECOND, "host-1": -77 * SECOND, "host-2": 123 * SECOND})
    _begin(w, price)
    _attempt(w, 1, {"host-0": [0, 1], "host-1": [2, 3]}, start=40.0, first_step=1, last_step=25, warm=True)
    # Rank 3 is killed in the middle of step 26 and noticed half a second later.
    w.add("host-1", 106.5, "rank.exited", attempt=1, rank=3, detail={"exit_code": -9, "reason": "signal 9"})
    _incident(w, "i1", "rank_exit", 107.0, 1, "host-1", 3, "rank 3 on host-1 was killed by signal 9", 106.5, "restart")
    _attempt(w, 2, {"host-0": [0, 1], "host-1": [2, 3]}, start=108.0, first_step=26, last_step=45, cause="i1")
    # The whole of host-1 goes silent during step 46; the newest state is that of step 40 on disk.
    _incident(w, "i2", "host_lost", 160.0, 2, "host-1", None, "host-1: silent for 3.0 s", 156.0, "swap", "host-2")
    w.add("supervisor", 160.0, "host.lost", host="host-1", detail={"evidence": "silent for 3.0 s"})
    _attempt(w, 3, {"host-0": [0, 1], "host-2": [2, 3]}, start=163.0, first_step=41, last_step=60, cause="i2")
    w.add("supervisor", 180.0, "host.released", host="host-1", detail={"reason": "given back"})
    _end(w, finish)
    w.close()
    return directory


def _begin(w: Writer, price: float | None) -> None:
    cost = {} if price is None else {"usd_per_hour": price}
    submitted = {"spec_digest": "0" * 64, "backend": "local", "version": "0.1", "name": "made up"}
    w.add("client", 0.0, "run.submitted", detail=submitted)
    w.add("supervisor", 1.0, "supervisor.started", detail={"term": 1, "pid": 17})
    w.add("supervisor", 1.0, "host.requested", detail={"count": 3})
    for number, at in ((0, 20.0), (1, 22.0), (2, 25.0)):
        host, role = f"host-{number}", "spare" if number == 2 else "active"
        w.add("supervisor", at, "host.allocated", host=host, detail={"gpus": 2, "role": role, **cost})
        w.add(host, at + 5.0, "agent.started", attempt=0, detail={"pid": 30 + number, "ranks": 2})
        offset = {"offset_ns": w.offsets_ns[host], "error_ns": 40_000}
        w.add("supervisor", at + 5.1, "clock.offset", host=host, detail=offset)


def _incident(
    w: Writer,
    name: str,
    kind: str,
    at: float,
    attempt: int,
    host: str,
    rank: int | None,
    evidence: str,
    since: float,
    action: str,
    replacement: str | None = None,
    *,
    secondary: bool = False,
) -> None:
    detail = {"incident_id": name, "incident": kind, "evidence": evidence, "since_ns": round(since * SECOND)}
    detail |= {"secondary": True} if secondary else {}
    w.add("supervisor", at, "incident.detected", attempt=attempt, host=host, rank=rank, detail=detail)
    reason = {"restart": "first failure of this rank", "swap": "a spare stands ready"}[action]
    more = {"replacement": replacement} if replacement else {}
    w.add(
        "supervisor",
        at + 0.01,
        "incident.decided",
        attempt=attempt,
        detail={"incident_id": name, "action": action, "reason": reason, **more},
    )
    w.add("supervisor", at + 0.02, "attempt.ended", attempt=attempt, detail={"reason": name})


def _attempt(
    w: Writer,
    number: int,
    hosts: dict[str, list[int]],
    *,
    start: float,
    first_step: int,
    last_step: int,
    warm: bool = False,
    cause: str | None = None,
) -> None:
    detail = {
        "world_size": 4,
        "layout": {"dp_shard": 4},
        "hosts": hosts,
        "resume_step": first_step - 1 if cause else -1,
    }
    if cause:
        detail |= {"cause": cause, "tier": "memory" if number == 2 else "disk"}
    w.add("supervisor", start, "attempt.started", attempt=number, detail=detail)
    t = start + (8.0 if warm else 1.0)
    for phase, at in (("start", start + 0.1), ("restore", t), ("warmup", t + 1.0)):
        for host, ranks in hosts.items():
            for rank in ranks:
                w.add(host, at, "phase.changed", attempt=number, rank=rank, phase=phase)
    t += 1.0
    for step in range(first_step, last_step + 1):
        length = STEP_NS / SECOND + (4.0 if step == first_step and warm else 0.5 if step == first_step else 0.0)
        if step == first_step + 10:
            length += 1.5  # one slow step
        t += length
        _step(w, number, step, t, length)
        if step == first_step:
            for host, ranks in hosts.items():
                for rank in ranks:
                    w.add(host, t, "phase.changed", attempt=number, rank=rank, phase="train")
        t = _after(w, number, hosts, step, t)


def _step(w: Writer, attempt: int, step: int, t: float, length: float) -> None:
    detail = {
        "loss": loss_at(step),
        "grad_norm": 1.0 + 3.0 / step,
        "learning_rate": 2e-5,
        "step_ns": round(length * SECOND),
        "tokens": TOKENS,
        "supervised_tokens": TOKENS // 4,
        "padding_tokens": 128,
        "data_wait_ns": 10_000_000,
        "stall_ns": 20_000_000,
        "tokens_per_s": TOKENS / length,
        "mfu": 0.41 * 2.0 / length,
        "memory_bytes": 61 * 2**30 + step * 2**20,
        "rows": 32,
    }
    w.add("host-0", t, "step", attempt=attempt, rank=0, step=step, detail=detail)


def _after(w: Writer, attempt: int, hosts: dict[str, list[int]], step: int, t: float) -> float:
    """Snapshot, save every 20 steps, evaluation after step 30."""
    memory = {"tier": "memory", "uri": "shm", "bytes": 10**9, "duration_ns": 2 * 10**7}
    w.add("host-0", t + 0.03, "checkpoint.committed", attempt=attempt, rank=0, step=step, detail=memory)
    pauses = [("checkpoint", 1.0)] * (step % 20 == 0) + [("eval", 3.0)] * (step == 30)
    for phase, length in pauses:
        for host, ranks in hosts.items():
            for rank in ranks:
                w.add(host, t, "phase.changed", attempt=attempt, rank=rank, phase=phase)
        t += length
        if phase == "checkpoint":
            done = {"tier": "disk", "uri": f"checkpoints/step-{step:08d}", "bytes": 4 * 10**9, "stall_ns": 10**9}
            w.add("host-0", t, "checkpoint.committed", attempt=attempt, rank=0, step=step, detail=done)
        else:
            _eval(w, attempt, step, t)
        for host, ranks in hosts.items():
            for rank in ranks:
                w.add(host, t, "phase.changed", attempt=attempt, rank=rank, phase="train")
    return t


def _eval(w: Writer, attempt: int, step: int, t: float) -> None:
    figures = {"loss": loss_at(step) + 0.05, "execution_accuracy": 0.875, "questions": 200, "baseline_accuracy": 0.2}
    w.add("host-0", t, "eval", attempt=attempt, rank=0, step=step, detail=figures)


def _end(w: Writer, finish: bool) -> None:
    if not finish:
        return
    w.add("supervisor", 208.5, "attempt.ended", attempt=3, detail={"reason": "done"})
    finished = {"outcome": "succeeded", "exit_code": 0, "reason": "60 steps", "final_step": 60}
    w.add("supervisor", 209.0, "run.finished", detail=finished)
    for number in (0, 2):
        w.add("supervisor", 214.0, "host.released", host=f"host-{number}", detail={"reason": "done"})
    w.add("supervisor", 214.1, "supervisor.ended", detail={"reason": "done"})
