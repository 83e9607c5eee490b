"""Whether the tests notice small mistakes: sixty at random in ten rooms of ``src``, each met by the tests that run it.

    python tools/mutants.py reach            once: which test file runs which function, seconds, failures (minutes)
    python tools/mutants.py run [--jobs 2]   draws and measures; continues where an earlier run was stopped
    python tools/mutants.py page             the results as a page (stdout)

The draw depends on ``--at`` alone, the commit whose ``src`` is measured; the tests are the checkout's. A mutant is a
change of one statement in a function that a unit or contract test runs, so a survivor is the tests' doing. Six count in
each room; a survivor that people judge equivalent (``"equivalent": "reason"`` in its row) is replaced by the next one.
``benchmarks/MUTANTS_DRAWN.jsonl`` keeps the draw, ``benchmarks/MUTANTS.jsonl`` has a line for each mutant that was
measured. A killed mutant names a test that passes without it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "mutants"
DRAWN = ROOT / "benchmarks" / "MUTANTS_DRAWN.jsonl"
RESULTS = ROOT / "benchmarks" / "MUTANTS.jsonl"
COMMIT = "331955c5"
IN_EACH_ROOM = 6
RESERVE = 4
ROOMS = {
    "agent": ("agent",),
    "supervise": ("supervise",),
    "storage, transport": ("storage", "transport"),
    "protocol, core": ("protocol", "core"),
    "gce, google": ("backends/gce", "backends/google"),
    "gke": ("backends/gke",),
    "vertex": ("backends/vertex",),
    "slurm, local": ("backends/slurm", "backends/local"),
    "checkpoint": ("checkpoint", "checkpoint_format"),
    "train": ("train",),
}
TESTS = ("unit", "contract", "scenario")
MARKS = "not slow and not soak and not live"
#: A mutant that makes tests this many times slower hangs; the rest is for start-up on a busy machine.
TIME_LIMIT, START_S = 5, 60
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NEIGHBOURS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LOGS = re.compile(r"(^|\.)(log|logger|_log|warnings)\.|(^|\.)(print|debug|info|warning|warn|exception|say)$")
REACH = '''"""Which functions a test runs, written once for each test file (``tools/mutants.py``)."""
import os

seen = set()
PATH = os.environ.get("MUSTER_REACH")


def hit(function):
    if function not in seen:
        seen.add(function)
        if PATH and "MUSTER_TEST_FILE" in os.environ:
            descriptor = os.open(PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{os.environ['MUSTER_TEST_FILE']}\\t{function}\\n".encode())
            os.close(descriptor)
'''


@dataclass(frozen=True)
class Mutant:
    id: str
    room: str
    file: str
    function: str
    """``file:line`` of its definition."""
    line: int
    operator: str
    before: str
    after: str
    start: int
    """Bytes of the file that ``text`` replaces: from here to ``end``."""
    end: int
    text: str


# ---------------------------------------------------------------- the tree that is measured


def copied_tree(folder: Path, commit: str) -> Path:
    """The checkout's files with ``src`` of that commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout.split(b"\0")
    for name in (os.fsdecode(name) for name in listed if name and not name.startswith(b"src/")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def pytest_run(folder: Path, arguments: list[str], limit_s: float | None, **variables: str) -> tuple[int | None, str]:
    """Exit code (None: over the limit, all that it started killed) and output."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", **variables}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", MARKS, *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        return code, output.read()


# ---------------------------------------------------------------- which test file runs which function


def functions_of(text: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, list[ast.stmt]]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTION):
            is_documented = ast.get_docstring(node, clean=False) is not None
            if body := node.body[is_documented:]:
                yield node, body


def instrumented(text: str, file: str) -> str:
    """The module with a call of ``hit`` at the beginning of each function."""
    lines = text.splitlines(keepends=True)
    inserts: dict[int, list[str]] = defaultdict(list)
    for node, body in functions_of(text):
        first = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", ()))])
        line, column = lines[first - 1].encode(), body[0].col_offset
        if line[:column].strip():  # on the line of its `def`
            lines[first - 1] = (line[:column] + f'_hit("{file}:{node.lineno}"); '.encode() + line[column:]).decode()
        else:
            inserts[first].append(" " * column + f'_hit("{file}:{node.lineno}")\n')
    top = [each for each in ast.parse(text).body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    body = ast.parse(text).body
    start = top[-1].end_lineno + 1 if top else (body[0].end_lineno + 1 if ast.get_docstring(ast.parse(text)) else 1)
    inserts[start].insert(0, "from muster._reach import hit as _hit\n")
    return "".join("".join(inserts[number]) + line for number, line in enumerate([*lines, ""], 1))


def measure_reach(commit: str, jobs: int) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = copied_tree(Path(name), commit)
        for path in sorted((folder / "src" / "muster").rglob("*.py")):
            text = path.read_text()
            path.write_text(changed := instrumented(text, str(path.relative_to(folder))))
            compile(changed, str(path), "exec")
        (folder / "src" / "muster" / "_reach.py").write_text(REACH)
        groups = []
        for kind in TESTS:
            tests = folder / "tests" / kind
            groups += [[path] for path in sorted(tests.glob("*/")) if any(path.rglob("test_*.py"))]
            groups.append(sorted(tests.glob("test_*.py")))
        groups = [[str(path.relative_to(folder)) for path in group] for group in groups]
        done = set((CACHE / "groups").read_text().splitlines()) if (CACHE / "groups").exists() else set()
        left = [group for group in groups if group and group[0] not in done]

        def work() -> None:
            while left:
                group = left.pop(0)
                record = {"MUSTER_REACH": "reach", "MUSTER_TIMES": "times.jsonl", "MUSTER_RECORD": "record"}
                began = time.monotonic()
                code, output = pytest_run(
                    folder, group, None, **{name: str(CACHE / file) for name, file in record.items()}
                )
                with (CACHE / "groups").open("a") as file:
                    file.write(f"{group[0]}\n")
                print(
                    f"{group[0]}: code {code}, {time.monotonic() - began:.0f} s",
                    *output.splitlines()[-12:],
                    sep="\n  ",
                    flush=True,
                )

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# ---------------------------------------------------------------- the draw


def reached_by() -> dict[str, set[str]]:
    """Function (``file:line``) -> test files that run it."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in (CACHE / "reach").read_text().splitlines():
        test, _, function = line.partition("\t")
        found[function].add(test)
    return found


def draw(folder: Path, reached: dict[str, set[str]], commit: str) -> Iterator[Mutant]:
    """For each room its mutants in the order in which they count; statements are drawn, then a change of each."""
    for room, packages in ROOMS.items():
        statements: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
        for package in packages:
            for path in sorted((folder / "src" / "muster" / package).rglob("*.py")):
                file = str(path.relative_to(folder))
                for mutant in mutants_of(path.read_text(), file, room):
                    if any(
                        test.startswith(("tests/unit", "tests/contract")) for test in reached.get(mutant.function, ())
                    ):
                        statements[file, mutant.line].append(mutant)
        chance, drawn = random.Random(f"{commit} {room}"), 0
        for place in chance.sample(sorted(statements), len(statements)):
            mutant = chance.choice(statements[place])
            if drawn < IN_EACH_ROOM + RESERVE and is_another_program((folder / mutant.file).read_text(), mutant):
                drawn += 1
                yield mutant


def mutants_of(text: str, file: str, room: str) -> Iterator[Mutant]:
    """Every change of every statement in its functions."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    whole = text.encode()
    for function, body in functions_of(text):
        if function.name in ("__repr__", "__str__"):
            continue
        for statement in own_statements(body):
            for number, (operator, node, new) in enumerate(changes_of(statement)):
                start, end = (
                    lines[node.lineno - 1] + node.col_offset,
                    lines[node.end_lineno - 1] + node.end_col_offset,
                )
                name = f"{file.removeprefix('src/muster/')}:{statement.lineno}:{number}"
                mutant = Mutant(
                    name, room, file, f"{file}:{function.lineno}", statement.lineno, operator,
                    whole[start:end].decode(), new, start, end, new,
                )  # fmt: skip
                yield mutant


def is_another_program(text: str, mutant: Mutant) -> bool:
    try:
        return compile(changed(text.encode(), mutant), mutant.file, "exec") != compile(text, mutant.file, "exec")
    except SyntaxError:
        return False


def changed(whole: bytes, mutant: Mutant) -> bytes:
    return whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :]


def own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of the function itself: none of a function or class inside of it, no log line."""
    for statement in body:
        if isinstance(statement, (*FUNCTION, ast.ClassDef)):
            continue
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and LOGS.search(ast.unparse(value.func)):
            continue
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_constant(statement):
            continue
        yield statement
        for block in ("body", "orelse", "finalbody"):
            yield from own_statements(getattr(statement, block, []))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from own_statements(part.body)


def _is_constant(statement: ast.Assign | ast.AnnAssign) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return any(isinstance(target, ast.Name) and target.id.isupper() for target in targets)


def changes_of(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    """Operator, the node that is replaced, its new text."""
    match statement:
        case ast.Expr(value=ast.Call()):
            yield "call dropped", statement, "pass"
        case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign(target=ast.Attribute()):
            yield "assignment dropped", statement, "pass"
        case ast.Raise():
            yield "raise dropped", statement, "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", statement, "return None"
        case ast.If(test=test) | ast.While(test=test):
            yield "condition negated", test, f"(not ({ast.unparse(test)}))"
        case ast.Try(handlers=handlers):
            yield from (("except nothing", each.type, "()") for each in handlers if each.type is not None)
    for expression in expressions_of(statement):
        yield from changes_of_expression(expression)


def expressions_of(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions of the statement alone; nothing in strings, annotations and patterns."""
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
            "decorator_list",
        ) and isinstance(node, ast.stmt):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (ast.JoinedStr, ast.Lambda)) or not isinstance(each, ast.AST):
                continue
            if isinstance(each, ast.expr):
                yield each
            yield from expressions_of(each)


def changes_of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST, str]]:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator, *_]) if type(operator) in NEIGHBOURS:
            new.ops[0] = NEIGHBOURS[type(operator)]()
            yield "comparison", node, f"({ast.unparse(new)})"
        case ast.BoolOp(op=operator):
            new.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and, or", node, f"({ast.unparse(new)})"
        case ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            yield "condition negated", node, f"({ast.unparse(new)})"
        case ast.BinOp(op=ast.Add() | ast.Sub() as operator, left=left, right=right):
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                new.op = ast.Sub() if isinstance(operator, ast.Add) else ast.Add()
                yield "plus, minus", node, f"({ast.unparse(new)})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "integer + 1", node, f"({value + 1})"
            yield "integer - 1", node, f"({value - 1})"
        case ast.Call(keywords=[_, *_]) if not LOGS.search(ast.unparse(node.func)):
            for number, keyword in enumerate(new.keywords):
                if keyword.arg is not None:
                    less = copy.deepcopy(new)
                    del less.keywords[number]
                    yield f"keyword {keyword.arg} dropped", node, ast.unparse(less)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# ---------------------------------------------------------------- the measurement


class Bench:
    """One copy of the tree, in which one mutant is tried at a time."""

    def __init__(self, folder: Path, commit: str, reached: dict[str, set[str]], seconds: dict[str, float]) -> None:
        self.folder = copied_tree(folder, commit)
        self.reached, self.seconds = reached, seconds
        self.sound: set[str] = set()
        self.unsound: set[str] = set()

    def measure(self, mutant: Mutant) -> dict[str, object]:
        """Its row of results: ``killed_by`` a test that passes without it, "time limit", or None."""
        path, own = self.folder / mutant.file, own_tests(mutant.room)
        tests = sorted(
            self.reached[mutant.function], key=lambda test: (not test.startswith(own), self.seconds.get(test, 1))
        )
        limit_s = TIME_LIMIT * sum(self.seconds.get(test, 1) for test in tests) + START_S
        whole, began = path.read_bytes(), time.monotonic()
        killed_by, tries = None, 0
        while tries < 5:
            tries += 1
            left_out = [f"--deselect={test}" for test in sorted(self.unsound)]
            path.write_bytes(changed(whole, mutant))
            try:
                code, output = pytest_run(self.folder, ["-x", *left_out, *tests], limit_s)
            finally:
                path.write_bytes(whole)
            if code is None:
                killed_by = "time limit"
            elif code:
                killed_by = next(
                    iter(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", output, re.MULTILINE)), output[-300:]
                )
                if not self.is_sound(killed_by):
                    killed_by = None
                    continue
            break
        row = asdict(mutant)
        for key in ("start", "end", "text", "function"):
            del row[key]
        return row | {"killed_by": killed_by, "seconds": round(time.monotonic() - began, 1), "test_files": len(tests)}

    def is_sound(self, test: str) -> bool:
        """Whether the test passes without a mutant."""
        if test not in self.sound:
            code, _ = pytest_run(self.folder, [test.partition("[")[0]], 600)
            (self.unsound if code else self.sound).add(test)
        return test in self.sound


def own_tests(room: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{package}/" for package in ROOMS[room])


def measured_rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(commit: str, jobs: int) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for row in map(json.loads, (CACHE / "times.jsonl").read_text().splitlines()):
        seconds[row["file"]] += max(row["wall_s"], row["cpu_s"] + row["child_cpu_s"])
    reached = reached_by()
    if not DRAWN.exists():
        with tempfile.TemporaryDirectory(prefix="mutants-") as name:
            drawn = list(draw(copied_tree(Path(name), commit), reached, commit))
        DRAWN.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in drawn))
    mutants = [Mutant(**json.loads(line)) for line in DRAWN.read_text().splitlines()]
    rows = measured_rows()
    done, replaced = {row["id"] for row in rows}, {row["id"] for row in rows if row.get("equivalent")}
    left = []
    for room in ROOMS:
        counted = [mutant for mutant in mutants if mutant.room == room and mutant.id not in replaced][:IN_EACH_ROOM]
        left += [(place, mutant) for place, mutant in enumerate(counted) if mutant.id not in done]
    left = [mutant for _, mutant in sorted(left, key=lambda each: each[0])]  # one of each room, then the next of each
    lock = threading.Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-") as name:
            bench = Bench(Path(name), commit, reached, seconds)
            while left:
                row = bench.measure(left.pop(0))
                with lock, RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{row['id']}: {row['operator']}: {row['killed_by'] or 'SURVIVED'} ({row['seconds']} s)", flush=True
                )

    in_threads(work, jobs)


def in_threads(work: Callable[[], None], jobs: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def page(commit: str) -> str:
    rows = [row for row in measured_rows() if not row.get("equivalent")]
    counts = {room: [bool(row["killed_by"]) for row in rows if row["room"] == room] for room in ROOMS}
    total = IN_EACH_ROOM * len(ROOMS)
    lines = [
        f"# Mutants of {commit}", "",
        f"The tests kill {sum(map(sum, counts.values()))} of {len(rows)} measured mutants; {total} are drawn,",
        "as `tools/mutants.py` says. `python tools/mutants.py run` measures the rest. The machine was busy.", "",
        "| room | killed | survived |", "|---|--:|--:|",
        *(f"| {room} | {sum(killed)} | {len(killed) - sum(killed)} |" for room, killed in counts.items()), "",
        "| mutant | change | ended by | s |", "|---|---|---|--:|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: (list(ROOMS).index(str(row["room"])), str(row["id"]))):
        before, after = (" ".join(str(row[key]).split())[:70] for key in ("before", "after"))
        place, ended = (
            str(row["id"]).rpartition(":")[0],
            f"`{row['killed_by']}`" if row["killed_by"] else "**survived**",
        )
        cells = (place, f"{row['operator']}: `{before}` -> `{after}`", ended, f"{row['seconds']:.0f}")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("reach", "run", "page"))
    parser.add_argument(
        "--at", default=COMMIT, metavar="REV", help="the commit whose src is measured and that seeds the draw"
    )
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    match given.action:
        case "reach":
            measure_reach(given.at, given.jobs)
        case "run":
            run(given.at, given.jobs)
        case "page":
            print(page(given.at))


if __name__ == "__main__":
    main()
