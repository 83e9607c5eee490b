"""Faults of processes on docs/explanation/recovery.md's list that no recovery test covers, by real signals.

Every run's history is judged by the offline checker. Hosts and networks: test_chaos_hosts_live; the long ones:
test_chaos_soak.
"""

import contextlib
import json
import os
import random
import signal
import socket
import time

import psutil
import pytest
from chaos import SCRIPT_LOSS, Judged, script_spec
from cluster import LiveRun, spec_of

from muster.chaos.target import has_agent_connection, listening

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


# ---------------------------------------------------------------- ranks


def test_kills_at_random_moments_never_leave_half_an_update(tmp_path, reference, seed):
    """Faults 1-4: whenever a rank dies (in a forward, an all-reduce, one shard's update, right after the vote), the
    restored state is that of a complete step."""
    rng = random.Random(seed)
    with Judged(tmp_path, spec_of(**{"training.steps": 120})) as run:
        run.start()
        step = 5
        for blow in range(10):
            run.wait_for_step(step)
            time.sleep(rng.uniform(0, 0.06))  # a step takes about 0.05 s: anywhere in it
            run.kill_rank(rng.randrange(2))
            run.wait_until(lambda blow=blow: len(run.events("attempt.started")) > blow + 1, "a new attempt")
            step = run.step() + 4
        run.ended()
        assert set(run.recoveries()) == {"restart"}
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **{"training.steps": 120})[:2]


def test_whatever_a_rank_does_once_is_a_restart(tmp_path):
    """An exception, and faults 9 (held GIL: no heartbeat, no death), 10 (livelock: heartbeats, no step), 28 (torch's
    allocator fails, by a resource limit), one after the other."""
    faults = {"once": "rank_exception", "gil": "rank_hang", "livelock": "rank_hang", "memory": "rank_oom"}
    with Judged(tmp_path / "run", script_spec(tmp_path, *faults, step_timeout_s=1.5)) as run:
        run.start()
        run.ended()
        assert set(run.recoveries()) == {"restart"} and len(run.events("attempt.started")) == 5, run.story()
        # The lost peer's broken connection may have been heard first.
        found = [event.detail for event in run.troubles() if event.detail["incident"] != "rank_exit"]
        assert [each["incident"] for each in found] == list(faults.values()), run.story()
        for each, words in zip(found, ("a passing trouble", "no progress", "no progress", ""), strict=True):
            assert words in each["evidence"], run.story()
        assert run.events("step")[-1].detail["loss"] == pytest.approx(SCRIPT_LOSS, rel=1e-12)


def test_the_same_exception_at_the_same_step_ends_with_a_verdict(tmp_path):
    with Judged(tmp_path / "run", script_spec(tmp_path, "always")) as run:
        run.start()
        run.ended(1)
        assert run.recoveries()[-1] == "stop" and len(run.events("attempt.started")) == 2, run.story()
        assert "bad row 17" in run.verdict() and "same step" in run.verdict()


def test_not_a_number_stops_the_run_instead_of_looping(tmp_path):
    """Fault 31: the step is retried, since a flipped bit would not recur; then the batch is at fault."""
    with Judged(tmp_path, spec_of(**{"training.optimizer.learning_rate": 1e30})) as run:
        run.start()
        run.ended(1)
        assert run.recoveries() == ["restart", "stop"], run.story()
        assert run.troubles()[0].detail["incident"] == "not_finite"
        assert len(run.events("step")) < 10, "nothing was applied"


def test_the_fork_server_dies_and_takes_the_store_with_it(tmp_path, reference):
    """Faults 13 and 37: ranks continue; the store's port is taken by then, and the next attempt uses another one."""
    with Judged(tmp_path, spec_of()) as run:
        run.start()
        run.wait_for_step(10)
        (server,) = run.fork_servers()
        stores = [each.pid for each in psutil.Process(server).children() if not has_agent_connection(each.pid)]
        ports = [port for pid in stores for port in listening(pid)]
        assert ports, "a store listens"
        os.kill(server, signal.SIGKILL)
        with contextlib.ExitStack() as taken:
            for port in ports:
                run.wait_until(lambda port=port: taken_port(taken, port), f"port {port} to be free")
            run.wait_for_step(run.step() + 2)
            run.kill_rank(1)
            run.ended()
        # Ranks whose parent is gone end well or badly like any other: no attempt more.
        assert run.recoveries() == ["restart"] and len(run.events("attempt.started")) == 2, run.story()
        assert run.final_hash() == reference(1, 2)[0]


def taken_port(stack, port):
    """Whether the port is ours from now on."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        return False
    sock.listen()
    stack.enter_context(sock)
    return True


def test_what_goes_wrong_inside_a_step_leaves_no_trace(tmp_path, reference, monkeypatch):
    """Faults 2, 3, 4, 28, 31 and 40 at exact points, one after another, injected by a rank itself."""
    faults = ["kill-reduce", "kill-voted", "kill-updated", "reader", "memory", "not-finite"]
    monkeypatch.setenv("MUSTER_DRILL", "1")
    with Judged(tmp_path, spec_of()) as run:
        run.start()
        for number, fault in enumerate(faults):
            run.wait_for_step(run.step() + 4)
            before = len(run.events("incident.resolved"))
            order = {"fault": fault, "rank": number % 2}
            (tmp_path / "inject_fault.tmp").write_text(json.dumps(order))
            os.replace(tmp_path / "inject_fault.tmp", tmp_path / "inject_fault.json")
            run.wait_until(lambda n=before: len(run.events("incident.resolved")) > n, f"recovery from {fault}")
            assert (tmp_path / f"inject_fault.{fault}.done").exists(), run.story()
        run.ended()
        assert set(run.recoveries()) == {"restart"}, run.story()
        kinds = [event.detail["incident"] for event in run.troubles()]
        assert {"rank_exit", "rank_exception", "rank_oom", "not_finite"} <= set(kinds), run.story()
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2)[:2]


def test_a_supervisor_that_stood_still_blames_nobody(tmp_path, reference):
    """Fault 12, stopped instead of killed, for longer than a host may be silent: queued messages are handled."""
    changes = {"training.steps": 120}
    with Judged(tmp_path, spec_of(**changes, **{"recovery.heartbeat_timeout_s": 1.5})) as run:
        run.start()
        run.wait_for_step(10)
        at = run.step()
        os.kill(run.supervisor.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(run.supervisor.pid, signal.SIGCONT)
        run.ended()
        assert run.recoveries() == [] and run.step() > at, run.story()
        assert run.final_hash() == reference(1, 2, **changes)[0]


# ---------------------------------------------------------------- checkpoints


def test_a_torn_checkpoint_and_a_rotten_one_are_passed_over(tmp_path, reference):
    """Faults 32, 33 and 42: everything dies during a save, and the newest complete version is corrupted."""
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
        skipped = [event.detail for event in run.events("checkpoint.rejected")]
        assert any(f"{newest:08d}" in each["uri"] for each in skipped), run.story()
        restored = [event.step for event in run.events("checkpoint.restored")][-1]
        assert 0 < restored < newest
        assert run.final_hash() == reference(1, 2)[0]
