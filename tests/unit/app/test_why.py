"""``muster why``: the culprit first, in ten lines; of a run without incidents it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.hang_captures import ASLEEP, CAPTURED, IN_ALL_REDUCE, RAS_TEXT, gloo_dump, spy_dump

from muster.app.inspect.why import LONGEST_LOG_BYTES, IncidentView, Why, why
from muster.cli import main
from muster.config import load
from muster.core.errors import UsageError
from muster.core.event_log import EventLog, EventReader
from muster.core.event_log.reader import Line
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

RUNS = [("all_reduce", [4])] * 4
RUN_FILE = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 5}
"""
STAT = "31528 (python) {} 1 1 1 0 -1 4194304 37282 0 3 0 104 20 0 0 20 0 2"


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    for rank in range(12):
        late = rank == 7
        (tmp_path / f"_dump_{rank}").write_text(gloo_dump(RUNS[: 3 if late else 4], done=3))
        (tmp_path / f"host-1-rank-{rank}.txt").write_text(spy_dump(ASLEEP if late else IN_ALL_REDUCE))
        (tmp_path / f"{rank}.stat").write_text(STAT.format("S"))
    return tmp_path


def test_captures_are_known_by_their_content(captures: Path) -> None:
    found = why(None, str(captures))
    assert found.analysis is not None
    (culprit,) = found.analysis.culprits
    assert (culprit.rank, culprit.kind, culprit.place) == (7, "code", "/home/u/train.py:31")
    lines = found.lines()
    assert len(lines) == 10 and lines[0].startswith("rank 7 ") and "11 ranks wait" in lines[1]
    assert lines[2].startswith("rank 7: process sleeps; in no collective; step at /home/u/train.py:31")
    assert lines[-1] == "and 5 lines more: --all" and len(found.lines(whole=True)) == 14
    assert json.loads(json.dumps(found.to_json()))["analysis"]["culprits"][0]["rank"] == 7


def test_a_stopped_rank_and_nccls_report_among_captures(captures: Path) -> None:
    (captures / "3.stat").write_text(STAT.format("T"))
    (captures / "ras.txt").write_text(RAS_TEXT[: RAS_TEXT.index("Warnings")])
    analysis = why(None, str(captures)).analysis
    assert analysis is not None and [(one.rank, one.kind) for one in analysis.culprits] == [(3, "stopped")]
    assert "ras.txt: the report of NCCL's RAS is cut" in analysis.missing


def test_what_is_cut_or_unknown_is_named_and_never_guessed(captures: Path) -> None:
    cut = (captures / "_dump_3").read_text()
    (captures / "_dump_3").write_text(cut[: len(cut) // 2] + '"entries"')
    (captures / "notes.md").write_text("hello")
    (captures / "dump.json").write_text(gloo_dump(RUNS, done=3))
    analysis = why(None, str(captures)).analysis
    assert analysis is not None and [one.rank for one in analysis.culprits] == [7]
    told = "\n".join(analysis.missing)
    assert "_dump_3: flight recorder: not JSON" in told
    assert "dump.json: its rank is not known" in told
    assert "of no known form: notes.md" in told
    assert "no flight recorder of rank 3" in told


@pytest.mark.skipif(CAPTURED is None, reason="the captures are not on this machine")
@pytest.mark.parametrize("differs", ["nothing", "missing", "cut", "empty", "version", "unknown version", "garbage"])
@pytest.mark.parametrize("of", [3, 14])
def test_the_recorded_set_and_sets_that_differ(tmp_path: Path, differs: str, of: int) -> None:
    """One rank's dump of sixteen differs, of a rank that waits (3) or of one that is waited for (14)."""
    assert CAPTURED is not None
    for path in CAPTURED.glob("_dump_*.json"):
        content = path.read_bytes()
        if path.stem == f"_dump_{of}":
            content = {
                "nothing": content, "missing": b"", "cut": content[: len(content) // 2], "empty": b"",
                "version": content.replace(b'"version": "2.9"', b'"version": "2.4"'),
                "unknown version": content.replace(b'"version": "2.9"', b'"version": "9.1"'),
                "garbage": bytes(range(256)) * 40,
            }[differs]  # fmt: skip
            if differs == "missing":
                continue
        (tmp_path / path.name).write_bytes(content)
    found = why(None, str(tmp_path))
    assert found.analysis is not None
    named, whole = {one.rank for one in found.analysis.culprits}, differs in ("nothing", "version")
    assert named == {9, 14} | (set() if whole else {of}), found.lines(whole=True)
    assert whole or found.analysis.culprits[0].rank == of, "of which nothing is known"
    told = [line for line in found.lines(whole=True) if line.startswith("missing: ") and "no stack of" not in line]
    assert bool(told) == (not whole) and all(f"_dump_{of}" in line or f"rank {of}" in line for line in told), told
    assert any(line.startswith(("rank 9", "ranks 9")) for line in found.lines()), (
        "the culprit is in the first ten lines"
    )


def test_a_folder_that_holds_nothing_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"no capture of a rank in .*a\.txt"):
        why(None, str(tmp_path))
    with pytest.raises(UsageError, match="no folder"):
        why(None, str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="no run given"):
        why(None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    place = run_registry.home() / "runs" / "demo-1"
    return run_registry.create(
        "demo-1", place, run_file="name: demo\n", resolved=load.loads(RUN_FILE).spec.model_dump_json()
    )


def write(run: RunDir, *events: tuple[str, int | None, dict[str, object]]) -> None:
    log = EventLog(run.run_id, run.events, "supervisor", 1)
    for kind, step, detail in events:
        log.append(kind, step=step, rank=1, detail=detail)
    log.close()


def test_a_run_without_incidents(run: RunDir) -> None:
    write(run, ("run.message", None, {"text": "all is well"}))
    assert why("demo-1").lines() == ["demo-1: no incident, nothing has gone wrong so far"]


def test_the_next_lever_is_the_last_line(run: RunDir) -> None:
    write(run, ("attempt.started", None, {"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"host-0": [0, 1]}}))
    steps = EventLog(run.run_id, run.events, "host-0", 1)
    for step in range(1, 9):
        detail = {
            "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 100_000, "tokens": 10, "padding_tokens": 0,
            "supervised_tokens": 10, "compute_ns": 60_000, "comm_ns": 10_000, "host_gap_ns": 30_000,
        }  # fmt: skip
        steps.append("step", step=step, rank=0, host="host-0", detail=detail)
    steps.close()
    found = why("demo-1")
    assert found.lines()[0] == "demo-1: no incident, nothing has gone wrong so far"
    assert found.lines()[1].startswith("next: host_gap, worth 30% of a step at most: ")
    assert json.loads(json.dumps(found.to_json()))["next"]["worth_share"] == pytest.approx(0.3)
    long = Why(subject="-", incidents=(IncidentView(incident_id="i1", kind="-", evidence="-"),) * 12, lever=found.lever)
    assert (len(long.lines()), long.lines()[8:]) == (10, ["and 4 lines more: --all", found.lines()[1]])


def test_of_a_long_log_the_incidents_alone_are_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, ("incident.detected", 9, {"incident_id": "i1", "incident": "rank_hang", "evidence": "it stands still"}))
    opened: list[str] = []
    real = EventReader.read_lines

    def read_lines(self: EventReader, path: Path) -> Iterator[Line]:
        opened.append(path.name)
        return real(self, path)

    monkeypatch.setattr(EventReader, "read_lines", read_lines)
    with open(run.events / "host-0.1.jsonl", "wb") as file:
        file.truncate(LONGEST_LOG_BYTES + 1)  # sparse
    found = why("demo-1")
    assert found.lines() == ["incident i1: rank_hang at step 9, attempt 1: it stands still"] and found.lever is None
    assert opened == ["supervisor.1.jsonl"]


def test_incidents_of_a_run_the_newest_first(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    fell = {
        "incident_id": "i1",
        "incident": "rank_exception",
        "evidence": "rank 1 on host-0: KeyError",
        "message": "'a'",
    }
    write(
        run,
        ("incident.detected", 3, fell),
        ("incident.decided", None, {"incident_id": "i1", "action": "restart", "reason": "once more"}),
        ("incident.resolved", 4, {"incident_id": "i1", "lost_ns": 2_500_000_000}),
        ("incident.detected", 9, {"incident_id": "i2", "incident": "rank_hang", "evidence": "rank 0 stands still"}),
    )
    assert why("demo-1").lines() == [
        "incident i2: rank_hang at step 9, attempt 1: rank 0 stands still",
        "incident i1: rank_exception at step 3, attempt 1: rank 1 on host-0: KeyError",
        "  last words: 'a'",
        "  decision: restart: once more; the next new step came 2.50 s later",
    ]
    assert main.run(["why", "demo-1", "--json"]) == 0
    assert [one["incident_id"] for one in json.loads(capsys.readouterr().out)["incidents"]] == ["i2", "i1"]


def test_what_came_with_another_incident_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"incident_id": "i1", "incident": "rank_exception", "evidence": "rank 0 on host-0: connection reset"}
    cause = {
        "incident_id": "i2",
        "incident": "rank_oom",
        "evidence": "rank 1: out of memory",
        "part_of": "i1",
    }
    decided = {"incident_id": "i1", "action": "restart", "reason": "once more"}
    write(run, ("incident.detected", 3, first), ("incident.decided", None, decided), ("incident.detected", 3, cause))
    assert why("demo-1").lines() == [
        "incident i2 (part of i1): rank_oom at step 3, attempt 1: rank 1: out of memory",
        "incident i1: rank_exception at step 3, attempt 1: rank 0 on host-0: connection reset",
        "  decision: restart: once more",
    ]
    assert main.run(["why", "demo-1", "--json"]) == 0
    assert [one["part_of"] for one in json.loads(capsys.readouterr().out)["incidents"]] == ["i1", None]


def test_what_was_captured_of_a_hang(run: RunDir) -> None:
    gathered = {
        "incident_id": "i1", "summary": "rank 1 sleeps", "culprit": "code", "confidence": "high", "victims": 3,
        "operation": "all_reduce", "group": "default_pg", "ranks": ["rank 1: in no collective"], "missing": ["x"],
    }  # fmt: skip
    hung = {"incident_id": "i1", "incident": "rank_hang", "evidence": "rank 1 sleeps", "culprit": "code"}
    write(run, ("evidence.gathered", None, gathered), ("incident.detected", 9, hung))
    assert why("demo-1").lines() == [
        "incident i1: rank_hang at step 9, attempt 1: rank 1 sleeps",
        "  culprit: code, confidence high; 3 ranks wait in all_reduce of default_pg",
        "  rank 1: in no collective",
        "  missing: x",
    ]


def test_what_was_seen_beside_an_exit_comes_after_its_incident(run: RunDir) -> None:
    seen = {
        "incident_id": "i1",
        "summary": "rank 1 is gone; the kernel has killed",
        "culprit": "dead",
        "ranks": ["rank 1"],
    }
    exited = {"incident_id": "i1", "incident": "rank_exit", "evidence": "rank 1 was killed by SIGKILL"}
    write(run, ("incident.detected", 9, exited), ("evidence.gathered", None, seen))
    assert why("demo-1").lines()[1:] == ["  seen at the exit: rank 1 is gone; the kernel has killed", "  rank 1"]


def test_a_run_and_captures_at_once_are_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["why", "demo-1", "--from", "."]) == 2
    assert "a run and --from were given" in capsys.readouterr().err
