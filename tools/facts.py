"""What ``tools/house.py`` and the selection of tests know of a Python file: parsed once for each content.

The cache is ``.cache/facts.json``, by SHA-256 of a file's text; another version of this module starts a new one.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "facts.json"
MOST = 10_000
BACKENDS = {"local", "slurm", "gke", "vertex", "gce"}
#: Words in the name of an object that implements one of our own interfaces.
SEAMS = {"launcher", "policy", "backend", "backends", "store", "clock", "shell", "source", "task", "judge", "watcher"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SKIPS = re.compile(r"#\s*fmt:\s*(skip|off)\b")
MARKER = re.compile(r"\bmark\.(reads|loads)$")
MEMBER = re.compile(r"(muster(?:\.\w+)+)(?::\w+)?")
MODULE_NAME = re.compile(r"\bmuster(?:\.[A-Za-z_]\w*)+")
#: Not plain present-day English: refused in docstrings, comments, messages and pages (CONTRIBUTING.md, "Rules").
REFUSED = re.compile(
    r"\b(whoever|whatever|somebody|nobody|anew|(?:un)?told|beside|mend(?:s|ed)?|deposed|lonely|rungs?|for\s+ever)\b",
    re.IGNORECASE,
)
#: Names, not words: code in back quotes and the target of a link.
QUOTED = re.compile(r"(`+)[^`]*?\1|\]\([^)\s]*\)")


@dataclass
class Facts:
    lines: int
    imports: list[tuple[str, list[str] | None, int, str]] = field(default_factory=list)
    """Module, the names that are taken from it (None: ``import module``), line, and where the statement is: at
    ``module`` level, inside a ``function``, under ``if TYPE_CHECKING`` (``typing``)."""
    functions: list[tuple[str, int, int, int, int, int]] = field(default_factory=list)
    """Name, line, length, McCabe's number, all branches, parameters (``self`` and ``cls`` left out)."""
    classes: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, line, fields: annotated in the body or set in ``__init__``."""
    marks: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Figure -> line and text of each occurrence."""
    named: list[str] = field(default_factory=list)
    """Modules of ours (or what is in them) that strings name, docstrings left out."""
    tables: list[str] = field(default_factory=list)
    """Modules of ours that a table at module level names: members of a ``Registry``, what is loaded when it is used."""
    declared: dict[str, list[str]] = field(default_factory=dict)
    """Arguments of the markers ``reads`` and ``loads``."""


class Cache:
    def __init__(self, path: Path = CACHE) -> None:
        self.path = path
        self.version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        self.is_changed = False
        self.files: dict[str, dict[str, object]] = {}
        try:
            stored = json.loads(path.read_text())
            if stored["version"] == self.version and len(stored["files"]) < MOST:
                self.files = stored["files"]
        except (OSError, ValueError, KeyError):
            pass

    def facts(self, text: bytes) -> Facts:
        key = hashlib.sha256(text).hexdigest()
        if key not in self.files:
            self.files[key] = asdict(facts_of(text))
            self.is_changed = True
        return Facts(**self.files[key])  # type: ignore[arg-type]

    def save(self) -> None:
        if self.is_changed:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"version": self.version, "files": self.files}))
            new.replace(self.path)


def facts_of(text: bytes) -> Facts:
    syntax = ast.parse(text)
    facts = Facts(len(text.splitlines()), list(imports_of(syntax.body, "module")), tables=list(tables_of(syntax)))
    named, docstrings = set(), set()
    for node in ast.walk(syntax):
        if isinstance(node, FUNCTION):
            sizes = (length(node), mccabe([node]), decisions(node), parameters(node))
            facts.functions.append((node.name, node.lineno, *sizes))
        elif isinstance(node, ast.ClassDef):
            facts.classes.append((node.name, node.lineno, len(fields_of(node))))
        elif isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            named.update(MODULE_NAME.findall(node.value))
        elif isinstance(node, ast.Call) and (marker := MARKER.search(ast.unparse(node.func))):
            declared = [each.value for each in node.args if isinstance(each, ast.Constant)]
            facts.declared.setdefault(marker[1], []).extend(declared)
        if isinstance(node, (ast.expr, ast.stmt)):
            for figure, test in MARKS.items():
                if test(node):
                    shown = ast.unparse(node).splitlines()[0][:110]
                    facts.marks.setdefault(figure, []).append((node.lineno, shown))
    skips = [number for number, line in enumerate(text.decode().splitlines(), 1) if SKIPS.search(line)]
    facts.marks["fmt-skip"] = [(number, "fmt: skip") for number in skips]
    facts.marks["words"] = sorted(words_of(text.decode(), syntax))
    facts.named = sorted(named)
    return facts


# ---------------------------------------------------------------- words


def words_of(source: str, syntax: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each refused word in a Python file. A string without a space is a key or a name."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from refused(token.string, token.start[0])
    for node in ast.walk(syntax):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\s", node.value):
            yield from refused(node.value, node.lineno)


def refused(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Line (of the word, if the text begins in line ``first``) and surroundings of each refused word in prose."""
    prose = QUOTED.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), text)
    for match in REFUSED.finditer(prose):
        begin = prose.rfind("\n", 0, match.start()) + 1
        near = prose[max(begin, match.start() - 40) : match.end() + 40].split("\n")[0]
        yield first + prose.count("\n", 0, match.start()), f"{' '.join(match[0].lower().split())}: {near.strip()}"


def imports_of(body: Iterable[ast.AST], kind: str) -> Iterator[tuple[str, list[str] | None, int, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module, [alias.name for alias in node.names], node.lineno, kind
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_of(node.body, "typing")
            yield from imports_of(node.orelse, kind)
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            inside = "function" if isinstance(node, FUNCTION) and kind == "module" else kind
            yield from imports_of(ast.iter_child_nodes(node), inside)


def tables_of(syntax: ast.Module) -> Iterator[str]:
    for node in syntax.body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) or (
            isinstance(value, ast.Call) and ast.unparse(value.func).startswith("Registry")
        ):
            texts = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
            names = (MEMBER.fullmatch(text) for text in texts if isinstance(text, str))
            yield from (name[1] for name in names if name)


# ---------------------------------------------------------------- sizes


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


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
    ]
    return len([name for name in names if name not in ("self", "cls")])


def fields_of(body: ast.ClassDef) -> set[str]:
    names = {
        each.target.id
        for each in body.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    for function in body.body:
        if isinstance(function, FUNCTION) and function.name == "__init__":
            stores = (each for each in ast.walk(function) if isinstance(each, ast.Attribute))
            names |= {
                each.attr for each in stores if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
            }
    return names


# ---------------------------------------------------------------- occurrences


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


def is_lambda(node: ast.AST) -> bool:
    return isinstance(node, ast.Lambda)


MARKS = {
    "lambdas": is_lambda,
    "backend-names": names_a_backend,
    "seams": looks_up_a_seam,
    "any": is_any,
    "untyped-mappings": is_untyped_mapping,
    "environment": reads_environment,
}
