"""Where a run is, in one sentence; what Slurm offers; what is refused and how."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest
from fakes.clock import VirtualClock
from fakes.slurm import NODES, FakeSlurm

from muster.backends.slurm import reason_text
from muster.backends.slurm.commands import Job, Slurm, is_of, name_of
from muster.backends.slurm.job_outcome import ACCOUNTING_LAGS_S, SlurmJob, judge
from muster.backends.slurm.launcher import SlurmLauncher
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, BusyError, CapacityError, ConflictError, RunFileError, UsageError
from muster.core.events import Event
from muster.core.types import JobHandle, JobState
from muster.storage.run_output import Verdict

HERE = Path("/runs/r")
RECORD = SlurmJob(run_id="r", backend="slurm", submission=1, submitted_wall_ns=0, state="submitted", job_id="12")
JOB = Job(
    id="12", name="muster-r.1", state="RUNNING", reason="None", nodes="n[1-3]", count=3, start_s=100, end_s=None,
    folder="/runs/r", partition="main",
)  # fmt: skip
SAVED = Verdict(outcome="preempted", exit_code=75, reason="saved and left after step 9", wall_ns=200 * 10**9)


def look(*jobs, verdict=None, record=RECORD, accounted=None, **more):
    return judge(record, jobs, verdict, accounted, run_dir=HERE, **more)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Priority", "higher priority"),
        ("Resources", "waits for nodes"),
        ("(Resources)", "waits for nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved (UnavailableNodes:n[1-2])"),
        ("BeginTime", "after a requeue"),
        ("QOSMaxGRESPerUser", "your QOS has reached a limit (QOSMaxGRESPerUser)"),
        ("AssocGrpGRES", "your account has reached a limit"),
        ("SomethingNew", "Slurm reports SomethingNew"),
    ],
)
def test_a_waiting_job_says_why(reason, says):
    found = look(dataclasses.replace(JOB, state="PENDING", reason=reason))
    assert found.state is JobState.WAITING and says in found.reason and "job 12 waits" in found.reason


def test_a_running_job_names_its_nodes():
    found = look(JOB)
    assert found.state is JobState.RUNNING and "3 nodes (n[1-3])" in found.reason
    assert found.tasks["supervisor"].startswith("running")


def test_a_verdict_ends_the_run_before_slurm_has_noticed():
    found = look(JOB, verdict=Verdict(outcome="succeeded", exit_code=0, reason="done", wall_ns=200 * 10**9))
    assert (found.state, found.exit_code, found.reason) == (JobState.SUCCEEDED, 0, "done")


def test_a_run_that_saved_on_notice_goes_on_in_its_next_job():
    first = dataclasses.replace(JOB, state="COMPLETED")
    waiting = dataclasses.replace(JOB, id="13", state="PENDING", reason="Priority", start_s=None)
    found = look(first, waiting, verdict=SAVED)
    assert found.state is JobState.WAITING and "job 13, the 2nd of this run" in found.reason
    begun = dataclasses.replace(JOB, id="13", start_s=300)
    assert look(first, begun, verdict=SAVED).state is JobState.RUNNING
    assert look(first, verdict=SAVED).state is JobState.PREEMPTED
    for state in ("RUNNING", "COMPLETING"):
        leaving = look(dataclasses.replace(JOB, state=state), verdict=SAVED)
        assert leaving.state is JobState.RUNNING and "job 12 is ending" in leaving.reason, "it may submit the next one"
        assert "supervisor" not in leaving.tasks
    requeued = dataclasses.replace(JOB, state="PENDING", reason="BeginTime", start_s=None)
    assert look(requeued, verdict=SAVED).state is JobState.WAITING


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT"])
def test_a_run_that_saved_at_sigterm_was_stopped_if_a_person_cancelled_its_job(state):
    """scancel, a preemption and a time limit all begin with SIGTERM, at which the run saves."""
    found = look(dataclasses.replace(JOB, state=state), verdict=SAVED)
    assert found.state is (JobState.STOPPED if state == "CANCELLED" else JobState.PREEMPTED)
    row = {"State": "CANCELLED by 1000" if state == "CANCELLED" else state, "JobID": "12"}
    assert look(accounted=row, verdict=SAVED).state is found.state, "squeue has dropped it"
    done = dataclasses.replace(SAVED, outcome="succeeded", exit_code=0)
    assert look(accounted=row, verdict=done).state is JobState.SUCCEEDED, "it was done before"


@pytest.mark.parametrize(
    ("state", "start_s", "found"),
    [("CANCELLED", None, JobState.STOPPED), ("NODE_FAIL", 300, JobState.FAILED), ("FAILED", 300, JobState.FAILED)],
)
def test_how_the_next_job_ended_counts_and_not_that_the_one_before_saved(state, start_s, found):
    first, second = dataclasses.replace(JOB, state="COMPLETED"), dataclasses.replace(JOB, id="13", state=state)
    status = look(first, dataclasses.replace(second, start_s=start_s), verdict=SAVED)
    assert status.state is found and "job 13" in status.reason


@pytest.mark.parametrize(
    ("state", "found"),
    [("CANCELLED", JobState.STOPPED), ("TIMEOUT", JobState.FAILED), ("PREEMPTED", JobState.PREEMPTED),
     ("NODE_FAIL", JobState.FAILED), ("COMPLETED", JobState.FAILED), ("OUT_OF_MEMORY", JobState.FAILED)],
)  # fmt: skip
def test_an_end_without_a_verdict_is_slurms(state, found):
    status = look(dataclasses.replace(JOB, state=state))
    assert status.state is found and "job 12" in status.reason
    assert look(accounted={"State": f"{state} by 0", "JobID": "12"}).state is found, "from the accounting alone"


@pytest.mark.parametrize(
    ("state", "code"),
    [("OUT_OF_MEMORY", 1), ("DEADLINE", 1), ("TIMEOUT", 1), ("FAILED", 1), ("NODE_FAIL", None), ("BOOT_FAIL", None)],
)
def test_what_a_job_would_do_again_is_a_verdict_and_what_a_machine_did_is_none(state, code):
    """A sweep goes on with a trial whose machine was lost."""
    status = look(dataclasses.replace(JOB, state=state))
    assert (status.state, status.exit_code) == (JobState.FAILED, code)


@pytest.mark.parametrize(
    ("state", "found"),
    [("RUNNING", JobState.RUNNING), ("COMPLETING", JobState.RUNNING), ("PENDING", JobState.WAITING),
     ("REQUEUED", JobState.WAITING)],
)  # fmt: skip
def test_an_accounting_that_lags_is_believed_while_the_run_writes_and_ten_minutes_more(state, found):
    row = {"State": state, "JobID": "12"}
    lagging = look(accounted=row, quiet_s=30.0)
    assert lagging.state is found and "last written 30 s ago" in lagging.reason and "job 12" in lagging.reason
    assert look(accounted=row, quiet_s=ACCOUNTING_LAGS_S).state is found
    runaway = look(accounted=row, quiet_s=ACCOUNTING_LAGS_S + 1)
    assert runaway.state is JobState.FAILED and "runawayjobs" in runaway.reason and "slurm-12.log" in runaway.reason
    done = Verdict(outcome="succeeded", exit_code=0, reason="done", wall_ns=200 * 10**9)
    assert look(accounted=row, verdict=done).state is JobState.SUCCEEDED, "the run's own word comes first"


def test_a_job_that_only_the_accounting_knows_is_not_handed_in_again_until_the_run_is_quiet(tmp_path):
    """squeue has dropped the job, sacct still has it as running: `recover` waits, but not for ever."""
    shell, clock = FakeSlurm(held=True), VirtualClock()
    clock.now_s = time.time()  # files carry the real time
    slurm = SlurmLauncher(slurm=Slurm(shell=shell), clock=clock)
    request = slurm.render(spec_of(device="cpu"), run_id="r-1", run_dir=str(tmp_path))
    handle = slurm.submit(request)
    (tmp_path / "logs" / "agent-host-0.log").write_text("alive\n")
    shell.jobs.clear()
    shell.accounts = f"{handle.job_id}|RUNNING|0:0|Unknown\n"
    assert slurm.poll(handle).state is JobState.RUNNING
    again = dataclasses.replace(request, labels={**request.labels, "submission": "2"})
    with pytest.raises(ConflictError, match="accounting has it as running"):
        slurm.submit(again)
    clock.sleep(ACCOUNTING_LAGS_S + 60)
    assert slurm.poll(handle).state is JobState.FAILED
    slurm.submit(again)


def test_a_forgotten_job_is_no_running_one():
    assert look().state is JobState.FAILED and "no longer knows job 12" in look().reason
    assert look(record=None).state is JobState.ABSENT
    assert look(record=dataclasses.replace(RECORD, job_id=None), is_locked=True).state is JobState.WAITING
    assert look(JOB, record=dataclasses.replace(RECORD, state="cancelled")).state is JobState.STOPPED


def test_names_do_not_catch_each_other():
    assert name_of("a-1", 2) == "muster-a-1.2"
    assert is_of("muster-a-1.2", "a-1") and is_of("muster-a-1", "a-1") and is_of("muster-a-1.2", "a-1", 2)
    assert (
        not is_of("muster-a-1.2", "a-1", 1) and not is_of("muster-a-1.x", "a-1") and not is_of("muster-a-12.1", "a-1")
    )


# ---------------------------------------------------------------- offers


def spec_of(**resources) -> RunSpec:
    slurm = resources.pop("slurm", {})
    return RunSpec.model_validate(
        {"name": "n", "backend": "slurm", "command": ["x"], "resources": resources, "slurm": slurm}
    )


def launcher() -> SlurmLauncher:
    return SlurmLauncher(slurm=Slurm(shell=FakeSlurm()))


def test_offers_are_kinds_of_usable_nodes():
    found = {offer.location: offer for offer in launcher().offers(spec_of())}
    assert set(found) == {"main", "cpu"}
    assert (found["main"].accelerator, found["main"].gpus_per_node, found["main"].max_nodes) == ("H100", 8, 2)
    assert found["main"].gpu_memory_bytes > 0 and found["main"].usd_per_node_hour is None
    assert (found["cpu"].accelerator, found["cpu"].gpus_per_node) == ("cpu", 0)


def test_a_reservations_nodes_are_offered_to_a_run_that_names_it():
    shell = FakeSlurm()
    shell.nodes = [("n7", "main", state, *NODES[0][3:]) for state in ("reserved", "maint", "idle$")]
    shell.nodes = [(f"n{place}", *row[1:]) for place, row in enumerate(shell.nodes)]
    slurm = SlurmLauncher(slurm=Slurm(shell=shell))
    assert slurm.offers(spec_of()) == []
    assert [offer.max_nodes for offer in slurm.offers(spec_of(reservation="august"))] == [3]
    assert slurm.resolve(spec_of(hosts=3, reservation="august")).resources.ranks_per_host == 8


def test_gpus_without_a_type_may_be_the_ones_that_are_asked_for():
    """Google's images name no type in sinfo: gpu:8."""
    shell = FakeSlurm(
        nodes=[("n1", "a4", "idle", "gpu:8", *NODES[0][4:]), ("n2", "a4", "idle", "gpu:8", *NODES[0][4:])]
    )
    slurm = SlurmLauncher(slurm=Slurm(shell=shell))
    (offer,) = slurm.offers(spec_of(accelerator="B200"))
    assert (offer.accelerator, offer.gpus_per_node, offer.max_nodes) == ("B200", 8, 2) and offer.gpu_memory_bytes > 0
    found = slurm.resolve(spec_of(hosts=2, accelerator="B200"))
    assert (found.resources.ranks_per_host, found.slurm.gres) == (8, None)
    assert slurm.offers(spec_of())[0].accelerator == "gpu", "nobody says which"


def test_offers_keep_to_what_the_run_file_names():
    assert [offer.location for offer in launcher().offers(spec_of(queue="cpu"))] == ["cpu"]
    assert [offer.location for offer in launcher().offers(spec_of(accelerator="H100"))] == ["main"]
    assert launcher().offers(spec_of(accelerator="B200")) == []
    assert [offer.location for offer in launcher().offers(spec_of(slurm={"constraint": "a3mega"}))] == ["main"]


def test_device_and_ranks_come_from_the_nodes():
    found = launcher().resolve(spec_of(hosts=2))
    assert (found.resources.device, found.resources.ranks_per_host, found.slurm.gres) == ("cuda", 8, None)
    found = launcher().resolve(spec_of(hosts=2, accelerator="H100"))
    assert found.slurm.gres == "gpu:h100:8"
    found = launcher().resolve(spec_of(hosts=2, device="cpu"))
    assert (found.resources.device, found.resources.ranks_per_host) == ("cpu", 1)


def test_too_many_nodes_is_no_capacity_and_too_many_ranks_a_wrong_file():
    with pytest.raises(CapacityError, match=r"3 nodes with GPUs .*2 in main"):
        launcher().resolve(spec_of(hosts=2, spare_hosts=1, device="cuda"))
    with pytest.raises(RunFileError, match="9 ranks; a node has 8 GPUs"):
        launcher().resolve(spec_of(ranks_per_host=9, device="cuda"))


def test_sinfo_that_fails_is_an_error_not_an_empty_cluster():
    shell = FakeSlurm()
    shell.trouble["sinfo"] = (False, "slurm_load_partitions: Unable to contact slurm controller (connect failure)")
    with pytest.raises(BackendError, match="Unable to contact"):
        SlurmLauncher(slurm=Slurm(shell=shell)).offers(spec_of())


def test_a_refusal_is_one_line():
    text = "sbatch: error: Batch job submission failed: Invalid qos specification\nmore\n"
    found = reason_text.refusal("sbatch", text)
    assert "\n" not in str(found) and "Invalid qos" in str(found) and found.hint


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "sbatch: error: You must specify a time limit (--time)\nsbatch: error: Batch job submission failed: Error",
        "sbatch: error: --time is required on this cluster",
    ],
)
def test_a_site_that_demands_a_time_limit_is_answered_with_the_key(said):
    found = reason_text.refusal("sbatch", said)
    assert isinstance(found, UsageError) and "slurm.default_time_limit" in found.hint


def test_a_limit_of_the_accounting_is_no_missing_time_limit():
    said = "sbatch: error: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    assert isinstance(reason_text.refusal("sbatch", said), CapacityError)


def test_a_run_that_waits_is_not_handed_in_a_second_time(tmp_path):
    slurm = SlurmLauncher(slurm=Slurm(shell=FakeSlurm(held=True)))
    request = slurm.render(spec_of(device="cpu"), run_id="r-1", run_dir=str(tmp_path))
    slurm.submit(request)
    again = dataclasses.replace(request, labels={**request.labels, "submission": "2"})
    with pytest.raises(ConflictError, match="continues by itself: job 1 waits"):
        slurm.submit(again)
    (tmp_path / "events").mkdir()
    saved = {"outcome": "preempted", "exit_code": 75, "reason": "saved and left", "final_step": 9}
    slurm.slurm.shell.jobs["1"].state = "COMPLETING"
    event = Event(
        run_id="r-1", attempt=1, seq=0, mono_ns=0, wall_ns=time.time_ns(), host="", kind="run.finished", detail=saved
    )
    (tmp_path / "events" / "supervisor.1.jsonl").write_text(json.dumps(event.to_json()) + "\n")
    with pytest.raises(ConflictError, match="has not ended yet: saved and left; job 1 is ending"):
        slurm.submit(again)
    slurm.slurm.shell.jobs["1"].state = "TIMEOUT"
    assert slurm.submit(again).job_id == "2"


def test_an_interrupted_submit_is_no_waiting_run(tmp_path):
    shell = FakeSlurm(held=True)
    slurm = SlurmLauncher(slurm=Slurm(shell=shell))
    request = slurm.render(spec_of(device="cpu"), run_id="r-1", run_dir=str(tmp_path))
    shell.trouble["sbatch"] = (False, "sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    with pytest.raises(BusyError):
        slurm.submit(request)
    handle = JobHandle(run_id="r-1", backend="slurm", job_id="", run_dir=str(tmp_path))
    assert slurm.poll(handle).state is JobState.FAILED and "interrupted" in slurm.poll(handle).reason
    again = dataclasses.replace(request, labels={**request.labels, "submission": "2"})
    assert slurm.submit(again).job_id == "1"
    assert slurm.poll(handle).state is JobState.WAITING


def test_a_submission_that_took_too_long_is_looked_for_by_its_name(tmp_path):
    """sbatch was ended after a minute; the controller may have the job all the same."""

    class Slow(FakeSlurm):
        def run(self, argv, **more):
            done = super().run(argv, **more)
            if argv[0] == "sbatch":
                raise BusyError("sbatch did not finish within 60.0 s")
            return done

    slurm = SlurmLauncher(slurm=Slurm(shell=Slow(held=True)))
    assert slurm.submit(slurm.render(spec_of(device="cpu"), run_id="r-1", run_dir=str(tmp_path))).job_id == "1"


def test_ctrl_c_at_the_terminal_does_not_reach_slurms_programs():
    shown = Slurm().shell.run(["ps", "-o", "pgid=", "-p", str(os.getpid())]).stdout
    code = "import os; print(os.getpgrp() == os.getpid())"
    assert Slurm().shell.run([sys.executable, "-c", code]).stdout.strip() == "True" and int(shown) == os.getpgrp()
