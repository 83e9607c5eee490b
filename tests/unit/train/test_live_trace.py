"""Traces of steps of a process that trains: whole files in the format, or a report of why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import chrome_trace

from muster.core.event_details.training import TraceWritten
from muster.protocol.values import TraceSteps
from muster.train.measurement.live_trace import MOST_STEPS, LiveTrace


class Agent:
    def __init__(self, *requests: TraceSteps) -> None:
        self.requests = list(requests)
        self.told: list[tuple[int | None, TraceWritten]] = []
        self.granted: list[float] = []

    def next_trace(self) -> TraceSteps | None:
        return self.requests.pop(0) if self.requests else None

    def progress(self, *, for_s: float = 0.0) -> None:
        self.granted.append(for_s)

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        assert kind == "trace.written"
        self.told.append((step, TraceWritten.of(detail)))


def take_steps(trace: LiveTrace, first: int, last: int) -> None:
    for step in range(first, last + 1):
        trace.begin(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        trace.end(step)


def live(agent: Agent, directory: Path) -> LiveTrace:
    return LiveTrace(agent, directory=directory / "traces", rank=3)  # type: ignore[arg-type]


def test_the_next_steps_are_in_a_trace_that_viewers_read_and_no_other_is(tmp_path: Path) -> None:
    agent = Agent(TraceSteps(request="a", steps=2))
    take_steps(live(agent, tmp_path), 5, 9)
    ((step, told),) = agent.told
    assert (step, told.first_step, told.request, told.problem) == (6, 5, "a", None)
    assert told.file == "traces/steps-5-6.rank-3.json"
    path = tmp_path / told.file
    assert told.bytes == path.stat().st_size and told.write_ns is not None and told.write_ns > 0
    assert chrome_trace.read(path).names.count("aten::mm") == 2
    assert list(path.parent.iterdir()) == [path], "no part is left"
    assert agent.granted.count(0.0) == 2, "a grant of time ends with what it was for"


def test_requests_are_answered_one_after_the_other(tmp_path: Path) -> None:
    agent = Agent(TraceSteps(request="a", steps=1), TraceSteps(request="b", steps=2))
    take_steps(live(agent, tmp_path), 1, 4)
    assert [(step, told.request, told.first_step) for step, told in agent.told] == [(1, "a", 1), (3, "b", 2)]


def test_without_a_request_nothing_is_recorded(tmp_path: Path) -> None:
    agent = Agent()
    take_steps(live(agent, tmp_path), 1, 3)
    assert agent.told == [] and agent.granted == [] and not (tmp_path / "traces").exists()


def test_a_disk_that_takes_no_trace_stops_no_step(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file where the folder would be")
    agent = Agent(TraceSteps(request="a", steps=1), TraceSteps(request="b", steps=1))
    take_steps(live(agent, tmp_path), 1, 3)
    assert [told.request for _, told in agent.told] == ["a", "b"]
    assert all("cannot be written" in str(told.problem) and told.file is None for _, told in agent.told)


def test_a_trace_that_the_disk_cut_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X", "na')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    agent = Agent(TraceSteps(request="a", steps=1))
    take_steps(live(agent, tmp_path), 1, 1)
    ((_, told),) = agent.told
    assert "it is cut after" in str(told.problem) and list((tmp_path / "traces").iterdir()) == []


def test_a_profiler_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    agent = Agent(TraceSteps(request="a", steps=1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        take_steps(live(agent, tmp_path), 1, 2)
    ((_, told),) = agent.told
    assert "cannot start" in str(told.problem)
    assert "aten::mm" in {event.key for event in own.key_averages()}


def test_a_world_that_ends_gives_its_trace_up_and_the_next_one_can_begin(tmp_path: Path) -> None:
    agent = Agent(TraceSteps(request="a", steps=5), TraceSteps(request="b", steps=1))
    first = live(agent, tmp_path)
    take_steps(first, 1, 2)
    first.close()
    first.close()
    take_steps(live(agent, tmp_path), 3, 3)
    assert [(told.request, told.problem is None) for _, told in agent.told] == [("a", False), ("b", True)]


def test_a_trace_is_never_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.train.measurement.live_trace.MOST_STEPS", 4)
    agent = Agent(TraceSteps(request="a", steps=MOST_STEPS * 10))
    take_steps(live(agent, tmp_path), 1, 4)
    assert [step for step, _ in agent.told] == [4]
