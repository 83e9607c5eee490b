"""What a user's own script is given on this machine, and what is said of its end: typed as a user does."""

import signal

import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core import processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

RUN_FILE = """\
name: mine
run_dir: there
command: [train.py]
env: {FLAVOUR: sweet}
secrets: {MY_KEY: env}
resources: {device: cpu, ranks_per_host: 1, threads_per_rank: 1}
"""
SCRIPT = """\
import os, pathlib, time
print("begin", os.environ["FLAVOUR"], len(os.environ["MY_KEY"]), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
raise ValueError(f"the server refuses {os.environ['MY_KEY']}")
"""
SECRET = "correct horse battery staple"


def test_a_secret_reaches_the_script_and_nothing_else(tmp_path):
    shell = Shell(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "train.py").write_text(SCRIPT.replace('"go"', repr(str(tmp_path / "go"))))
    assert "the variable MY_KEY is not set here" in shell.run("train", "run.yaml", code=2).stderr
    assert not (tmp_path / "there").exists()
    shell.env["MY_KEY"] = SECRET
    training = shell.start("train", "run.yaml")
    log = tmp_path / "there" / "logs" / "rank-0.a1.log"
    eventually(lambda: log.exists() and f"begin sweet {len(SECRET)}" in log.read_text(), 90)
    run = (tmp_path / "there" / "run_id").read_text().strip()
    told = [" ".join(process.argv) for process in processes.labelled(run)]
    (tmp_path / "go").touch()
    told += training.communicate(timeout=90)
    assert training.returncode == 1 and "ValueError: the server refuses ***" in "".join(told)
    told += [shell.run(verb, run).stdout for verb in ("logs", "events")]
    holding = [path.name for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holding == ["secrets.json"]
    assert (tmp_path / "there" / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert SECRET not in "".join(told)


TALKS = """\
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "hello")   # no flush: somebody looks on
while not pathlib.Path("go").exists():
    time.sleep(0.05)
if os.environ["RANK"] == "0":
    for n in range(200_000):
        print("flood", n, "x" * 100)
    print("y" * 10_000_000)
def fail():
    raise ValueError("out of eggs")
fail()
"""


def test_a_script_is_heard_while_it_runs_and_its_last_words_are_its_traceback(tmp_path):
    shell = Shell(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE.replace("secrets: {MY_KEY: env}\n", ""))
    (tmp_path / "train.py").write_text(TALKS.replace('"go"', repr(str(tmp_path / "go"))))
    with (tmp_path / "shown").open("w") as shown:
        training = shell.start("train", "run.yaml", output=shown.fileno())
        eventually(lambda: "rank 0 hello\n" in (tmp_path / "shown").read_text(), 90)  # it runs still
        (tmp_path / "go").touch()
        assert training.wait(90) == 1
    text = (tmp_path / "shown").read_text()
    assert len(text) < 3_000_000 and "of the script's output left out: muster logs has all)" in text
    lines = text.splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.startswith("flood ")]
    assert numbers == sorted(set(numbers)) and numbers
    train = tmp_path / "train.py"
    start = lines.index("Traceback (most recent call last):")
    assert lines[start + 1].strip().startswith(f'File "{train}", line 11, in <module>')
    assert lines.index("ValueError: out of eggs") < next(n for n, line in enumerate(lines) if "incident i1" in line)


def test_the_work_folder_is_shipped_and_each_host_set_up_once(tmp_path):
    """An agent that is killed finds it done; a script that was edited meanwhile changes nothing of the run."""
    shell, project = Shell(tmp_path), tmp_path / "project"
    project.mkdir()
    (project / "ready.sh").write_text("#!/bin/sh\necho set up >> made.txt\n")
    (project / "ready.sh").chmod(0o755)
    (project / "part.py").write_text("WORD = 'first'\n")
    go = repr(str(tmp_path / "go"))
    (project / "train.py").write_text(
        f"import pathlib, time\nimport part\nprint('began', flush=True)\nwhile not pathlib.Path({go}).exists():\n"
        "    time.sleep(0.05)\nprint(part.WORD, pathlib.Path('made.txt').read_text().count('set up'))\n"
    )
    own = "name: mine\nrun_dir: there\nworkdir: project\nsetup: ready.sh\ncommand: [train.py]\n"
    (tmp_path / "run.yaml").write_text(own + "resources: {device: cpu, ranks_per_host: 1, threads_per_rank: 1}\n")
    training = shell.start("train", "run.yaml")
    log = tmp_path / "there" / "logs" / "rank-0.a1.log"
    eventually(lambda: log.exists() and "began" in log.read_text(), 90)
    (project / "part.py").write_text("WORD = 'second'\n")
    run = (tmp_path / "there" / "run_id").read_text().strip()
    (agent,) = [found for found in processes.labelled(run) if "muster.agent.host_agent" in found.argv]
    processes.send([agent], signal.SIGKILL)
    eventually(lambda: len(Watched(tmp_path / "there").events("agent.started")) == 2, 60)
    (tmp_path / "go").touch()
    out, err = training.communicate(timeout=90)
    assert training.returncode == 0 and "first 1\n" in out, out + err
    assert "workdir: 3 files, " in err and not (project / "made.txt").exists()


def test_a_setup_that_fails_is_one_line_and_is_not_tried_again(tmp_path):
    shell = Shell(tmp_path)
    (tmp_path / "train.py").write_text("print('never')\n")
    own = "name: mine\nrun_dir: there\nsetup: [[sh, -c, 'echo x >> n; echo no wheel for einops; exit 1']]\n"
    (tmp_path / "run.yaml").write_text(own + "command: [train.py]\nresources: {device: cpu, ranks_per_host: 1}\n")
    done = shell.run("train", "run.yaml", code=2)
    assert "ended with code 1: no wheel for einops" in done.stderr and "never" not in done.stdout
    assert (tmp_path / "there" / "n").read_text() == "x\n"
