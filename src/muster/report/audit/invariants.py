"""Whether a run's recorded history keeps the invariants I1-I8. Shares no code with what wrote the history.

Chains, markers and checksums are verified here a second time, from their description (docs/reference/events.md), with
the standard library alone, so that a mistake in the writer is not repeated in its check. Which lines of a damaged file
count is the one thing taken from elsewhere: the rule of all readers (``core.event_log``).

    I1  applied steps form one chain: no step is missing, none has two results; replicas hold one state
    I2  every step took the same samples each time it was taken, and the batch that the run file names
    I3  attempts and terms rise, one leader a term, one decision an incident, nothing after the end
    I4  losses and states equal a reference run's, step by step (only with a reference)
    I5  every committed checkpoint is whole; none was ignored in favour of an older state
    I6  nothing is applied or committed by an attempt after its successor began
    I7  times add up: the steps of an attempt fill no more time than they span; a host is released once
    I8  every incident that was acted upon ended, within the bound
    log every file's chain holds, and the heads that were cited are in the files

A file that its own writer found broken and said so (``log.damaged``) breaks nothing: steps of its attempt may be
missing, and where it is a supervisor's, I3, I8 and the hosts' release are not judged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from muster.core.processes import read_plain
from muster.report.audit.history import Finding, History, LayoutHistory, Line, layout_histories, load, up_to

#: Optimizers whose state comes back from a snapshot to the bit: with others a repeated step may differ slightly.
EXACT_OPTIMIZERS = frozenset({"adamw"})
INVARIANTS = ("log", "I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8")
#: A float sum taken in another order, relative; docs/explanation/recovery.md has the measured figure.
REORDERED = 1e-4
#: Ranks are ended after the run's end is written (``stop --force``): steps until then are accepted.
LEAVE_NS = 2_000_000_000


def check(run_dir: str | Path, *, reference: str | Path | None = None, bound_s: float = 60.0) -> dict[str, Finding]:
    """Check the history in ``run_dir``: invariant -> finding. Never raises for what a history contains."""
    findings = {name: Finding() for name in INVARIANTS}
    history = load(Path(run_dir), findings["log"])
    unreported: set[int] = set()
    with _judging(findings["I1"]):
        unreported = _step_chain(history, findings["I1"], findings["I2"])
    if not history.supervisor_damaged:  # its decisions cannot be read from what is left
        with _judging(findings["I3"]):
            _leadership(history, findings["I3"])
    if reference is not None:
        with _judging(findings["I4"]):
            _same_as_reference(history, load(Path(reference), Finding()), findings["I4"], unreported)
    with _judging(findings["I5"]):
        _checkpoints(history, findings["I5"])
    with _judging(findings["I6"]):
        _fences(history, findings["I6"])
    with _judging(findings["I7"]):
        _times(history, findings["I7"])
    if not history.supervisor_damaged:
        with _judging(findings["I8"]):
            _incident_ends(history, findings["I8"], bound_s)
    return findings


@contextlib.contextmanager
def _judging(finding: Finding) -> Iterator[None]:
    """An event that lacks what its kind says breaks what is judged by it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        finding.expect(False, f"an event is not as its kind says: {type(error).__name__}: {str(error)[:200]}")


# ---------------------------------------------------------------- I1, I2


def _steps(history: History) -> dict[int, list[Line]]:
    """Attempt -> its step events, in order."""
    result: dict[int, list[Line]] = defaultdict(list)
    for line in history.of("step"):
        result[int(line["attempt"])].append(line)
    return {attempt: sorted(lines, key=lambda line: int(line["step"])) for attempt, lines in sorted(result.items())}


def _step_chain(history: History, one_chain: Finding, samples: Finding) -> set[int]:
    """Returns the steps whose state survived although their events were lost."""
    runs = _steps(history)
    started = {int(line["attempt"]): line["detail"] for line in history.of("attempt.started")}
    reached = 0
    unreported: set[int] = set()
    results: dict[int, list[Line]] = defaultdict(list)
    for attempt, lines in runs.items():
        numbers = [int(line["step"]) for line in lines]
        if history.incomplete & {attempt, attempt - 1}:
            reached = max(reached, numbers[-1])
            for line in lines:
                results[int(line["step"])].append(line)
            continue
        one_chain.expect(
            numbers == list(range(numbers[0], numbers[0] + len(numbers))),
            f"attempt {attempt}: steps {_gaps(numbers)} are missing or doubled",
        )
        resumed = _resume_step(history, attempt, started)
        if resumed is not None:
            one_chain.expect(
                numbers[0] == resumed + 1, f"attempt {attempt} resumed from step {resumed} and first took {numbers[0]}"
            )
        # A rank killed between its snapshot and its event: the state of that step survives, its numbers do not.
        if resumed == reached + 1 and numbers[0] == resumed + 1 and started.get(attempt, {}).get("tier") == "memory":
            unreported.add(resumed)
        one_chain.expect(
            numbers[0] <= reached + 1 or resumed in unreported,
            f"attempt {attempt} begins at step {numbers[0]}, {reached} was the last before",
        )
        reached = max(reached, numbers[-1])
        one_chain.expect(*_one_state(attempt, lines))
        for line in lines:
            results[int(line["step"])].append(line)
    histories = layout_histories(history)
    batch = history.spec.get("training", {}).get("global_batch_size")
    for step, lines in results.items():
        for number, other in enumerate(lines[1:], 1):
            own = histories[int(other["attempt"])]
            earlier = [(line, histories[int(line["attempt"])]) for line in lines[:number]]
            comparable = [line for line, layout_history in earlier if _same_bits(history, step, layout_history, own)]
            one_chain.expect(*_same_result(step, (comparable or lines)[0], other, exact=bool(comparable)))
            skipped = lines[0]["detail"].get("skipped") or other["detail"].get("skipped")
            for key in ("rows",) if skipped else ("rows", "tokens", "supervised_tokens"):
                first, again = lines[0]["detail"].get(key), other["detail"].get(key)
                samples.expect(first == again, f"step {step} was taken with {key} {first} and again with {again}")
        rows = lines[-1]["detail"].get("rows")
        if rows is not None and batch is not None:
            expected, source = _batch_of(step, batch, started)
            samples.expect(rows == expected, f"step {step} took {rows} sequences, {source} sets {expected}")
    return unreported


def _one_state(attempt: int, lines: list[Line]) -> tuple[bool, str]:
    """Whether the replicas held one state after each step that was hashed: a difference persists."""
    apart = [line for line in lines if len(set(line["detail"].get("replica_hashes") or ())) > 1]
    if not apart:
        return True, ""
    hashes = ", ".join(f"{replica}: {digest}" for replica, digest in enumerate(apart[0]["detail"]["replica_hashes"]))
    many = f" (and after {len(apart) - 1} more)" if len(apart) > 1 else ""
    return False, f"attempt {attempt}: after step {apart[0]['step']}{many} the replicas hold two states ({hashes})"


def _gaps(numbers: list[int]) -> str:
    wrong = [str(after) for before, after in itertools.pairwise(numbers) if after != before + 1]
    return "around " + ", ".join(wrong[:5])


def _resume_step(history: History, attempt: int, started: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The step whose state the attempt began with; None where the history does not contain it."""
    restored = [int(line["step"]) for line in history.of("checkpoint.restored") if line["attempt"] == attempt]
    if restored:
        return restored[-1]
    logged = started.get(attempt, {}).get("resume_step")
    return int(logged) if logged is not None and logged >= 0 else None


def _batch_of(step: int, batch: int, started: Mapping[int, Mapping[str, Any]]) -> tuple[int, str]:
    """(sequences that ``step`` takes, what sets them): the run file, or the policy's newest change before the step."""
    newest = max(started, default=0)
    for change in reversed(started[newest].get("batch_schedule", []) if newest else []):
        if change["first_step"] <= step:
            return int(change["global_batch_size"]), "the policy"
    return batch, "the run file"


def _same_bits(history: History, step: int, first: LayoutHistory, other: LayoutHistory) -> bool:
    """Whether ``step`` must give the same bits at the end of two layout histories: exact sums, or equal ones.

    Some optimizers' state does not come back from a restore to the bit.
    """
    training = history.spec.get("training", {})
    if training.get("exact"):
        return True
    repeats = training.get("deterministic") and training.get("optimizer", {}).get("name", "adamw") in EXACT_OPTIMIZERS
    return bool(repeats) and up_to(first, step) == up_to(other, step)


def _same_result(step: int, first: Line, again: Line, *, exact: bool) -> tuple[bool, str]:
    hashes = (first["detail"].get("state_hash"), again["detail"].get("state_hash"))
    if exact and all(hashes) and hashes[0] != hashes[1]:
        return False, f"step {step} has two states: {hashes[0]} and {hashes[1]}"
    losses = (first["detail"].get("loss"), again["detail"].get("loss"))
    if any(loss is None for loss in losses):
        return True, ""
    same = losses[0] == losses[1] if exact else abs(losses[0] - losses[1]) <= REORDERED * max(1.0, abs(losses[0]))
    return same, f"step {step} has two losses: {losses[0]!r} and {losses[1]!r}"


# ---------------------------------------------------------------- I3


def _leadership(history: History, finding: Finding) -> None:
    attempts = [int(line["attempt"]) for line in history.of("attempt.started")]
    terms = [(int(line["detail"]["term"]), line) for line in history.of("supervisor.started")]
    for label, numbers in (("attempt numbers", attempts), ("terms of the lease", [term for term, _ in terms])):
        rising = all(before < after for before, after in itertools.pairwise(numbers))
        finding.expect(rising, f"{label} do not rise: {numbers}")
    acts = history.of("incident.decided", "attempt.started", "attempt.ended", "run.finished")
    for (term, line), (_, successor) in itertools.pairwise(terms):
        late = [act for act in acts if act["file"] == line["file"] and act["wall_ns"] > successor["wall_ns"]]
        problem = f"the supervisor of term {term} acted after its successor had the lease: {_names(late)}"
        finding.expect(not late, problem)
    for kind in ("incident.detected", "incident.decided"):
        _each_once(finding, [str(line["detail"]["incident_id"]) for line in history.of(kind)], f"{kind} of")
    causes = [str(line["detail"]["cause"]) for line in history.of("attempt.started") if line["detail"].get("cause")]
    _each_once(finding, causes, "an attempt because of")
    known = {str(line["detail"]["incident_id"]) for line in history.of("incident.detected")}
    for line in history.of("incident.decided"):
        finding.expect(
            str(line["detail"]["incident_id"]) in known,
            f"a decision on {line['detail']['incident_id']}, which is not an incident",
        )
    ended: Line | None = None
    for line in history.of("run.finished", "supervisor.started", "attempt.started", "step"):
        if line["kind"] == "run.finished":
            ended = line
        elif line["kind"] == "supervisor.started":
            ended = None
        elif line["kind"] == "attempt.started" or ended is None or line["wall_ns"] > ended["wall_ns"] + LEAVE_NS:
            finding.expect(ended is None, f"{line['kind']} of attempt {line['attempt']} after the run's end")


def _each_once(finding: Finding, names: list[str], kind: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    finding.checked += len(names)
    if twice:
        finding.problems.append(f"{kind} {', '.join(twice)}: more than once")


def _names(lines: list[Line]) -> str:
    return ", ".join(f"{line['kind']} (attempt {line['attempt']})" for line in lines[:3])


# ---------------------------------------------------------------- I4


def _same_as_reference(history: History, reference: History, finding: Finding, unreported: set[int]) -> None:
    """The last result of each step against the reference's; bit for bit where layouts and settings guarantee it.

    A run that did not succeed need not have the reference's last steps.
    """
    own, theirs = ({int(line["step"]): line for line in run.of("step")} for run in (history, reference))
    ended = history.of("run.finished")
    if not ended or ended[-1]["detail"]["outcome"] != "succeeded":
        theirs = {step: line for step, line in theirs.items() if step <= max(own, default=0)}
    own_layouts, their_layouts = layout_histories(history), layout_histories(reference)
    missing = sorted(set(own) ^ set(theirs) - unreported)
    finding.expect(not missing, f"{len(own)} steps here, {len(theirs)} in the reference: {missing[:5]} in one alone")
    for step in sorted(set(own) & set(theirs)):
        layouts = own_layouts[int(own[step]["attempt"])], their_layouts[int(theirs[step]["attempt"])]
        finding.expect(*_same_result(step, theirs[step], own[step], exact=_same_bits(history, step, *layouts)))


# ---------------------------------------------------------------- I5


def _checkpoints(history: History, finding: Finding) -> None:
    directory = Path(str(history.spec.get("checkpoint", {}).get("dir") or history.run_dir / "checkpoints"))
    skipped = {str(line["detail"]["uri"]).rstrip("/").rsplit("/", 1)[-1] for line in history.of("checkpoint.rejected")}
    for marker in sorted((directory / "commits").glob("step-*.json")) if directory.is_dir() else []:
        problem = _damage(marker, directory)
        passed_over = any(uri.startswith(marker.stem) for uri in skipped)
        finding.expect(problem is None or passed_over, f"{marker.name}: {problem}")
    durable: list[int] = []
    for line in history.of("checkpoint.committed", "attempt.started", "checkpoint.restored"):
        if line["kind"] == "checkpoint.committed":
            durable.append(int(line["step"]))
        elif line["kind"] == "checkpoint.restored" and durable and not skipped:
            finding.expect(
                int(line["step"]) >= max(durable),
                f"attempt {line['attempt']} restored step {line['step']} although step {max(durable)} was committed",
            )


def _damage(marker: Path, directory: Path) -> str | None:
    """What is wrong with the data that a marker promises; None when it is whole."""
    try:
        promised = json.loads(read_plain(marker))["body"]
        folder = directory / str(promised["prefix"])
        for item in (*promised["files"], promised["index"]):
            path = folder / str(item["name"])
            if not path.is_file():
                return f"{path.name} is missing"
            data = path.read_bytes()
            if len(data) != item["bytes"]:
                return f"{path.name} has {len(data)} bytes, promised {item['bytes']}"
            if _checksum(data, of_blocks=item in promised["files"]) != item["checksum"]["value"]:
                return f"{path.name} is corrupt: its checksum is not the promised one"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"not a marker ({type(error).__name__}: {error})"
    return None


def _checksum(data: bytes, *, of_blocks: bool) -> str:
    """Of an index: of its bytes. Of a shard: of the sums of its blocks of 1 MiB, which are the file's end."""
    if not of_blocks:
        return xxhash.xxh3_64_hexdigest(data)
    end = len(data) - 8 * -(-len(data) // ((1 << 20) + 8))
    blocks = (data[at : min(at + (1 << 20), end)] for at in range(0, end, 1 << 20))
    sums = b"".join(xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks)
    return xxhash.xxh3_64_hexdigest(sums) if sums == data[end:] else "not the sums of its blocks"


# ---------------------------------------------------------------- I6


def _fences(history: History, finding: Finding) -> None:
    newest = 0
    for line in history.of("attempt.started", "step", "checkpoint.committed"):
        if line["kind"] == "attempt.started":
            newest = max(newest, int(line["attempt"]))
            continue
        action = "applied step" if line["kind"] == "step" else "committed step"
        finding.expect(
            int(line["attempt"]) >= newest,
            f"attempt {line['attempt']} {action} {line.get('step')} on {line['host']} after attempt {newest} had begun",
        )


# ---------------------------------------------------------------- I7


def _times(history: History, finding: Finding) -> None:
    for attempt, lines in _steps(history).items():
        if len({line["host"] for line in lines}) == 1 and len(lines) > 1:
            spanned = lines[-1]["mono_ns"] - lines[0]["mono_ns"]
            filled = sum(int(line["detail"].get("step_ns", 0)) for line in lines[1:])
            finding.expect(
                filled <= spanned * 1.02 + 20_000_000,
                f"attempt {attempt}: its steps claim {filled / 1e9:.3f} s of {spanned / 1e9:.3f} s",
            )
    held: dict[str, int] = defaultdict(int)
    for line in history.of("host.allocated", "host.released"):
        name = str(line["host"])
        held[name] += 1 if line["kind"] == "host.allocated" else -1
        finding.expect(held[name] in (0, 1), f"{name} was allocated or released twice in a row")
    if history.of("run.finished") and not history.supervisor_damaged:
        for name, count in held.items():
            finding.expect(count == 0, f"{name} was never released, and the run is over")


# ---------------------------------------------------------------- I8


def _incident_ends(history: History, finding: Finding, bound_s: float) -> None:
    acted = {
        str(line["detail"]["incident_id"]): line
        for line in history.of("incident.decided")
        if line["detail"]["action"] not in ("ignore", "stop")
    }
    waited = {name for name, line in acted.items() if line["detail"]["action"] == "wait"}
    recovered = history.of("incident.resolved")
    for line in recovered:
        name, lost_s = str(line["detail"]["incident_id"]), line["detail"]["lost_ns"] / 1e9
        finding.expect(name in acted, f"recovered from {name}, on which there was no decision")
        if name not in waited:
            finding.expect(lost_s <= bound_s, f"{name} cost {lost_s:.2f} s, the bound is {bound_s:g} s")
    # What may follow a decision: its recovery, another incident, the run's end, or a supervisor that takes over.
    for name, line in acted.items():
        settled = any(
            later["wall_ns"] > line["wall_ns"]
            and (later["kind"] != "incident.resolved" or str(later["detail"]["incident_id"]) == name)
            for later in history.of("incident.resolved", "run.finished", "incident.detected", "supervisor.started")
        )
        finding.expect(settled, f"nothing followed the decision on {name} ({line['detail']['action']})")


# ---------------------------------------------------------------- words


def broken(findings: Mapping[str, Finding]) -> list[str]:
    """``I3: ...`` for each problem."""
    return [f"{name}: {problem}" for name, finding in findings.items() for problem in finding.problems]
