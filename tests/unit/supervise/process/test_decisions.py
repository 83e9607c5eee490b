"""What was decided is durable before it is acted on: in virtual runs whose home may not answer, and counted."""

import random
from dataclasses import dataclass, field

import pytest
from fakes.objects import Objects
from fakes.virtual_run import actions, check_invariants, kinds, machine, spec

from muster.protocol.values import RankEvent
from muster.simulate import cluster
from muster.simulate.cluster import Cluster
from muster.storage.home import BucketHome
from muster.supervise.process.decisions import Decisions
from muster.supervise.recovery.inputs import SECOND_NS, End, FromHost, StopRequest


@dataclass
class HomedCluster(Cluster):
    """A virtual run whose supervisor carries out its decisions by ``Decisions``; its home is down at times."""

    down: list[tuple[float, float]] = field(default_factory=list)
    """(from, to) in seconds."""
    syncs: list[float] = field(default_factory=list)
    """When everything so far was made durable."""
    durable: int = 0
    """How many of the first log entries are."""
    noted: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.decisions = Decisions(self.machine, self, self)

    def monotonic_ns(self):
        return self.now_ns

    def doubt(self):
        return None

    def note(self, text):
        self.noted.append(text)

    def append(self, effect):
        self.log.append((self.now_s, effect))

    def sync(self, _timeout_s):
        if any(begin <= self.now_s < end for begin, end in self.down):
            return "503"
        self.syncs.append(self.now_s)
        self.durable = len(self.log)
        return None

    def act(self, effect):
        lost = [log.kind for _, log in self.log[self.durable :] if log.sync]
        assert not lost, f"{effect} before {lost} was durable"
        if isinstance(effect, End):
            self.result = effect
        else:
            cluster.handle_message(self, effect.host, effect.message)

    def _effects(self, effects):
        self.decisions._carry_out(effects)
        self._schedule()

    def give(self, given):
        self._inbox.append(given)
        if self._acting:
            return
        self._acting = True
        while self._inbox:
            given = self._inbox.popleft()
            if self.result is None:
                self.decisions.give(given)
        self._acting = False
        self._schedule()

    def _schedule(self):
        due = self.decisions.deadline_ns
        if due is not None and due != self._tick_ns:
            self._tick_ns = due
            self.at(due / SECOND_NS, lambda: self._due(due))

    def _due(self, due):
        if self.decisions.deadline_ns == due and self.result is None:
            self.now_ns = max(self.now_ns, due)
            self._acting = True
            self.decisions.tend()
            self._acting = False
            if self._inbox:
                self.give(self._inbox.popleft())
            self._schedule()


def homed(of, *, steps=100, down=()):
    names = [f"host-{n}" for n in range(of.resources.hosts + of.resources.spare_hosts)]
    return HomedCluster(machine=machine(of), names=names, total_steps=steps, down=list(down))


@pytest.mark.parametrize(
    "fault, expected",
    [(lambda found: found.kill_rank(1), "restart"), (lambda found: found.kill_host("host-1"), "swap")],
)
def test_a_recovery_makes_two_writes(fault, expected):
    """The decision and the start of the attempt; in a folder each is an fsync, in a bucket a put."""
    found = homed(spec(hosts=2, spare_hosts=1))
    found.at(10.0, lambda: fault(found))
    assert found.run().exit_code == 0 and actions(found) == [expected]
    ((resolved_s, _),) = kinds(found, "incident.resolved")
    during = [at for at in found.syncs if 10.0 <= at <= resolved_s]
    assert len(during) == 2, during


@pytest.mark.parametrize("fault", [lambda found: found.kill_rank(1), lambda found: found.kill_host("host-1")])
def test_a_recovery_in_a_bucket_makes_two_requests_more_than_in_a_folder(fault, tmp_path):
    """Of the supervisor's own, which it waits for: what a thread ships every few seconds is the same with a fault."""
    store = Objects()
    (tmp_path / "run_id").write_text("r")
    log = BucketHome(tmp_path, "gs://bucket/r", store, store).open_log("r", "supervisor", 1)
    found = homed(spec(hosts=2, spare_hosts=1))
    requests = []

    def append(effect):
        HomedCluster.append(found, effect)
        log.append("run.message", detail={"text": effect.kind})
        if effect.kind in ("incident.detected", "incident.resolved"):
            requests.append(store.requests)

    found.append = append
    found.sync = lambda timeout_s: HomedCluster.sync(found, timeout_s) or (None if log.sync() else log.unsealed)
    found.at(10.0, lambda: fault(found))
    assert found.run().exit_code == 0
    before, after = requests
    assert after - before == 2 and store.counts["get"] == 0


@pytest.mark.parametrize("fault", [lambda found: found.kill_rank(1), lambda found: found.kill_host("host-1")])
@pytest.mark.parametrize("length_s", [0.5, 5.0, 90.0])
def test_a_home_that_is_down_delays_a_recovery_and_costs_no_host(fault, length_s):
    """90 s is longer than everything that the supervisor waits for hosts to answer."""
    found = homed(spec(hosts=2, spare_hosts=1), down=[(9.9, 9.9 + length_s)])
    found.at(10.0, lambda: fault(found))
    assert found.run().exit_code == 0
    assert len(actions(found)) == 1, "no host was late"
    started_s = kinds(found, "attempt.started")[-1][0]
    assert started_s >= 9.9 + length_s and started_s < 9.9 + length_s + 20
    assert any("decisions wait" in text for text in found.noted) and any(
        "can be written again" in t for t in found.noted
    )


def test_a_home_that_is_down_while_hosts_are_ending_their_ranks():
    """The first write was made, the second cannot be: the ranks start once it can."""
    found = homed(spec(hosts=2), down=[(10.06, 70.0)])
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0 and actions(found) == ["restart"]
    assert 70.0 <= kinds(found, "incident.resolved")[-1][0] < 85.0


def test_an_end_waits_for_its_events():
    found = homed(spec(hosts=1), down=[(9.0, 60.0)])
    found.at(10.0, lambda: found.give(StopRequest(source="test", exit_code=130)))
    end = found.run()
    assert end.outcome == "stopped" and found.now_s >= 60.0


def some_faults(found, rng):
    for _ in range(4):
        at_s, rank, name = rng.uniform(1, 60), rng.randrange(2), f"host-{rng.randrange(3)}"
        if rng.random() < 0.5:
            found.at(at_s, lambda rank=rank: found.kill_rank(rank))
        else:
            found.at(at_s, lambda name=name: found.kill_host(name))
            found.at(at_s + rng.uniform(1, 20), lambda name=name: found.return_host(name))


def test_random_faults_under_a_home_that_comes_and_goes():
    for seed in range(60):
        rng = random.Random(seed)
        begins = sorted(rng.uniform(0, 60) for _ in range(4))
        found = homed(
            spec(hosts=3, spare_hosts=1, min_hosts=1),
            steps=300,
            down=[(at, at + rng.expovariate(0.1)) for at in begins],
        )
        some_faults(found, rng)
        end = found.run(until_s=5000)
        assert end is not None, f"seed {seed} did not end"
        check_invariants(found)


@dataclass
class Outside:
    """A machine that answers nothing, its clock, and the world that its decisions are carried out in."""

    handled: list[object] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    now_ns: int = 0
    unsynced: str | None = None
    """Why nothing can be made durable."""
    reason: str | None = None
    """Why nothing may be decided."""
    deadline_ns: None = None

    def handle(self, given, _now_ns):
        self.handled.append(given)
        return []

    def monotonic_ns(self):
        return self.now_ns

    def postpone(self, by_ns):
        self.handled.append(by_ns)

    def append(self, _effect):
        pass

    def sync(self, _timeout_s):
        return self.unsynced

    def act(self, effect):
        self.handled.append(effect)

    def doubt(self):
        return self.reason

    def note(self, text):
        self.noted.append(text)


def test_inputs_wait_in_their_order():
    outside = Outside(unsynced="down")
    decisions = Decisions(outside, outside, outside)
    decisions._decided = True
    decisions._carry_out([End(exit_code=0, outcome="succeeded", reason="")])
    decisions.give("first")
    decisions.give("second")
    outside.now_ns = 500_000_000
    decisions.tend()
    assert not outside.handled, "tried again only after a second"
    outside.now_ns, outside.unsynced = 3 * SECOND_NS, None
    decisions.tend()
    postponed, end, *given = outside.handled
    assert postponed == 3 * SECOND_NS and isinstance(end, End) and given == ["first", "second"]


def test_who_cannot_show_the_lease_decides_nothing_and_goes_on_once_it_can():
    outside = Outside(reason="503")
    decisions = Decisions(outside, outside, outside)
    decisions.give("first")
    outside.now_ns = 20 * SECOND_NS
    decisions.tend()
    decisions.give("second")
    assert not outside.handled and len(outside.noted) == 1 and "503" in outside.noted[0]
    outside.now_ns, outside.reason = 40 * SECOND_NS, None
    decisions.tend()
    assert outside.handled == [40 * SECOND_NS, "first", "second"] and "40.0 s" in outside.noted[1]


def step(number, rank=0):
    return FromHost(
        host=f"host-{rank}",
        message=RankEvent(kind="step", attempt=1, mono_ns=0, wall_ns=0, rank=rank, step=number, detail={}),
    )


def test_days_of_steps_that_wait_take_no_memory_and_nothing_that_decides_is_dropped(monkeypatch):
    monkeypatch.setattr("muster.supervise.process.decisions.MOST_WAITING", 50)
    outside = Outside(reason="503")
    decisions = Decisions(outside, outside, outside)
    decisions._most = 50
    for number in range(1000):
        decisions.give(step(number))
        decisions.give(step(number, rank=1))
        if number % 100 == 0:
            decisions.give(f"decides {number}")
        assert len(decisions._inputs) <= 51
    outside.now_ns, outside.reason = 2 * SECOND_NS, None
    decisions.tend()
    assert [given for given in outside.handled if isinstance(given, str)] == [
        f"decides {number}" for number in range(0, 1000, 100)
    ]
    assert outside.handled[-2:] == [step(999), step(999, rank=1)]
