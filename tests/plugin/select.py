"""Which test files ``./setup.sh check`` runs: those that what changed since a commit can affect, and that have not
passed with the same inputs before.

The commit is named in ``tools/base-commit``: all tests passed there. Where it is not known (a shallow clone), and where
a file of ``EVERYTHING`` changed, all test files are selected. ``green.json`` in the cache has the key of each test
file's inputs when it passed.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.plugin.closure import ROOT, Graph, git, matches

BASE = "tools/base-commit"
GREEN = Path(".cache/tests/green.json")
#: Patterns of files on which every test depends.
EVERYTHING = (
    "pyproject.toml", "constraints.txt", "requirements/**", "setup.sh", "tests/conftest.py", "tests/plugin/**",
)  # fmt: skip
#: Files that no test needs to read.
NO_INPUTS = (BASE, ".gitignore", ".git-blame-ignore-revs", "benchmarks/*.jsonl", "benchmarks/*.md")


@dataclass(frozen=True)
class Selection:
    tests: list[str]
    why: str
    changed: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    """Changed files that are no test's input."""


def base_commit(root: Path = ROOT) -> str | None:
    """The commit that the file names, if this clone has it."""
    path = root / BASE
    return known_commit(root, path.read_text().strip()) if path.exists() else None


def known_commit(root: Path, name: str) -> str | None:
    argv = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    found = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    return found or None


def changed_files(root: Path, base: str) -> set[str]:
    """Files whose content differs from the commit's, deleted and untracked ones included."""
    differing = git(root, "diff", "--name-only", "--no-renames", "--no-ext-diff", "-z", base, "--")
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return set(filter(None, (differing + new).split("\0")))


def select(root: Path = ROOT, base: str | None = None, *, everything: bool = False) -> tuple[Graph, Selection]:
    base = base or base_commit(root)
    changed = changed_files(root, base) if base else set()
    graph = Graph(root, gone=[path for path in changed if not (root / path).is_file()])
    if everything:
        return graph, Selection(graph.test_files, "--all", frozenset(changed))
    if base is None:
        return graph, Selection(graph.test_files, f"{BASE} names no commit of this clone")
    return graph, affected(graph, changed, read_green(root))


def affected(graph: Graph, changed: set[str], green: dict[str, str]) -> Selection:
    forcing = sorted(path for path in changed if any(matches(path, pattern) for pattern in EVERYTHING))
    inputs = {test: graph.inputs(test) for test in graph.test_files}
    hit = [test for test in graph.test_files if forcing or inputs[test] & changed]
    common = environment(graph)
    tests = [test for test in hit if green.get(test) != key(graph, test, common)]
    shown = forcing or sorted(changed)
    why = ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "") + " changed"
    if passed := len(hit) - len(tests):
        why += f"; {passed} more passed with the same inputs before"
    read = set().union(*inputs.values())
    unread = sorted(
        path for path in changed - read if not any(matches(path, each) for each in (*EVERYTHING, *NO_INPUTS))
    )
    return Selection(tests, why if changed else "nothing changed", frozenset(changed), tuple(unread))


def environment(graph: Graph) -> str:
    """What every test depends on: the Python, the packages' lock, the machinery."""
    digest = hashlib.sha256(f"{sys.version} {sys.executable}\n".encode())
    for path, content in sorted(graph.hashes.items()):
        if any(matches(path, pattern) for pattern in EVERYTHING):
            digest.update(f"{path}\0{content}\n".encode())
    return digest.hexdigest()


def key(graph: Graph, test: str, common: str) -> str:
    return hashlib.sha256(f"{common} {graph.key(test)}".encode()).hexdigest()


def read_green(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / GREEN).read_text()))
    except (OSError, ValueError):
        return {}


def note_green(graph: Graph, passed: Iterable[str], others: Iterable[str]) -> None:
    """Write down that these test files passed with their present inputs, and that the others are no longer known to."""
    common, green = environment(graph), read_green(graph.root)
    for test in others:
        green.pop(test, None)
    green |= {test: key(graph, test, common) for test in passed}
    path = graph.root / GREEN
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(green))
    new.replace(path)
