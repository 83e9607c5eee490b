"""``./setup.sh check`` in a fresh clone: each part fails on a commit that is bad for it. ``tests/plugin/check.py``."""

import os
import subprocess
import sys

import pytest

GOOD = {
    "src/muster/plan/search.py": (
        "def best() -> int:\n    from muster.core.units import KILO\n\n    return KILO\n\n\n"
        "def other() -> int:\n    return 1\n"
    ),
    "src/muster/plan/families.py": "",
    "tests/fakes/clock.py": "from muster.core import units\n\n__all__ = ['units']\n",
    "tests/unit/plan/conftest.py": "from fakes.clock import units\n\n__all__ = ['units']\n",
    "tests/unit/plan/test_search.py": (
        "from muster.plan.search import best\n\n\ndef test_best():\n    assert best() == 1000\n"
    ),
    "tests/unit/plan/test_families.py": "def test_families():\n    pass\n",
    "tests/unit/core/test_words.py": "from muster.core import words\n\n\ndef test_words():\n    assert words\n",
    "tests/unit/core/test_program.py": "def test_program():\n    pass\n",
    "tests/unit/core/test_page.py": (
        "from pathlib import Path\n\nimport pytest\n\npytestmark = pytest.mark.reads('docs/page.md')\n\n\n"
        "def test_page():\n    assert (Path(__file__).parents[3] / 'docs' / 'page.md').read_text() == 'text\\n'\n"
    ),
    "tests/unit/core/test_undeclared.py": (
        "from pathlib import Path\n\n\ndef test_other():\n    folder = Path(__file__).parents[3] / 'do' 'cs'\n"
        "    assert (folder / 'other.md').read_text() == 'text\\n'\n"
    ),
    "src/muster/core/words.py": "",
    "src/muster/rank/program.py": "",
    "tools/helper.py": "",
}
LONG = "def long() -> int:\n" + "    x = 1\n" * 60 + "    return x\n"
#: What a commit changes, options, words of the output; the exit code is 1.
BAD = {
    "ruff": ({"src/muster/core/words.py": "import os\n"}, [], "F401"),
    "figures": ({"src/muster/core/words.py": LONG}, [], "functions over 60 lines"),
    "mypy": ({"src/muster/core/words.py": "def words() -> int:\n    return ''\n"}, [], "return-value"),
    "affected test": ({"src/muster/core/units.py": "KILO = 1024\n"}, [], "test_best - assert 1024 == 1000"),
    "page": ({"docs/page.md": "other\n"}, [], "FAILED tests/unit/core/test_page.py"),
    "missed": ({"docs/other.md": "changed\n"}, ["--all"], "MISSED: tests/unit/core/test_undeclared.py"),
}


@pytest.fixture
def clone(repository, tmp_path_factory):
    """A fresh clone of a repository whose check is good at its base commit."""
    repository.add_machinery()
    repository.write(GOOD)
    base = repository.commit()
    repository.write({"tools/base-commit": f"{base}\n"})
    repository.commit()
    folder = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", str(repository.root), str(folder)], check=True)
    repository.root = folder
    return repository


def check(clone, *options):
    env = os.environ | {"PYTHONPATH": str(clone.root / "src"), "PYTEST_ADDOPTS": "", "MUSTER_WORKERS": "0"}
    env.pop("MUSTER_TIMES", None)
    env.pop("MUSTER_TESTS_RAN", None)
    argv = [sys.executable, "-m", "tests.plugin.check", *options]
    done = subprocess.run(argv, cwd=clone.root, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_commit_fails(clone, name):
    files, options, words = BAD[name]
    clone.write(files)
    clone.commit()
    code, output = check(clone, *options)
    assert code == 1 and words in output and "check: FAILED" in output, output


@pytest.mark.slow
def test_a_good_one_runs_what_it_can_affect_and_the_second_time_nothing(clone):
    code, output = check(clone)
    assert code == 0 and "tools/base-commit changed: 0 of 7 test files" in output, output
    clone.write({"src/muster/plan/search.py": GOOD["src/muster/plan/search.py"].replace("return 1", "return 2")})
    code, output = check(clone)
    assert code == 0 and "changed: 1 of 7 test files" in output and "1 passed" in output, output
    code, output = check(clone)
    assert code == 0 and "1 more passed with the same inputs before: 0 of 7 test files" in output, output
    code, output = check(clone, "--why", "tests/unit/plan/test_search.py")
    assert code == 0 and "    -> src/muster/plan/search.py" in output
    code, output = check(clone, "--all")
    assert code == 0 and "7 passed" in output and "undeclared inputs of tests/unit/core/test_undeclared.py" in output, (
        output
    )
    code, output = check(clone, "--declare")
    assert '"docs/other.md"' in (clone.root / "tests" / "inputs.json").read_text()
    clone.commit()
    clone.write({"docs/other.md": "changed\n"})
    code, output = check(clone, "--since", "HEAD")
    assert code == 1 and "docs/other.md changed: 1 of 7 test files" in output and "test_undeclared.py" in output, output


@pytest.mark.slow
def test_a_crash_or_an_interruption_is_not_green(clone):
    clone.write({"tests/unit/core/test_words.py": "import os\n\n\ndef test_words():\n    os._exit(1)\n"})
    for _ in range(2):
        code, output = check(clone)
        assert code == 1 and "1 of 7 test files" in output, output
    code, output = check(clone, "--since", "no such commit")
    assert code == 2 and "this clone has no commit 'no such commit'" in output
