"""What a test file depends on: the files of the repository that can change how it ends.

The edges between Python files are the imports (in functions too; under ``TYPE_CHECKING`` they are mypy's business), the
tables of modules (``Registry``), and the modules of ours that a string of a test or a tool names. A test file depends
on all that it reaches so, on its folders' ``conftest.py``, on data files (those of each package of ``src`` that it
reaches; elsewhere those of the folder of each module that it reaches), and on what it declares::

    pytestmark = [pytest.mark.reads("docs/a.md", "examples/*.yaml"), pytest.mark.loads("muster.rank.fork_server")]

``tests/inputs.json`` has more declarations, which the recorder wrote. Where a name may be two files, both count.
"""

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from tools.facts import Cache, Facts

ROOT = Path(__file__).parents[2]
PYTHON = ("src/", "tests/", "tools/", "benchmarks/")
INPUTS = "tests/inputs.json"


class Graph:
    """The files of a checkout (``git``'s, and new ones that it does not ignore) and how they depend on each other.

    ``gone`` are files that were deleted: what would import or read them depends on them still.
    """

    def __init__(self, root: Path = ROOT, gone: Iterable[str] = ()) -> None:
        self.root = root
        listed = git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
        here = [path for path in sorted(filter(None, listed)) if (root / path).is_file()]
        texts = {path: (root / path).read_bytes() for path in here}
        self.hashes = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
        self.known = {*here, *gone}
        self.paths = sorted(self.known)
        cache = Cache(root / ".cache" / "facts.json")
        self.facts = {path: _facts(cache, path, text) for path, text in texts.items() if _is_python(path)}
        cache.save()
        declared = root / INPUTS
        self.recorded: dict[str, dict[str, list[str]]] = json.loads(declared.read_text()) if declared.exists() else {}
        self._closures: dict[str, frozenset[str]] = {}

    @cached_property
    def test_files(self) -> list[str]:
        """What ``./setup.sh check`` runs."""
        return [path for path in self.facts if path.startswith("tests/unit/") and Path(path).name.startswith("test_")]

    @cached_property
    def modules(self) -> dict[str, set[str]]:
        """Dotted name -> its files. In ``tests``, ``tools`` and ``benchmarks`` every end of a path is a name: folders
        of theirs are on ``sys.path``."""
        named: dict[str, set[str]] = defaultdict(set)
        for path in filter(_is_python, self.paths):
            parts = Path(path).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if parts[0] == "src":
                named[".".join(parts[1:])].add(path)
            else:
                for start in range(len(parts)):
                    named[".".join(parts[start:])].add(path)
        return named

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        return {path: self._imported(path, facts) for path, facts in self.facts.items()}

    def _imported(self, path: str, facts: Facts) -> set[str]:
        packages = (f"{folder}/__init__.py" for folder in Path(path).parents)  # they run before it
        found = {package for package in packages if package in self.known}
        for module, names, _, kind in facts.imports:
            if kind != "typing":
                found |= self.files_of(module)
                for name in names or ():
                    found |= self.modules.get(f"{module}.{name}", set())
        for name in facts.tables if path.startswith("src/") else facts.named:
            found |= self.files_of(name)
        return found - {path}

    def files_of(self, name: str) -> set[str]:
        """The files that importing ``name`` runs: its own and its packages'; of ``module.attribute`` the module's."""
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names:  # rather than a file of that name in a folder of fakes
            return set()
        return set().union(*(self.modules.get(".".join(parts[: end + 1]), ()) for end in range(len(parts))))

    def closure(self, path: str) -> frozenset[str]:
        """All that it reaches, with itself."""
        if path not in self._closures:
            found, todo = {path}, [path]
            while todo:
                todo += (new := self.edges.get(todo.pop(), set()) - found)
                found |= new
            self._closures[path] = frozenset(found)
        return self._closures[path]

    @cached_property
    def data(self) -> dict[str, set[str]]:
        """Folder of modules -> the data files that any of these may read."""
        folders = {str(Path(path).parent) for path in filter(_is_python, self.paths)} - {"tests", "tools", "benchmarks"}
        found: dict[str, set[str]] = defaultdict(set)
        for path in self.paths:
            if path.startswith(PYTHON) and not _is_python(path):
                if path.startswith("src/"):
                    found["/".join(path.split("/")[:3])].add(path)
                elif owner := next((str(each) for each in Path(path).parents if str(each) in folders), None):
                    found[owner].add(path)
        return found

    def data_of(self, path: str) -> set[str]:
        folder = "/".join(path.split("/")[:3]) if path.startswith("src/") else str(Path(path).parent)
        return self.data.get(folder, set())

    def declared(self, test: str, kind: str) -> list[str]:
        facts = self.facts.get(test)
        return [*(facts.declared.get(kind, ()) if facts else ()), *self.recorded.get(test, {}).get(kind, ())]

    def starts(self, test: str) -> set[str]:
        """The files from which it reaches the others: its own, conftests, and what it loads by name."""
        folders = {str(each) for each in Path(test).parents}
        found = {path for path in self.paths if path.endswith("/conftest.py") and str(Path(path).parent) in folders}
        for name in self.declared(test, "loads"):
            found |= {name} if name.endswith(".py") else self.files_of(name)
        return found | {test}

    def inputs(self, test: str) -> set[str]:
        found = set().union(*map(self.closure, self.starts(test)))
        found |= set().union(*map(self.data_of, found))
        for pattern in self.declared(test, "reads"):
            found |= {path for path in self.paths if matches(path, pattern)}
        return found

    @cached_property
    def folders(self) -> dict[str, set[str]]:
        """Each folder ("": the repository) -> the folders in and below it that hold files."""
        found: dict[str, set[str]] = defaultdict(set)
        for path in self.paths:
            folder, *above = ("" if str(each) == "." else str(each) for each in Path(path).parents)
            for each in (folder, *above):
                found[each].add(folder)
        return found

    def key(self, test: str) -> str:
        """SHA-256 of its inputs: the same as long as none of them changes, comes or goes."""
        digest = hashlib.sha256()
        for path in sorted(self.inputs(test)):
            digest.update(f"{path}\0{self.hashes.get(path, '')}\n".encode())
        return digest.hexdigest()

    def why(self, test: str, path: str) -> list[str]:
        """The chain from the test to that input of it; the reason comes last where it is no import."""
        before: dict[str, str] = dict.fromkeys(self.starts(test), "")
        todo = sorted(before, key=lambda each: each != test)
        for each in todo:
            if each == path or path in self.data_of(each):
                chain = [] if each == path else [f"{path} (data of its folder)"]
                while each:
                    chain.insert(0, each)
                    each = before[each]
                return chain if chain[0] == test else [test, *chain]
            for new in sorted(self.edges.get(each, set()) - before.keys()):
                before[new] = each
                todo.append(new)
        pattern = next((each for each in self.declared(test, "reads") if matches(path, each)), None)
        return [test, f"{path} (reads {pattern})"] if pattern else []


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def matches(path: str, pattern: str) -> bool:
    """``*`` stays in its folder, ``**`` at the end is everything below."""
    if pattern.endswith("/**"):
        return path.startswith(pattern[:-2])
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def covers(pattern: str, other: str) -> bool:
    """Whether every path that matches ``other`` matches ``pattern``, as far as their texts tell."""
    return pattern == other or (pattern.endswith("/**") and other.startswith(pattern[:-2]))


def _is_python(path: str) -> bool:
    return path.endswith(".py") and path.startswith(PYTHON)


def _facts(cache: Cache, path: str, text: bytes) -> Facts:
    try:
        return cache.facts(text)
    except SyntaxError:  # the tests that need it will say so
        return Facts(0)
