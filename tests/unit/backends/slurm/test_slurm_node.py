"""What a node does about its agent and the run's supervisor, and at the end for the batch node; the batch program."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fakes import supervisor_words
from fakes.host_program import OneHost
from fakes.slurm import FakeJob, FakeSlurm

from muster.backends.host import state as host
from muster.backends.host.place import ask_to_save
from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, RESUME, SUPERVISOR, Child, Exit, Lease, Looked, Outcome, State
from muster.backends.slurm import locate
from muster.backends.slurm import node as node_module
from muster.backends.slurm.batch import LINGER_S, RULES, BatchPlace
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.job_place import PART
from muster.backends.slurm.node import NodePlace, rules
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.event_log import EventLog

ENVIRON = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "muster-r.1", "SLURM_JOB_NODELIST": "n[1-2]"}
HELD = Looked(lease=Lease(kind="held", left_s=8.0))
STALE = Looked(lease=Lease(kind="held", left_s=-60.0))
FREE = Looked(lease=Lease(kind="free"))
VACATED = Looked(lease=Lease(kind="vacated"))
STEPS = ("step 0", "step 1")
CUT_OFF = Looked(lease=Lease(kind="held", left_s=8.0), cut_off=True)


@pytest.fixture
def run_dir(tmp_path):
    spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"]})
    (tmp_path / "resolved.json").write_text(spec.model_dump_json())
    (tmp_path / "hosts-1.json").write_text(json.dumps({"host-0": "n1", "host-1": "n2"}))
    (tmp_path / SCRIPT).write_text("#!/bin/bash\ntrue\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "token").write_text("ab" * 32)
    (tmp_path / "token").chmod(0o600)
    return tmp_path


def node(rank=0, says=None):
    found = OneHost(rules(rank))
    found.home.says = says
    return found


# ---------------------------------------------------------------- supervisor, cut, SIGTERM


def test_the_node_that_deposed_a_silent_holder_takes_its_place_at_once_and_learns_of_the_time():
    """The batch node, which is told of the time limit, may be the one that is lost."""
    second = node(1, HELD)
    second.time_left_s = 100.0
    second.lasts(30)
    second.home.says = VACATED
    second.lasts(1.5)
    assert SUPERVISOR in second.children.running and second.asked == ["time left"]
    second.lasts(110)
    assert second.asked == ["time left", "time"] and second.state.time_was_asked


@pytest.mark.parametrize("after", [HELD, FREE])
def test_a_node_that_is_cut_off_ends_its_own_ranks_and_starts_nothing(after):
    second = node(1, HELD)
    second.lasts(30)
    second.home.says = CUT_OFF
    second.lasts(60)
    assert second.asked == ["end here"] and second.children.sent == [(AGENT, signal.SIGKILL)]
    assert second.children.running == {} and second.leaving is None
    second.home.says = after
    second.lasts(5)
    assert AGENT in second.children.running, "it can be a spare"


def test_the_node_that_supervises_passes_sigterm_on_until_it_is_answered():
    first = node().holds()
    first.reached = False
    first.program.post(host.Noticed())
    first.lasts(4)
    assert 3 <= len(first.asked) <= 5 and set(first.asked) == {"notice"}
    first.reached, asked = True, len(first.asked)
    first.lasts(20)
    assert len(first.asked) == asked + 1 and first.children.sent == []
    first.home.says = Looked(lease=Lease(kind="free"), end=RESUME)
    first.children.end(SUPERVISOR, RESUME)
    first.lasts(2)
    assert first.leaving == (Outcome.RUN_ENDED, RESUME)


def test_the_other_nodes_ignore_sigterm_and_one_that_takes_over_passes_it_on():
    second, alone = node(1, HELD), node(1, FREE)
    for one in (second, alone):
        one.lasts(10)
        one.program.post(host.Noticed())
    second.lasts(10)
    assert second.asked == [] and second.children.sent == [] and second.leaving is None
    second.home.says = VACATED
    second.lasts(2)
    assert "notice" in second.asked
    assert alone.ends() == Exit(Outcome.EVICTED, 128 + signal.SIGTERM), "the run had no supervisor yet"
    assert alone.asked == ["end here"]


def test_sigterm_between_two_supervisors_of_a_node_waits_for_the_second():
    first = node().holds()
    first.children.end(SUPERVISOR, 137)
    first.lasts(0.5)
    first.program.post(host.Noticed())
    first.lasts(10)
    assert first.leaving is None and first.asked == ["notice"] and SUPERVISOR in first.children.running


# ---------------------------------------------------------------- what is Slurm's own


def place(run_dir, shell, kind=NodePlace, **more):
    spec = RunSpec.model_validate_json((run_dir / "resolved.json").read_text())
    more = {"rank": 1, "holder": None, **more} if kind is NodePlace else {}
    home, slurm = RunState(run_dir=run_dir), Slurm(shell=shell)
    return kind(
        home=home, run_dir=run_dir, run_id="r", environ=ENVIRON, spec=spec, began_wall_ns=0, slurm=slurm, **more
    )


def finish(run_dir, outcome, code):
    log = EventLog("r", run_dir / "events", "supervisor", 1)
    log.append("run.finished", detail={"outcome": outcome, "exit_code": code, "reason": ""})
    log.close()


def ended_job(run_dir):
    shell = FakeSlurm(held=True)
    shell.jobs["1"] = FakeJob(id="1", name="muster-r.1", folder=str(run_dir), process=None, end_s=2_000_000_000)
    return shell


def test_whoever_stands_in_for_the_batch_node_knows_the_time_limit(run_dir):
    left_s = place(run_dir, ended_job(run_dir)).time_left_s()
    assert left_s == pytest.approx(2_000_000_000 - 180 - time.time(), abs=5)
    assert place(run_dir, FakeSlurm()).time_left_s() == host.NEVER


@pytest.mark.parametrize(("starts", "asked", "ended", "jobs"), [
    (1, True, Exit(Outcome.RUN_ENDED, RESUME), {"1": "COMPLETING", "2": "PENDING"}),
    (1, False, Exit(Outcome.RUN_ENDED, RESUME), {"1": "COMPLETING"}),
    (1, True, Exit(Outcome.RUN_ENDED, 0), {"1": "COMPLETING"}),
    (0, False, Exit(Outcome.RUN_ENDED, 0), {"1": "RUNNING"}),
    (3, False, Exit(Outcome.GIVEN_UP, 2), {"1": "RUNNING"}),
])  # fmt: skip
def test_whoever_stands_in_for_the_batch_node_ends_the_job(run_dir, monkeypatch, starts, asked, ended, jobs):
    """A further job goes on, where the run has saved because of the time limit. Where one gave up another may not."""
    shell = ended_job(run_dir)
    monkeypatch.setattr(node_module, "BATCH_LEAVES_S", 0.0)
    state = State(programs={SUPERVISOR: Child(starts=starts)}, time_was_asked=asked)
    assert place(run_dir, shell).leave(ended, state) == (ended.code if starts else 0)
    assert {name: job.state for name, job in shell.jobs.items()} == jobs


def test_a_job_that_was_requeued_instead_is_not_ended(run_dir, monkeypatch):
    shell = ended_job(run_dir)
    shell.trouble["sbatch"] = (False, "sbatch: error: Batch job submission failed: Access/permission denied")
    monkeypatch.setattr(node_module, "BATCH_LEAVES_S", 0.0)
    state = State(programs={SUPERVISOR: Child(starts=1)}, time_was_asked=True)
    assert place(run_dir, shell).leave(Exit(Outcome.RUN_ENDED, RESUME), state) == RESUME
    assert ("scontrol", "requeue", "1") in shell.asked
    assert not [words for words in shell.asked if words[0] == "scancel"]


def test_a_runs_result_stands_whoever_holds_the_lease(run_dir):
    """The supervisor's node may be lost just after it."""
    one = place(run_dir, FakeSlurm(), holder=node(1, STALE).home)
    assert one.look(None) == STALE
    finish(run_dir, "succeeded", 0)
    assert one.look(None) == Looked(lease=Lease(kind="free"), end=0)
    one.began_wall_ns = time.time_ns() + 10**9
    assert one.look(None) == STALE, "an older job's"


def test_processes_of_a_host_are_found_by_their_label_whatever_their_session(run_dir):
    label = {"MUSTER_RUN_ID": "r", "MUSTER_HOST": "host-9", "PATH": os.environ["PATH"]}
    mine = subprocess.Popen(["sleep", "60"], env=label, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], env={**label, "MUSTER_HOST": "host-8"})
    try:
        place(run_dir, FakeSlurm(), rank=9).end_here()
        assert mine.wait(10) == -9 and other.poll() is None
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_nobody_to_tell_is_no_error(run_dir):
    home = RunState(run_dir=run_dir)
    assert ask_to_save(home.lease(), b"x", "a test") is False
    (run_dir / "lease.json").write_bytes(supervisor_words.lease(("127.0.0.1", 1)))
    assert ask_to_save(home.lease(), b"x", "a test") is False


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no-such0"):
        locate.address_of_this_node([], interface="no-such0")
    assert locate.address_of_this_node([], interface="lo") == "127.0.0.1"


# ---------------------------------------------------------------- the batch program


def batch():
    found = OneHost(RULES, programs=STEPS)
    found.home.says = FREE
    return found


def ends(job, name, code):
    """As soon as it runs; after so many seconds."""
    began = job.clock.now_s
    while name not in job.children.running and job.leaving is None:
        job.lasts(0.5)
    waited_s = job.clock.now_s - began
    job.children.end(name, code)
    job.lasts(0.5)
    return waited_s


@pytest.mark.parametrize("code", [2, 3])
def test_a_step_that_ended_too_early_is_started_again_ever_later_but_not_for_ever(code):
    job = batch()
    job.lasts(1)
    pauses = [ends(job, "step 0", early) for early in (1, 137, 0, 1)]
    assert pauses == pytest.approx([0, 10, 20, 30], abs=1.5)
    job.lasts(600)
    assert job.leaving is None, "the other node goes on"
    ends(job, "step 1", code)  # what is wrong with the run file is not asked again
    assert job.ends() == Exit(Outcome.END_UNWRITTEN, 1)
    assert [job.children.log.count(name) for name in STEPS] == [RULES.most_starts, 1]


def test_the_notice_goes_to_the_supervisor_until_it_answers():
    job = batch()
    job.reached = False
    job.program.post(host.Noticed())
    job.lasts(5)
    assert 3 <= len(job.asked) <= 6
    job.reached, asked = True, len(job.asked)
    job.lasts(60)
    assert len(job.asked) == asked + 1 and job.children.sent == [] and sorted(job.children.running) == [*STEPS]


def test_the_steps_that_are_cut_off_do_not_hold_up_the_end():
    job = batch()
    job.lasts(10)
    job.home.says = Looked(lease=Lease(kind="free"), end=0)
    ends(job, "step 1", 0)
    began = job.clock.now_s
    assert job.ends() == Exit(Outcome.RUN_ENDED, 0) and job.children.log == [*STEPS]
    assert LINGER_S - 1 <= job.clock.now_s - began <= LINGER_S + 2 and job.children.sent == []


def test_a_job_writes_down_which_host_is_which_node_and_starts_a_step_on_each(run_dir):
    text = "SlurmctldHost[0]    = head(192.0.2.5)\nSlurmctldHost[1]    = backup\nSlurmctldPort    = 6817\n"
    shell = FakeSlurm(hostnames="n1\nn2\n", configuration=text)
    programs = place(run_dir, shell, BatchPlace).host_program().programs
    assert json.loads((run_dir / "hosts-1.json").read_text()) == {"host-0": "n1", "host-1": "n2"}
    assert json.loads((run_dir / "controllers.json").read_text()) == [["192.0.2.5", 6817], ["backup", 6817]]
    assert list(programs) == ["step of host-0 on n1", "step of host-1 on n2"]
    argv = programs["step of host-1 on n2"].argv
    assert argv[0] == "srun" and "--nodelist=n2" in argv and list(argv[-2:]) == ["--host", "host-1"]


@pytest.mark.parametrize(("noticed", "code", "said"), [(True, RESUME, 0), (False, RESUME, RESUME), (True, 130, 130)])
def test_a_run_that_saved_because_of_the_time_limit_goes_on_in_a_further_job(run_dir, noticed, code, said):
    shell = FakeSlurm(held=True)
    one = place(run_dir, shell, BatchPlace)
    assert one.look(None) == FREE
    finish(run_dir, "preempted", code)
    assert one.look(None).end == code
    notice = host.Notice(since_s=0.0, scope="run", delivered=True) if noticed else None
    assert one.leave(Exit(Outcome.RUN_ENDED, code), State(notice=notice)) == said
    assert len(shell.jobs) == (1 if said == 0 else 0)
    assert one.leave(Exit(Outcome.END_UNWRITTEN, 0), State(notice=notice)) == 1, "a job without a result has failed"


# ---------------------------------------------------------------- the job after this one


@pytest.fixture
def further(run_dir, capsys):
    def resubmit(shell, *, environ=None, **keys):
        one = place(run_dir, shell, BatchPlace)
        one.spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"], **keys})
        one.environ = {**ENVIRON, **(environ or {})}
        return one.resubmit(), capsys.readouterr().out

    return resubmit


def test_a_further_job_is_handed_in_once(further):
    shell = FakeSlurm(held=True)
    went, said = further(shell)
    assert went and "continues in job 1" in said and shell.jobs["1"].name == "muster-r.1"
    shell.jobs["5"] = shell.jobs.pop("1")  # not this very job's id
    shell.jobs["5"].id = "5"
    went, said = further(shell)
    assert went and "continues in job 5" in said and len(shell.jobs) == 1


def test_where_none_can_be_handed_in_this_one_is_requeued(further):
    shell = FakeSlurm()
    shell.trouble["sbatch"] = (False, "sbatch: error: Batch job submission failed: Access/permission denied")
    went, said = further(shell)
    assert went and ("scontrol", "requeue", "1") in shell.asked and "permission denied" in said


def test_no_further_job_where_none_is_wanted(further):
    assert further(FakeSlurm(), slurm={"resubmit": "no"})[0] is None
    assert further(FakeSlurm(), slurm={"max_jobs": 3}, environ={PART: "3"})[0] is None
    went, said = further(FakeSlurm(), limits={"max_hours": 2})
    assert went is None and "max_hours (2) is used up" in said


def begin(run_dir, run_id, **keys):
    """A node's program as its step starts it; it ends with what is wrong with ``keys``."""
    spec = RunSpec.model_validate({"name": "r", "backend": "slurm", "command": ["x"], **keys})
    (run_dir / "resolved.json").write_text(spec.model_dump_json())
    words = [sys.executable, "-P", "-m", "muster.backends.slurm.node", "--run-dir", str(run_dir), "--run-id", run_id]
    env = {**os.environ, **ENVIRON}
    return subprocess.run([*words, "--host", "host-0"], env=env, capture_output=True, text=True, check=False)


def test_what_is_wrong_stands_in_the_jobs_own_log_too(run_dir):
    """srun's output goes there; the node's own log alone would have to be known of."""
    done = begin(run_dir, "r", slurm={"interface": "no-such0"})
    assert done.returncode == UsageError.exit_code
    assert "host-0: error: slurm.interface" in done.stderr and "no-such0" in done.stderr
    assert "error: slurm.interface" in (run_dir / "logs" / "node-host-0.log").read_text()


def test_a_node_begins_by_ending_what_an_earlier_start_of_it_left(run_dir):
    """Where Slurm tracks processes by their parents, a node's program that is killed leaves its agent behind."""
    label = {"MUSTER_RUN_ID": "r-left", "MUSTER_HOST": "host-0", "PATH": os.environ["PATH"]}
    left = subprocess.Popen(["sleep", "60"], env=label, start_new_session=True)
    try:
        done = begin(run_dir, "r-left", resources={"machine": "a3-megagpu-8g", "hosts": 2, "device": "cuda"})
        assert "no NCCL plugin" in done.stderr and left.wait(10) == -9
    finally:
        left.kill()
        left.wait()


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
