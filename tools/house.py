"""Figures of the source tree: ``python tools/house.py [--at REV ...] [--json | --list FIGURE] [--check]``.

Without ``--at`` the checkout is measured, uncommitted changes included; with it one column per git revision
(``checkout`` names the files as they are), so that before and after come from the same program:

    python tools/house.py --at 77c47f8 --at HEAD

``--list FIGURE`` prints every occurrence (file:line), ``--check`` exits with 1 where a limit is broken: each limit is
for ``src`` in the last column, and ``src`` may not have more lines than in the first column. Needs Python 3.11 alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = {"local", "slurm", "gke", "vertex", "gce"}
#: Words in the name of an object that implements one of our own interfaces.
SEAMS = {"launcher", "policy", "backend", "backends", "store", "clock", "shell", "source", "task", "judge", "watcher"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
KINDS = ("module", "function", "typing")


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    kind: str
    """Where the statement is: at ``module`` level, inside a ``function``, under ``if TYPE_CHECKING`` (``typing``)."""


@dataclass
class Module:
    name: str
    path: Path
    text: str
    is_package: bool
    syntax: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.syntax = ast.parse(self.text, str(self.path))

    @property
    def package(self) -> str:
        """The package directly under ``muster``: one floor of the house."""
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def folder(self) -> str:
        return self.name if self.is_package or self.name.count(".") < 2 else self.name.rpartition(".")[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.syntax))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, FUNCTION)]


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
            modules[name] = Module(name, path.relative_to(self.root.parent), path.read_text(), is_package)
        return modules

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """What each module imports from this tree; ``from package import name`` is the module of that name, if any."""
        return {
            name: [
                Import(target, line, kind)
                for target, line, kind in imports_of(module.syntax.body, "module", self.modules)
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


# ---------------------------------------------------------------- reading one file


def imports_of(body: Iterable[ast.AST], kind: str, known: Mapping[str, object]) -> Iterator[tuple[str, int, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, kind) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            targets = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((target, node.lineno, kind) for target in sorted(targets & known.keys()))
            if node.module in known and targets - known.keys():
                yield node.module, node.lineno, kind
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imports_of(node.body, "typing", known)
            yield from imports_of(node.orelse, kind, known)
        else:
            inside = "function" if isinstance(node, (*FUNCTION, ast.Lambda)) and kind == "module" else kind
            yield from imports_of(ast.iter_child_nodes(node), inside, known)


def mccabe(body: Iterable[ast.stmt]) -> int:
    """As ruff's C901 counts it: statements that branch, nested functions included; no ``and``, ``or``, conditionals."""
    total = 0
    for node in body:
        match node:
            case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
                total += 1 + mccabe(node.body) + mccabe(node.orelse)
            case ast.Try() | ast.TryStar():
                total += mccabe(node.body) + bool(node.orelse) + mccabe(node.orelse) + mccabe(node.finalbody)
                total += sum(1 + mccabe(handler.body) for handler in node.handlers)
            case ast.With() | ast.AsyncWith() | ast.ClassDef():
                total += mccabe(node.body)
            case ast.Match():
                total += sum(1 + mccabe(case.body) for case in node.cases) - _is_default(node.cases[-1])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                total += 1 + mccabe(node.body)
    return total


def _is_default(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def decisions(function: ast.AST) -> int:
    """All that branches: McCabe's number with ``and``, ``or``, ``x if y else z``, ``assert`` and comprehensions."""
    total = 1
    for node in ast.walk(function):
        match node:
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
            case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While() | ast.ExceptHandler() | ast.Assert():
                total += 1
            case ast.match_case():
                total += not _is_default(node)
    return total


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


def nodes(tree: Tree, test: Callable[[ast.AST], bool], *, outside: str = "") -> list[str]:
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node).splitlines()[0][:110]}"
        for module in tree.modules.values()
        if module.package != outside
        for node in module.nodes
        if test(node) and isinstance(node, (ast.expr, ast.stmt))
    ]


def functions(tree: Tree, size: Callable[[ast.FunctionDef | ast.AsyncFunctionDef], int], limit: int) -> list[str]:
    sizes = [
        (size(node), f"{module.path}:{node.lineno}: {node.name}")
        for module in tree.modules.values()
        for node in module.functions
    ]
    return [f"{where} {number}" for number, where in sorted(sizes, reverse=True) if number > limit]


def big_folders(tree: Tree) -> list[str]:
    files = Counter(module.path.parent for module in tree.modules.values())
    return [f"{folder}: {number}" for folder, number in files.most_common() if number > 20]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def names_a_backend(node: ast.AST) -> bool:
    """A comparison with a back end's name, a case of one, or a table by such names."""
    match node:
        case ast.Compare():
            return any(
                isinstance(part, ast.Constant) and part.value in BACKENDS
                for side in (node.left, *node.comparators)
                for part in (side.elts if isinstance(side, (ast.Tuple, ast.Set, ast.List)) else [side])
            )
        case ast.Match():
            values = [
                part.value for case in node.cases for part in ast.walk(case.pattern) if isinstance(part, ast.Constant)
            ]
            return bool(BACKENDS.intersection(each for each in values if isinstance(each, str)))
        case ast.Dict():
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
            return len(keys & BACKENDS) > 1
        case ast.Subscript(value=ast.Name(id="Literal")):
            return sum(isinstance(part, ast.Constant) and part.value in BACKENDS for part in ast.walk(node.slice)) > 1
        case ast.Call(func=ast.Name(id="isinstance")):
            return any(isinstance(part, ast.Name) and part.id.endswith("Launcher") for part in ast.walk(node.args[1]))
    return False


def looks_up_a_seam(node: ast.AST) -> bool:
    """``getattr(launcher, "ask", None)``: part of one of our interfaces that its type does not mention."""
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(), *_]):
            names = [part.id for part in ast.walk(owner) if isinstance(part, ast.Name)]
            names += [part.attr for part in ast.walk(owner) if isinstance(part, ast.Attribute)]
            words = {word for name in names for word in name.lower().split("_")}
            return bool(words & SEAMS) or ast.unparse(owner) == "self"
    return False


def is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"


def is_untyped_mapping(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(
            value=ast.Name(id="dict" | "Mapping" | "MutableMapping"),
            slice=ast.Tuple(elts=[*_, ast.Name(id="Any" | "object")]),
        ):
            return True
    return False


def reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv"):
            return True
    return False


@dataclass(frozen=True)
class Figure:
    label: str
    of: Callable[[Tree], list[str] | int]
    limit: int | None = None
    """Of ``src``."""


FIGURES = {
    "files": Figure("files", lambda tree: len(tree.modules)),
    "lines": Figure("lines", lambda tree: sum(len(each.text.splitlines()) for each in tree.modules.values())),
    "functions": Figure("functions", lambda tree: sum(1 for each in tree.modules.values() for _ in each.functions)),
    "long-files": Figure(
        "files over 800 lines",
        lambda tree: [str(each.path) for each in tree.modules.values() if len(each.text.splitlines()) > 800],
        0,
    ),
    "long-functions": Figure("functions over 60 lines", lambda tree: functions(tree, length, 60), 0),
    "mccabe-10": Figure("McCabe over 10", lambda tree: functions(tree, lambda node: mccabe([node]), 10)),
    "mccabe-15": Figure("McCabe over 15", lambda tree: functions(tree, lambda node: mccabe([node]), 15), 0),
    "decisions-10": Figure(
        "all branches (and, or, if-else, comprehensions too) over 10", lambda tree: functions(tree, decisions, 10)
    ),
    "decisions-15": Figure(
        "all branches (and, or, if-else, comprehensions too) over 15", lambda tree: functions(tree, decisions, 15)
    ),
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
        lambda tree: nodes(tree, names_a_backend, outside="backends"),
        0,
    ),
    "seams": Figure("getattr and hasattr on our own seams", lambda tree: nodes(tree, looks_up_a_seam), 0),
    "any": Figure("Any", lambda tree: nodes(tree, is_any), 250),
    "untyped-mappings": Figure("mappings of Any or object", lambda tree: nodes(tree, is_untyped_mapping), 120),
    "environment": Figure("reads of os.environ", lambda tree: nodes(tree, reads_environment)),
}


# ---------------------------------------------------------------- revisions, the table


def measured(folder: Path) -> dict[str, dict[str, list[str] | int]]:
    trees = {"src": Tree(folder / "src"), "tests": Tree(folder / "tests")}
    return {name: {key: figure.of(tree) for key, figure in FIGURES.items()} for name, tree in trees.items()}


def at_revision(revision: str) -> dict[str, dict[str, list[str] | int]]:
    if revision == "checkout":
        return measured(ROOT)
    archive = subprocess.run(
        ["git", "archive", revision, "src", "tests"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measured(Path(folder))


def number(value: list[str] | int) -> int:
    return value if isinstance(value, int) else len(value)


def broken(columns: Mapping[str, Mapping[str, Mapping[str, list[str] | int]]]) -> list[str]:
    first, *_, last = [trees["src"] for trees in [*columns.values()] * 2]
    limits = {key: figure.limit for key, figure in FIGURES.items() if figure.limit is not None}
    limits["lines"] = number(first["lines"])
    return [
        f"{FIGURES[key].label}: {number(last[key])}, limit {limit} (tools/house.py --list {key})"
        for key, limit in limits.items()
        if number(last[key]) > limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at", action="append", metavar="REV", help="a git revision, or 'checkout'; may be repeated")
    parser.add_argument("--json", action="store_true", help="numbers as JSON")
    parser.add_argument("--list", choices=FIGURES, metavar="FIGURE", help=f"every occurrence: {', '.join(FIGURES)}")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is broken")
    given = parser.parse_args()
    columns = {revision: at_revision(revision) for revision in given.at or ["checkout"]}
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
        print(f"| | limit (src) | {' | '.join(heads)} |\n|---|--:|{'--:|' * len(heads)}")
        for key, figure in FIGURES.items():
            cells = [f"{number(columns[at][tree][key]):,}" for tree in ("src", "tests") for at in columns]
            print(f"| {figure.label} | {'' if figure.limit is None else figure.limit} | {' | '.join(cells)} |")
    problems = broken(columns) if given.check else []
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
