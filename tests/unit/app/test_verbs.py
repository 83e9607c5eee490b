"""Verbs over made-up runs: what is folded, what is written first, who is told what. No process is started."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import supervisor_words

from muster.app.inspect import event_format, logs, status, supervisor_client
from muster.app.inspect.report import report as report_of
from muster.app.run import recover, stop, submit
from muster.backends.local.resolve import resolve
from muster.config import load
from muster.config.spec import RunSpec
from muster.core import event_log, resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError, ConflictError, Problem, RunFileError, UsageError
from muster.core.event_details.training import Step
from muster.core.event_log import EventLog
from muster.core.events import Event
from muster.core.typed_json import at
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, Offer, TaskSpec
from muster.protocol.client import AskStatus, FromClient, RestartRun, SupervisorStatus
from muster.report import log_folder
from muster.report.log_folder import progress
from muster.report.run_view import run_view
from muster.storage import run_registry

RUN_FILE = """\
name: Demo run
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 5}
"""
SPEC_TEXT = load.loads(RUN_FILE).spec.model_dump_json()
STEP = {
    "loss": 2.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "step_ns": 500_000_000,
    "tokens": 100,
    "supervised_tokens": 40,
    "padding_tokens": 28,
    "mfu": 0.25,
}


@dataclasses.dataclass
class Paper:
    """A back end that writes down what it is told."""

    name: str = "local"
    gpus: int = 0
    state: JobState = JobState.ABSENT
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    told: list[JobRequest] = dataclasses.field(default_factory=list)
    cancelled: list[str] = dataclasses.field(default_factory=list)
    refuse: bool = False
    follow = None
    exec = None
    steps = None
    attach = None
    revive = None
    remote = None

    def offers(self, spec: object) -> list[Offer]:
        return [
            Offer(
                backend="local", machine="m", location="here", accelerator="cpu", gpus_per_node=self.gpus,
                gpu_memory_bytes=0, usd_per_node_hour=0.0, peak_flops_per_gpu=None, max_nodes=1, mode="owned",
            )
        ]  # fmt: skip

    def resolve(self, spec: RunSpec) -> RunSpec:
        return resolve(spec, self.offers(spec)[0])

    def render(self, spec: object, *, run_id: str, run_dir: str) -> JobRequest:
        tasks = (TaskSpec(name="supervisor", argv=("x",)),)
        return JobRequest(run_id=run_id, backend="local", run_dir=run_dir, tasks=tasks)

    def submit(self, request: JobRequest) -> JobHandle:
        intent = [event.kind for event in event_log.merged(Path(request.run_dir) / "events")]
        assert "run.submitted" in intent, "the intent is written before anything is started"
        if self.refuse:
            raise BackendError("no")
        self.told.append(request)
        self.state = JobState.RUNNING
        (Path(request.run_dir) / "job.json").write_text(json.dumps({"submission": int(request.labels["submission"])}))
        return JobHandle(run_id=request.run_id, backend="local", job_id="1", run_dir=request.run_dir)

    def find(self, run_id: str) -> JobHandle | None:
        found = [request for request in self.told if request.run_id == run_id]
        return JobHandle(run_id=run_id, backend="local", job_id="1", run_dir=found[-1].run_dir) if found else None

    def poll(self, handle: JobHandle) -> JobStatus:
        return JobStatus(state=self.state, reason="so it is", tasks=self.tasks)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        for name, text in (
            ("rank-0.a1", "zero\n"),
            ("rank-0.a2", "again\n"),
            ("rank-10.a1", "ten\n"),
            ("agent", "a\n"),
        ):
            if (after or {}).get(name, 0) < len(text):
                yield LogChunk(task=name, text=text, next_offset=len(text))

    def remaining(self, handle: JobHandle) -> list[str]:
        return []

    def cancel(self, handle: JobHandle) -> None:
        self.cancelled.append(handle.run_id)
        self.state = JobState.STOPPED


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = Paper()
    monkeypatch.setattr("muster.backends.load", lambda name: found)
    return found


class Passing(SystemClock):
    """Time that passes while somebody sleeps, and what happens then."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.passed_s = act, 0.0

    def monotonic_ns(self) -> int:
        return int(self.passed_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        self.act()


def submitted(*overrides: str) -> submit.Submitted:
    return submit.submit(load.loads(RUN_FILE, overrides), argv=["muster", "submit", "x.yaml", "api_key=hunter2"])


# ---------------------------------------------------------------- submit


def test_submit_makes_the_run_and_logs_the_intent_first(paper: Paper):
    found = submitted()
    assert found.run.path == run_registry.home() / "runs" / found.run.run_id
    assert found.run.run_file.read_text() == RUN_FILE
    assert oct(found.run.token.stat().st_mode & 0o777) == "0o600" and len(found.run.token.read_text()) == 64
    (event,) = event_log.merged(found.run.events)
    assert event.kind == "run.submitted" and event.detail["name"] == "Demo run"
    assert event.detail["spec_digest"] == resolved_file.digest(resolved_file.read(found.run.path))
    assert "hunter2" not in json.dumps(event.to_json())
    assert len(paper.told) == 1 and paper.told[0].labels["submission"] == "1"


def test_a_planned_run_keeps_the_plans_step(paper: Paper):
    found = submitted()
    (event,) = event_log.merged(found.run.events)
    assert "plan" not in event.detail
    submit.log_intent(found.run, found.spec, "{}", (), planned_step_s={"matrices": 0.5})
    assert event_log.merged(found.run.events)[-1].detail["plan"] == {"step_s_by_item": {"matrices": 0.5}}


def test_the_machine_fills_in_device_and_ranks(paper: Paper):
    assert submitted().spec.resources.ranks_per_host == 1
    paper.gpus = 8
    spec = submitted("resources.hosts=2").spec
    assert (spec.resources.device, spec.resources.ranks_per_host) == ("cuda", 4)
    with pytest.raises(RunFileError, match="this machine has 8"):
        submitted("resources.ranks_per_host=16")
    with pytest.raises(RunFileError, match="does not divide"):
        submitted("parallelism.dp_replicate=3")


def test_a_refused_job_leaves_nothing(paper: Paper, tmp_path: Path):
    paper.refuse = True
    for overrides in ((), (f"run_dir={tmp_path}/there",)):
        with pytest.raises(BackendError):
            submitted(*overrides)
    assert list(run_registry.registry()) == []
    assert not (tmp_path / "there").exists()


def test_the_same_folder_is_the_same_run(paper: Paper, tmp_path: Path):
    place = f"run_dir={tmp_path}/there"
    first = submitted(place)
    again = submitted(place)
    assert again.again and again.run == first.run
    with pytest.raises(ConflictError, match="which is running"):
        submitted(place, "training.steps=6")
    paper.state = JobState.STOPPED
    third = submitted(place, "training.steps=6")
    assert third.run == first.run and not third.again
    assert paper.told[-1].labels["submission"] == "2"
    assert run_registry.find(first.run.run_id).path == tmp_path / "there"


def test_a_token_of_a_killed_submit_is_made_whole(paper: Paper, tmp_path: Path):
    run = run_registry.create("a-1", tmp_path / "r", run_file="", resolved="{}")
    token = run.token.read_text()
    run_registry.create("a-1", tmp_path / "r", run_file="", resolved="{}")
    assert run.token.read_text() == token, "agents may hold it already"
    run.token.write_text("")
    run_registry.create("a-1", tmp_path / "r", run_file="", resolved="{}")
    assert len(run.token.read_text()) == 64


# ---------------------------------------------------------------- finding runs


def test_runs_are_found_by_id_beginning_folder_and_last(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    one, two = submitted("name=one").run, submitted("name=two").run
    assert run_registry.find(one.run_id) == one
    assert run_registry.find("tw") == two
    assert run_registry.find(str(one.path)) == one
    assert run_registry.find("last").run_id in (one.run_id, two.run_id)
    for wrong in ("", "zzz", "/", "../x"):
        with pytest.raises(UsageError):
            run_registry.find(wrong)
    with pytest.raises(UsageError, match="names 2 runs"):
        submitted("name=one")
        run_registry.find("one")


def test_a_run_elsewhere_is_found_by_its_folders_name_from_anywhere(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there = submitted(f"run_dir={tmp_path / 'work' / 'first-run'}").run
    submitted("name=first-run-too")
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    assert run_registry.find("first-run") == there
    submitted(f"run_dir={tmp_path / 'other' / 'first-run'}")
    with pytest.raises(UsageError, match="'first-run' names 2 runs"):
        run_registry.find("first-run")


@pytest.mark.parametrize("name", ["a", "Ünï cödé", "-", "9 lives", "x" * 63, "../..", "a--b", "🚀"])
def test_run_ids_are_dns_labels(name: str):
    import re

    found = run_registry.new_run_id(name, now_s=0, salt="beef")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found) and len(found) <= run_registry.MAX_ID
    assert found.endswith("-19700101-000000-beef") and "--" not in found


# ---------------------------------------------------------------- status, logs, events


def write(run: run_registry.RunDir, *events: tuple[str, int | None, dict[str, Any]], attempt: int = 1) -> None:
    log = EventLog(run.run_id, run.events, "agent", attempt)
    for kind, step, detail in events:
        log.append(kind, step=step, rank=0, detail=detail)
    log.close()


def test_a_summary_counts_a_step_taken_again_once(paper: Paper):
    run = submitted().run
    start = {"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"h": [0, 1]}}
    write(run, ("attempt.started", None, start), *[("step", n, {**STEP, "loss": 9.0 - n}) for n in (1, 2, 3)])
    write(run, ("attempt.started", None, start), *[("step", n, {**STEP, "loss": 8.0 - n}) for n in (3, 4)], attempt=2)
    found = progress(log_folder.read(run.events))
    assert (found.last_step, found.final_loss, found.tokens, found.view.attempt) == (4, 4.0, 400, 2)
    assert found.speed.tokens_per_s == report_of(str(run.path)).document.tokens_per_s
    assert found.speed.mfu == 0.25


def test_status_is_for_programs_too(paper: Paper):
    run = submitted().run
    write(run, ("step", 1, STEP))
    found = status.status(run.run_id).to_json()
    assert (found["state"], found["step"], found["loss"], found["reason"]) == ("running", 1, 2.0, "so it is")
    json.dumps(found)
    assert [each.run.run_id for each in status.all_runs()] == [run.run_id]


def test_the_newest_run_comes_first(paper: Paper):
    runs = [submitted(f"name={name}").run.run_id for name in ("b", "a", "c")]
    assert [each.run.run_id for each in status.all_runs()] == runs[::-1]


def test_status_knows_pace_and_money_as_the_ledger_does(paper: Paper):
    run = submitted("training.steps=10").run
    log = EventLog(run.run_id, run.events, "host-0", 1)
    begun = log.append("host.allocated", detail={"gpus": 2, "role": "active", "usd_per_hour": 36.0})
    log.append("attempt.started", detail={"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"host-0": [0, 1]}})
    steps = [log.append("step", step=n, rank=0, detail=STEP) for n in (1, 2, 3)]
    found = status.status(run.run_id)
    assert found.summary.total_steps == 10
    pace = (steps[2].wall_ns - steps[0].wall_ns) / 2e9
    assert found.summary.step_every_s == pytest.approx(pace) and found.eta_s == pytest.approx(7 * pace)
    view = run_view(event_log.merged(run.events))
    assert view.usd(begun.wall_ns + 100 * 10**9) == pytest.approx(1.0), "it is still held"
    released = log.append("host.released", detail={"reason": "over"})
    log.close()
    paid = status.status(run.run_id).summary.usd
    assert paid == pytest.approx((released.wall_ns - begun.wall_ns) / 1e9 / 100)
    assert paid == pytest.approx(report_of(str(run.path)).document.cost.usd, rel=1e-3)
    assert status.status(run.run_id).summary.usd == paid


def test_logs_of_one_rank_are_not_those_of_rank_ten(paper: Paper):
    run = submitted().run
    assert [chunk.task for chunk in logs.logs(run.run_id)] == ["rank-0.a1", "rank-0.a2", "rank-10.a1", "agent"]
    assert [chunk.text for chunk in logs.logs(run.run_id, rank=0)] == ["zero\n", "again\n"]
    assert [chunk.task for chunk in logs.logs(run.run_id, task="agent")] == ["agent"]
    with pytest.raises(UsageError, match="no log of rank 7"):
        list(logs.logs(run.run_id, rank=7))


def test_following_ends_with_the_run(paper: Paper):
    run = submitted().run

    class Impatient:
        slept = 0

        def sleep(self, seconds: float) -> None:
            self.slept += 1
            write(run, ("run.message", None, {"text": f"note {self.slept}"}), attempt=self.slept)
            paper.state = JobState.SUCCEEDED if self.slept == 2 else JobState.RUNNING

        def monotonic_ns(self) -> int:
            return 0

        wall_ns = monotonic_ns

    seen = [
        event.detail["text"]
        for event in logs.events(run.run_id, follow=True, kinds=("run.message",), clock=Impatient())
    ]
    assert seen == ["note 1", "note 2"]


def test_every_step_line_holds_the_fields_terms(paper: Paper):
    text = event_format.step_line(3, Step(**STEP))
    for words in ("step 3", "loss  2.0000", " 0.500 s", " 200 tokens/s", "MFU 25.0%"):
        assert words in text


def test_step_lines_are_columns_of_at_most_120(paper: Paper):
    run = submitted("training.steps=400", "output.log_every_steps=7").run
    log, narrate = EventLog(run.run_id, run.events, "host-0", 1), event_format.Narrator(run.path)
    figures = {**STEP, "grad_norm": 12.5, "learning_rate": 1e-4, "memory_bytes": 2**30, "tokens": 123_456}
    lines = [narrate(log.append("step", step=n, rank=0, detail={**figures, "loss": n / 30})) for n in range(1, 401)]
    log.close()
    shown = [text for text in lines if text]
    assert [text.split()[1 if "/" in text.split()[1] else 2] for text in shown[:2]] == ["7/400", "14/400"]
    assert shown[-1].startswith("step 400/400  loss 13.3333") and len(shown) == 400 // 7 + 1, "and the last"
    assert max(map(len, shown)) <= 120 and all("ETA" in text and "GiB" in text for text in shown)
    assert len({text.index("tokens/s") for text in shown}) == 1, "aligned"


def test_a_corrected_run_file_has_another_number_of_steps(paper: Paper):
    run = submitted("training.steps=9").run
    log, narrate = EventLog(run.run_id, run.events, "host-0", 1), event_format.Narrator(run.path)
    assert narrate(log.append("step", step=1, rank=0, detail=STEP)).startswith("step 1/9  ")
    resolved_file.write(run.path, re.sub(r'"steps": *9', '"steps": 77', resolved_file.read(run.path)))
    narrate(log.append("attempt.started", detail={"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"h": [0, 1]}}))
    assert narrate(log.append("step", step=2, rank=0, detail=STEP)).startswith("step  2/77  ")
    log.close()


def test_a_failed_start_says_its_sentence_once():
    reason = "rank 0 on host-0: UsageError: model: transformers knows no model_type 'lama'"
    place = {"run_id": "r", "attempt": 1, "seq": 0, "mono_ns": 0, "wall_ns": 0, "host": "supervisor"}
    told = {"incident_id": "i1", "incident": "rank_exception", "evidence": reason}
    events = [
        Event(**place, kind="incident.detected", detail=told),
        Event(**place, kind="incident.decided", detail={"incident_id": "i1", "action": "stop", "reason": reason}),
        Event(**place, kind="run.finished", detail={"outcome": "failed", "reason": reason, "exit_code": 2}),
        Event(**place, kind="incident.detected", detail={**told, "incident_id": "i2"}),
    ]
    lines = event_format.Narrator()
    said = [lines(event) for event in events]
    assert said[1:3] == ["decision on i1: stop: as above", "failed: as above"]
    assert reason in said[0] and reason in said[3], "another incident is told in full"


# ---------------------------------------------------------------- stop, down, recover


def test_stopping_an_ended_run_is_success_and_one_without_supervisor_says_so(paper: Paper):
    run = submitted().run
    paper.state = JobState.STOPPED
    assert stop.stop(run.run_id).was_running is False
    with pytest.raises(supervisor_client.SupervisorUnreachable, match="no supervisor holds"):
        supervisor_client.request(run, AskStatus())


def test_a_run_that_ends_before_its_supervisor_hears_of_the_stop_is_stopped(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
):
    run = submitted().run

    def unreachable(*_: object, **__: object) -> SupervisorStatus:
        paper.state = JobState.SUCCEEDED
        raise supervisor_client.SupervisorUnreachable("gone")

    monkeypatch.setattr("muster.app.run.stop.request", unreachable)
    found = stop.stop(run.run_id)
    assert found.was_running and not found.again and found.status.state is JobState.SUCCEEDED


@pytest.mark.parametrize("when", ["before the request", "after it"])
def test_whoever_submits_the_run_again_while_it_stops_is_left_alone(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, when: str
):
    run = submitted().run

    def submit_again() -> None:
        run.job.write_text(json.dumps({"submission": 2}))

    def answer(*_: object, **__: object) -> SupervisorStatus:
        if when == "before the request":
            submit_again()
            raise supervisor_client.SupervisorUnreachable("the old one is gone, the new one is not there yet")
        return supervisor_words.status("run")

    monkeypatch.setattr("muster.app.run.stop.request", answer)
    found = stop.stop(run.run_id, clock=Passing(submit_again if when == "after it" else lambda: None))
    assert found.again and found.status.state is JobState.RUNNING and paper.cancelled == []


@pytest.mark.parametrize("stays", [True, False])
def test_a_host_that_never_hears_of_the_end_is_ended(paper: Paper, monkeypatch: pytest.MonkeyPatch, stays: bool):
    run = submitted().run
    left = ["process 7: an agent that had not connected yet"]
    monkeypatch.setattr(paper, "remaining", lambda handle: [] if paper.cancelled else left, raising=False)
    monkeypatch.setattr("muster.app.run.stop.request", lambda *_, **__: supervisor_words.status("run"))
    clock = Passing(lambda: None)

    def end() -> None:
        paper.state = JobState.STOPPED
        if not stays and clock.passed_s > 5:
            left.clear()

    clock.act = end
    assert stop.stop(run.run_id, clock=clock).status.state is JobState.STOPPED
    assert paper.cancelled == ([run.run_id] if stays else [])


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "absent"])
def test_a_lease_that_its_supervisor_writes_again_is_waited_for(paper: Paper, monkeypatch, damaged: bool):
    run, waited = submitted().run, []
    lease = supervisor_words.lease(("127.0.0.1", 1))
    run.events.mkdir(exist_ok=True)
    (run.events / "supervisor.0.jsonl").write_text('{"kind":"supervisor.started"}\n')
    if damaged:
        run.lease.write_bytes(lease[:-9])

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            run.lease.write_bytes(lease)

    monkeypatch.setattr(supervisor_client, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(waited)))
    with pytest.raises(supervisor_client.SupervisorUnreachable, match="does not answer"):  # it is asked
        supervisor_client.request(run, AskStatus(), timeout_s=0.5)
    assert len(waited) == 3
    run.lease.unlink()
    with pytest.raises(supervisor_client.SupervisorUnreachable, match="no supervisor holds"):
        supervisor_client.request(run, AskStatus(), timeout_s=5.0)
    assert 4.0 <= sum(waited[3:]) < 4.3, "not for ever"
    (run.events / "supervisor.0.jsonl").write_text('{"kind":"run.finished"}\n')
    before = len(waited)
    with pytest.raises(supervisor_client.SupervisorUnreachable, match="no supervisor holds"):
        supervisor_client.request(run, AskStatus())
    assert len(waited) == before, "nobody mends the lease of a run that has ended"


def test_a_supervisor_that_is_gone_does_not_answer(paper: Paper):
    run = submitted().run
    run.lease.write_bytes(supervisor_words.lease(("127.0.0.1", 1)))
    with pytest.raises(supervisor_client.SupervisorUnreachable, match="does not answer"):
        supervisor_client.request(run, AskStatus(), timeout_s=0.5)


def test_down_ends_and_writes_the_end_once(paper: Paper):
    run = submitted().run
    assert stop.down(run.run_id).left == ()
    stop.down(run.run_id)
    kinds = [event.kind for event in event_log.merged(run.events)]
    assert kinds.count("run.finished") == 1
    assert paper.cancelled == [run.run_id] * 2


def test_recover_submits_again_but_not_beside_a_living_supervisor(paper: Paper):
    run = submitted().run
    paper.tasks = {"supervisor": "running (pid 1)"}
    with pytest.raises(ConflictError, match="a supervisor holds"):
        recover.recover(run.run_id)
    paper.tasks, paper.state = {}, JobState.STOPPED
    recover.recover(run.run_id)
    assert paper.told[-1].labels["submission"] == "2"
    paper.state = JobState.SUCCEEDED
    with pytest.raises(UsageError, match="is done"):
        recover.recover(run.run_id)
    found = recover.recover(run.run_id, ["training.steps=9"])
    assert found.spec.training.steps == 9
    assert json.loads(run.resolved.read_text())["training"]["steps"] == 9


def test_recover_in_the_foreground_is_for_runs_of_this_machine(paper: Paper):
    run = submitted().run
    resolved_file.write(run.path, resolved_file.read(run.path).replace('"backend": "local"', '"backend": "slurm"'))
    with pytest.raises(UsageError, match="backend: slurm does not have"):
        recover.recover_here(run.run_id)
    assert [event.kind for event in event_log.merged(run.events)] == ["run.submitted"], "nothing was written"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("resources.ranks_per_host=2", "resources.ranks_per_host cannot change while hosts are held"),
        ("resources.threads_per_rank=3", "resources.threads_per_rank cannot change"),
        ("backend=slurm", "backend cannot change"),
        ("parallelism.pp_schedule=zbv", "parallelism.pp_schedule cannot change"),
        ("run_dir=elsewhere", "run_dir cannot change"),
        ("resources.hosts=2", "2 hosts are needed, and 1 are held"),
        ("training.steps=many", "whole number"),
    ],
)
def test_a_restart_is_refused_what_held_hosts_cannot_do(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, override: str, words: str
):
    run = submitted().run
    before = run.resolved.read_text()
    told: list[FromClient] = []

    def answer(_: object, message: FromClient, **__: object) -> SupervisorStatus:
        told.append(message)
        return supervisor_words.status("hold", hosts=[("host-0", True), ("host-1", False)])

    monkeypatch.setattr("muster.app.run.stop.request", answer)
    with pytest.raises((ConflictError, UsageError)) as caught:
        stop.restart(run.run_id, [override])
    assert words in str(caught.value) and told == [AskStatus()] and run.resolved.read_text() == before
    stop.restart(run.run_id, ["training.steps=7", "resources.hosts=2", "resources.min_hosts=1"])
    assert told[-1] == RestartRun()


def test_a_restart_with_a_policy_that_cannot_be_loaded_is_refused(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run = submitted().run
    monkeypatch.setattr("muster.app.run.stop.request", lambda *_, **__: supervisor_words.status("hold"))
    (tmp_path / "mine.py").write_text("decide = 1\n")
    with pytest.raises(UsageError, match="has no decide"):
        stop.restart(run.run_id, [f"recovery.policy={tmp_path}/mine.py"])


def test_the_supervisors_sentence_stands_beside_the_back_ends(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    run = submitted().run
    monkeypatch.setattr(
        "muster.app.inspect.status.request",
        lambda *_, **__: supervisor_words.status("hold", reason="failed; hosts are held"),
    )
    found = status.status(run.run_id).to_json()
    assert (found["reason"], found["now"], found["phase"]) == ("so it is", "failed; hosts are held", "hold")


def test_a_damaged_record_of_a_job_is_shown_and_can_be_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from muster.backends.local.launcher import LocalLauncher

    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    run = run_registry.create("damaged-1", tmp_path / "home" / "runs" / "damaged-1", run_file="", resolved=SPEC_TEXT)
    run.job.write_text('{"tasks": {')
    found = LocalLauncher().poll(JobHandle(run_id=run.run_id, backend="local", job_id="", run_dir=str(run.path)))
    assert found.state is JobState.FAILED and "cannot read" in found.reason
    assert stop.down(run.run_id).left == ()


def test_a_line_that_is_no_event_is_named_and_the_others_are_read(paper: Paper):
    run = submitted().run
    (run.events / "agent.1.jsonl").write_text("[]\n")
    found = status.status(run.run_id)
    assert found.summary.name == "Demo run" and [str(damage) for damage in found.damaged] == [
        "agent.1.jsonl:1: not an event: not a JSON object but list"
    ]
    assert at(found.to_json(), "damaged", 0, "file") == "agent.1.jsonl"
    assert status.all_runs() == [found]


def test_recover_says_what_its_supervisor_would_stumble_over(paper: Paper):
    run = submitted().run
    paper.state = JobState.STOPPED
    (run.events / "host-0.1.jsonl").write_text("garbage\n")
    token = run.token.read_text()
    run.token.unlink()
    with pytest.raises(AccessError, match="token"):
        recover.recover(run.run_id)
    assert len(paper.told) == 1, "nothing was started"
    run.token.write_text(token)
    run.token.chmod(0o600)
    recover.recover(run.run_id)
    assert len(paper.told) == 2


def test_recover_with_changes_refuses_what_submit_would(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    run = submitted().run
    paper.state = JobState.STOPPED
    monkeypatch.setattr(
        "muster.app.planning.model_shape.not_submitted", lambda _spec: Problem("resources.device", "no machines")
    )
    with pytest.raises(RunFileError, match="no machines"):
        recover.recover(run.run_id, ["training.steps=9"])
    assert len(paper.told) == 1, "nothing was started"
    recover.recover(run.run_id)
    assert len(paper.told) == 2


def test_an_intent_that_the_disk_does_not_take_is_an_error(paper: Paper, monkeypatch: pytest.MonkeyPatch):
    run = submitted().run

    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.core.event_log.writer.os.open", full)
    with pytest.raises(BackendError, match=r"client\.0\.jsonl cannot be written: No space left on device"):
        submit.log_event(run, "run.message", {"text": "x"})
