"""Chaos: faults of the reference's list that the recovery tests do not cover, by real signals on real runs.

Every run's history is judged by the offline checker. The soak (``-m soak``) is replayable: each test prints its
seed, and MUSTER_CHAOS_SEED sets it.
"""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from chaos import SCRIPT_LOSS, Judged, References, script_spec
from cluster import LiveRun, ip, namespaces_work, spec_of

pytestmark = [pytest.mark.timeout(300)]
live = pytest.mark.live
needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2 for network namespaces")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return References(tmp_path_factory)


@pytest.fixture
def seed():
    found = int(os.environ.get("MUSTER_CHAOS_SEED", "20261121"))
    print(f"MUSTER_CHAOS_SEED={found}")
    return found


# ---------------------------------------------------------------- ranks


@live
def test_kills_at_random_moments_never_leave_half_an_update(tmp_path, reference, seed):
    """Faults 1-4: whatever a rank was in when it died (a forward, an all-reduce, one shard's update, the moment
    after the vote), the state that goes on is a whole step's."""
    rng = random.Random(seed)
    with Judged(tmp_path, spec_of(**{"training.steps": 150})) as run:
        run.start()
        step = 5
        for blow in range(10):
            run.wait_for_step(step)
            time.sleep(rng.uniform(0, 0.06))  # a step takes about 0.05 s: anywhere in it
            run.kill_rank(rng.randrange(2))
            run.wait_until(lambda blow=blow: len(run.events("attempt.started")) > blow + 1, "a new attempt")
            step = run.step() + 4
        run.ended()
        assert set(run.actions()) == {"restart"}
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("recovered")), run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **{"training.steps": 150})[:2]


@live
def test_an_exception_once_is_a_restart(tmp_path):
    with Judged(tmp_path / "run", script_spec(tmp_path, "once")) as run:
        run.start()
        run.ended()
        incident = restarted_once(run, "rank_exception")
        assert "a passing trouble" in incident.detail["evidence"]
        assert run.events("step")[-1].detail["loss"] == pytest.approx(SCRIPT_LOSS, rel=1e-12)


def restarted_once(run, kind):
    """One restart because of an incident of ``kind``; the lost peer's broken connection may have been heard first."""
    assert set(run.actions()) == {"restart"} and len(run.events("attempt.started")) == 2, run.story()
    (found,) = [event for event in run.events("incident") if event.detail["incident"] == kind]
    assert {event.detail["incident"] for event in run.events("incident")} <= {kind, "rank_exit"}, run.story()
    return found


@live
def test_the_same_exception_at_the_same_step_ends_with_a_verdict(tmp_path):
    with Judged(tmp_path / "run", script_spec(tmp_path, "always")) as run:
        run.start()
        run.ended(1)
        assert run.actions()[-1] == "stop" and len(run.events("attempt.started")) == 2, run.story()
        assert "bad row 17" in run.verdict() and "same step" in run.verdict()


@live
@pytest.mark.parametrize("how", ["gil", "livelock"])
def test_a_rank_that_lives_and_does_nothing_is_found_by_its_lack_of_progress(tmp_path, how):
    """Faults 9 and 10: held GIL (no heartbeat, no death) and livelock (heartbeats, no step)."""
    with Judged(tmp_path / "run", script_spec(tmp_path, how, step_timeout_s=1.0)) as run:
        run.start()
        run.ended()
        assert "no progress" in restarted_once(run, "rank_hang").detail["evidence"]
        assert run.events("step")[-1].detail["loss"] == pytest.approx(SCRIPT_LOSS, rel=1e-12)


@live
def test_out_of_memory_is_named_and_not_held_against_the_host(tmp_path):
    """Fault 28, by a resource limit: torch's allocator fails."""
    with Judged(tmp_path / "run", script_spec(tmp_path, "memory")) as run:
        run.start()
        run.ended()
        restarted_once(run, "rank_oom")


@live
def test_not_a_number_stops_the_run_instead_of_looping(tmp_path):
    """Fault 31: the same batch would give it again."""
    with Judged(tmp_path, spec_of(**{"training.optimizer.learning_rate": 1e30})) as run:
        run.start()
        run.ended(1)
        assert run.actions() == ["stop"], run.story()
        assert run.events("incident")[0].detail["incident"] == "not_finite"


@live
def test_the_fork_server_dies_and_takes_the_store_with_it(tmp_path, reference):
    """Faults 13 and 37: ranks step on; the next attempt meets at a new server's store."""
    with Judged(tmp_path, spec_of(**{"training.steps": 150})) as run:
        run.start()
        run.wait_for_step(10)
        (server,) = run.fork_servers()
        os.kill(server, signal.SIGKILL)
        run.wait_until(lambda: run.fork_servers() != [server], "a new fork server")
        run.wait_for_step(run.step() + 5)
        run.kill_rank(1)
        run.ended()
        assert run.final_hash() == reference(1, 2, **{"training.steps": 150})[0]


# ---------------------------------------------------------------- hosts


@live
def test_a_host_that_was_stopped_and_wakes_up_late_writes_nothing(tmp_path, reference):
    """Fault 8: declared lost while stopped, replaced, then continued: fenced."""
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 200,
               "recovery.heartbeat_timeout_s": 1.0}  # fmt: skip
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        run.wait_for_spare()
        name = run.ranks()[1][1]
        run.signal_host(name, signal.SIGSTOP)
        run.wait_until(lambda: run.events("recovered"), "recovery")
        run.signal_host(name, signal.SIGCONT)
        run.ended()
        assert run.actions()[0] == "swap" and set(run.actions()[1:]) <= {"ignore"}, run.story()
        assert run.final_hash() == reference(2, 1, **{"training.steps": 200})[0]


@live
def test_a_preemption_notice_swaps_the_host_before_it_goes(tmp_path, reference):
    """Fault 38: SIGTERM to one host of two, as a scheduler would send it. No crash is counted."""
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 200}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        run.wait_for_spare()
        name = run.ranks()[1][1]
        run.agents[name].send_signal(signal.SIGTERM)
        run.ended()
        assert run.actions()[0] == "swap", run.story()
        assert run.events("incident")[0].detail["incident"] == "preemption_notice"
        assert run.events("notice")
        assert name not in {host for _, host in run.ranks().values()}
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("recovered")), run.story()
        assert run.final_hash() == reference(2, 1, **{"training.steps": 200})[0]


@live
def test_a_spare_that_cannot_start_is_set_aside_and_an_extra_agent_is_parked(tmp_path, monkeypatch):
    """Faults 18 and 19."""
    broken_torch = tmp_path / "broken" / "torch"
    broken_torch.mkdir(parents=True)
    (broken_torch / "__init__.py").write_text("raise ImportError('this host has no torch')")
    changes = {"resources.hosts": 1, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 400}
    with Judged(tmp_path / "run", spec_of(**changes), extra_hosts=1) as run:
        run.start(["host-0"])
        run.wait_for_step(3)
        monkeypatch.setenv("PYTHONPATH", str(broken_torch.parent))
        run.start_agent("host-1")
        monkeypatch.undo()
        run.start_agent("host-2")
        run.wait_until(
            lambda: "cannot start" in str([e.detail for e in run.events("run.note")]), "the bad spare's note"
        )
        run.wait_for_spare()
        assert run.events("incident") == [], run.story()
        run.signal_host("host-0")
        run.wait_until(lambda: run.events("recovered") or len(run.events("attempt.started")) > 1, "the swap")
        assert {host for _, host in run.ranks().values()} <= {"host-0", "host-2"}
        assert run.actions() == ["swap"], run.story()
        run.tell({"t": "stop", "force": True})
        run.wait()


@live
def test_exact_sums_shrink_and_grow_without_changing_a_bit(tmp_path, reference):
    """Faults 14, 17 and 41 with ``exact: true``: 3 -> 2 -> 3 hosts, and the course of a run on 3 and of one on 2."""
    exact = {"training.exact": True, "training.steps": 120}
    changes = {"resources.hosts": 3, "resources.min_hosts": 2, "resources.ranks_per_host": 1, **exact}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(8)
        run.signal_host("host-2")
        run.wait_until(lambda: run.events("recovered"), "recovery")
        run.start_agent("host-2")
        run.ended()
        assert run.actions() == ["shrink", "grow"], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **exact)[:2]


# ---------------------------------------------------------------- checkpoints


@live
def test_a_torn_checkpoint_and_a_rotten_one_are_passed_over(tmp_path, reference):
    """Faults 32, 33 and 42: everything dies in the middle of a save, and the newest whole version rots."""
    spec = spec_of(**{"checkpoint.every_steps": 4, "checkpoint.keep_last": 4})
    with LiveRun(tmp_path, spec) as run:
        run.start()
        run.wait_until(lambda: len(run.events("checkpoint.committed")) >= 2, "two checkpoints")
        begun = len(run.events("checkpoint.begun"))
        run.wait_until(lambda: len(run.events("checkpoint.begun")) > begun, "a save under way")
        os.kill(run.supervisor.pid, signal.SIGKILL)
        run.signal_host("host-0")
        markers = sorted((tmp_path / "checkpoints" / "commits").glob("step-*.json"))
        newest = int(markers[-1].stem.removeprefix("step-"))
        (folder,) = (tmp_path / "checkpoints").glob(f"step-{newest:08d}.a*")
        path = max((each for each in folder.iterdir()), key=lambda each: each.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    with Judged(tmp_path, spec) as run:
        run.start()
        run.ended()
        skipped = [event.detail for event in run.events("checkpoint.skipped")]
        assert any(f"{newest:08d}" in each["uri"] for each in skipped), run.story()
        restored = [event.step for event in run.events("checkpoint.restored")][-1]
        assert 0 < restored < newest
        assert run.final_hash() == reference(1, 2)[0]


# ---------------------------------------------------------------- networks


@live
@needs_namespaces
def test_a_flapping_link_below_the_limit_disturbs_nobody(tmp_path, reference):
    """Fault 24: half a second down, four times; the limit is two seconds."""
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 100}
    with Judged(tmp_path, spec_of(**changes, **{"recovery.heartbeat_timeout_s": 2.5}), netns=True) as run:
        run.start()
        run.wait_for_step(10)
        for _ in range(4):
            run.network.cut("host-1")
            time.sleep(0.5)
            run.network.heal("host-1")
            time.sleep(1.0)
        run.ended()
        assert run.actions() == [], run.story()
        assert run.final_hash() == reference(2, 1, **{"training.steps": 100})[0]


@live
@needs_namespaces
def test_a_one_way_partition_is_silence_too(tmp_path, reference):
    """Fault 22: a host hears everybody and nobody hears it."""
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 100}
    with Judged(tmp_path, spec_of(**changes, **{"recovery.heartbeat_timeout_s": 0.8}), netns=True) as run:
        run.start()
        run.wait_for_step(10)
        run.wait_for_spare()
        name = run.ranks()[1][1]
        if not drop_everything_from(run.network, name):
            pytest.skip("this kernel has no token bucket (tc tbf)")
        run.ended()
        assert run.actions()[0] == "swap", run.story()
        assert "silent" in run.events("host.lost")[0].detail["evidence"]
        assert run.final_hash() == reference(2, 1, **{"training.steps": 100})[0]


def drop_everything_from(network, name):
    """A bucket that no packet fits through, on the way out; False where the kernel has no tbf."""
    bucket = ["tbf", "rate", "8bit", "burst", "1b", "limit", "1b"]
    command = ["tc", "-n", network.namespace(name), "qdisc", "add", "dev", "eth0", "root", *bucket]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------- soak


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_supervisors_die_in_a_faulty_run(tmp_path, reference, seed):
    """Fault 12, twenty times, while ranks die too: nothing is done twice (the checker's I3)."""
    rng = random.Random(seed)
    with Judged(tmp_path, spec_of(**{"training.steps": 1500})) as run:
        run.start()
        run.wait_for_step(5)
        for blow in range(20):
            time.sleep(rng.uniform(0, 0.8))
            if rng.random() < 0.4:
                kill_some_rank(run, rng)
                time.sleep(rng.uniform(0, 0.3))
            os.kill(run.supervisor.pid, signal.SIGKILL)
            run.supervisor.wait()
            run.start_supervisor()
            run.wait_until(lambda blow=blow: len(run.events("supervisor.started")) >= blow + 2, "a new supervisor")
        run.ended(timeout_s=600)
        assert len(run.events("supervisor.started")) == 21
        assert run.final_hash() == reference(1, 2, **{"training.steps": 1500})[0]


def kill_some_rank(run, rng):
    """One that is there; a rank may just be dying of the blow before."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice([pid for _, (pid, _) in sorted(run.ranks().items())]), signal.SIGKILL)


@pytest.mark.soak
@needs_namespaces
@pytest.mark.timeout(600)
def test_a_split_network_heals_after_30_seconds(tmp_path):
    """Fault 23: two hosts against two; the supervisor's half goes on, the other is fenced and comes back."""
    changes = {"resources.hosts": 4, "resources.min_hosts": 2, "resources.ranks_per_host": 1, "training.steps": 2000,
               "recovery.heartbeat_timeout_s": 1.5}  # fmt: skip
    with Judged(tmp_path, spec_of(**changes), netns=True) as run:
        run.start()
        run.wait_for_step(10, 180)
        away = ["host-2", "host-3"]
        split(run.network, away)
        run.wait_until(lambda: run.events("attempt.started")[-1].detail["world_size"] == 2, "the shrink", 120)
        at = run.step()
        run.wait_until(lambda: run.step() > at + 10, "steps of the half that goes on")
        time.sleep(30)
        assert {host for _, host in run.ranks().values()} == {"host-0", "host-1"}, "one side goes on"
        join(run.network, away)
        run.wait_until(lambda: run.events("attempt.started")[-1].detail["world_size"] == 4, "the growth", 120)
        at = run.step()
        run.wait_until(lambda: run.step() > at + 10, "steps of the whole")
        assert len(run.events("supervisor.started")) == 1, "no two leaders"
        run.tell({"t": "stop", "force": True})
        run.wait()


def split(network, names):
    """The hosts in ``names`` see only each other: their links leave the bridge for one of their own."""
    ip("link", "add", f"{network.tag}b2", "type", "bridge")
    ip("link", "set", f"{network.tag}b2", "up")
    for name in names:
        ip("link", "set", f"{network.tag}v{network.names.index(name)}", "master", f"{network.tag}b2")


def join(network, names):
    for name in names:
        ip("link", "set", f"{network.tag}v{network.names.index(name)}", "master", f"{network.tag}br")
    ip("link", "del", f"{network.tag}b2")


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("every_s", [15, 60])
def test_punisher(tmp_path, seed, every_s):
    """Fault 44: kills with exponential gaps; the share of steps that stood (torchft's marks: 30 % and 82 %)."""
    minutes = float(os.environ.get("MUSTER_CHAOS_MINUTES", "10"))
    rng = random.Random(seed)
    with Judged(tmp_path, spec_of(**{"training.steps": 1_000_000})) as run:
        run.start()
        run.wait_for_step(20)
        began, blows, first = time.monotonic(), 0, run.step()
        while time.monotonic() < began + minutes * 60:
            time.sleep(rng.expovariate(1 / every_s))
            kill_some_rank(run, rng)
            blows += 1
        steps, spent_s = run.step() - first, time.monotonic() - began
        lost_s = sum(event.detail["lost_ns"] for event in run.events("recovered")) / 1e9
        share = 1 - lost_s / spent_s
        print(f"{blows} kills in {spent_s:.0f} s: {steps} steps, {share:.1%} of the time stood")
        assert steps > 0 and share >= (0.70 if every_s == 15 else 0.95)
        run.tell({"t": "stop", "force": True})
        run.wait()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("round_", range(int(os.environ.get("MUSTER_CHAOS_ROUNDS", "10"))))
def test_random_faults(tmp_path, seed, round_):
    """Fault 45: a random mix on three hosts with one spare; replay one by MUSTER_CHAOS_SEED."""
    rng = random.Random(seed * 1000 + round_)
    changes = {"resources.hosts": 3, "resources.min_hosts": 1, "resources.ranks_per_host": 1, "training.exact": True,
               "resources.spare_hosts": 1, "training.steps": 800, "checkpoint.every_steps": 50,
               "recovery.heartbeat_timeout_s": 1.5}  # fmt: skip
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(5)
        for _ in range(8):
            time.sleep(rng.uniform(0.2, 3.0))
            if run.supervisor.poll() is not None:
                break
            fault = rng.choice(["rank", "rank", "stop", "host", "agent", "supervisor", "return"])
            strike(run, rng, fault)
        run.ended(timeout_s=900)


def strike(run, rng, fault):
    ranks = run.ranks()
    pid, host = ranks[rng.choice(sorted(ranks))]
    print(f"{fault} on {host}")
    if fault in ("rank", "stop"):
        try:
            os.kill(pid, signal.SIGKILL if fault == "rank" else signal.SIGSTOP)
        except ProcessLookupError:
            return
    elif fault == "host" and len({name for _, name in ranks.values()}) > 1:
        run.signal_host(host)
    elif fault == "agent":
        newest = [event for event in run.events("agent.started") if event.host == host][-1]
        try:
            os.kill(newest.detail["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return
    elif fault == "supervisor":
        os.kill(run.supervisor.pid, signal.SIGKILL)
        run.supervisor.wait()
        run.start_supervisor()
    elif fault == "return":
        for name, agent in run.agents.items():
            if agent.poll() is not None:
                run.start_agent(name)
