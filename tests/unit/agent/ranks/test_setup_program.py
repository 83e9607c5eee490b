"""The run file's setup on one host: its programs are real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import eventually

from muster.config.spec import RunSpec
from muster.core import resolved_file

MODULE = "muster.agent.ranks.setup_program"


class Host:
    def __init__(self, folder: Path, **given: object) -> None:
        self.folder, self.log = folder, folder / "setup.log"
        self.spec = RunSpec.model_validate({"name": "x", "command": ["train.py"], **given})
        resolved_file.write(folder, self.spec.model_dump_json() + "\n")

    def start(self, digest: str = "a") -> subprocess.Popen[str]:
        argv = [sys.executable, "-P", "-m", MODULE, "--run-dir", str(self.folder), "--log", str(self.log)]
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*argv, "--done", str(self.folder / "done"), "--digest", digest],
                stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "MY_KEY": "correct horse"},
            )  # fmt: skip

    def run(self, digest: str = "a") -> tuple[int, str]:
        program = self.start(digest)
        out, _ = program.communicate(timeout=60)
        return program.returncode, out


def test_once_on_a_host_and_again_where_it_changed(tmp_path):
    host = Host(tmp_path, setup=[["python", "-c", "open('n', 'a').write('x')"], ["sh", "-c", "echo said"]])
    assert host.run() == host.run() == (0, "") and (tmp_path / "n").read_text() == "x"
    assert host.run("b")[0] == 0 and (tmp_path / "n").read_text() == "xx"
    assert "said\n" in host.log.read_text() and "$ sh -c echo said" in host.log.read_text()


def test_the_first_failure_is_told_with_its_last_words(tmp_path):
    steps = [["sh", "-c", "echo begin; echo no room left for correct horse >&2; exit 3"], ["touch", "never"]]
    host = Host(tmp_path, setup=steps, secrets={"MY_KEY": "env"})
    code, out = host.run()
    assert code == 1 and "exit 3 ended with code 3: no room left for ***" in out and '"exit_code":2' in out
    assert not (tmp_path / "never").exists() and not (tmp_path / "done").read_text()


@pytest.mark.parametrize(("setup", "said"), [([["no-such-program"]], "cannot start no-such-program: No such file")])
def test_a_program_that_is_not_there(tmp_path, setup, said):
    assert said in Host(tmp_path, setup=setup).run()[1]


def lives(tmp_path: Path) -> bool:
    try:
        os.kill(int((tmp_path / "pid").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return True


def test_what_takes_too_long_is_ended_with_what_it_started(tmp_path):
    host = Host(tmp_path, setup=[["sh", "-c", "sleep 1000 & echo $! > pid; wait"]], setup_timeout_s=2.0)
    code, out = host.run()
    assert code == 1 and "took longer than setup_timeout_s=2" in out
    eventually(lambda: not lives(tmp_path), 20)


def test_a_stop_ends_what_it_started(tmp_path):
    host = Host(tmp_path, setup=[["sh", "-c", "sleep 1000 & echo $! > pid; wait"]])
    program = host.start()
    eventually(lambda: lives(tmp_path), 30)
    program.send_signal(signal.SIGTERM)
    assert program.wait(20) == 143
    eventually(lambda: not lives(tmp_path), 20)


def test_a_second_one_waits_for_the_first_and_does_nothing(tmp_path):
    host = Host(tmp_path, setup=[["sh", "-c", "echo x >> n; while [ ! -e go ]; do sleep 0.05; done"]])
    first = host.start()
    eventually(lambda: (tmp_path / "n").exists(), 30)
    second = host.start()
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert first.wait(30) == second.wait(30) == 0 and (tmp_path / "n").read_text() == "x\n"
