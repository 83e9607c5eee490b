"""Figures of the source tree: ``python tools/house.py [--at REV ...] [--json | --list FIGURE] [--check]``.

Without ``--at`` the checkout is measured, uncommitted changes included; with it one column per git revision
(``checkout`` names the files as they are), so that before and after come from the same program:

    python tools/house.py --at 77c47f8 --at HEAD

``--list FIGURE`` prints every occurrence (file:line), ``--check`` exits with 1 where a limit is broken: each limit is
for ``src`` in the last column, and ``src`` may not have more lines than in the first column. A limit that is above its
goal is where the figure stood when the limit was set: it is only ever lowered. ``--check`` also refuses commits after
``tools/base-commit`` whose subject is over 72 characters or names no area. Needs Python 3.11 alone.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from facts import Cache, Facts, refused

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("module", "function", "typing")
CACHE = Cache()


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    kind: str
    """Where the statement is: at ``module`` level, inside a ``function``, under ``if TYPE_CHECKING`` (``typing``)."""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    facts: Facts
    is_package: bool

    @property
    def package(self) -> str:
        """The package directly under ``muster``: one floor of the house."""
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def folder(self) -> str:
        return self.name if self.is_package or self.name.count(".") < 2 else self.name.rpartition(".")[0]


@dataclass
class Tree:
    """The Python files under one folder (``src`` or ``tests``)."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        modules = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = Module(name, path.relative_to(self.root.parent), CACHE.facts(path.read_bytes()), is_package)
        return modules

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """What each module imports from this tree; ``from package import name`` is the module of that name, if any."""
        return {
            name: [
                Import(target, line, kind)
                for imported, names, line, kind in module.facts.imports
                for target in targets(imported, names, self.modules)
                if target != name
            ]
            for name, module in self.modules.items()
        }

    def circles(self, group: Callable[[Module], str], kinds: Iterable[str] = KINDS) -> list[str]:
        """Groups of modules that import each other, directly or through others."""
        graph: dict[str, set[str]] = {}
        for name, imports in self.imports.items():
            here = group(self.modules[name])
            graph.setdefault(here, set())
            for each in imports:
                if each.kind in kinds and group(self.modules[each.target]) != here:
                    graph[here].add(group(self.modules[each.target]))
        return [" <-> ".join(sorted(each)) for each in strongly_connected(graph) if len(each) > 1]


def targets(imported: str, names: list[str] | None, known: Mapping[str, object]) -> list[str]:
    """The modules that the statement imports: ``from package import name`` is the module of that name, if any."""
    modules = {f"{imported}.{name}" for name in names or ()}
    found = sorted(modules & known.keys())
    return [*found, imported] if imported in known and (names is None or modules - known.keys()) else found


def strongly_connected(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            components.append(component)

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


# ---------------------------------------------------------------- figures: each a list of occurrences, or a number


def marks(tree: Tree, figure: str, *, outside: str = "") -> list[str]:
    return [
        f"{module.path}:{line}: {text}"
        for module in tree.modules.values()
        if module.package != outside
        for line, text in module.facts.marks.get(figure, ())
    ]


#: Places in the facts of a function.
LENGTH, MCCABE, BRANCHES, PARAMETERS = 2, 3, 4, 5
#: What is written down for others to read has as many fields as they need.
RECORDS = ("muster.protocol.", "muster.config.", "muster.core.event_details.")


#: Where a refused word stays: (file, word) -> why.
WORDS_ALLOWED: Mapping[tuple[str, str], str] = {}
#: Pages and other texts that are searched for refused words.
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md")
TEXTS = {".yaml", ".sh", ".js", ".html", ".css"}


def refused_words(tree: Tree) -> list[str]:
    """In docstrings, comments and messages; with ``src`` also in its other texts and in the pages."""
    root = tree.root.parent
    found = [(str(each.path), *mark) for each in tree.modules.values() for mark in each.facts.marks.get("words", ())]
    if tree.root.name == "src":
        texts = [path for path in tree.root.rglob("*") if path.suffix in TEXTS and ".min." not in path.name]
        pages = [path for pattern in PAGES for path in root.glob(pattern)]
        for path in sorted(texts + pages):
            found += [(str(path.relative_to(root)), *mark) for mark in refused(path.read_text(encoding="utf-8"))]
    return [
        f"{path}:{line}: {text}" for path, line, text in found if (path, text.partition(":")[0]) not in WORDS_ALLOWED
    ]


def functions(tree: Tree, size: int, limit: int) -> list[str]:
    sizes = [
        (function[size], f"{module.path}:{function[1]}: {function[0]}")
        for module in tree.modules.values()
        for function in module.facts.functions
    ]
    return [f"{where} {number}" for number, where in sorted(sizes, reverse=True) if number > limit]


def big_classes(tree: Tree) -> list[str]:
    sizes = [
        (fields, f"{module.path}:{line}: {name}")
        for module in tree.modules.values()
        if not module.name.startswith(RECORDS)
        for name, line, fields in module.facts.classes
    ]
    return [f"{where} {number}" for number, where in sorted(sizes, reverse=True) if number > 15]


def many_lambdas(tree: Tree) -> list[str]:
    counted = [(len(each.facts.marks.get("lambdas", ())), str(each.path)) for each in tree.modules.values()]
    return [f"{path}: {number}" for number, path in sorted(counted, reverse=True) if number > 5]


def small_modules(tree: Tree) -> list[str]:
    return [
        f"{each.path}: {each.facts.lines}"
        for each in tree.modules.values()
        if not each.is_package and each.facts.lines < 30
    ]


def big_folders(tree: Tree) -> list[str]:
    files = Counter(module.path.parent for module in tree.modules.values())
    return [f"{folder}: {number}" for folder, number in files.most_common() if number > 20]


@dataclass(frozen=True)
class Figure:
    label: str
    of: Callable[[Tree], list[str] | int]
    limit: int | None = None
    """Of ``src``."""
    goal: int | None = None
    """Where the limit is to fall; None: it is there."""
    of_tests: int | None = None
    """The limit of ``tests``, where it has one."""


FIGURES = {
    "files": Figure("files", lambda tree: len(tree.modules)),
    "lines": Figure(
        "lines", lambda tree: sum(each.facts.lines for each in tree.modules.values()), 120_700, 104_000, 119_550
    ),
    "functions": Figure("functions", lambda tree: sum(len(each.facts.functions) for each in tree.modules.values())),
    "long-files": Figure(
        "files over 800 lines",
        lambda tree: [str(each.path) for each in tree.modules.values() if each.facts.lines > 800],
        0,
    ),
    "long-functions": Figure("functions over 60 lines", lambda tree: functions(tree, LENGTH, 60), 0),
    "mccabe-10": Figure("McCabe over 10", lambda tree: functions(tree, MCCABE, 10)),
    "mccabe-15": Figure("McCabe over 15", lambda tree: functions(tree, MCCABE, 15), 0),
    "decisions-10": Figure(
        "all branches (and, or, if-else, comprehensions too) over 10", lambda tree: functions(tree, BRANCHES, 10)
    ),
    "decisions-15": Figure(
        "all branches (and, or, if-else, comprehensions too) over 15",
        lambda tree: functions(tree, BRANCHES, 15),
        146,
        40,
    ),
    "parameters": Figure("functions with more than 8 parameters", lambda tree: functions(tree, PARAMETERS, 8), 25, 0),
    "fields": Figure("classes with more than 15 fields, but for records", big_classes, 33, 0),
    "lambda-files": Figure("files with more than 5 lambdas", many_lambdas, 16, 0),
    "lambdas": Figure("lambdas", lambda tree: marks(tree, "lambdas"), 580, 250),
    "fmt-skip": Figure("fmt: skip", lambda tree: marks(tree, "fmt-skip"), 244, 0),
    "small-modules": Figure("modules under 30 lines", small_modules, 40),
    "folders": Figure("folders with more than 20 Python files of their own", big_folders, 0),
    "circles-module": Figure(
        "import circles of modules, module level", lambda tree: tree.circles(lambda each: each.name, ["module"]), 0
    ),
    "circles-function": Figure(
        "import circles of modules, functions' imports too",
        lambda tree: tree.circles(lambda each: each.name, ["module", "function"]),
        0,
    ),
    "circles": Figure(
        "import circles of modules, every kind of import", lambda tree: tree.circles(lambda each: each.name), 0
    ),
    "circles-packages": Figure(
        "import circles of packages, every kind of import", lambda tree: tree.circles(lambda each: each.package), 0
    ),
    "circles-folders": Figure(
        "import circles of folders at any depth, every kind", lambda tree: tree.circles(lambda each: each.folder), 0
    ),
    "lazy-imports": Figure(
        "imports inside functions",
        lambda tree: [
            f"{tree.modules[name].path}:{each.line}: {each.target}"
            for name, imports in tree.imports.items()
            for each in imports
            if each.kind == "function"
        ],
    ),
    "backend-names": Figure(
        "branches on a back end's name outside backends/",
        lambda tree: marks(tree, "backend-names", outside="backends"),
        0,
    ),
    "seams": Figure("getattr and hasattr on our own seams", lambda tree: marks(tree, "seams"), 0),
    "any": Figure("Any", lambda tree: marks(tree, "any"), 168, 120),
    "untyped-mappings": Figure("mappings of Any or object", lambda tree: marks(tree, "untyped-mappings"), 120),
    "words": Figure("refused words in docstrings, comments, messages and pages", refused_words, 0),
    "environment": Figure("reads of os.environ", lambda tree: marks(tree, "environment")),
}


# ---------------------------------------------------------------- revisions, the table


def measured(folder: Path) -> dict[str, dict[str, list[str] | int]]:
    trees = {"src": Tree(folder / "src"), "tests": Tree(folder / "tests")}
    return {name: {key: figure.of(tree) for key, figure in FIGURES.items()} for name, tree in trees.items()}


def at_revision(revision: str) -> dict[str, dict[str, list[str] | int]]:
    if revision == "checkout":
        return measured(ROOT)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measured(Path(folder))


def number(value: list[str] | int) -> int:
    return value if isinstance(value, int) else len(value)


def broken(columns: Mapping[str, Mapping[str, Mapping[str, list[str] | int]]]) -> list[str]:
    first, *_, last = [*columns.values()] * 2
    limits = {(key, "src"): figure.limit for key, figure in FIGURES.items() if figure.limit is not None}
    limits |= {(key, "tests"): figure.of_tests for key, figure in FIGURES.items() if figure.of_tests is not None}
    limits["lines", "src"] = min(limits["lines", "src"], number(first["src"]["lines"]))
    return [
        f"{FIGURES[key].label} of {tree}: {number(last[tree][key])}, limit {limit} (tools/house.py --list {key})"
        for (key, tree), limit in limits.items()
        if number(last[tree][key]) > limit
    ]


SUBJECT = re.compile(r"[a-z][\w., /-]*: \S")


def bad_subjects(root: Path) -> list[str]:
    """Subjects of commits after ``tools/base-commit`` that are too long or name no area; none where that is unknown."""
    try:
        base = (root / "tools" / "base-commit").read_text().strip()
    except OSError:
        return []
    argv = ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    done = subprocess.run(argv, cwd=root, check=False, capture_output=True, text=True)
    commits = [line.split(" ", 1) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [
        f"subject of commit {commit} ('area: what', at most 72 characters): {subject}"
        for commit, subject in commits
        if len(subject) > 72 or not SUBJECT.match(subject)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at", action="append", metavar="REV", help="a git revision, or 'checkout'; may be repeated")
    parser.add_argument("--json", action="store_true", help="numbers as JSON")
    parser.add_argument("--list", choices=FIGURES, metavar="FIGURE", help=f"every occurrence: {', '.join(FIGURES)}")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is broken")
    given = parser.parse_args()
    columns = {revision: at_revision(revision) for revision in given.at or ["checkout"]}
    CACHE.save()
    if given.list:
        for tree in ("src", "tests"):
            value = list(columns.values())[-1][tree][given.list]
            print(*([f"{tree}: {value}"] if isinstance(value, int) else value), sep="\n")
    elif given.json:
        print(json.dumps(
            {at: {tree: {key: number(value) for key, value in figures.items()} for tree, figures in trees.items()}
             for at, trees in columns.items()}, indent=2,
        ))  # fmt: skip
    elif not given.check:
        heads = [f"{tree}, {at}" for tree in ("src", "tests") for at in columns]
        print(f"| | limit (src) | goal | {' | '.join(heads)} |\n|---|--:|--:|{'--:|' * len(heads)}")
        for key, figure in FIGURES.items():
            cells = [f"{number(columns[at][tree][key]):,}" for tree in ("src", "tests") for at in columns]
            limit, goal = ("" if each is None else f"{each:,}" for each in (figure.limit, figure.goal))
            print(f"| {figure.label} | {limit} | {goal} | {' | '.join(cells)} |")
    problems = broken(columns) + bad_subjects(ROOT) if given.check else []
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
