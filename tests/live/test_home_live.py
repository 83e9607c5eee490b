"""Agents and supervisors die at random moments; what the run's home holds is enough, and nothing is done without it.

On a folder and on a bucket that only the processes' own requests reach. ``MUSTER_HOME_KILLS`` (8) is the number of
kills of each, ``MUSTER_CHAOS_SEED`` replays a run.
"""

import json
import os
import random
import signal
import time

import psutil
import pytest
from chaos import Judged
from cluster import spec_of
from fakes.chains import check_directory
from fakes.gcs import GcsFake
from homed import HomedRun, KilledRun

from muster.core.event_log.cadence import SEAL_S
from muster.protocol.client import AskStatus, StopRun
from muster.supervise.process.lease import LEASE_S

pytestmark = pytest.mark.live
KILLS = int(os.environ.get("MUSTER_HOME_KILLS", "8"))
#: A lost pod loses at most what was not sealed: the age at which lines are sealed, and the write itself.
ALLOWED_S = SEAL_S + 1.0
#: An agent that dies younger than 10 s, three times in a row, ends its host, and with it what its ranks had not told.
YOUNG_S = 12.0
#: An agent that was killed ships what it had left once it is back, and has read what the home holds of it.
BACK_S = 15.0
CHANGES = {
    "resources.hosts": 2,
    "resources.ranks_per_host": 1,
    "recovery.heartbeat_timeout_s": 3.0,
    "training.steps": 1_000_000,
}
#: Of an agent, of a supervisor, of all of a host, of all of a supervisor.
FAULTS = ["agent"] * 3 + ["supervisor"] * 3 + ["pod", "leader"]


@pytest.fixture
def bucket(monkeypatch, seed):
    with GcsFake.unkind(seed=seed) as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


def agents(run):
    """Host -> (pid, seconds) of each agent that lives."""
    newest = {event.host: event for event in run.events("agent.started")}
    now_ns = time.time_ns()
    found = {host: (event.detail["pid"], (now_ns - event.wall_ns) / 1e9) for host, event in newest.items()}
    return {host: agent for host, agent in sorted(found.items()) if psutil.pid_exists(agent[0])}


def hashes(run):
    """Step -> what its state was found to be, each time that it was taken."""
    found = {}
    for event in run.events("step"):
        if event.detail["state_hash"] is not None:
            found.setdefault(event.step, set()).add(event.detail["state_hash"])
    return found


def states_are_those_of_an_undisturbed_run(run, folder):
    """Step by step, the last one's included."""
    found = hashes(run)
    changes = {"resources.hosts": 1, "resources.ranks_per_host": 2, "recovery.heartbeat_timeout_s": 30.0}
    with Judged(folder, spec_of(**{**CHANGES, **changes})) as undisturbed:
        undisturbed.start()
        undisturbed.wait_for_step(max(found), 900)
        undisturbed.tell(StopRun(force=True))
        undisturbed.wait()
        expected = hashes(undisturbed)
    assert found and all(states == expected[step] for step, states in found.items())


def stopped(run):
    """Saved, and ended by its user."""
    at = run.step()
    run.wait_for_step(at + 5)
    run.tell(StopRun())
    run.ended(130, timeout_s=120)
    assert max(event.step for event in run.events("checkpoint.committed")) == max(hashes(run))


@pytest.mark.timeout(300 + 40 * KILLS)
def test_kills_on_a_folder(tmp_path, seed):
    rng = random.Random(seed)
    with KilledRun(tmp_path / "run", spec_of(**CHANGES)) as run:
        run.start()
        run.wait_for_step(5)
        for blow in range(KILLS):
            time.sleep(rng.uniform(0.2, 3.0))
            old = [pid for pid, age_s in agents(run).values() if age_s > YOUNG_S]
            if old and rng.random() < 0.5:
                os.kill(rng.choice(old), signal.SIGKILL)
            else:
                terms = len(run.events("supervisor.started"))
                os.kill(run.supervisor.pid, signal.SIGKILL)
                run.supervisor.wait()
                run.start_supervisor()
                run.wait_until(lambda at=terms: len(run.events("supervisor.started")) > at, f"supervisor {blow}")
        stopped(run)
        states_are_those_of_an_undisturbed_run(run, tmp_path / "undisturbed")


@pytest.mark.timeout(300 + 60 * KILLS)
def test_kills_on_a_bucket(tmp_path, seed, bucket):
    """In a pod that lives on nothing is lost; with a pod, what it had not sealed; no decision is acted on before."""
    rng = random.Random(seed)
    spec = spec_of(**{"resources.spare_hosts": 1, **CHANGES})
    with HomedRun(tmp_path / "run", spec, "gs://bucket/runs/live") as run:
        run.start()
        run.wait_for_step(5, 120)
        began_s = time.monotonic()
        for blow in range(KILLS):
            time.sleep(rng.uniform(0.2, 4.0))
            strike(run, rng, rng.choice(FAULTS))
            run.replace_ended_pods()
            assert run.unlogged_attempts(blow) == [], run.story()
        print(f"{KILLS} kills in {time.monotonic() - began_s:.0f} s, up to step {run.step()}", flush=True)
        stopped(run)
        wrong, oldest_s = run.missing(ALLOWED_S)
        assert wrong == [], "\n".join(wrong[:20])
        print(f"{len(run.lost)} pods lost; the oldest event that was lost with one: {oldest_s:.1f} s", flush=True)
        checked = check_directory(run.dir / "events", run_id="live")
        assert checked and all(found.problem is None for found in checked.values()), checked
        end = json.loads(run.home.store.get(run.home.uri_of("end.json")).data)
        assert (end["job"], end["submission"], end["exit_code"]) == ("job-1", "1", 130)
        run.start_supervisor()
        assert run.wait(60) == 130, "a supervisor of the same job ends as the run did"
        states_are_those_of_an_undisturbed_run(run, tmp_path / "undisturbed")


def strike(run, rng, fault):
    terms = len(run.events("supervisor.started"))
    if fault == "agent":
        run.wait_until(lambda: any(age_s > YOUNG_S for _, age_s in agents(run).values()), "an agent that is not young")
        name, (pid, _) = rng.choice([item for item in agents(run).items() if item[1][1] > YOUNG_S])
        print(f"agent ({name}) at step {run.step()}", flush=True)
        os.kill(pid, signal.SIGKILL)
        return
    name = rng.choice(["host-0", "host-1", "host-2"])
    print(f"{fault} ({name}) at step {run.step()}", flush=True)
    if fault == "pod":
        # With its agent down too it would lose what that had left: two faults at once.
        run.wait_until(lambda: agents(run).get(name, (0, 0.0))[1] > BACK_S, "a host whose agent is up")
        run.lose(name)
        run.start_agent(name)
        return
    if fault == "supervisor":
        run.kill_supervisor()
    else:
        run.lose("supervisor")
    run.start_supervisor()
    run.wait_until(lambda: len(run.events("supervisor.started")) > terms, "a new supervisor")


@pytest.mark.timeout(300)
def test_a_bucket_that_is_away_delays_decisions_and_stops_no_step(tmp_path, bucket):
    """Decisions wait, for a moment and for longer than a lease; ranks step meanwhile, and their events wait."""
    with HomedRun(tmp_path, spec_of(**CHANGES), "gs://bucket/runs/live") as run:
        run.start()
        run.wait_for_step(5, 120)
        bucket.away = True
        run.kill_rank(1)
        run.wait_until(lambda: run.events("incident.decided"), "the decision")
        time.sleep(3.0)
        waits = [event for event in run.events("run.message") if "decisions wait" in event.detail["text"]]
        assert waits and len(run.events("attempt.started")) == 1
        assert "waiting for the run's home" in run.tell(AskStatus()).reason
        bucket.away = False
        run.wait_until(lambda: run.events("incident.resolved"), "the recovery")
        assert run.recoveries() == ["restart"] and not run.events("host.lost"), run.story()

        bucket.away = True
        time.sleep(LEASE_S + 5.0)
        assert run.supervisor.poll() is None, "nobody else has its lease"
        before = run.step()
        run.wait_for_step(before + 5)
        run.kill_rank(0)
        time.sleep(3.0)
        assert len(run.events("attempt.started")) == 2
        bucket.away = False
        run.wait_until(lambda: len(run.events("incident.resolved")) == 2, "the second recovery")
        assert len(run.events("supervisor.started")) == 1 and not run.events("host.lost"), run.story()

        run.kill_supervisor()
        run.start_supervisor()
        run.wait_until(lambda: run.events("attempt.adopted"), "the takeover")
        assert len(run.events("attempt.started")) == 3 and not run.events("host.lost"), run.story()
        run.tell(StopRun(force=True))
        run.wait()
        wrong, _ = run.missing(0.0)
        assert wrong == [], "\n".join(wrong[:20])
