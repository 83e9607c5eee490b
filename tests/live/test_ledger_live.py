"""The ledger of a real run with real faults: it closes, the second script agrees, and it can be read at any moment."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import LiveRun, spec_of

from muster.report import api

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
CHANGES = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 110,
           "recovery.baseline_steps": 20}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two hosts and a spare: a rank is killed, then a whole host is stopped; looked at in between."""
    directory = tmp_path_factory.mktemp("ledger")
    with LiveRun(directory, spec_of(**CHANGES)) as run:
        run.start()
        run.wait_for_step(40)  # the reference is measured in steps 11 to 30
        run.wait_for_spare()
        run.kill_rank(1)
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "recovery of the rank")
        run.between = api.load(directory).to_json()
        run.wait_for_step(70)
        # Stopped, not killed: a death is noticed within less than two hosts' clocks can be compared, and takes 0 s.
        run.signal_host(run.ranks()[1][1], signal.SIGSTOP)
        assert run.wait() == 0, run.index()
        yield run


@pytest.fixture(scope="module")
def found(run):
    return api.load(run.dir).to_json()


def test_the_identity_closes_and_everything_has_a_name(found):
    spent = found["categories"]
    assert sum(each["host_ns"] for each in spent.values()) == found["host_time"]["purchased_host_ns"]
    assert spent["unattributed"]["host_ns"] == 0
    assert spent["other"]["share"] < 0.02
    for name in ("productive", "start", "detect", "restart", "restore", "spare", "out"):
        assert spent[name]["host_s"] > 0, name


def test_the_second_script_agrees(run, found):
    (run.dir / "report.json").write_text(json.dumps(found))
    told = subprocess.run(
        [sys.executable, ROOT / "tools" / "recompute_goodput.py", run.dir, "--report", run.dir / "report.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_every_step_counts_once_and_the_chains_hold(found):
    assert found["steps"] == found["final_step"] == 110
    assert found["log"]["verified"], found["log"]["problems"]
    assert found["outcome"] == "succeeded"


def test_incidents_agree_with_the_supervisor(run, found):
    killed, lost = [incident for incident in found["incidents"] if incident["stopped_training"]][:2]
    assert (killed["kind"], killed["action"]) == ("rank_exit", "restart")
    assert (lost["kind"], lost["action"]) == ("host_lost", "swap")
    told = {event.detail["incident_id"]: event.detail for event in run.events("incident.resolved")}
    for incident in (killed, lost):
        # Ours begins at the fault, the supervisor's at its detection; both end with the same step.
        assert incident["lost_s"] - incident["detect_s"] == pytest.approx(incident["lost_s_supervisor"], abs=0.3)
        assert incident["redone_steps"] == told[incident["incident_id"]]["redone_steps"]
        assert incident["host_s"]["restart"] > 0
    assert killed["detect_s"] < 1.0
    assert "replaced by" in lost["sentence"]


def test_the_report_in_the_middle_was_a_report(run, found):
    between = run.between
    assert between["outcome"] is None and between["host_time"]["identity_error"] == 0
    assert 40 <= between["steps"] < 110
    assert between["tokens"] < found["tokens"]


def test_the_reference_was_measured_with_fault_tolerance_off(run, found):
    (event,) = run.events("baseline_rate")
    assert (event.step, event.detail["first_step"], event.detail["steps"]) == (30, 11, 17)
    reference = found["goodput"]["reference"]
    assert reference["source"] == "measured with fault tolerance off"
    assert reference["tokens_per_s"] == event.detail["tokens_per_s"] > 0
    assert -0.5 < found["goodput"]["fault_tolerance_overhead"] < 0.9, "on a busy machine little more can be said"
    held = {event.step: event.detail.get("snapshot_step") for event in run.events("step") if event.attempt == 1}
    # A version counts once its checksum is there, which a thread makes: a step's own event may be earlier.
    assert {held[step] for step in range(11, 31)} == {10}, "no snapshot within it"
    assert held[32] in (31, 32)


def test_the_memory_tiers_are_in_the_exposure(found):
    ages = found["checkpoint_exposure"]
    step_s = found["speed"]["step_s"]
    assert ages["memory"]["newest_step"] in (109, 110), "the last step's event may come before the version's checksum"
    assert 100 < ages["peer"]["newest_step"] < 110, "a peer holds what was taken before"
    assert ages["memory"]["greatest_age_s"] > 20 * step_s / 2, "twenty steps without a snapshot"
    assert ages["memory"]["mean_age_s"] < ages["peer"]["mean_age_s"]


def test_the_command_writes_the_page(run):
    page = run.dir / "page.html"
    command = [sys.executable, "-m", "muster.cli.main", "report", str(run.dir), "--html", "--output", str(page)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == str(page)
    assert "killed by" in page.read_text(encoding="utf-8")
