"""Random lives of a supervisor, for the host program and for what decided in a GKE pod before it.

Both start it as often and end with the same code.
"""

import contextlib
import io
import random
import types

import pytest
from fakes.clock import VirtualClock
from fakes.host_program import OneHost
from oracles import gke_pod
from thorough import usually

from muster.backends.gke.pod.main import PodPlace, supervisor_rules
from muster.backends.host.state import RESUME, SUPERVISOR, Requeued


class OldHome:
    """The run's home, as the old pod reads it."""

    says_how_it_ended = True

    def __init__(self, clock):
        self.clock, self.until_s, self.end = clock, 0.0, None

    def held_s(self):
        return max(0.0, self.until_s - self.clock.now_s)

    def held_by(self):
        return None

    def ended(self):
        return self.end

    def catch_up(self):
        pass

    def ship(self, writer, timeout_s):
        pass

    def end_instead(self, before, code, reason):
        self.end = code


class OldPod(gke_pod.Pod):
    """Its program lives as the script says."""

    def _wait(self):
        lived_s, code, end, held_s = self.script[self.starts % len(self.script)]
        self.starts += 1
        self.clock.sleep(lived_s)
        self.state.end = end
        self.state.until_s = self.clock.now_s + held_s
        return code


def old(script, queued, monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(gke_pod, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s, sleep=clock.sleep))
    pod = OldPod(
        argv=["x"], role="supervisor", state=OldHome(clock), age_s=lambda: 1000.0, requeue=lambda: next(queued)
    )
    pod.script, pod.clock, pod.starts, pod._started = script, clock, 0, 0.0
    with contextlib.redirect_stderr(io.StringIO()):
        return pod._supervise(), pod.starts


def new(script, queued):
    host = OneHost(supervisor_rules(reads_end=True, grace_s=90.0), programs=(SUPERVISOR,))
    host.requeued = types.SimpleNamespace(pop=lambda index: Requeued(text=next(queued)))
    starts, ends_s = 0, None
    for _ in range(200_000):
        host.program.turn()
        if host.program.ended is not None:
            return PodPlace(home=None).leave(host.program.ended, host.state), starts
        if SUPERVISOR in host.children.running:
            if ends_s is None:
                lived_s, code, end, held_s = script[starts % len(script)]
                starts, ends_s = starts + 1, host.clock.now_s + lived_s
            if host.clock.now_s >= ends_s:
                ends_s = None
                host.children.end(SUPERVISOR, code)
                host.home.end, host.home.until_s, host.home.pid = end, host.clock.now_s + held_s, 7
        host.clock.sleep(0.5)
    raise AssertionError("it never ends")


def life(rng):
    """(seconds, exit code, the end in the home after it, for how long another supervisor holds the run then)."""
    code = rng.choice([0, 1, 1, 2, 3, 5, 6, RESUME, 130, 137])
    end = rng.choice([None, None, None, 0, 1, 130, RESUME])
    lived_s = rng.choice([1.0, 5.0, 59.0, 61.0, 700.0])
    return lived_s, code, end, rng.choice([0.0, 0.0, 30.0]) if code == 1 else 0.0


@pytest.mark.parametrize("block", range(2))
def test_the_same_starts_and_exit_codes(block, monkeypatch):
    codes = set()
    for seed in range(block, usually(80, nightly=5000), 2):
        rng = random.Random(seed)
        script = [life(rng) for _ in range(12)]
        before = old(script, iter(["ns/x"] * 9), monkeypatch)
        assert before == new(script, iter(["ns/x"] * 9)), f"seed {seed}: {script}"
        codes.add(before[0])
    assert {0, RESUME, 130} <= codes
