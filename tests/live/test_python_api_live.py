"""Muster from Python as in a notebook, and its values beside those of the commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from verbs import Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_python.py"


def test_the_notebook_runs_and_says_what_the_commands_say(tmp_path):
    shell = Shell(tmp_path)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, env=shell.env, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 steps, loss " in done.stdout and "exit code 0, step 8" in done.stdout, done.stdout
    (run_id,) = [row["run_id"] for row in json.loads(shell.run("status", "--json").stdout)]
    code = f"""
import json, muster
print(json.dumps([
    muster.status({run_id!r}).to_json(), [event.to_json() for event in muster.events({run_id!r})],
    muster.report({run_id!r}).to_json(), muster.down({run_id!r}).to_json(),
], default=str))"""
    values = json.loads(subprocess.run(
        [sys.executable, "-c", code], env=shell.env, capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip
    status, events, report, down = values
    said = json.loads(shell.run("status", run_id, "--json").stdout)
    assert {key for key in said if said[key] != status[key]} <= {"age_s"}
    assert [json.loads(line) for line in shell.run("events", run_id, "--json").stdout.splitlines()] == events
    assert json.loads(shell.run("report", run_id, "--json").stdout) == report
    assert json.loads(shell.run("down", run_id, "--json").stdout) == down and down["clean"]
