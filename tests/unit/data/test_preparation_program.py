"""``python -m muster.data`` as a host's agent starts it: its last line says what happened, whatever it was."""

import subprocess
import sys

import pytest

from muster.config import load
from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREPARATION, DataFailed

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
    assert answer.hint == "pip install 'muster[train,data]'"
