"""``muster profile``: what was reported, of whom nothing came and why; a run that has ended is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.app.inspect import profile
from muster.cli import main
from muster.config import load
from muster.core.errors import UsageError
from muster.core.event_log import EventLog, reader
from muster.core.typed_json import encode
from muster.core.types import JobState, JobStatus
from muster.health.hang.stack_groups import StackGroup
from muster.health.hang.stacks import Frame
from muster.protocol.client import AskStacks, FromClient, HostStatus, SupervisorStatus, TraceRun
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

RUN_FILE = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 5}
"""


class Supervisor:
    """Answers as one would, and has ranks report what ``reports`` says once they are asked."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.asked: list[FromClient] = []
        self.refused: str | None = None
        self.reports: list[tuple[str, int | None, int | None, dict[str, Any]]] = []
        self.stacks: tuple[str, ...] = ()
        self.state = JobState.RUNNING

    def __call__(self, run: RunDir, message: FromClient, *, timeout_s: float = 5.0) -> SupervisorStatus:
        self.asked.append(message)
        if isinstance(message, TraceRun):
            log = EventLog(self.run.run_id, self.run.events, "host-0", 2)
            for kind, rank, step, detail in self.reports:
                given = {"request": message.request, **detail} if kind == "trace.written" else detail
                log.append(kind, rank=rank, step=step, detail=given)
            log.close()
        host = HostStatus(connected=True, ready=True, active=True, ranks=(0, 1))
        return SupervisorStatus(
            phase="run", reason="trains", attempt=2, step=9, hosts={"host-0": host}, refused=self.refused,
            stacks=self.stacks, missing=("host-1 has not answered",) if self.stacks else (),
        )  # fmt: skip

    def poll(self, handle: object) -> JobStatus:
        return JobStatus(state=self.state, reason="as it is")


@pytest.fixture
def boss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    place = run_registry.home() / "runs" / "demo-1"
    run = run_registry.create(
        "demo-1", place, run_file="name: demo\n", resolved=load.loads(RUN_FILE).spec.model_dump_json()
    )
    found = Supervisor(run)
    launcher = SimpleNamespace(poll=found.poll, remote=None)
    for module in ("profile", "logs", "check"):
        monkeypatch.setattr(f"muster.app.inspect.{module}.job", lambda run: (launcher, None))
    monkeypatch.setattr("muster.app.inspect.logs.mirror", lambda *_: None)
    monkeypatch.setattr("muster.app.inspect.profile.request", found)
    return found


def written(rank: int, first: int = 11) -> tuple[str, int, int, dict[str, Any]]:
    file = f"traces/steps-{first}-{first + 2}.rank-{rank}.json"
    return "trace.written", rank, first + 2, {"first_step": first, "file": file, "bytes": 2_000_000, "write_ns": 10**8}


def test_every_rank_that_was_asked_reports(boss: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    boss.reports = [written(1), written(0)]
    place = boss.run.path / "traces" / "steps-11-13.rank-1.json"
    place.parent.mkdir()
    place.write_text("{}")
    assert main.run(["profile", "demo-1", "--steps", "3", "--rank", "all"]) == 0
    out = capsys.readouterr()
    assert out.out.splitlines() == [
        f"{place}  rank 1, steps 11 to 13, 2.0 MB, written in 0.10 s",
        "traces/steps-11-13.rank-0.json  rank 0, steps 11 to 13, 2.0 MB, written in 0.10 s",
    ]
    (asked,) = boss.asked
    assert isinstance(asked, TraceRun) and (asked.steps, asked.ranks) == (3, ())


def test_of_a_rank_that_dies_meanwhile_it_is_said_so(boss: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    held = {"exit_code": 1, "reason": "x", "hold_s": 5.0}
    boss.reports = [written(0), ("run.held", None, None, held)]
    assert main.run(["profile", "demo-1", "--rank", "0,1"]) == 1
    told = capsys.readouterr().err
    assert "rank 1: no trace: attempt 2 ended first" in told and "error: 1 of 2 traces were not written" in told


def test_what_a_rank_could_not_do_is_told(boss: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    boss.reports = [("trace.written", 0, None, {"problem": "the trace cannot be written: no space"})]
    assert main.run(["profile", "demo-1", "--json"]) == 1
    (trace,) = json.loads(capsys.readouterr().out)
    assert trace["problem"] == "the trace cannot be written: no space" and trace["file"] is None


def test_the_log_so_far_is_not_read(boss: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(boss.run.run_id, boss.run.events, "host-0", 1)
    for number in range(50):
        log.append("run.message", detail={"text": f"{number}"})
    log.close()
    read: list[int] = []
    real = reader._line

    def line(raw: bytes, end: int, number: int) -> reader.Line:
        read.append(number)
        return real(raw, end, number)

    monkeypatch.setattr(reader, "_line", line)
    boss.reports = [written(0)]
    (trace,) = profile.traces("demo-1", ranks=(0,))
    assert trace.first_step == 11 and read == [1], "what was written after the request"


def test_another_ones_report_is_not_mine(boss: Supervisor) -> None:
    kind, rank, step, detail = written(0, first=2)
    boss.reports = [(kind, rank, step, {**detail, "request": "another"}), written(0)]
    (trace,) = profile.traces("demo-1", ranks=(0,))
    assert trace.first_step == 11


def test_refusals_and_a_run_that_has_ended(boss: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    boss.refused = "there is no rank 9: the run's ranks are 0-1"
    assert main.run(["profile", "demo-1", "--rank", "9"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: demo-1: {boss.refused}"
    boss.state = JobState.SUCCEEDED
    for words in ([], ["--stacks"]):
        assert main.run(["profile", "demo-1", *words]) == 2
        assert "demo-1 has ended: as it is" in capsys.readouterr().err
    assert main.run(["check", "demo-1"]) == 2
    assert "demo-1 has ended: as it is" in capsys.readouterr().err


def test_stacks_for_people_and_for_programs(boss: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    frames = (
        Frame(function="all_reduce", file="/v/lib/python3.11/site-packages/torch/distributed/c10d.py", line=5),
        Frame(function="main", file="/home/u/train.py", line=9),
        Frame(function="run_rank", file="/v/lib/python3.11/site-packages/muster/rank/worker.py", line=75),
        Frame(function="main", file="/v/lib/python3.11/site-packages/muster/rank/fork_server.py", line=93),
    )
    groups = (StackGroup(ranks=(0, 1, 2), hosts=("host-0",), frames=frames), StackGroup(ranks=(3,), hosts=("host-1",)))
    boss.stacks = tuple(encode(group).decode() for group in groups)
    assert main.run(["profile", "demo-1", "--stacks"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ranks 0-2 (3) on host-0",
        "  all_reduce at torch/distributed/c10d.py:5",
        "  main at /home/u/train.py:9",
        "rank 3 on host-1",
        "  no stack was captured",
        "missing: host-1 has not answered",
    ]
    assert main.run(["profile", "demo-1", "--stacks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["ranks"] == [0, 1, 2]
    assert all(isinstance(message, AskStacks) for message in boss.asked)


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0,7", (0, 7)), (" 3-5, 1", (1, 3, 4, 5)), ("all", ()), ("2,2-3", (2, 3))]
)
def test_ranks_in_words(text: str, ranks: tuple[int, ...]) -> None:
    assert profile.ranks_of(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "5-3", "1,,2", "-1", "1e3", "0-99999999999"])
def test_words_that_name_no_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="--rank"):
        profile.ranks_of(text)
