"""A small repository with the machinery of this one."""

import shutil
import subprocess
from pathlib import Path

from tests.plugin.closure import ROOT, Graph
from tests.plugin.select import affected, changed_files

FILES = {
    "src/muster/__init__.py": "",
    "src/muster/core/__init__.py": "",
    "src/muster/core/units.py": "KILO = 1000\n",
    "src/muster/core/words.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from muster.core import units\n"
    ),
    "src/muster/plan/__init__.py": "",
    "src/muster/plan/search.py": "def best():\n    from muster.core.units import KILO\n    return KILO\n",
    "src/muster/plan/families.py": "KINDS = Registry('kind', 'group', {'one': 'muster.plan.member:ONE'})\n",
    "src/muster/plan/member.py": "ONE = 1\n",
    "src/muster/plan/tables/prices.csv": "1\n",
    "src/muster/rank/__init__.py": "",
    "src/muster/rank/lazy.py": "def lazy() -> object:\n    from muster.core import deep\n\n    return deep\n",
    "src/muster/core/deep.py": "",
    "src/muster/rank/program.py": "from muster.core import words\n",
    "docs/page.md": "text\n",
    "docs/other.md": "text\n",
    "examples/a.yaml": "a: 1\n",
    "tests/fakes/clock.py": "import muster.core.units\n",
    "tests/unit/plan/conftest.py": "from fakes.clock import muster\n",
    "tests/unit/plan/test_search.py": (
        "from muster.plan.search import best\ndef test_best():\n    assert best() == 1000\n"
    ),
    "tests/unit/plan/test_families.py": "from muster.plan import families\n",
    "tests/unit/core/test_words.py": "from muster.core import words\ndef test_words():\n    assert words\n",
    "tests/unit/core/test_lazy.py": "from muster.rank.lazy import lazy\n\n\ndef test_lazy():\n    assert lazy()\n",
    "tests/unit/core/test_program.py": 'PROGRAM = ["python", "-m", "muster.rank.program"]\n',
    "tests/unit/core/test_page.py": (
        "import pytest\npytestmark = [pytest.mark.reads('docs/page.md', 'examples/*'),"
        " pytest.mark.loads('tools/helper.py')]\n"
    ),
    "tools/helper.py": "from muster.core import words\n",
}  # fmt: skip


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.write(FILES)
        self.base = self.commit()

    def git(self, *arguments: str) -> str:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(argv, cwd=self.root, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", "tests: state")
        return self.git("rev-parse", "HEAD")

    def affected(self, green: dict[str, str] | None = None) -> set[str]:
        """Test files, without their folder, that the difference to ``base`` selects."""
        changed = changed_files(self.root, self.base)
        graph = Graph(self.root, gone=[path for path in changed if not (self.root / path).is_file()])
        return {Path(test).name for test in affected(graph, changed, green or {}).tests}

    def add_machinery(self) -> None:
        """The plugins, ``tools/house.py`` and the settings, as this checkout has them."""
        shutil.copytree(
            ROOT / "tests" / "plugin", self.root / "tests" / "plugin", ignore=shutil.ignore_patterns("*.pyc")
        )
        for name in ("tools/facts.py", "tools/house.py", "pyproject.toml", ".gitignore", "tests/conftest.py"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("second_try", "sizes", "worker_crash"):
            shutil.copy(ROOT / "tests" / f"{name}.py", self.root / "tests" / f"{name}.py")
