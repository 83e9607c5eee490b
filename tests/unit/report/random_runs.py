"""Random event logs: runs that could be, and heaps of events that could not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fakes.event_details import random_detail

from muster.core.event_details.kinds import KINDS
from muster.core.events import PHASES, Event

SECOND = 1_000_000_000
Files = dict[str, list[Event]]


class Pen:
    """Writes events into files as their writers would, each with its own clock."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.files: Files = {}
        self.offset: dict[str, int] = {}

    def add(self, writer: str, t: int, kind: str, *, attempt: int = 0, host: str | None = None, **given: Any) -> None:
        name = f"{writer}.1.jsonl"
        events = self.files.setdefault(name, [])
        shift = self.offset.get(writer, 0)
        events.append(
            Event(
                run_id="random",
                attempt=attempt,
                seq=len(events),
                mono_ns=t - shift,
                wall_ns=1_790_000_000 * SECOND + t,
                host=host or writer,
                kind=kind,
                **given,
            )
        )


def plausible(seed: int) -> Files:
    """A run as it could happen: hosts come, attempts fail, steps are redone, hosts are lost, swapped and released."""
    rng = random.Random(seed)
    pen = Pen(rng)
    number = rng.randint(1, 4)
    ranks = rng.randint(1, 2)
    hosts = [f"host-{n}" for n in range(number + rng.randint(0, 2))]
    pen.offset = {host: rng.randint(-(10**13), 10**13) for host in hosts}
    t = rng.randint(0, 10**12)
    pen.add("client", t, "run.submitted", detail={"spec_digest": "0", "backend": "local", "version": "0"})
    price = rng.choice([None, 0.0, rng.uniform(1, 100)])
    t += rng.randint(0, 60 * SECOND)
    pen.add("supervisor", t, "host.requested", detail={"count": len(hosts)})
    for n, host in enumerate(hosts):
        t += rng.randint(1, 20 * SECOND)
        cost = {} if price is None else {"usd_per_hour": price}
        role = "active" if n < number else "spare"
        pen.add("supervisor", t, "host.allocated", host=host, detail={"gpus": ranks, "role": role, **cost})
        if rng.random() < 0.9:
            measured = {"offset_ns": pen.offset[host], "error_ns": 50_000}
            pen.add("supervisor", t + SECOND, "clock.offset", host=host, detail=measured)
        pen.add(host, t + rng.randint(0, 5 * SECOND), "agent.started", detail={"pid": 1, "ranks": ranks})
    t = _attempts(pen, hosts, number, ranks, t + 6 * SECOND)
    if rng.random() < 0.8:
        outcome = rng.choice(["succeeded", "succeeded", "failed", "stopped"])
        pen.add("supervisor", t, "run.finished", detail={"outcome": outcome, "exit_code": 0, "reason": "end"})
        for host in hosts:
            if rng.random() < 0.9:
                t += rng.randint(0, 5 * SECOND)
                pen.add("supervisor", t, "host.released", host=host)
    return pen.files


def _attempts(pen: Pen, hosts: list[str], number: int, ranks: int, t: int) -> int:
    rng = pen.rng
    members = hosts[:number]
    resume, durable, cause = 0, 0, None
    for attempt in range(1, rng.randint(2, 6)):
        placed = {host: list(range(n * ranks, (n + 1) * ranks)) for n, host in enumerate(members)}
        detail: dict[str, Any] = {"world_size": ranks * len(members), "layout": {}, "hosts": placed}
        if attempt > 1:
            detail |= {"resume_step": resume, "cause": cause}
        t += rng.randint(1, 3 * SECOND)
        pen.add("supervisor", t, "attempt.started", attempt=attempt, detail=detail)
        everyone = [(host, rank) for host in members for rank in placed[host]]
        for phase in ("start", "restore", "warmup"):
            t += rng.randint(1, 3 * SECOND)
            for host, rank in everyone:
                pen.add(host, t, "phase.changed", attempt=attempt, rank=rank, phase=phase)
        t, last, durable = _steps(pen, everyone, attempt, resume, durable, t)
        failed = rng.random() < 0.7
        fault = t + rng.randint(0, 2 * SECOND)
        t = fault + rng.randint(1, 8 * SECOND)
        if not failed:
            pen.add("supervisor", t, "attempt.ended", attempt=attempt, detail={"reason": "done"})
            return t + 1
        cause, host = f"i{attempt}", rng.choice(members)
        if rng.random() < 0.5:
            pen.add(host, fault, "rank.exited", attempt=attempt, rank=placed[host][0], detail={"exit_code": -9})
        detail = {"incident_id": cause, "incident": "rank_exit", "evidence": "it died"}
        if rng.random() < 0.7:
            detail["since_ns"] = fault
        pen.add("supervisor", t, "incident.detected", attempt=attempt, host=host, detail=detail)
        action = rng.choice(["restart", "swap", "shrink", "wait"])
        said = {"incident_id": cause, "action": action, "reason": "because"}
        pen.add("supervisor", t + 1, "incident.decided", attempt=attempt, detail=said)
        pen.add("supervisor", t + 2, "attempt.ended", attempt=attempt, detail={"reason": cause})
        if action == "wait":
            pen.add("supervisor", t + 3, "phase.changed", attempt=attempt, phase="wait")
            t += rng.randint(4, 30 * SECOND)
        elif action in ("swap", "shrink"):
            pen.add("supervisor", t + 3, "host.lost", attempt=attempt, host=host, detail={"evidence": "gone"})
            spare = [h for h in hosts if h not in members] if action == "swap" else []
            rest = [h for h in members if h != host]
            members = [*rest, *spare[:1]] or members
        t += 5
        resume = rng.choice([last, last, durable])
    return t


def _steps(
    pen: Pen, everyone: list[tuple[str, int]], attempt: int, resume: int, durable: int, t: int
) -> tuple[int, int, int]:
    rng = pen.rng
    host = everyone[0][0]
    last = resume
    for step in range(resume + 1, resume + 1 + rng.randint(0, 25)):
        length = rng.randint(SECOND // 2, 2 * SECOND)
        t += length + rng.randint(0, 200_000)
        detail = {
            "loss": rng.random(),
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "step_ns": length,
            "tokens": rng.choice([1024, 1024, 1000]),
            "supervised_tokens": 10,
            "padding_tokens": 0,
            "data_wait_ns": rng.randint(0, length // 3),
            "stall_ns": rng.randint(0, length // 3),
        }
        if rng.random() < 0.5:
            detail |= {"snapshot_step": step - rng.randint(0, 2), "peer_step": max(0, step - 3)}
        pen.add(host, t, "step", attempt=attempt, rank=0, step=step, detail=detail)
        if attempt == 1 and step == 12 and rng.random() < 0.4:
            rate = {"tokens_per_s": rng.uniform(500, 2000), "world_size": len(everyone), "steps": 6, "first_step": 5}
            pen.add(host, t + 1, "baseline_rate", attempt=attempt, rank=0, step=step, detail=rate)
        if step == resume + 1:
            for name, rank in everyone:
                pen.add(name, t, "phase.changed", attempt=attempt, rank=rank, phase="train")
        last = step
        if rng.random() < 0.15:
            t += _pause(pen, everyone, attempt, t, rng.choice(["checkpoint", "eval"]))
            done = {"tier": rng.choice(["memory", "disk"]), "uri": "u", "bytes": 1}
            pen.add(host, t, "checkpoint.committed", attempt=attempt, rank=0, step=step, detail=done)
            durable = step if done["tier"] == "disk" else durable
    return t, last, durable


def _pause(pen: Pen, everyone: list[tuple[str, int]], attempt: int, t: int, phase: str) -> int:
    length = pen.rng.randint(1, 3 * SECOND)
    for at, name in ((t, phase), (t + length, "train")):
        for host, rank in everyone:
            pen.add(host, at, "phase.changed", attempt=attempt, rank=rank, phase=name)
    return length


def implausible(seed: int) -> Files:
    """Events of every kind, with values of the right type, in an order and at times that make no sense."""
    rng = random.Random(seed)
    pen = Pen(rng)
    writers = ["supervisor", "client", "host-0", "host-1", "host-2"]
    pen.offset = {writer: rng.choice([0, rng.randint(-(10**12), 10**12)]) for writer in writers}
    for _ in range(rng.randint(1, 120)):
        kind = rng.choice(list(KINDS))
        drawn = random_detail(KINDS[kind], rng)
        plausible = {key: _VALUES[key](rng) for key in drawn if key in _VALUES}
        detail = drawn | {key: value for key, value in plausible.items() if type(value) is type(drawn[key])}
        pen.add(
            rng.choice(writers),
            rng.randint(0, 200) * SECOND + rng.randint(0, 5),
            kind,
            attempt=rng.randint(0, 4),
            host=rng.choice([None, "host-0", "host-1", "host-2", "stranger"]),
            rank=rng.choice([None, 0, 0, 1, 2]),
            step=rng.choice([None, *range(12)]),
            phase=rng.choice([None, *PHASES]) if kind != "phase.changed" else rng.choice(PHASES),
            detail=detail,
        )
    return pen.files


def _ns(rng: random.Random) -> int:
    return rng.choice([0, rng.randint(0, 50 * SECOND)])


def _incident(rng: random.Random) -> str:
    return f"i{rng.randint(0, 3)}"


_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "step_ns": _ns,
    "stall_ns": _ns,
    "data_wait_ns": _ns,
    "since_ns": _ns,
    "lost_ns": _ns,
    "offset_ns": _ns,
    "error_ns": _ns,
    "tokens": lambda rng: rng.choice([0, 512, 1024]),
    "loss": lambda rng: rng.random(),
    "tokens_per_s": lambda rng: rng.uniform(1, 1000),
    "world_size": lambda rng: rng.randint(1, 4),
    "resume_step": lambda rng: rng.randint(-1, 8),
    "hosts": lambda rng: {f"host-{n}": [n] for n in range(rng.randint(0, 3))},
    "stages_ns": lambda rng: {"collected": 5},
    "incident_id": _incident,
    "cause": _incident,
    "reason": _incident,
    "incident": lambda rng: rng.choice(["rank_exit", "host_lost", "straggler"]),
    "action": lambda rng: rng.choice(["restart", "swap", "ignore", "stop", "wait"]),
    "replacement": lambda rng: "host-2",
    "role": lambda rng: rng.choice(["active", "spare"]),
    "usd_per_hour": lambda rng: rng.choice([0.0, 12.5]),
    "exit_code": lambda rng: rng.choice([0, 1, -9]),
}
