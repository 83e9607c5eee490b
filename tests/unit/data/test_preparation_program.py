"""``python -m muster.data`` as a host's agent starts it: its last line says what happened, whatever it was."""

import json
import sqlite3
import subprocess
import sys

import pytest

from muster.app.inspect.event_format import line
from muster.config import load
from muster.core.errors import install_command
from muster.core.events import Event
from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREPARATION, DataFailed, DataPrepared

RUN_FILE = """\
name: demo
model: {config: {model_type: llama}, tokenizer: {kind: word, vocab_size: 100}}
data: {sources: [{type: text2sql, rows: 20}]}
training: {steps: 1}
"""


@pytest.mark.parametrize("package", ["tokenizers", "numpy"])
def test_a_package_that_is_missing_is_named(tmp_path, package):
    """An import at the top of the program ended it with a traceback in a file, and "ended with code 1" for its user."""
    (tmp_path / "resolved.json").write_text(load.loads(RUN_FILE, environment=False).spec.model_dump_json())
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['data', '--run-dir', {str(tmp_path)!r}];"
        " runpy.run_module('muster.data', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    answer = reader_of(PREPARATION)(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, DataFailed) and answer.exit_code == done.returncode == 2, done.stderr
    assert answer.error == f"data preparation needs {package}, which is not installed"
    assert answer.hint == install_command("train,data")


def test_held_out_questions_that_cannot_be_scored_are_said_where_people_look(tmp_path):
    database = sqlite3.connect(tmp_path / "c.sqlite")
    database.execute("CREATE TABLE city (name TEXT)")
    database.close()
    queries = ["SELECT COUNT(*) FROM city", "SELECT name FROM city", "SELECT missing FROM city"]
    rows = [json.dumps({"prompt": "q", "completion": query}) for query in queries]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    path = str(tmp_path / "rows.jsonl")
    source = {"type": "file", "path": path, "heldout_path": path, "database": str(tmp_path / "c.sqlite")}
    data = json.dumps({"sources": [source], "cache_dir": str(tmp_path / "cache"), "workers": 1})
    text = RUN_FILE.replace("{sources: [{type: text2sql, rows: 20}]}", data)
    (tmp_path / "resolved.json").write_text(load.loads(text, environment=False).spec.model_dump_json())
    argv = [sys.executable, "-m", "muster.data", "--run-dir", str(tmp_path)]
    answer = reader_of(PREPARATION)(subprocess.run(argv, capture_output=True, timeout=60).stdout.splitlines()[-1])
    assert isinstance(answer, DataPrepared)
    detail = {"fingerprint": "f", "tokens": 1, "sequences": 1, "cached": False, **answer.more}
    event = Event(
        run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=0, host="h", kind="data.prepared", step=None, detail=detail
    )
    assert (line(event) or "").endswith(
        "; 2 held-out questions left out: 1: gold query returns no row; 1: gold query fails; "
        f"first: {path}:2: no rows: SELECT name FROM city"
    )
