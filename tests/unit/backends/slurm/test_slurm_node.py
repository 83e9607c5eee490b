"""Who takes the lease, when, and what becomes of the holder; what follows a time limit; one node's step."""

import json
import os
import subprocess
import sys
import time

import pytest
from fakes import supervisor_words
from fakes.slurm import FakeJob, FakeSlurm

from muster.backends.slurm import batch as batch_module
from muster.backends.slurm import locate
from muster.backends.slurm import node as node_module
from muster.backends.slurm.batch import Batch, Step, send_to_supervisor
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.node import SILENCE_S, Node
from muster.backends.slurm.resubmit import PART, resubmit
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import ConflictError, UsageError
from muster.protocol.client import StopRun
from muster.storage.store import open_store
from muster.supervise.process.lease import LeaseKeeper

ENVIRON = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "muster-r.1", "SLURM_JOB_NODELIST": "n[1-2]"}


class Recorder(Node):
    """A node that starts nothing and writes down what it would have started."""

    def _start(self, name, argv, variables):
        self.started = [*getattr(self, "started", []), name]
        return subprocess.Popen(["true"])


@pytest.fixture
def run_dir(tmp_path):
    spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"]})
    (tmp_path / "resolved.json").write_text(spec.model_dump_json())
    (tmp_path / "hosts-1.json").write_text(json.dumps({"host-0": "n1", "host-1": "n2"}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "token").write_text("ab" * 32)
    (tmp_path / "token").chmod(0o600)
    return tmp_path


def candidate(run_dir, host="host-1", *, controller=True, silent_s=0.0):
    found = Recorder(run_dir, "r", host, ENVIRON, Slurm(shell=FakeSlurm()))
    found._reaches_a_controller = lambda: controller
    found.reached_s = time.monotonic() - silent_s
    return found


def held(run_dir):
    """A lease whose holder lives."""
    keeper = LeaseKeeper(open_store(), str(run_dir / "lease.json"))
    keeper.take(("192.0.2.1", 9))
    return keeper


def unreachable(monkeypatch, value=False):
    monkeypatch.setattr(locate, "connects", lambda address, **_: value)


def test_a_holder_that_answers_is_left_alone(run_dir, monkeypatch):
    held(run_dir)
    unreachable(monkeypatch, True)
    node = candidate(run_dir, silent_s=100)
    node._watch_lease()
    assert node.starts == 0 and node.reached_s > time.monotonic() - 1


def test_a_silent_holder_is_borne_with_for_a_while_then_deposed(run_dir, monkeypatch):
    keeper = held(run_dir)
    unreachable(monkeypatch)
    node = candidate(run_dir, silent_s=SILENCE_S / 2)
    node._watch_lease()
    assert node.starts == 0
    keeper.renew()
    node = candidate(run_dir, silent_s=SILENCE_S + 1)
    node._watch_lease()
    assert node.started == ["supervisor"]
    with pytest.raises(ConflictError):
        keeper.renew()  # the old holder finds out at its next renewal, wherever it is
    successor = LeaseKeeper(open_store(), str(run_dir / "lease.json"))
    assert successor.take(("192.0.2.2", 9)) == 2


def test_later_nodes_are_more_patient(run_dir, monkeypatch):
    held(run_dir)
    unreachable(monkeypatch)
    node = candidate(run_dir, "host-3", silent_s=SILENCE_S + 1)
    node._watch_lease()
    assert node.starts == 0 and node.silence_limit_s > SILENCE_S + 1


def test_a_node_that_reaches_nobody_ends_its_own_ranks_and_deposes_nobody(run_dir, monkeypatch):
    keeper = held(run_dir)
    unreachable(monkeypatch)
    ended = []
    monkeypatch.setattr(node_module, "end_labelled", lambda *arguments, **_: ended.append(arguments))
    node = candidate(run_dir, controller=False, silent_s=100)
    node.agent = subprocess.Popen(["sleep", "60"])
    node._watch_lease()
    assert node.starts == 0 and ended == [("r", "host-1")]
    assert node.agent.poll() is not None
    keeper.renew()
    node.looked_s, node.reached_s = 0.0, time.monotonic() - 100
    node._reaches_a_controller = lambda: True
    node._watch_lease()  # the controller answers again: the holder gets its time anew
    assert node.starts == 0
    keeper.renew()


def test_a_lease_that_was_given_back_is_the_first_nodes_to_take(run_dir):
    keeper = held(run_dir)
    keeper.give_back()
    second, first = candidate(run_dir, "host-1"), candidate(run_dir, "host-0")
    second._watch_lease()
    first._watch_lease()
    assert (second.starts, first.starts) == (0, 1)


def supervisor_ends(node, program, times):
    """So often beside a living agent, each time as soon as it was started."""
    node.agent = subprocess.Popen(["sleep", "60"])
    try:
        for _ in range(times):
            node.supervisor = subprocess.Popen(["sh", "-c", program])
            node.supervisor.wait()
            node.took_over_s = time.monotonic()
            node._check_children()
    finally:
        node.agent.kill()
        node.agent.wait()


def test_a_supervisor_that_was_killed_is_started_again_at_once_but_not_for_ever(run_dir):
    node = candidate(run_dir, "host-0")
    supervisor_ends(node, "kill -9 $$", 10)
    assert node.started == ["supervisor"] * 5 and node.failures >= 6


@pytest.mark.parametrize(("held_by_another", "failures"), [(True, 0), (False, 6)])
def test_a_lost_race_for_the_lease_is_no_failure(run_dir, held_by_another, failures):
    """Six lost races would have kept this node from taking over for the rest of the job."""
    node = candidate(run_dir, "host-1")
    keeper = held(run_dir)
    if not held_by_another:
        keeper.give_back()
    supervisor_ends(node, "exit 1", 6)
    assert node.failures == failures and node.starts == 0


def test_processes_of_a_host_are_found_by_their_label_whatever_their_session():
    label = {"MUSTER_RUN_ID": "r-of-this-test", "MUSTER_HOST": "host-9", "PATH": os.environ["PATH"]}
    mine = subprocess.Popen(["sleep", "60"], env=label, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], env={**label, "MUSTER_HOST": "host-8"})
    try:
        node_module.end_labelled("r-of-this-test", "host-9", spared={os.getpid()})
        assert mine.wait(10) == -9 and other.poll() is None
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_where_the_controllers_are_is_learnt_from_slurms_configuration(run_dir, monkeypatch):
    text = "SlurmctldHost[0]    = head(192.0.2.5)\nSlurmctldHost[1]    = backup\nSlurmctldPort    = 6817\n"
    shell = FakeSlurm(configuration=text)
    assert Slurm(shell=shell).controllers() == [("192.0.2.5", 6817), ("backup", 6817)]
    node = Recorder(run_dir, "r", "host-1", ENVIRON, Slurm(shell=shell))
    unreachable(monkeypatch)
    assert node._reaches_a_controller(), "nobody knows: the lease decides"
    (run_dir / "controllers.json").write_text(json.dumps([["192.0.2.5", 6817]]))
    assert not node._reaches_a_controller()


def test_whoever_stands_in_for_the_batch_node_knows_the_time_limit_and_ends_the_job(run_dir, monkeypatch):
    shell = FakeSlurm()
    shell.jobs["1"] = FakeJob(id="1", name="muster-r.1", folder=str(run_dir), process=None, end_s=2_000_000_000)
    node = Recorder(run_dir, "r", "host-1", ENVIRON, Slurm(shell=shell))
    assert node._notice_due() == 2_000_000_000 - 180
    monkeypatch.setattr(node_module, "BATCH_LEAVES_S", 0.0)
    (run_dir / SCRIPT).write_text("#!/bin/bash\ntrue\n")
    shell.held = node.noticed = True
    node._replace_batch(75)
    assert shell.jobs["1"].state == "COMPLETING" and shell.jobs["2"].state == "PENDING", "a further job goes on"


def test_nobody_to_tell_is_no_error(run_dir):
    assert send_to_supervisor(run_dir, StopRun()) is False
    (run_dir / "lease.json").write_bytes(supervisor_words.lease(("127.0.0.1", 1)))
    assert send_to_supervisor(run_dir, StopRun()) is False


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no-such0"):
        locate.address_of_this_node([], interface="no-such0")
    assert locate.address_of_this_node([], interface="lo") == "127.0.0.1"


# ---------------------------------------------------------------- the job after this one


def further(run_dir, shell, *, environ=None, **slurm):
    spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"], "slurm": slurm})
    said = []
    (run_dir / SCRIPT).write_text("#!/bin/bash\ntrue\n")
    went = resubmit(spec, run_dir, "r", {**ENVIRON, **(environ or {})}, Slurm(shell=shell), said.append)
    return went, " ".join(said)


def test_a_further_job_is_handed_in_once(run_dir):
    shell = FakeSlurm(held=True)
    went, said = further(run_dir, shell)
    assert went and "continues in job 1" in said and shell.jobs["1"].name == "muster-r.1"
    shell.jobs["5"] = shell.jobs.pop("1")  # not this very job's id
    shell.jobs["5"].id = "5"
    went, said = further(run_dir, shell)
    assert went and "continues in job 5" in said and len(shell.jobs) == 1


def test_where_none_can_be_handed_in_this_one_is_requeued(run_dir):
    shell = FakeSlurm()
    shell.trouble["sbatch"] = (False, "sbatch: error: Batch job submission failed: Access/permission denied")
    went, said = further(run_dir, shell)
    assert went and ("scontrol", "requeue", "1") in shell.asked and "permission denied" in said


def test_hours_that_are_used_up_are_not_bought_again(run_dir):
    spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"], "limits": {"max_hours": 2}})
    said = []
    assert resubmit(spec, run_dir, "r", ENVIRON, Slurm(shell=FakeSlurm()), said.append) is False
    assert "max_hours (2) is used up" in said[0]


def test_no_further_job_where_none_is_wanted(run_dir):
    assert further(run_dir, FakeSlurm(), resubmit="no")[0] is False
    assert further(run_dir, FakeSlurm(), max_jobs=3, environ={PART: "3"})[0] is False


def test_a_job_writes_down_which_host_is_which_node(run_dir):
    shell = FakeSlurm()
    shell.hostnames = "n1\nn2\n"
    batch = Batch(run_dir, "r", ENVIRON, Slurm(shell=shell))
    assert [(step.host, step.node) for step in batch._steps()] == [("host-0", "n1"), ("host-1", "n2")]


def test_a_step_that_says_what_is_wrong_with_the_run_file_is_not_asked_again(run_dir, monkeypatch):
    monkeypatch.setattr(batch_module, "STEP_PAUSE_S", -1.0)
    batch = Batch(run_dir, "r", ENVIRON, Slurm(shell=FakeSlurm()))
    started = []
    monkeypatch.setattr(batch, "_start", started.append)
    for code, again in ((1, True), (UsageError.exit_code, False)):
        step = Step(host="host-0", node="n1", process=subprocess.Popen(["sh", "-c", f"exit {code}"]), starts=1)
        step.process.wait()
        batch._reap(step)
        assert batch._restart([step]) is again and (step in started) is again


def test_what_is_wrong_stands_in_the_jobs_own_log_too(run_dir):
    """srun's output goes there; the node's own log alone would have to be known of."""
    spec = RunSpec.model_validate(
        {"name": "r", "backend": "slurm", "command": ["x"], "slurm": {"interface": "no-such0"}}
    )
    (run_dir / "resolved.json").write_text(spec.model_dump_json())
    words = [sys.executable, "-P", "-m", "muster.backends.slurm.node", "--run-dir", str(run_dir), "--run-id", "r"]
    done = subprocess.run(
        [*words, "--host", "host-0"], env={**os.environ, **ENVIRON}, capture_output=True, text=True, check=False
    )
    assert done.returncode == UsageError.exit_code
    assert "host-0: error: slurm.interface" in done.stderr and "no-such0" in done.stderr
    assert "error: slurm.interface" in (run_dir / "logs" / "node-host-0.log").read_text()


@pytest.mark.parametrize(
    ("address", "pattern", "place"),
    [
        # As srun of Slurm 22.05 gives it in a step, with topology/tree.
        ("spine.leaf1.node1", "switch.switch.node", {"MUSTER_RACK": "leaf1", "MUSTER_BLOCK": "spine"}),
        ("top.spine.leaf1.node1", "switch.switch.switch.node", {"MUSTER_RACK": "leaf1", "MUSTER_BLOCK": "spine"}),
        ("leaf1.node1", "switch.node", {"MUSTER_RACK": "leaf1"}),
        ("block7.node1", "block.node", {"MUSTER_RACK": "block7"}),
        ("node1", "node", {}),
        ("", "", {}),
        ("spine.leaf1.node2", "switch.switch.node", {}),
        ("spine.leaf1.x.node1", "switch.switch.node", {}),
    ],
)
def test_a_nodes_rack_is_its_leaf_switch(address, pattern, place):
    environ = {
        "SLURMD_NODENAME": "node1", "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern,
    }  # fmt: skip
    assert locate.place_of_this_node(environ) == place
    assert locate.place_of_this_node({}) == {}
