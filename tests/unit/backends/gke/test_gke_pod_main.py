"""Two supervisors' pods and one bucket: real processes, real signals, and what Kubernetes is told about their ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fakes.gcs import GcsFake

from muster.backends.gke.pod import main
from muster.backends.gke.pod.main import AGAIN, BACK_END_FAULT, Pod
from muster.backends.gke.pod.own_jobset import OwnJobSet, all_pods_go, runs_since
from muster.backends.gke.pod.run_state import RunState
from muster.core.errors import AccessError
from muster.core.typed_json import encode
from muster.protocol.lease import EndRecord
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


def lease(seconds):
    record = {"expires_wall_ns": time.time_ns() + int(seconds * 1e9)}
    open_store().put(f"{HOME}/lease.json", json.dumps(record).encode())


def end(code, *, job=JOB, submission="1"):
    record = EndRecord(job=job, submission=submission, term=1, outcome="x", exit_code=code, reason="x", wall_ns=0)
    open_store().put(f"{HOME}/end.json", encode(record))


def state_of(folder):
    return RunState(run_dir=folder, job=JOB)


def start(folder, program, *options):
    argv = [sys.executable, "-m", "muster.backends.gke.pod.main", "supervisor", "--run-dir", str(folder)]
    argv += ["--requeue", f"default/{JOB}", *options, "--", sys.executable, "-c", program]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def ended(pod):
    out, err = pod.communicate(timeout=60)
    return pod.returncode, out + err


def run(folder, program, **fields):
    """The exit code of a supervisor's pod, in this process."""
    return Pod(argv=[sys.executable, "-c", program], role="supervisor", state=state_of(folder), **fields).run()


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
    assert ended(start(folder, SAYS)) == (0, "up\n")
    assert time.monotonic() - began > 2.5


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


@pytest.mark.parametrize("code", [1, 6])
def test_a_crash_is_no_verdict(folder, code):
    """A Python exception is code 1: the Job would end the run."""
    assert run(folder, f"raise SystemExit({code})") == AGAIN


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


def test_wrong_words_and_refused_access_are_the_users(folder):
    assert [run(folder, f"raise SystemExit({code})") for code in (2, 5)] == [2, 5]


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
    pod = Pod(
        argv=[sys.executable, "-c", program], role="supervisor", state=state_of(folder), all_go=all_go, **fields
    )  # fmt: skip
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


def test_where_nobody_says_which_it_has_until_the_grace_is_almost_over(folder):
    code, took_s = signalled(folder, ON_TERM.format("0"), lambda: None, grace_s=11.0)
    assert code == AGAIN and took_s > 2.5


def test_a_later_pod_leaves_when_the_allocation_ends_not_when_its_own_time_is_over(folder, capfd):
    ends = ON_TERM.format(f"sys.exit({AGAIN})")
    began = time.monotonic()
    assert run(folder, ends, leave_after_s=1000.0, age_s=lambda: 998.0) == BACK_END_FAULT
    assert time.monotonic() - began < 30 and "the allocation is about to end" in capfd.readouterr().err


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
