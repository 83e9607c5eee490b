"""``check_invariants.py --replay``: the unfailed run is made from the record alone, and compared step by step."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import Judged
from cluster import spec_of

from muster.core import resolved_file

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
CHECKER = Path(__file__).parents[2] / "tools" / "check_invariants.py"


def judge(run_dir, *more):
    """(exit code, I4, standard error)."""
    done = subprocess.run(
        [sys.executable, CHECKER, "--json", "--replay", *more, run_dir], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)[str(run_dir)]["invariants"]["I4"], done.stderr


def test_a_replay_agrees_with_what_happened_and_differs_from_another_seeds_run(tmp_path):
    """A rank is killed, and the run is stopped long before its schedule ends: the replay goes as far and no further."""
    with Judged(tmp_path / "run", spec_of(**{"training.steps": 1000, "training.exact": True})) as run:
        run.start()
        run.wait_for_step(6)
        run.kill_rank(1)
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        os.kill(run.supervisor.pid, signal.SIGINT)
        run.ended(130)
        last = run.step()
    code, batch_schedule, told = judge(run.dir)
    assert code == 0 and batch_schedule["holds"] and batch_schedule["checked"] >= last, (batch_schedule, told)
    (folder,) = re.findall(r"in (/\S+)$", told.splitlines()[0])
    assert not Path(folder).exists(), "a replay that agrees is not kept"

    shutil.copytree(run.dir, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    spec = json.loads(resolved_file.read(tmp_path / "other"))
    spec["training"]["seed"] += 1
    resolved_file.write(tmp_path / "other", json.dumps(spec))
    code, batch_schedule, told = judge(tmp_path / "other", "--ranks", "1")
    (folder,) = re.findall(r"kept in (/\S+)$", told)
    assert code == 1 and "step 1 has two states" in batch_schedule["problems"][0], batch_schedule
    assert (Path(folder) / "resolved.json").is_file()
    shutil.rmtree(folder)
