"""``benchmarks/loops/job.py``: a measured training does not outlive the benchmark that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Starts a training that never ends and says its pid.
PROGRAM = """
import os, sys
from pathlib import Path
from loops import job
said, log, limit_s = sys.argv[1:]
training = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(300)"
if os.environ.get("LAUNCHED"):  # as torchrun's: in a session of its own, and ended by it
    launcher = "import signal, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], "
    launcher += "start_new_session=True); signal.signal(signal.SIGTERM, lambda *_: child.kill()); child.wait()"
    argv = [sys.executable, "-c", launcher, training, said]
else:
    argv = [sys.executable, "-c", training, said]
job.run(argv, dict(os.environ), Path(log), timeout_s=float(limit_s))
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("launched", ["", "1"], ids=["alone", "launched"])
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT, None], ids=["terminated", "interrupted", "limit"])
def test_a_training_ends_with_its_benchmark(tmp_path: Path, told: signal.Signals | None, launched: str) -> None:
    said, limit_s = tmp_path / "pid", "1" if told is None else "300"
    argv = [sys.executable, "-c", PROGRAM, str(said), str(tmp_path / "log"), limit_s]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "LAUNCHED": launched}
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL, start_new_session=True) as benchmark:
        try:
            while not (said.exists() and said.read_text()):
                assert benchmark.poll() is None
                time.sleep(0.01)
            pid = int(said.read_text())
            if told is not None:
                benchmark.send_signal(told)
            benchmark.wait(30)
        finally:
            benchmark.kill()
    left = alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left and benchmark.returncode != 0
