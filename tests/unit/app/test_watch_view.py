"""One look at a run, folded from its events."""

import pytest
from rich.console import Console

from muster.app.inspect.watch import Watcher, watch
from muster.cli.output import age
from muster.cli.watch import _render, goodput, summary
from muster.config.spec import RunSpec
from muster.core.errors import BackendError
from muster.core.event_log import EventLog
from muster.storage import run_registry

STEP = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "step_ns": 10**8, "tokens": 640, "supervised_tokens": 600,
        "padding_tokens": 0}  # fmt: skip
LAYOUT = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(tmp_path))
    spec = RunSpec.model_validate(
        {
            "name": "w",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 50},
            "resources": {"hosts": 2, "ranks_per_host": 1},
        }
    )
    return run_registry.create("w-1", tmp_path / "home" / "runs" / "w-1", run_file="", resolved=spec.model_dump_json())


def drawn(view, width):
    with (console := Console(width=width, force_terminal=False)).capture() as captured:
        console.print(_render(view))
    return captured.get()


def log_of(run, writer, attempt):
    return EventLog(run.run_id, run.events, writer, attempt)


def test_hosts_ranks_steps_tiers_and_incidents(run):
    boss = log_of(run, "supervisor", 1)
    for host in ("host-0", "host-1", "host-2"):
        boss.append("host.allocated", host=host, detail={"gpus": 1, "role": "active"})
    hosts = {"host-0": [0], "host-1": [1]}
    boss.append("attempt.started", attempt=1, detail={"world_size": 2, "layout": LAYOUT, "hosts": hosts})
    boss.append("phase.changed", host="host-2", phase="spare")
    agents = {host: log_of(run, host, 1) for host in hosts}
    for rank, (host, log) in enumerate(agents.items()):
        log.append("rank.started", host=host, rank=rank, detail={"pid": 100 + rank})
        log.append("phase.changed", host=host, rank=rank, phase="train")
    agents["host-0"].append("step", host="host-0", rank=0, step=7, detail=STEP)
    agents["host-0"].append(
        "checkpoint.committed", host="host-0", rank=0, step=5, detail={"tier": "disk", "uri": "u", "bytes": 1}
    )
    watcher = Watcher(run)
    view = watcher.look()
    assert (view.attempt, view.step, view.total_steps, view.world_size) == (1, 7, 50, 2)
    assert {name: host.state for name, host in view.hosts.items()} == {
        "host-0": "training", "host-1": "training", "host-2": "spare",
    }  # fmt: skip
    assert view.hosts["host-1"].ranks[1].phase == "train" and view.hosts["host-1"].ranks[1].pid == 101
    assert [(tier.tier, tier.step) for tier in view.tiers] == [("memory", None), ("peer", None), ("disk", 5)]
    assert len(view.news) == 11 and view.incidents == ()

    boss.append("host.lost", host="host-1", attempt=1, detail={"evidence": "silent"})
    boss.append(
        "incident.detected",
        host="host-1",
        attempt=1,
        step=7,
        detail={"incident_id": "i1", "incident": "host_lost", "evidence": "host-1: silent for 3.00 s"},
    )
    boss.append(
        "incident.decided",
        host="host-1",
        attempt=1,
        detail={"incident_id": "i1", "action": "swap", "reason": "a spare is ready", "replacement": "host-2"},
    )
    hosts = {"host-0": [0], "host-2": [1]}
    boss.append("attempt.started", attempt=2, detail={"world_size": 2, "layout": LAYOUT, "hosts": hosts, "cause": "i1"})
    view = watcher.look()
    assert len(view.news) == 4
    assert {name: host.state for name, host in view.hosts.items()} == {
        "host-0": "training", "host-1": "lost", "host-2": "training",
    }  # fmt: skip
    assert len(view.incidents) == 1 and "silent for 3.00 s" in view.incidents[0] and "host-2" in view.incidents[0]
    assert "attempt 2" in summary(view) and "step 7/50" in summary(view)
    assert _render(view) is not None


def test_the_ledgers_figures_stand_beside_it_and_are_not_folded_at_each_look(run):
    class Clock:
        ns = 100 * 10**9

        def wall_ns(self):
            return self.ns

        def monotonic_ns(self):
            return self.ns

    clock = Clock()
    boss, agent = (
        EventLog(run.run_id, run.events, "supervisor", 1, clock),
        EventLog(run.run_id, run.events, "h", 1, clock),
    )

    def steps(first, last):
        for step in range(first, last + 1):
            clock.ns += 10**8
            agent.append("step", host="h", rank=0, attempt=1, step=step, detail=STEP)

    boss.append("host.allocated", host="h", detail={"gpus": 1, "role": "active", "usd_per_hour": 36.0})
    clock.ns += 10**9
    boss.append("attempt.started", attempt=1, detail={"world_size": 1, "layout": LAYOUT, "hosts": {"h": [0]}})
    steps(1, 40)
    watcher = Watcher(run, clock=clock)
    first = watcher.look().account
    assert first.goodput_active == pytest.approx(4 / 5) and first.usd == pytest.approx(0.05)
    assert first.losses[0][1] == pytest.approx(1 / 5)
    steps(41, 60)
    assert watcher.look().account is first, "two seconds later nothing is folded again"
    clock.ns += 10**10
    later = watcher.look().account
    assert later.goodput_active == pytest.approx(6 / 7)
    assert goodput(watcher.view) == "goodput 85.7%"
    for width in (80, 120):
        text = drawn(watcher.view, width)
        assert "$0.07 so far" in text and "not training: " in text and "None" not in text
        assert text.index("loss 2.5000") < text.index("$0.07") < text.index("goodput"), "goodput comes last"
        assert max(map(len, text.splitlines())) <= width
    assert "goodput 85.7%" in summary(watcher.view)


def test_an_unknown_end_is_looked_at_once(run):
    log_of(run, "supervisor", 1).append("host.requested", detail={"count": 2})
    looks = list(watch("w-1"))
    assert len(looks) == 1 and looks[0].ended, "no job stands behind it"


@pytest.mark.parametrize(
    "seconds, words", [(None, "-"), (0.44, "0.4 s"), (119, "119.0 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_ages_for_people(seconds, words):
    assert age(seconds) == words


def test_events_of_a_run_whose_folder_is_elsewhere_are_brought_and_not_twice_a_second(run, monkeypatch):
    from muster.core.types import JobState, JobStatus

    boss, slept = log_of(run, "supervisor", 1), []

    class Elsewhere:
        name = "gke"

        @property
        def remote(self):
            return self

        def find(self, run_id):
            return None

        def home(self, run_id):
            return None

        def poll(self, handle):
            return JobStatus(state=JobState.SUCCEEDED if len(slept) == 2 else JobState.RUNNING, reason="")

        def ask(self, run_id, message, **_):
            raise BackendError("no pod")

        def mirror(self, run_id, folder):
            assert (run_id, folder) == (run.run_id, run.events)
            boss.append("run.message", detail={"text": f"look {len(slept)}"})

    class Clock:
        def sleep(self, seconds):
            slept.append(seconds)

        def wall_ns(self):
            return 0

        monotonic_ns = wall_ns

    monkeypatch.setattr("muster.backends.load", lambda name: Elsewhere())
    texts = [event.detail["text"] for view in watch(run.run_id, every_s=0.1, clock=Clock()) for event in view.news]
    assert texts == ["look 0", "look 1", "look 2"] and slept == [2.0, 2.0]


def test_a_checkpoint_beyond_keep_last_takes_the_removed_one_away_not_the_new_one(run):
    log = log_of(run, "host-0", 1)
    for step in (10, 20, 30):
        log.append("checkpoint.committed", rank=0, step=step, detail={"tier": "disk", "uri": f"/c/{step}", "bytes": 1})
        if step == 30:  # as the saver says it: the step of the save that made one too many
            log.append("checkpoint.removed", rank=0, step=30, detail={"uri": "/c/10"})
    assert [tier.step for tier in Watcher(run).look().tiers if tier.tier == "disk"] == [30]
