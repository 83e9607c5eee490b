"""What a user's own script is given on this machine, and what is said of its end: typed as a user does."""

import pytest
from verbs import Shell
from waiting import eventually

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
