"""Without a listener: ranks that end without a supervisor, one that does not register with a new agent, a script that
never calls muster.run."""

import os
import signal

import psutil
import pytest
from cluster import LiveRun, spec_of

from muster.config.spec import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def test_ranks_of_two_hosts_that_end_without_a_supervisor_have_succeeded(tmp_path):
    spec = spec_of(**{"resources.hosts": 2, "resources.ranks_per_host": 1, "training.steps": 30})
    with LiveRun(tmp_path, spec) as run:
        run.start()
        run.wait_for_step(5)
        os.kill(run.supervisor.pid, signal.SIGKILL)
        run.supervisor.wait()
        run.supervisor = None
        run.wait_until(lambda: len(run.events("rank.exited")) == 2, "the end of both ranks")
        run.start_supervisor()
        assert run.wait(40) == 0, run.story()
        assert run.step() == 30 and len(run.events("attempt.started")) == 1, run.story()


def test_a_stopped_rank_whose_agent_dies_too_is_ended_with_its_attempt(tmp_path):
    with LiveRun(tmp_path, spec_of()) as run:
        run.start()
        run.wait_for_step(10)
        stopped, _ = run.ranks()[1]
        (agent,) = (event.detail["pid"] for event in run.events("agent.started"))
        os.kill(stopped, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        run.wait_until(lambda: len(run.events("attempt.started")) == 2, "another attempt")
        assert not psutil.pid_exists(stopped), "it holds its device while its successor starts"
        assert run.wait() == 0, run.story()
        assert run.step() == 60 and run.recoveries() == ["restart"], run.story()


def test_a_script_that_never_speaks_may_take_its_time(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("import time\n\ntime.sleep(6)\n")
    of = {
        "name": "silent",
        "command": [str(script)],
        "resources": {"ranks_per_host": 1, "device": "cpu", "threads_per_rank": 1},
        "recovery": {"start_timeout_s": 4.0},
        "checkpoint": {"every_steps": 0},
    }
    with LiveRun(tmp_path, RunSpec.model_validate(of)) as run:
        run.start()
        assert run.wait(60) == 0 and len(run.events("attempt.started")) == 1, run.story()
        assert "rank_hang" not in [event.detail["incident"] for event in run.troubles()], run.story()
        messages = [event.detail["text"] for event in run.events("run.message")]
        assert any("start_timeout_s applies from then on" in text for text in messages)
