"""What a test opens, lists and loads, itself or in its children: ``tests/plugin/recorder.py``."""

import json
import os
import subprocess
import sys

import pytest

from tests.plugin.closure import Graph
from tests.plugin.recorder import undeclared
from tests.unit.plugin.small_repository import Repository

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests.plugin import recorder
def pytest_configure(config):
    config.pluginmanager.register(recorder)
"""
TEST = """
import importlib, os, subprocess, sys
from pathlib import Path
ROOT = Path(__file__).parents[3]
{top}
def test_it(tmp_path):
    {body}
"""
CHILD = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]], check=True)"
PAGE, GLOB, HELPER = "docs/other.md", "docs/*", "tools/helper.py"
MEMBER, PROGRAM = "src/muster/plan/member.py", "src/muster/rank/program.py"
LOAD = "importlib.import_module('muster.' + 'plan.member')"
#: Name -> what the test does, what it needs to declare.
CASES = {
    "nothing": ("(tmp_path / 'file').write_text('nothing of the repository')", {}),
    "read": ("(ROOT / 'docs' / 'other.md').read_text()", {"reads": [PAGE]}),
    "exists": ("assert (ROOT / 'docs' / 'other.md').exists()", {"reads": [PAGE]}),
    "relative": ("os.chdir(ROOT); open('docs/other.md').close()", {"reads": [PAGE]}),
    "forked": ("os.waitpid(os.fork() or os._exit(not open(ROOT / 'docs' / 'other.md')), 0)", {"reads": [PAGE]}),
    "listed": ("assert list((ROOT / 'docs').glob('*.md'))", {"reads": [GLOB]}),
    "walked": ("assert list((ROOT / 'src/muster').rglob('*.csv'))", {"reads": ["src/muster/**"]}),
    "loaded": (LOAD, {"loads": [MEMBER]}),
    "loaded_before": (LOAD, {"loads": [MEMBER]}),
    "module": ("subprocess.run([sys.executable, '-m', 'muster.' + 'rank.program'])", {"loads": [PROGRAM]}),
    "script": ("subprocess.run([sys.executable, ROOT / 'tools' / 'helper.py'])", {"loads": [HELPER]}),
    "grandchild": (f"subprocess.run([sys.executable, '-c', {CHILD!r}, ROOT / 'tools/helper.py'])", {"loads": [HELPER]}),
    "imported": ("import muster.plan.member", {}),
    "declared": ("(ROOT / 'docs' / 'other.md').read_text()", {}),
    "collected": ("pass", {"reads": [PAGE]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def needs(tmp_path_factory):
    """Case -> what is undeclared, after one run of all of them in one process."""
    repository = Repository(tmp_path_factory.mktemp("repository"))
    repository.add_machinery()
    tops = {"collected": "(ROOT / 'docs' / 'other.md').read_text()"}
    files = {name: f"tests/unit/core/test_{name}.py" for name in CASES}
    repository.write({
        "tests/conftest.py": CONFTEST.format(root=str(repository.root)),
        "tests/inputs.json": json.dumps({files["declared"]: {"reads": [GLOB]}}),
        **{files[name]: TEST.format(body=body, top=tops.get(name, "")) for name, (body, _) in CASES.items()},
    })  # fmt: skip
    record = repository.root / ".cache" / "record"
    record.parent.mkdir()
    env = os.environ | {"MUSTER_RECORD": str(record), "PYTHONPATH": str(repository.root / "src")}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files.values()]
    done = subprocess.run(argv, cwd=repository.root, env=env, capture_output=True, text=True, check=False)
    assert f"{len(CASES)} passed" in done.stdout, done.stdout
    found = undeclared(Graph(repository.root), record)
    assert not found.keys() - set(files.values())
    return {name: {kind: each for kind, each in found.get(file, {}).items() if each} for name, file in files.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_is_opened_and_not_an_input_is_found(needs, name):
    assert needs[name] == CASES[name][1]
