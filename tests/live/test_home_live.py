"""Agents and supervisors die at random moments; what the run's home holds is enough, and nothing is done without it.

On a folder and on a bucket that only the processes' own requests reach. ``MUSTER_HOME_KILLS`` (8) is the number of
kills of each, ``MUSTER_CHAOS_SEED`` replays a run.
"""

import contextlib
import json
import os
import random
import time

import pytest
from chaos import Judged
from cluster import spec_of
from fakes.gcs import GcsFake
from homed import HomedRun

from muster.core.event_log import check_directory
from muster.core.event_log.cadence import SEAL_S

KILLS = int(os.environ.get("MUSTER_HOME_KILLS", "8"))
#: A killed node loses at most what was not sealed: the age at which lines are sealed, and the write itself.
ALLOWED_S = SEAL_S + 1.0
STEPS = {"training.steps": 100 + 30 * KILLS}
CHANGES = {"resources.hosts": 2, "resources.ranks_per_host": 1, "recovery.heartbeat_timeout_s": 3.0, **STEPS}

#: Of an agent, of a supervisor, of all of a host, of all of a supervisor.
FAULTS = ["agent"] * 3 + ["supervisor"] * 3 + ["pod", "leader"]


@pytest.fixture
def bucket(monkeypatch, seed):
    with GcsFake.unkind(seed=seed) as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


def agent_of(run, rng):
    found = {event.host: event.detail["pid"] for event in run.events("agent.started")}
    return found[rng.choice(sorted(found))]


@pytest.mark.timeout(120 + 40 * KILLS)
def test_kills_on_a_folder(tmp_path, reference, seed):
    rng = random.Random(seed)
    with Judged(tmp_path, spec_of(**CHANGES)) as run:
        run.start()
        run.wait_for_step(5)
        for blow in range(KILLS):
            time.sleep(rng.uniform(0.2, 3.0))
            if rng.random() < 0.5:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent_of(run, rng), 9)
            else:
                terms = len(run.events("supervisor.started"))
                os.kill(run.supervisor.pid, 9)
                run.supervisor.wait()
                run.start_supervisor()
                run.wait_until(lambda at=terms: len(run.events("supervisor.started")) > at, f"supervisor {blow}")
        run.ended(timeout_s=300)
        assert run.final_hash() == reference(1, 2, **STEPS)[0]


@pytest.mark.timeout(240 + 60 * KILLS)
def test_kills_on_a_bucket(tmp_path, reference, seed, bucket):
    """In a pod that lives on nothing is lost; with a pod, what it had not sealed; no decision is acted on before."""
    rng = random.Random(seed)
    with HomedRun(tmp_path, spec_of(**{"resources.spare_hosts": 1, **CHANGES}), "gs://bucket/runs/live") as run:
        run.start()
        run.wait_for_step(5, 120)
        began_s, first = time.monotonic(), run.step()
        for blow in range(KILLS):
            time.sleep(rng.uniform(0.2, 4.0))
            strike(run, rng, rng.choice(FAULTS))
            run.replace_ended_pods()
            assert run.unlogged_attempts(blow) == [], run.story()
        print(f"{time.monotonic() - began_s:.0f} s, steps {first} to {run.step()}", flush=True)
        run.ended(timeout_s=600)
        print(f"ended after {time.monotonic() - began_s:.0f} s", flush=True)
        wrong, oldest_s = run.missing(ALLOWED_S)
        assert wrong == [], "\n".join(wrong[:20])
        print(f"{KILLS} kills, {len(run.lost)} pods lost; the oldest event that was lost with one: {oldest_s:.1f} s")
        checked = check_directory(run.dir / "events", run_id="live")
        assert checked and all(found.problem is None for found in checked.values()), checked
        assert run.final_hash() == reference(1, 2, **STEPS)[0]
        end = json.loads(run.home.store.get(run.home.uri_of("end.json")).data)
        assert (end["job"], end["submission"], end["exit_code"]) == ("job-1", "1", 0)
        run.start_supervisor()
        assert run.wait(60) == 0, "a supervisor of the same job ends as the run did"
        assert len(run.events("supervisor.started")) == len(
            {e.detail["term"] for e in run.events("supervisor.started")}
        )


def strike(run, rng, fault):
    terms = len(run.events("supervisor.started"))
    name = rng.choice(["host-0", "host-1", "host-2"])
    print(f"{fault} ({name}) at step {run.step()}", flush=True)
    if fault == "agent":
        with contextlib.suppress(ProcessLookupError):
            run.kill_agent(name)
        return
    if fault == "pod":
        run.lose(name)
        run.start_agent(name)
        return
    if fault == "supervisor":
        run.kill_supervisor()
    else:
        run.lose("supervisor")
    run.start_supervisor()
    run.wait_until(lambda: len(run.events("supervisor.started")) > terms, "a new supervisor")
