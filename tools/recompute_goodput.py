#!/usr/bin/env python3
"""Recompute a run's headline figures from its event log alone, sharing no code with Muster.

    python tools/recompute_goodput.py RUN_DIR [--report report.json]

Checks every file's hash chain, then finds purchased host-time, tokens of the final lineage, the reference
rate, token goodput and cost in its own way, and prints them as JSON. With ``--report`` (the output of
``muster report RUN --json``) it compares: exit code 1 where a figure differs by more than 1e-9 (relative), or
where the report's categories do not sum to the host-time that this script finds purchased.

Only the standard library. Definitions: docs/explanation/goodput.md.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import sys
from pathlib import Path

TOLERANCE = 1e-9


def read(directory):
    """File name -> events, whole lines only; and what is wrong with the chains."""
    files, wrong = {}, []
    for path in sorted(Path(directory).glob("*.jsonl")):
        events, head, position = [], None, 0
        raw = path.read_bytes()
        for line in raw[: raw.rfind(b"\n") + 1].splitlines(keepends=True):
            event = json.loads(line)
            if head is None:
                head = hashlib.sha256(f"muster:{event['run_id']}:{path.name}".encode()).hexdigest()
            if event["prev"] != head or event["seq"] != position:
                wrong.append(f"{path.name}: line {position + 1} breaks the chain")
            head, position = hashlib.sha256(line).hexdigest(), position + 1
            events.append(event)
        if events:
            files[path.name] = events
    return files, wrong


def on_one_axis(files):
    """[(time in ns, file, event)] in order: the first supervisor's clock, offsets as that supervisor measured them."""
    supervisors = sorted(
        (name for name in files if name.startswith("supervisor.")), key=lambda name: int(name.split(".")[1])
    )
    anchor = (
        files[supervisors[0]][0] if supervisors else min((v[0] for v in files.values()), key=lambda e: e["wall_ns"])
    )
    zero = anchor["wall_ns"] - anchor["mono_ns"]

    def by_wall(event):
        shift = event["wall_ns"] - event["mono_ns"] - zero
        return shift if abs(shift) >= 20_000_000 else 0

    shift_of = {name: by_wall(files[name][0]) for name in supervisors}
    offsets = {}
    for name in supervisors:
        for event in files[name]:
            if event["kind"] == "clock.offset":
                seen = offsets.setdefault(event["host"], [])
                seen.append((event["mono_ns"] + shift_of[name], event["detail"]["offset_ns"] + shift_of[name]))
    timed = []
    for name, events in files.items():
        guess = shift_of.get(name, by_wall(events[0]))
        measured = [] if name in shift_of else next((offsets[e["host"]] for e in events if e["host"] in offsets), [])
        if measured:
            near = min((offset for _, offset in measured), key=lambda offset: abs(offset - guess))
            measured = [(at, offset) for at, offset in measured if abs(offset - near) < 1_000_000_000]
        for event in events:
            shift = guess
            if measured:
                shift = measured[0][1]
                for at, offset in measured:
                    if at <= event["mono_ns"] + near:
                        shift = offset
            timed.append((event["mono_ns"] + shift, name, event))
    timed.sort(key=lambda item: (item[0], item[1], item[2]["seq"]))
    return timed


def held(timed):
    """Host -> {ns held, first, last, gpus, price} from grants and releases; open ones end at the newest event.

    A host that no grant names (a trainer without a supervisor) counts from its first event to its agent's end.
    """
    newest = timed[-1][0]
    hosts = {}
    for t, _, event in timed:
        host = hosts.get(event["host"])
        if event["kind"] == "host.allocated":
            host = hosts.setdefault(event["host"], {"spans": [], "since": None, "usd": None})
            host["since"] = t if host["since"] is None else host["since"]
            host["gpus"] = max(1, event["detail"]["gpus"])
            host["usd"] = event["detail"].get("usd_per_hour", host["usd"])
        elif event["kind"] == "host.released" and host and host["since"] is not None:
            host["spans"].append((host["since"], t))
            host["since"] = None
    for host in hosts.values():
        if host["since"] is not None:
            host["spans"].append((host["since"], newest))
    return {**hosts, **ungranted(timed, hosts)}


def ungranted(timed, granted):
    newest, hosts = timed[-1][0], {}
    for t, name, event in timed:
        if event["host"] in granted or name.split(".")[0] in ("supervisor", "client"):
            continue
        host = hosts.setdefault(event["host"], {"spans": [(t, t)], "usd": None, "ranks": set()})
        host["ranks"] |= {event["rank"]} if "rank" in event else set()
        host["spans"] = [(host["spans"][0][0], t if event["kind"] == "agent.ended" else newest)]
        host["gpus"] = max(1, len(host["ranks"]))
    return hosts


def attempts(timed):
    """Attempt -> {begun, ended, world, resume, rows}, and the newest durable step if the run ended without success."""
    by_number, restored, outcome, durable = {}, {}, None, 0
    for t, _, event in timed:
        number, detail, kind = event["attempt"], event.get("detail", {}), event["kind"]
        if kind == "attempt.started" and number not in by_number:
            by_number[number] = {"begun": t, "ended": None, "world": detail["world_size"], "rows": []}
            planned = detail.get("resume_step")
            by_number[number]["resume"] = by_number[number]["planned"] = planned
            by_number[number]["source"] = detail.get("resume_attempt")
        elif kind == "attempt.ended" and number in by_number and by_number[number]["ended"] is None:
            by_number[number]["ended"] = max(t, by_number[number]["begun"])
        elif kind == "checkpoint.restored" and event.get("step") is not None:
            restored[number] = event["step"]
        elif kind == "checkpoint.committed" and detail["tier"] in ("disk", "bucket"):
            durable = max(durable, event.get("step") or 0)
        if kind == "run.finished":
            outcome = detail["outcome"]
        elif kind in ("run.submitted", "attempt.started"):
            outcome = None
    if not by_number:
        lone_ranks(timed, by_number)
    numbers = sorted(by_number)
    for number, following in itertools.pairwise(numbers):
        this, after = by_number[number], by_number[following]["begun"]
        if this["ended"] is None or this["ended"] > after:
            this["ended"] = max(this["begun"], after)
    for number, this in by_number.items():
        if this["resume"] is None or this["resume"] < 0:
            this["resume"] = None
        this["resume"] = restored.get(number, this["resume"])
    return {number: by_number[number] for number in numbers}, None if outcome in (None, "succeeded") else durable


def lone_ranks(timed, by_number):
    """Without a supervisor the ranks' own events say what attempts there were, and of how many ranks."""
    worlds = {}
    for t, _, event in timed:
        if event.get("rank") is not None:
            new = {"begun": t, "ended": None, "rows": [], "resume": None, "planned": None, "source": None}
            this = by_number.setdefault(event["attempt"], new)
            worlds.setdefault(event["attempt"], set()).add((event["host"], event["rank"]))
            this["world"] = len(worlds[event["attempt"]])


def lineage(timed):
    """Steps of the final state, as rows, and how many applied ones were lost.

    Forward: each attempt takes over the chain of the newest earlier one that held the state it starts from.
    """
    by_number, durable = attempts(timed)
    for t, _, event in timed:
        this = by_number.get(event["attempt"])
        if this is None or event["kind"] != "step" or event.get("rank") not in (0, None):
            continue
        if this["ended"] is not None and t > this["ended"]:
            continue
        detail = event["detail"]
        floor = this["rows"][-1]["end"] if this["rows"] else this["begun"]
        logged = max(0, detail["step_ns"])
        room = t - max(floor, t - logged) if logged else max(0, t - floor)
        waits = max(0, detail.get("data_wait_ns", 0) + detail.get("stall_ns", 0))
        this["rows"].append(
            {
                "attempt": event["attempt"],
                "step": event["step"],
                "tokens": detail["tokens"],
                "length": room,
                "net": max(1, room - waits),
                "world": this["world"],
                "place": len(this["rows"]) + 1,
                "end": max(t, floor),
            }
        )
    chains = []
    for number, this in by_number.items():
        resume = this["rows"][0]["step"] - 1 if this["rows"] else this["resume"]
        if resume is None:
            continue
        if this["planned"] is not None and this["planned"] >= 0:
            resume = min(resume, this["planned"])  # the event of its first step may be missing
        chains.append(Chain(chains, resume, number, this["source"]))
        for row in this["rows"]:
            if row["step"] <= chains[-1].high and chains[-1].own:
                chains.append(Chain(chains, row["step"] - 1, number, None))
            chains[-1].add(row)
    final = chains[-1].rows if chains else {}
    kept = [final[step] for step in sorted(final) if durable is None or step <= durable]
    return kept, sum(len(this["rows"]) for this in by_number.values()) - len(kept)


class Chain:
    """Steps that one state rests on; it held every state from ``low`` to ``high``, and perhaps later ones whose events
    were lost: the attempt that took the snapshot, ``source``, did."""

    def __init__(self, earlier, resume, attempt, source):
        self.low = self.high = max(0, resume)
        self.own, self.attempt = 0, attempt
        below = [chain for chain in earlier if chain.low <= self.low]
        named = [chain for chain in below if chain.attempt == source]
        source = (named or [chain for chain in below if self.low <= chain.high] or below or [None])[-1]
        self.rows = {step: row for step, row in source.rows.items() if step <= self.low} if source else {}

    def add(self, row):
        self.rows[row["step"]] = row
        self.high = row["step"]
        self.own += 1


def reference(timed, steps):
    """(tokens/s, ranks): measured into the log, or the median of clean steps at the largest world; None if neither."""
    for _, _, event in reversed(timed):
        if event["kind"] == "baseline_rate":
            return event["detail"]["tokens_per_s"], event["detail"]["world_size"]
    worlds = {}
    for row in steps:
        if row["place"] > 2 and row["tokens"] > 0 and row["length"] > 0:
            worlds.setdefault(row["world"], []).append(row["net"] / row["tokens"])
    enough = [world for world in worlds if len(worlds[world]) >= 5]
    return (1e9 / statistics.median(worlds[max(enough)]), max(enough)) if enough else None


def figures(directory):
    """Everything, as one mapping."""
    files, wrong = read(directory)
    if not files:
        sys.exit(f"no event log in {directory}")
    timed = on_one_axis(files)
    hosts = held(timed)
    steps, lost = lineage(timed)
    spans = [span for host in hosts.values() for span in host["spans"]]
    purchased = sum(end - begin for begin, end in spans)
    tokens = sum(row["tokens"] for row in steps)
    rate = reference(timed, steps)
    figures = {
        "chain_problems": wrong,
        "purchased_host_ns": purchased,
        "steps": len(steps),
        "tokens": tokens,
        "lost_steps": lost,
        "goodput_active": None,
        "goodput_purchased": None,
        "usd": None,
    }
    if rate and spans:
        any_held, upto = 0, min(begin for begin, _ in spans)
        for begin, end in sorted(spans):
            any_held, upto = any_held + max(0, end - max(begin, upto)), max(upto, end)
        ranks = sum((end - begin) * host["gpus"] for host in hosts.values() for begin, end in host["spans"])
        active = min(any_held, ranks / rate[1])  # no more was active than was bought
        figures["goodput_active"] = tokens / (rate[0] * active / 1e9) if active else None
        figures["goodput_purchased"] = tokens / (rate[0] / rate[1] * ranks / 1e9) if ranks else None
    if hosts and all(host["usd"] is not None for host in hosts.values()):
        figures["usd"] = sum((end - begin) / 3.6e12 * h["usd"] for h in hosts.values() for begin, end in h["spans"])
    return figures


def differences(figures, report):
    """What the report says otherwise."""
    pairs = {
        "purchased_host_ns": report["host_time"]["purchased_host_ns"],
        "steps": report["steps"],
        "tokens": report["tokens"],
        "lost_steps": report["token_counts"]["recomputed_steps"],
        "goodput_active": report["goodput"]["active"],
        "goodput_purchased": report["goodput"]["purchased"],
        "usd": report["cost"]["usd"],
    }
    wrong = []
    for name, reported in pairs.items():
        own = figures[name]
        if (own is None) != (reported is None) or (
            own is not None and abs(own - reported) > TOLERANCE * max(abs(own), 1e-9)
        ):
            wrong.append(f"{name}: the report says {reported}, the log {own}")
    total = sum(spent["host_ns"] for spent in report["categories"].values())
    if abs(total - figures["purchased_host_ns"]) > TOLERANCE * max(1, figures["purchased_host_ns"]):
        wrong.append(f"the categories sum to {total} host-ns, purchased were {figures['purchased_host_ns']}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--report", type=Path, help="output of `muster report RUN --json` to compare with")
    given = parser.parse_args()
    events = given.run_dir / "events"
    result = figures(events if events.is_dir() else given.run_dir)
    if given.report:
        result["differences"] = differences(result, json.loads(given.report.read_text()))
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["chain_problems"] or result.get("differences") else 0)


if __name__ == "__main__":
    main()
