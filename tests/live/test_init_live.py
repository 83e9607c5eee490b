"""``muster init``: for each kind of rows it writes a file that plan and train accept; wrong rows are named."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live
SCHEMA = "CREATE TABLE t (a INT)"
KINDS = {
    "chat": [
        {"messages": [{"role": "user", "content": f"Colour {n}?"}, {"role": "assistant", "content": f"It is {n % 3}."}]}
        for n in range(30)
    ],
    "prompt and completion": [{"instruction": f"Add 1 to {n}", "output": str(n + 1)} for n in range(30)],
    "text": [{"text": f"The number {n} comes before the number {n + 1}. " * 4} for n in range(30)],
    "question and SQL": [
        {"question": f"Rows above {n}?", "schema": SCHEMA, "sql": f"SELECT a FROM t WHERE a > {n}"} for n in range(30)
    ],
}


@pytest.fixture
def muster(tmp_path):
    env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(*argv):
        return subprocess.run(
            [sys.executable, "-m", "muster.cli.main", *argv], cwd=tmp_path, env=env, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=280, check=False,
        )  # fmt: skip

    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_file_trains(kind, tmp_path, muster):
    write(tmp_path / "rows.jsonl", KINDS[kind])
    made = muster("init", "--from", "rows.jsonl")
    assert made.returncode == 0 and made.stdout == "run.yaml\n", made.stderr
    assert f"30 rows of {kind}" in made.stderr
    written = (tmp_path / "run.yaml").read_bytes()
    again = muster("init", "--from", "rows.jsonl")
    assert again.returncode == 2 and "not overwritten" in again.stderr
    assert (tmp_path / "run.yaml").read_bytes() == written
    planned = muster("plan", "run.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    trained = muster("train", "run.yaml", "training.steps=2", "evaluation.samples=0", "evaluation.num_questions=0")
    assert trained.returncode == 0 and "done after step 2" in trained.stdout + trained.stderr, trained.stderr


def test_a_wrong_row_is_named_and_nothing_is_written(tmp_path, muster):
    write(tmp_path / "rows.jsonl", [*KINDS["chat"][:4], {"messages": [{"role": "user"}]}])
    made = muster("init", "--from", "rows.jsonl")
    assert made.returncode == 2 and "rows.jsonl:5: a chat turn needs 'role' and 'content'" in made.stderr
    write(tmp_path / "rows.jsonl", [{"chosen": "a", "rejected": "b"}])
    made = muster("init")  # the one file here
    assert made.returncode == 2 and "rows.jsonl:1: columns 'chosen', 'rejected'" in made.stderr
    assert not (tmp_path / "run.yaml").exists()
