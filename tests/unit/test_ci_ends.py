"""A run of the tests, and CI's, ends and tells what it knows, whatever a test does: ``tests/worker_crash.py``,
``.ci/steps.sh``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD = "def test_1(): pass\ndef test_2(): pass\ndef test_3(): pass\n"
#: Its worker dies with one test behind it and ``AFTER`` before it.
DIES = """
import os, pathlib, signal
def test_before(): pass
def test_dies():
    with pathlib.Path(__file__).with_name("tries").open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGSEGV)
"""
AFTER = "def test_after(): pass\n"
STEPS = """
set -euo pipefail
exec </dev/null
export WORK=$1 CI_MINUTE_S=1 MUSTER_SECOND_TRY=$1/second_try
. .ci/steps.sh
fine() { echo "FAILED: test_some.py" >"$MUSTER_SECOND_TRY"; }
bad() { return 3; }
hang() { echo "it begins"; setsid sleep 1000 & echo $! >"$2"; bash -c 'trap "" INT TERM; sleep 1000; sleep 1000'; }
export -f fine bad hang
step 30 "a good one" fine
step 30 "a bad one" bad
step "$2" "one that hangs" hang to "$3"
step 30 "the last" fine
"""


def run_pytest(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text("import worker_crash\n\n\ndef pytest_configure(config):\n"
                                        "    config.pluginmanager.register(worker_crash)\n")  # fmt: skip
    env = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT / "tests")}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "loadfile", *arguments]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("after", ["", AFTER, AFTER + GOOD], ids=["last", "one after", "four after"])
def test_a_worker_that_dies_costs_one_test_which_is_named(tmp_path, workers, after):
    files = {"test_a.py": GOOD, "test_b.py": GOOD, "test_c.py": DIES + after, "test_d.py": AFTER, "test_e.py": GOOD}
    code, output = run_pytest(tmp_path, files, "-n", workers)
    total = 3 + 3 + 1 + after.count("def ") + 1 + 3
    assert code == 1 and f"1 failed, {total} passed" in output
    assert (tmp_path / "tries").read_text() == "x", "what kills a worker is not tried on the next one"
    _, _, summary = output.partition("WORKERS THAT CRASHED")
    assert "\ntest_c.py: test_c.py::test_dies\n" in summary
    _, _, fault = output.partition("what Python said of it")
    assert "Current thread" in fault.partition("\n\n")[2].splitlines()[0] and "in test_dies" in fault


def test_each_of_many_deaths_costs_its_test(tmp_path):
    files = {"test_a.py": GOOD, **{f"test_b{number}.py": DIES + AFTER for number in range(3)}}
    code, output = run_pytest(tmp_path, files, "-n", "2")
    assert code == 1 and "3 failed, 9 passed" in output


@pytest.mark.parametrize("which", ["one", "both"])
def test_workers_that_die_before_they_have_a_test_are_no_success(tmp_path, which):
    """One of two is enough for nothing to be run at all: xdist waits for both before it begins."""
    who = "True" if which == "both" else 'os.environ["PYTEST_XDIST_WORKER"] != "gw1"'
    begins = f"import os, signal\nif {who}:\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
    code, output = run_pytest(tmp_path, {"test_a.py": begins + GOOD}, "-n", "2", "--max-worker-restart", "1")
    assert code == 1 and "none: gw0 collected them, or had ended" in output


def run_steps(folder: Path, limit: int) -> subprocess.Popen[str]:
    work = folder / "work"
    work.mkdir()
    argv = ["bash", "-c", STEPS, "steps", str(work), str(limit), str(folder / "pid")]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def is_gone(folder: Path) -> bool:
    """Whether what the hanging step had started in a session of its own has been killed."""
    try:
        return "State:\tZ" in Path(f"/proc/{(folder / 'pid').read_text().strip()}/status").read_text()
    except FileNotFoundError:
        return True


def test_a_step_that_hangs_is_killed_with_what_it_started_and_the_next_ones_run(tmp_path):
    running = run_steps(tmp_path, 4)
    output, _ = running.communicate(timeout=60)
    lines = output.splitlines()
    assert running.returncode == 1 and "it begins" in lines and is_gone(tmp_path)
    ends = [line.split(None, 2)[2] for line in lines[-4:]]
    assert [" ".join(end.split()) for end in ends] == [
        "ok a good one", "FAILED a bad one", "TIMED OUT one that hangs", "ok the last",
    ]  # fmt: skip
    assert "FAILED: test_some.py" in lines and not (tmp_path / "work").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_tells_how_far_it_came(tmp_path, number):
    running = run_steps(tmp_path, 60)
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(number)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and is_gone(tmp_path)
    assert "STOPPED" in output.splitlines()[-1] and "FAILED    a bad one" in output and "the last" not in output
