"""What ``muster`` and ``muster.api`` export: adding or removing a name is a decision, written down here."""

import ast
import importlib
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster.app import api
from muster.config import load
from muster.report.api import Report
from muster.report.ledger.fold import fold

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
import random_runs

VERBS = [
    "all_runs",
    "checkpoints",
    "damage_in_words",
    "down",
    "events",
    "execute",
    "export",
    "find_run",
    "load",
    "logs",
    "plan",
    "preview",
    "recover",
    "report",
    "restart",
    "status",
    "stop",
    "submit",
    "train",
    "watch",
    "watch_page",
]
#: What ``import muster`` gives beside them.
TOP = ["down", "events", "plan", "recover", "report", "status", "stop", "submit", "train"]
TYPES = [
    "Backend",
    "Cluster",
    "Console",
    "Damage",
    "Event",
    "Loaded",
    "MusterError",
    "Problem",
    "RunDir",
    "RunFileError",
    "RunSpec",
    "RunView",
    "Sink",
    "Terminal",
    "UsageError",
    "printable",
    "redact",
    "shown",
]


def test_exports():
    assert muster.__all__ == ["__version__", "api", *TOP] and muster.api is api
    assert api.__all__ == sorted([*VERBS, *TYPES])
    assert all(callable(getattr(api, name)) for name in api.__all__)


def test_importing_costs_nothing():
    code = "import sys, muster.app.api; print(sorted(m for m in sys.modules if m.startswith('muster.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['muster.app', 'muster.app.api']"


def test_muster_itself_is_imported_without_anything_and_gives_the_verbs():
    code = (
        "import sys, muster; assert not [m for m in sys.modules if m.startswith('muster.')]\n"
        "import muster.train, muster.plan.format, muster.report.api\n"  # packages of those names
        "assert all(callable(getattr(muster, name)) for name in muster.__all__[2:])\n"
        "assert not {'torch', 'transformers', 'typer'} & sys.modules.keys(), 'loaded too early'\n"
        "assert muster.plan.format is sys.modules['muster.plan.format']\n"
        "try: muster.train('/nowhere/run.yaml')\n"
        "except muster.api.MusterError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "/nowhere/run.yaml" in done.stdout, done.stderr


def test_the_types_are_those_of_the_verbs():
    stub = ast.parse(Path(muster.__file__).with_name("__init__.pyi").read_text())
    told = {
        each.asname: (node.module, each.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster.app.")
        for each in node.names
    }
    assert sorted(told) == TOP
    for name, (module, there) in told.items():
        assert getattr(importlib.import_module(module), there) is getattr(api, name)


def test_overrides_of_what_was_loaded_are_refused():
    loaded = api.load(str(Path(__file__).parents[3] / "examples" / "text2sql-cpu.yaml"))
    assert load.given(loaded) is loaded
    with pytest.raises(api.UsageError, match="where the run file is loaded"):
        load.given(loaded, ["training.steps=3"])


def test_what_tab_and_help_show():
    """In a notebook: names of the verbs, and of a verb that is a package too its signature, not the package's text."""
    assert set(muster.__all__) <= set(dir(muster))
    assert list(inspect.signature(muster.plan).parameters)[:2] == ["run_file", "overrides"]
    assert "muster.plan(run_file" in pydoc.render_doc(muster.plan) and "no clock, no files" not in muster.plan.__doc__


def test_what_a_notebooks_cell_shows_is_short():
    """The fields of a report were 909,341 characters: every event."""
    made = random_runs.plausible(3)
    result = Report(ledger=fold(made))
    assert result.ledger.run_id in repr(result) and len(repr(result)) < 10_000
    assert result._repr_html_().startswith("<pre>") and "Event(" not in result._repr_html_()
    run_file = Path(__file__).parents[3] / "examples/text2sql-cpu.yaml"
    planned = muster.plan(run_file)
    assert "this machine" in repr(planned) and len(repr(planned)) < 2_000
    assert "this machine" in planned._repr_html_()
