"""What a rank on TPUs tells of its chips. No TPU: chips and libtpu are played, with what the real libtpu 0.0.42 has."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from muster.core.event_details.kinds import KINDS
from muster.core.event_details.training import ChipsUsage
from muster.train_jax import chips
from muster.train_jax.chips import EVERY_S, ChipsWatch, libtpu_percentages, watch_chips

STATS = {"bytes_in_use": 7, "peak_bytes_in_use": 9, "bytes_limit": 16, "largest_alloc_size": 1}


class Chip:
    def __init__(self, stats=STATS):
        self.stats = stats

    def memory_stats(self):
        return self.stats


class Agent:
    def __init__(self):
        self.told = []

    def emit(self, kind, *, step, **detail):
        KINDS[kind].of(detail)  # as its reader does
        self.told.append((step, detail))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def watch(percentages, stats=STATS, count=2):
    found = ChipsWatch(
        agent=Agent(), chips=[Chip(stats) for _ in range(count)], percentages=percentages, clock_s=Clock()
    )

    def step(number, *, later_s=0.0, answered=True):
        found.clock_s.now += later_s
        found.at_step(number)
        if answered and found._asking is not None:
            found._asking.join(10)

    return found, step


def test_what_libtpu_found_is_told_at_the_end_of_the_next_step_and_then_every_ten_seconds():
    asked = []
    found, step = watch(lambda name: asked.append(name) or ["91.50", "0.00"])
    step(1)
    assert not found.agent.told and asked == ["duty_cycle_pct", "tensorcore_util"]
    step(2)
    memory = {"memory_bytes": [7, 7], "memory_peak_bytes": [9, 9], "memory_limit_bytes": [16, 16]}
    assert found.agent.told == [(2, {**memory, "busy": [0.915, 0.0], "tensorcore": [0.915, 0.0]})]
    step(3, later_s=EVERY_S - 1)
    step(4, later_s=2.0)
    step(5)
    assert [number for number, _ in found.agent.told] == [2, 5] and len(asked) == 4


def test_a_libtpu_that_hangs_holds_up_no_step_and_jax_goes_on_telling():
    never = threading.Event()
    found, step = watch(lambda name: never.wait(20) or [])
    step(1, answered=False)
    step(2, answered=False)
    assert not found.agent.told
    step(3, later_s=EVERY_S, answered=False)
    assert [(number, "busy" in detail) for number, detail in found.agent.told] == [(3, False)]
    never.set()


@pytest.mark.parametrize("answer", [["n/a"], [""], None, RuntimeError("no runtime")])
def test_an_answer_that_is_no_number_is_left_out(answer):
    def ask(name):
        if isinstance(answer, Exception):
            raise answer
        return answer if name == "duty_cycle_pct" else ["50.0"]

    found, step = watch(ask)
    step(1)
    step(2)
    [(_, detail)] = found.agent.told
    assert "busy" not in detail and detail.get("tensorcore") == (None if isinstance(answer, Exception) else [0.5])


def test_without_libtpu_memory_is_told_and_without_either_nothing():
    found, step = watch(None)
    step(1)
    assert [number for number, _ in found.agent.told] == [1]
    for stats in (None, {"num_allocs": 3}):
        found, step = watch(None, stats)
        step(1)
        assert not found.agent.told


def test_chips_of_a_cpu_are_never_asked(monkeypatch):
    monkeypatch.setattr(chips, "libtpu_percentages", lambda: pytest.fail("libtpu is not for this machine"))
    found = watch_chips(Agent())
    found.at_step(1)
    assert not found.chips and not found.agent.told


def test_libtpu_is_asked_by_the_names_that_it_supports(monkeypatch):
    metric = types.SimpleNamespace(data=lambda: ["1.0"], description=lambda: "")
    names = ["tensorcore_util", "ici_link_health", "duty_cycle_pct", "hbm_capacity_total"]
    monitoring = types.SimpleNamespace(list_supported_metrics=lambda: names, get_metric=lambda name: metric)
    package, sdk = types.ModuleType("libtpu"), types.ModuleType("libtpu.sdk")
    package.__path__, sdk.tpumonitoring = [], monitoring
    monkeypatch.setitem(sys.modules, "libtpu", package)
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    assert libtpu_percentages()("duty_cycle_pct") == ["1.0"]
    names[:] = ["ici_link_health"]
    assert libtpu_percentages() is None
    del sdk.tpumonitoring
    assert libtpu_percentages() is None
    monkeypatch.setitem(sys.modules, "libtpu.sdk", None)
    assert libtpu_percentages() is None


def test_the_names_are_those_of_an_installed_libtpu():
    pytest.importorskip("libtpu")
    assert libtpu_percentages() is not None
    assert ChipsUsage.kind in KINDS
