"""The first program of a pod, as process and with real signals: what Kubernetes is told about how the pod ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.backends.gke.pod.main import BACK_END_FAULT, PodPlace, host_program, name_after_pod, supervisor_rules
from muster.backends.host.run_state import RunState
from muster.backends.host.state import RESUME as AGAIN
from muster.core.typed_json import encode
from muster.protocol.exit_codes import UNSUPERVISED
from muster.protocol.lease import LeaseRecord
from muster.protocol.version import MINE

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

HANDLED = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {0}); print('up', flush=True); time.sleep(60)"
)
PATIENT = HANDLED.format("sys.exit(0)")


def start(role, run_dir, program, *options):
    argv = [sys.executable, "-m", "muster.backends.gke.pod.main", role, "--run-dir", str(run_dir), *options, "--"]
    return subprocess.Popen(
        [*argv, sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def held(seconds):
    """A lease of another machine's supervisor."""
    until = time.time_ns() + int(seconds * 1e9)
    record = LeaseRecord(version=MINE, term=1, address=("10.0.0.9", 7000), pid=1, machine="another", boot_id="b",
                         expires_wall_ns=until, expires_mono_ns=until)  # fmt: skip
    return encode(record)


def wait_until_it_listens(pod):
    """Until the pod's own handler is there: before it, a signal ends Python as any other program."""
    caught = 0
    until = time.monotonic() + 60
    while not caught & 1 << (signal.SIGTERM - 1) and time.monotonic() < until:
        time.sleep(0.05)
        status = Path(f"/proc/{pod.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        caught = int(line.split()[1], 16)


def ended(pod):
    out, err = pod.communicate(timeout=60)
    return pod.returncode, out + err


@pytest.mark.parametrize("code", [0, 1, 6, 130])
def test_a_verdict_is_passed_on_and_a_hosts_failure_is_free(tmp_path, code):
    assert ended(start("supervisor", tmp_path, f"raise SystemExit({code})"))[0] == code
    assert ended(start("host", tmp_path, f"raise SystemExit({code})"))[0] == (AGAIN if code else 0)


def test_a_host_that_is_taken_away_leaves_well_and_wants_another(tmp_path):
    pod = start("host", tmp_path, PATIENT, "--host", "host-0")
    assert pod.stdout.readline() == "up\n"
    pod.send_signal(signal.SIGTERM)
    assert ended(pod)[0] == AGAIN, "the agent ended with 0: told to Kubernetes, the host would never come back"


def test_a_supervisor_that_is_taken_away_is_not_told_that_the_run_is(tmp_path):
    pod = start("supervisor", tmp_path, HANDLED.format("print('told', flush=True)"))
    assert pod.stdout.readline() == "up\n"
    pod.send_signal(signal.SIGTERM)
    code, said = ended(pod)
    assert code == AGAIN and "told" not in said


def test_a_supervisor_stands_by_while_another_holds_the_run(tmp_path):
    """Its predecessor went without giving the lease back; ending with a verdict here would end the run."""
    lease = tmp_path / "lease.json"
    lease.write_bytes(held(2.0))
    began = time.monotonic()
    code, said = ended(start("supervisor", tmp_path, "print('up')"))
    assert code == 0 and said.startswith("up\n") and time.monotonic() - began > 1.5
    faster = f"open({str(lease)!r}, 'wb').write({held(15.0)!r})"
    program = f"import os; seen = {str(lease) + '.seen'!r}; first = not os.path.exists(seen); open(seen, 'w').close()\n"
    program += f"if first:\n    {faster}\n    raise SystemExit(1)\nraise SystemExit(3)"
    assert ended(start("supervisor", tmp_path, program))[0] == 3
    lease.write_bytes(held(1000.0))
    pod = start("supervisor", tmp_path, "print('up')")
    wait_until_it_listens(pod)
    pod.send_signal(signal.SIGTERM)
    assert ended(pod)[0] == AGAIN


def test_before_the_allocation_ends_the_run_is_told_to_save(tmp_path):
    program = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit({AGAIN})); time.sleep(60)"
    code, said = ended(start("supervisor", tmp_path, program, "--leave-after-s", "2"))
    assert "the allocation is about to end: saving" in said
    assert code == BACK_END_FAULT and "this pod may not queue it" in said


def test_a_run_that_saved_is_queued_again_unless_it_lived_too_short(tmp_path, monkeypatch, capsys):
    made, saved = [], [sys.executable, "-c", f"raise SystemExit({AGAIN})"]

    def ended_with():
        place = PodPlace(home=RunState(run_dir=tmp_path), queue=lambda: made.append(1) or "ns/x")
        return host_program(place, saved, supervisor_rules(reads_end=False, grace_s=30.0)).run()

    assert ended_with() == BACK_END_FAULT and not made and "after only" in capsys.readouterr().err
    monkeypatch.setattr("muster.backends.gke.pod.main.SHORTEST_RUN_S", 0.0)
    assert ended_with() == 0 and made == [1] and "continuation queued: ns/x" in capsys.readouterr().err


def test_an_agent_to_whom_nobody_came_is_started_again(tmp_path):
    mark = tmp_path / "mark"
    program = (
        f"import pathlib, sys; mark = pathlib.Path({str(mark)!r}); first = not mark.exists(); mark.touch(); "
        f"sys.exit({UNSUPERVISED} if first else 0)"
    )
    code, said = ended(start("host", tmp_path, program, "--host", "host-0"))
    assert code == 0 and f"code {UNSUPERVISED}" in said


def test_a_host_is_named_after_its_pod():
    argv = ["python", "-m", "muster.agent.watchdog", "--host", "host-2", "--run-dir", "/runs/host-2/x"]
    name, told = name_after_pod("host-2", argv, "llama-host-2-0-abcde")
    assert name == "host-2-abcde" and told == [*argv[:4], "host-2-abcde", *argv[5:]]
    assert name_after_pod("", argv, "p-abcde") == ("", argv) and name_after_pod("h", argv, "") == ("h", argv)


def test_what_ranks_write_is_in_the_pods_own_output(tmp_path):
    """As it is written, and to the last half line: a copy, marked with the file's name; no other host's."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-9.a1.log").write_text("another host's\n")
    program = (
        "import json, os, pathlib, sys, time; "
        f"run = pathlib.Path({str(tmp_path)!r}); log = open(run / 'logs' / 'rank-0.a1.log', 'a', buffering=1); "
        "log.write('first\\n'); events = open(run / 'events' / 'host-0.1.jsonl', 'a', buffering=1); "
        "events.write(json.dumps({'kind': 'rank.started', 'rank': 0, 'attempt': 1}) + chr(10)); "
        "[time.sleep(0.02) for _ in iter((run / 'go').exists, True)]; log.write('second\\nhalf'); print('agent ends')"
    )
    first_program = [sys.executable, "-m", "muster.backends.gke.pod.main"]
    argv = [*first_program, "host", "--run-dir", str(tmp_path), "--host", "host-0"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    pod = subprocess.Popen([*argv, "--", sys.executable, "-c", program], **pipes)
    assert pod.stdout.readline() == "rank-0.a1 | first\n", "while the rank still writes"
    (tmp_path / "go").touch()
    out, _ = pod.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["agent ends", "rank-0.a1 | half", "rank-0.a1 | second"]


def test_process_1_collects_what_its_children_leave(tmp_path):
    """An orphan's parent is process 1 of the container: uncollected, it stays a zombie."""
    program = (
        "import os, subprocess, sys, time; "
        "subprocess.Popen(['sh', '-c', 'sleep 0.2 & exit 0']).wait(); time.sleep(1.5); "
        "stats = [open(f'/proc/{p}/stat').read() for p in os.listdir('/proc') if p.isdigit()]; "
        "raise SystemExit([one.rsplit(')', 1)[1].split()[0] for one in stats].count('Z'))"
    )
    try:
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("pid namespaces need root")
    argv = [*unshare, sys.executable, "-m", "muster.backends.gke.pod.main", "host", "--run-dir", str(tmp_path), "--"]
    began = time.monotonic()
    assert subprocess.run([*argv, sys.executable, "-c", program], timeout=60, env=dict(os.environ)).returncode == 0
    assert time.monotonic() - began < 60
