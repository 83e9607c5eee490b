"""Two supervisors' pods and one bucket: real processes, real signals, and what Kubernetes is told about their ends."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fakes.gcs import GcsFake

from muster.backends.gke.manifests.jobset import VERDICTS
from muster.backends.gke.pod import main
from muster.backends.gke.pod.continuation import AllocationsUsedUp, JobSetGone
from muster.backends.gke.pod.main import (
    BACK_END_FAULT,
    OwnJobSet,
    PodPlace,
    all_pods_go,
    host_program,
    runs_since,
    supervisor_rules,
)
from muster.backends.google.http import Unreachable
from muster.backends.host import decide, run_state
from muster.backends.host.run_state import RunState
from muster.backends.host.state import RESUME as AGAIN
from muster.backends.host.state import SUPERVISOR
from muster.core.errors import AccessError, BackendError, MusterError
from muster.core.typed_json import decode, encode
from muster.protocol.lease import LEASE_S, EndRecord, LeaseRecord
from muster.protocol.version import MINE
from muster.storage.home import open_home
from muster.storage.store import open_store

HOME, RUN_ID, JOB = "gs://bucket/runs/llama", "llama", "llama-c2"
SAYS = "print('up', flush=True); "
ON_TERM = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {0}); " + SAYS + "time.sleep(60)"


@pytest.fixture
def bucket(monkeypatch):
    with GcsFake() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


@pytest.fixture
def folder(tmp_path, bucket):
    """A pod's own run folder."""
    for name, text in {"home": HOME, "run_id": RUN_ID, "submission": "1"}.items():
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


def lease(seconds, **changed):
    until = time.time_ns() + int(seconds * 1e9)
    record = LeaseRecord(version=MINE, term=1, address=("10.0.0.9", 7000), pid=1, machine="another", boot_id="b",
                         expires_wall_ns=until, expires_mono_ns=until)  # fmt: skip
    open_store().put(f"{HOME}/lease.json", json.dumps({**json.loads(encode(record)), **changed}).encode())


def end(code, *, job=JOB, submission="1"):
    record = EndRecord(job=job, submission=submission, term=1, outcome="x", exit_code=code, reason="x", wall_ns=0)
    open_store().put(f"{HOME}/end.json", encode(record))


def state_of(folder):
    return RunState(run_dir=folder, job=JOB, brings_events=True)


def start(folder, program, *options):
    argv = [sys.executable, "-m", "muster.backends.gke.pod.main", "supervisor", "--run-dir", str(folder)]
    argv += ["--requeue", f"default/{JOB}", *options, "--", sys.executable, "-c", program]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def ended(pod):
    out, err = pod.communicate(timeout=60)
    return pod.returncode, out + err


def pod_of(folder, program, *, leave_after_s=None, grace_s=30.0, requeue=None, **fields):
    place = PodPlace(home=state_of(folder), queue=requeue, **fields)
    argv, rules = [sys.executable, "-c", program], supervisor_rules(reads_end=True, grace_s=grace_s)
    return host_program(place, argv, rules, writer=SUPERVISOR, leave_after_s=leave_after_s)


def run(folder, program, **fields):
    """The exit code of a supervisor's pod, in this process."""
    return pod_of(folder, program, **fields).run()


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_supervisor_waits_for_the_lease_and_then_works(folder):
    lease(3.0)
    began = time.monotonic()
    code, said = ended(start(folder, SAYS))
    assert code == 0 and said.startswith("up\n") and time.monotonic() - began > 2.5


@pytest.mark.parametrize("code", [0, 1, 6, 130])
def test_it_ends_as_the_run_did_and_starts_nothing(folder, code):
    """A lease that the run's end gave back would start the run anew; the JobSet ends by whichever pod is first."""
    end(code)
    assert run(folder, f"open({str(folder / 'up')!r}, 'w')") == code and not (folder / "up").exists()


@pytest.mark.parametrize("other", [{"job": "llama"}, {"submission": "2"}])
def test_the_end_of_another_allocation_or_submission_is_not_this_ones(folder, other):
    end(130, **other)
    assert run(folder, SAYS) == 0


def test_what_the_other_one_could_not_queue_any_more_this_one_does(folder, monkeypatch):
    """The run saved and asks to be continued; the pod that was to queue the rest is gone with its node."""
    monkeypatch.setattr(main, "OTHERS_REQUEUE_S", 0.5)
    monkeypatch.setattr(main, "SHORTEST_RUN_S", 0.4)
    end(AGAIN)
    made = []
    assert run(folder, "raise SystemExit(9)", requeue=lambda: made.append(1) or "default/x") == 0 and made == [1]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(decide, "SOONEST_S", 0.01)
    monkeypatch.setattr(decide, "BACK_OFF_S", 0.01)


def fails_until(folder, times, code, then=""):
    """A program that ends with ``code`` so many times; then it does something else."""
    tries = folder / "tries"
    return (
        f"import sys; open({str(tries)!r}, 'a').write('x'); "
        f"sys.exit({code}) if len(open({str(tries)!r}).read()) <= {times} else None; {then}"
    )


@pytest.mark.parametrize("code", [1, 4, 5, 6, 137])
def test_a_crash_is_no_verdict(folder, quick, code):
    """A Python exception is code 1, a refused credential is 5: the Job would end the run."""
    assert run(folder, fails_until(folder, 3, code)) == 0 and len((folder / "tries").read_text()) == 4


def test_one_that_had_worked_makes_room_for_another_pod(folder, monkeypatch):
    monkeypatch.setattr(decide, "MOVES_S", 0.0)
    assert run(folder, fails_until(folder, 9, 6)) == AGAIN and len((folder / "tries").read_text()) == 1


@pytest.mark.parametrize("code", [1, 5])
def test_what_crashes_for_ever_is_counted(folder, quick, code, capfd):
    """By the Job's backoff limit: 75 is free, and a verdict would end a run because its bucket does not answer."""
    assert run(folder, f"raise SystemExit({code})") == main.COUNTED
    assert f"code {code}" in capfd.readouterr().err and main.COUNTED not in [*VERDICTS, AGAIN]


def test_a_crash_that_leaves_its_own_lease_is_counted_too(folder, monkeypatch):
    """It runs for 10 s after its holder: no other supervisor was faster."""
    monkeypatch.setattr(decide, "TRIES", 2)
    monkeypatch.setattr(decide, "SOONEST_S", 0.01)
    monkeypatch.setattr(decide, "BACK_OFF_S", 0.01)
    takes = (
        "from muster.supervise.process import lease; from muster.storage.store import open_store; "
        f"lease.LEASE_S = 1.5; lease.LeaseKeeper(open_store(), '{HOME}/lease.json').take(('127.0.0.1', 1)); "
    )
    assert run(folder, fails_until(folder, 0, 0, takes + "sys.exit(1)")) == main.COUNTED
    assert (folder / "tries").read_text() == "xx"
    assert json.loads(open_store().get(f"{HOME}/lease.json").data)["term"] == 2


def test_who_lost_the_race_for_the_lease_has_not_crashed(folder, monkeypatch):
    monkeypatch.setattr(decide, "TRIES", 1)
    lease(4.0)
    record = open_store().get(f"{HOME}/lease.json").data
    open_store().delete(f"{HOME}/lease.json")
    puts = (
        f"import sys; from muster.storage.store import open_store; open_store().put('{HOME}/lease.json', {record!r}); "
    )
    tries = str(folder / "tries")
    lost = f"import os; seen = os.path.exists({tries!r}); open({tries!r}, 'a').write('x')\n"
    assert run(folder, f"{lost}if not seen:\n    {puts}sys.exit(1)") == 0
    assert (folder / "tries").read_text() == "xx"


@pytest.mark.parametrize("code", [1, 6])
def test_a_verdict_is_one_once_it_stands_in_the_home(folder, code):
    program = (
        "import sys; from pathlib import Path; from muster.storage.store import open_store; "
        f"open_store().put('{HOME}/end.json', Path({str(folder / 'record')!r}).read_bytes()); "
        f"sys.exit({code})"
    )
    record = EndRecord(job=JOB, submission="1", term=1, outcome="x", exit_code=code, reason="x", wall_ns=0)
    (folder / "record").write_bytes(encode(record))
    assert run(folder, program) == code


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_words_are_the_users_within_seconds(folder, code):
    began = time.monotonic()
    assert run(folder, f"raise SystemExit({code})") == code and time.monotonic() - began < 20


@pytest.mark.parametrize("changed", [{"expires_wall_ns": None}, {"expires_wall_ns": "soon"}, {"version": [99, 0]}])
def test_a_lease_that_nobody_can_read_is_no_end_of_the_pod(folder, changed):
    lease(1000.0, **changed)
    assert run(folder, SAYS) == 0


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_lease_from_a_machine_of_another_time_is_judged_by_its_renewals(folder, monkeypatch, ahead_s):
    now_s = [1000.0]
    monkeypatch.setattr(run_state, "time", SimpleNamespace(monotonic=lambda: now_s[0], time_ns=time.time_ns))
    state = state_of(folder)
    state.brings_events = False
    for second in range(4):
        now_s[0] = 1000.0 + 3 * second
        lease(ahead_s + second)
        looked = state.look(None).lease
        assert looked.kind == ("held" if ahead_s > 0 or second else "free") and looked.left_s <= LEASE_S
    now_s[0] += LEASE_S - 1
    assert state.look(None).lease.kind == "held"
    now_s[0] += 2
    assert state.look(None).lease.kind == "free", "it has not renewed for a lease's length of ours"


def test_one_that_stands_by_has_the_events_before_it_takes_over(folder, tmp_path_factory):
    """Reading weeks of them takes a minute in which nobody supervises."""
    other = tmp_path_factory.mktemp("other")
    for name in ("home", "run_id", "submission"):
        (other / name).write_text((folder / name).read_text())
    log = open_home(other).open_log(RUN_ID, "supervisor", 1)
    log.append("run.message", detail={"text": "weeks ago"})
    assert log.sync()
    log.close()
    lease(3.0)
    found = folder / "events" / "supervisor.1.jsonl"
    assert run(folder, f"import sys; sys.exit(0 if 'weeks ago' in open({str(found)!r}).read() else 75)") == 0


def test_what_cannot_be_brought_while_standing_by_is_silent(folder):
    open_store().put(f"{HOME}/events/supervisor.1/0-0000000001", b"damaged")
    with pytest.raises(MusterError):
        open_home(folder).mirror(folder)
    lease(5.0)
    code, said = ended(start(folder, SAYS))
    assert code == 0 and said.startswith("up\n") and "damaged" not in said


LOGS = (
    "import sys, time; from pathlib import Path; from muster.core.event_log import EventLog; "
    "log = EventLog('llama', Path({0!r}) / 'events', 'supervisor', 7); "
    "log.append('run.message', detail={{'text': 'last'}}); "
    "print('up', flush=True); time.sleep(60)"
)


def test_a_pod_that_alone_goes_brings_its_log_home_and_says_no_end(folder, tmp_path_factory):
    """Its supervisor is not told that the run is preempted; what it wrote reaches the bucket before the pod ends."""
    pod = start(folder, LOGS.format(str(folder)), "--grace-s", "12")
    assert pod.stdout.readline() == "up\n"
    pod.send_signal(signal.SIGTERM)  # no API server answers: its hosts would say so, and none is here
    began = time.monotonic()
    code, _ = ended(pod)
    assert code == AGAIN and state_of(folder).ended() is None and time.monotonic() - began < 30
    follower = tmp_path_factory.mktemp("follower")
    for name in ("home", "run_id"):
        (follower / name).write_text((folder / name).read_text())
    assert open_home(follower).mirror(follower) > 0
    assert '"last"' in (follower / "events" / "supervisor.7.jsonl").read_text()


def signalled(folder, program, all_go, **fields):
    """A pod that gets SIGTERM once its program is up."""
    read, write = os.pipe()
    pod = pod_of(folder, program, all_go=all_go, **fields)
    kept = os.dup(1)
    os.dup2(write, 1)
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    watcher = f"import os, signal; os.read({read}, 3); os.kill({os.getpid()}, signal.SIGUSR1)"
    helper = subprocess.Popen([sys.executable, "-c", watcher], pass_fds=[read], stdout=subprocess.DEVNULL)
    began = time.monotonic()
    try:
        return pod.run(), time.monotonic() - began
    finally:
        os.dup2(kept, 1)
        helper.wait(10)
        for descriptor in (kept, read, write):
            os.close(descriptor)


def test_a_supervisor_whose_pod_alone_goes_is_killed_at_once(folder):
    code, took_s = signalled(folder, ON_TERM.format(f"open({str(folder / 'told')!r}, 'w')"), lambda: False)
    assert code == AGAIN and took_s < 20 and not (folder / "told").exists()


def test_where_all_pods_go_it_saves_and_the_same_jobset_goes_on(folder):
    """Evicted by its queue: the hosts get their signal too. The end for this time is no end of the run."""
    end(AGAIN, job="an earlier one")
    told = folder / "told"
    record = EndRecord(job=JOB, submission="1", term=1, outcome="x", exit_code=AGAIN, reason="x", wall_ns=0)
    (folder / "record").write_bytes(encode(record))
    saves = (
        f"(open({str(told)!r}, 'w').close(), open_store().put("
        f"'{HOME}/end.json', Path({str(folder / 'record')!r}).read_bytes()), sys.exit({AGAIN}))"
    )
    program = "from pathlib import Path; from muster.storage.store import open_store; " + ON_TERM.format(saves)
    code, _ = signalled(folder, program, lambda: True, requeue=lambda: pytest.fail("its nodes are still the queue's"))
    assert code == AGAIN and told.exists() and state_of(folder).ended() is None


def test_an_end_stands_where_only_this_pod_goes(folder, monkeypatch):
    """The run saved because its allocation ends; that this pod is drained does not make the run go on here."""
    record = EndRecord(job=JOB, submission="1", term=1, outcome="x", exit_code=AGAIN, reason="x", wall_ns=0)
    (folder / "record").write_bytes(encode(record))
    program = (
        "import os, signal, sys; from pathlib import Path; from muster.storage.store import open_store; "
        f"open_store().put('{HOME}/end.json', Path({str(folder / 'record')!r}).read_bytes()); "
        f"os.kill(os.getppid(), signal.SIGTERM); sys.exit({AGAIN})"
    )
    assert run(folder, program, all_go=lambda: time.sleep(0.5) or False) == AGAIN and state_of(folder).ended() == AGAIN


def test_where_nobody_says_which_it_has_until_the_grace_is_almost_over(folder):
    code, took_s = signalled(folder, ON_TERM.format("0"), lambda: None, grace_s=11.0)
    assert code == AGAIN and took_s > 2.5


def test_a_later_pod_leaves_when_the_allocation_ends_not_when_its_own_time_is_over(folder, capfd):
    ends = ON_TERM.format(f"sys.exit({AGAIN})")
    began = time.monotonic()
    assert run(folder, ends, leave_after_s=1000.0, age_s=lambda: 998.0) == BACK_END_FAULT
    assert time.monotonic() - began < 30 and "the allocation is about to end" in capfd.readouterr().err


SAVED = f"raise SystemExit({AGAIN})"


def requeues(*results):
    """One result per call: an exception, or the name of what was made."""
    rest = list(results)

    def requeue():
        result = rest.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return requeue, rest


@pytest.mark.parametrize("error", [Unreachable("no answer"), BackendError("503"), AccessError("a role that is new")])
def test_an_api_server_that_is_away_for_a_moment_is_asked_again(folder, quick, error):
    requeue, rest = requeues(error, error, "default/x")
    assert run(folder, SAVED, requeue=requeue, age_s=lambda: 1000.0) == 0 and not rest


@pytest.mark.parametrize(
    ("error", "code"), [(Unreachable("no answer"), AGAIN), (BackendError("refused"), main.COUNTED)]
)
def test_what_one_pod_cannot_queue_the_next_one_does(folder, monkeypatch, error, code):
    """A verdict would delete the other supervisor, whose turn it is then."""
    monkeypatch.setattr(decide, "REQUEUE_S", 0.0)
    end(AGAIN)
    monkeypatch.setattr(main, "OTHERS_REQUEUE_S", 0.0)
    requeue, _ = requeues(error)
    assert run(folder, SAVED, requeue=requeue, age_s=lambda: 1000.0) == code and code not in VERDICTS
    requeue, _ = requeues("default/x")
    assert run(folder, SAVED, requeue=requeue, age_s=lambda: 1000.0) == 0


def test_a_run_whose_allocations_are_used_up_has_reached_its_limit(folder, monkeypatch, capfd):
    monkeypatch.setattr(main, "OTHERS_REQUEUE_S", 0.0)
    end(AGAIN)
    requeue, _ = requeues(AllocationsUsedUp("the run has had 2 allocations", hint="limits.max_hours"))
    assert run(folder, SAVED, requeue=requeue, age_s=lambda: 1000.0) == 130
    assert "has had 2 allocations" in capfd.readouterr().err
    found = decode(EndRecord, open_store().get(f"{HOME}/end.json").data)
    assert (found.exit_code, found.outcome, found.reason) == (130, "stopped", "the run has had 2 allocations")


def test_the_rest_of_a_run_that_somebody_deleted_is_not_tried_for_minutes(folder):
    requeue, _ = requeues(JobSetGone("the JobSet is gone"))
    assert run(folder, SAVED, requeue=requeue, age_s=lambda: 1000.0) == BACK_END_FAULT


def test_an_allocation_is_as_old_as_the_jobset_says_not_as_this_pod(folder, monkeypatch):
    """The pod that finds the end may be a minute old; a run that ends a minute after its beginning has done nothing."""
    assert run(folder, SAVED, requeue=lambda: "default/x", age_s=lambda: 3600.0) == 0
    assert run(folder, SAVED, requeue=lambda: "default/x", age_s=lambda: 5.0) == BACK_END_FAULT
    ages = [None, 3600.0]
    assert run(folder, SAVED, requeue=lambda: "default/x", age_s=lambda: ages.pop(0)) == 0 and not ages


def jobset(**spec):
    row = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-08-22T10:00:00Z"}
    return {"metadata": {"creationTimestamp": "2026-08-21T10:00:00Z"}, "spec": spec, "status": {"conditions": [row]}}


def test_all_pods_go_where_the_jobset_is_suspended_or_deleted():
    assert [all_pods_go(one) for one in (jobset(suspend=True), jobset(suspend=False), jobset(), None)] == [
        True, False, False, True
    ]  # fmt: skip
    going = jobset()
    going["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:00Z"
    assert all_pods_go(going)


def test_an_allocation_begins_when_the_queue_lets_it_run():
    assert runs_since(jobset()).isoformat() == "2026-08-22T10:00:00+00:00"
    assert runs_since({**jobset(), "status": {}}).isoformat() == "2026-08-21T10:00:00+00:00"
    assert runs_since(None) is None


def test_an_api_server_that_does_not_answer_is_not_waited_for():
    def refused():
        raise AccessError("no account")

    assert OwnJobSet(which="a/b", connect=refused).goes(5.0) is None
    slow = OwnJobSet(which="a/b", connect=lambda: time.sleep(1) or refused())
    began = time.monotonic()
    assert slow.goes(0.2) is None and time.monotonic() - began < 3
