"""The random driver's trials: replayable, and nothing that it can do is never done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2] / "live"))

import strikes
import trials
from striking import Outcome
from verdict import Traces, files_left

from muster.core import processes
from muster.supervise.process.limits import OwnLimits

TRIALS = [trials.draw(seed) for seed in range(500)]
OF_POWER = {(strike.kind, strike.target) for strike in trials.draw(trials.POWER_FROM).strikes}
STRUCK = [strike for trial in TRIALS for strike in trial.strikes]


def test_a_seed_is_one_trial():
    assert [trials.draw(seed) for seed in range(500)] == TRIALS
    assert len({trial.strikes for trial in TRIALS}) == 500
    later = [trials.draw(seed) for seed in range(trials.STORES_FROM, trials.STORES_FROM + 100)]
    assert {1} == {trial.stages for trial in later}
    assert "store" in {strike.target for trial in later for strike in trial.strikes}


def test_every_kind_meets_every_target():
    assert {strike.kind for strike in STRUCK} == set(trials.KINDS)
    for kinds, targets in (
        (trials.OF_A_PROCESS, trials.PROCESSES),
        (trials.OF_A_FILE, trials.FILES),
        (["verbs"], trials.VERBS),
        *(([kind], trials.DISKS) for kind in trials.OF_THE_DISK),
    ):
        assert {strike.target for strike in STRUCK if strike.kind in kinds} == set(targets)
    assert {strike.target for strike in STRUCK if strike.kind == "kill"} == set(trials.PROCESSES)


def test_a_trial_is_a_run_that_can_be():
    for trial in TRIALS:
        assert 1 <= trial.hosts <= 3 and trial.ranks() % trial.replicas == 0
        assert 1 <= len(trial.strikes) <= 5
        assert all(0 < strike.step < trials.LAST < trials.STEPS for strike in trial.strikes)
        assert all(strike.host < trial.hosts + trial.spares for strike in trial.strikes)
    assert {trial.hosts for trial in TRIALS} == {1, 2, 3}


@pytest.mark.parametrize("kind", trials.OF_A_FILE)
def test_damage_is_done(kind):
    data = bytes(range(256))
    for share in range(100):
        broken = trials.damaged(data, kind, share / 100)
        assert broken != data and len(broken) <= len(data)
    assert trials.damaged(b"", kind, 0.5) == b""


def test_what_may_end_a_run_is_something_that_is_done():
    for kind, target in trials.MAY_END:
        struck = kind in trials.KINDS and target in {*trials.PROCESSES, *trials.VERBS}
        assert struck or (kind, target) in OF_POWER
    assert all(len(end) == 2 and end[1] for end in trials.MAY_END.values())


def test_a_run_may_wait_for_help_if_it_says_so_and_was_struck_so(monkeypatch):
    assert all(kind in trials.OF_A_PROCESS and target in trials.PROCESSES for kind, target in trials.MAY_WAIT)
    assert all(words and why for words, why in trials.MAY_WAIT.values())
    said = []
    monkeypatch.setattr(processes, "restore_limits", lambda before: "RLIMIT_NOFILE of process 1 was lowered")
    OwnLimits(said).keep("run-1")
    struck, other = (
        trials.Trial(1, 1, 0, 1, False, (trials.Strike(1, kind, "supervisor", 0, 0.5),))
        for kind in ("file limit", "kill")
    )
    assert trials.may_wait(struck, said[0]) and not trials.may_wait(other, said[0])
    assert not trials.may_wait(struck, "waiting for a host to return")


def test_a_result_that_no_disk_took_is_a_failure_that_a_disk_explains():
    reason = f"done after step 56; step 56 was {trials.NOT_WRITTEN} (host-0: no such folder)"
    away, other = (next(trial for trial in TRIALS if trial.strikes[0].kind == kind) for kind in ("disk away", "flip"))
    other = trials.Trial(1, 1, 0, 1, False, other.strikes[:1])
    assert trials.may_end(away, "failed", reason) and not trials.may_end(other, "failed", reason)
    assert not trials.may_end(away, "failed", "the same error occurred 2 times")


def test_what_a_run_leaves_is_found():
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); time.sleep(600)"
    label = {**os.environ, "MUSTER_RUN_ID": f"left-{os.getpid()}"}
    traces = Traces()
    process = subprocess.Popen([sys.executable, "-c", code], env=label, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        traces.look(label["MUSTER_RUN_ID"])
        left = traces.left(label["MUSTER_RUN_ID"])
        assert [line.split()[1] for line in left] == ["process", "the"] and "listener on port" in left[1], left
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, which is nothing that is left
    assert traces.left(label["MUSTER_RUN_ID"]) == []
    process.communicate()


def test_what_its_children_are_is_remembered_without_a_label():
    code = "import os, subprocess; p = subprocess.Popen(['sleep', '600'], env={}); print(p.pid, flush=True); p.wait()"
    label = {**os.environ, "MUSTER_RUN_ID": f"parent-{os.getpid()}"}
    traces = Traces()
    process = subprocess.Popen([sys.executable, "-c", code], env=label, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        traces.look(label["MUSTER_RUN_ID"])
        process.kill()
        process.wait()
        assert [found.pid for found in traces.living(label["MUSTER_RUN_ID"])] == [child]
    finally:
        os.kill(child, 9)


def test_files_that_nobody_needs_are_found(tmp_path):
    for name in ("memory/muster-0-abc", "temporary", "trial/there/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "trial/there/checkpoints/.index.json.1a.tmp").touch()
    (tmp_path / "trial/there/checkpoints/index.json").touch()
    left = files_left(tmp_path / "trial", tmp_path / "memory", tmp_path / "temporary")
    assert sorted(Path(line).name for line in left) == [".index.json.1a.tmp", "muster-0-abc"]


def test_a_trial_without_a_strike_does_not_count():
    assert Outcome(skipped=["kill: rank: no such process"]).verdict == "empty"
    assert Outcome(applied=["kill: rank (pid 7) at step 3"]).verdict == "survived"
    assert Outcome(applied=["kill: rank (pid 7) at step 3"], problems=["I1"]).verdict == "not survived"


def test_seeds_are_repeated_in_rounds_and_a_resumed_record_counts_trials():
    assert strikes.to_do([75, 146], 2, []) == [(75, 1), (146, 1), (75, 2), (146, 2)]
    assert strikes.to_do([75, 146], 3, [75, 75, 146, 9]) == [(146, 2), (75, 3), (146, 3)]


def test_the_report_counts_by_fault():
    def row(seed, applied, problems=(), skipped=()):
        outcome = Outcome(applied=list(applied), problems=list(problems), skipped=list(skipped))
        return {"seed": seed, "commit": "abc", **outcome.to_json()}

    told = strikes.report(
        [
            row(1, ["kill: rank (pid 7) at step 3", "flip: lease (lease.json of 9 bytes, at 2) at step 5"]),
            row(2, ["kill: rank (pid 8) at step 3"], ["the final weights differ"]),
            row(3, [], skipped=["term: agent: no such process"]),
        ]
    ).splitlines()
    assert [line.split() for line in told[1:3]] == [["flip:", "lease", "1", "0"], ["kill:", "rank", "1", "1"]]
    assert told[3].startswith(
        "2 trials with 3 faults: 1 survived, 1 not; 1 faults could not be done, 1 trials had none"
    )
    assert told[4] == "not survived: seed 2 on abc: the final weights differ"
