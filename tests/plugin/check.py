"""``./setup.sh check``: ruff, the figures of ``tools/house.py``, mypy, and the unit tests that a change can affect.

    ./setup.sh check [--all | --since REV] [pytest arguments]
    ./setup.sh check --why TEST_FILE     how that test depends on what changed
    ./setup.sh check --declare           adds to tests/inputs.json what the last --all found undeclared

``--all`` runs every unit test, and records what each test file opens: what is not among its inputs is listed, and a
test file that fails although the selection would have left it out is MISSED. ``--since`` compares with that commit
instead of the one in ``tools/base-commit``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.plugin import recorder, select, times
from tests.plugin.closure import INPUTS, ROOT, Graph

CACHE = ROOT / ".cache" / "tests"
MARKS = "not slow and not soak"
#: A second pytest process costs 1.5 s of imports: worth it from so many seconds, or files of unknown length.
ALONE_S, ALONE_FILES = 20, 15
#: Arguments with which pytest runs all of each file.
WHOLE = ("-q", "-v", "-n", "--durations", "--tb", "-p")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./setup.sh check", allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--since", metavar="REV")
    parser.add_argument("--why", metavar="TEST_FILE")
    parser.add_argument("--declare", action="store_true")
    given, rest = parser.parse_known_args(arguments)
    base = select.known_commit(ROOT, given.since) if given.since else None
    if given.since and base is None:
        return _error(f"--since: this clone has no commit {given.since!r}")
    if given.declare:
        return _declare()
    began = time.monotonic()
    graph, selection = select.select(base=base, everything=given.all)
    if given.why:
        return _why(graph, given.why, selection.changed)
    codes = [_run("ruff", "check", "--quiet", "."), _run_file("tools/house.py", "--check")]
    is_warm = (ROOT / ".mypy_cache").exists()
    mypy = _start_mypy()
    if is_warm:  # seconds; else beside the tests
        codes.append(_end(mypy))
    tests = _tests(graph, selection, rest, is_all=given.all)
    codes.append(tests)
    if not is_warm:
        codes.append(_end(mypy))
    print(f"check: {'FAILED' if any(codes) else 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
    return int(any(codes))


def _error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _run(module: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False).returncode


def _run_file(*arguments: str) -> int:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode


def _start_mypy() -> "subprocess.Popen[str]":
    """Without ``--num-workers``: mypy 2.4.1 fails where a worker does not start in time, as on a busy machine."""
    argv = [sys.executable, "-m", "mypy"]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _end(mypy: "subprocess.Popen[str]") -> int:
    output, _ = mypy.communicate()
    print(f"mypy: {output.strip()}", flush=True)
    return mypy.returncode


# ---------------------------------------------------------------- the tests


def _tests(graph: Graph, selection: select.Selection, rest: list[str], *, is_all: bool) -> int:
    known = _known_seconds()
    print(f"check: {in_words(graph, selection, known)}", flush=True)
    for path in selection.unread:
        print(f"check: no test reads {path}")
    if not selection.tests:
        return 0
    CACHE.mkdir(parents=True, exist_ok=True)
    files = {name: CACHE / name for name in ("check.jsonl", "failed.json", "record")}
    for path in files.values():
        path.unlink(missing_ok=True)
    workers = os.environ.get("MUSTER_WORKERS", "2") if _is_long(selection.tests, known) else "0"
    targets = ["tests/unit"] if len(selection.tests) == len(graph.test_files) else selection.tests
    argv = ["-m", MARKS, "-n", workers, "--dist", "loadfile", "-q", *targets, *rest]
    environment = {"MUSTER_FAILED": str(files["failed.json"])}
    environment["MUSTER_TIMES"] = os.environ.get("MUSTER_TIMES", str(files["check.jsonl"]))
    if is_all:
        environment["MUSTER_RECORD"] = str(files["record"])
    code = subprocess.run(
        [sys.executable, "-m", "pytest", *argv], cwd=ROOT, env=os.environ | environment, check=False
    ).returncode
    if code not in (0, 1, 5):  # passed, failed, nothing to run
        print(f"check: pytest ended with exit code {code} before its end", flush=True)
    _note_seconds(known, Path(environment["MUSTER_TIMES"]))
    failed = _failed(files["failed.json"])
    if failed is not None and all(argument.startswith(WHOLE) or argument.isdecimal() for argument in rest):
        select.note_green(graph, set(selection.tests) - failed, failed)
    if is_all:
        code = _compare(graph, selection, failed or set()) or code
        _list_undeclared(graph, files["record"])
    return code


def in_words(graph: Graph, selection: select.Selection, known: dict[str, list[float]]) -> str:
    text = f"{selection.why}: {len(selection.tests)} of {len(graph.test_files)} test files"
    rows = [known[test] for test in selection.tests if test in known]
    if rows and len(rows) >= len(selection.tests) * 0.8:
        text += f", {sum(row[0] for row in rows):,.0f} tests, about {sum(row[1] for row in rows):,.0f} s"
    return text


def _is_long(tests: list[str], known: dict[str, list[float]]) -> bool:
    unknown = sum(test not in known for test in tests)
    return unknown > ALONE_FILES or sum(known[test][1] for test in tests if test in known) > ALONE_S


def _known_seconds() -> dict[str, list[float]]:
    """Test file -> how many tests it had when it last ran, and their seconds."""
    try:
        return dict(json.loads((CACHE / "seconds.json").read_text()))
    except (OSError, ValueError):
        return {}


def _note_seconds(known: dict[str, list[float]], path: Path) -> None:
    counts: dict[str, int] = {}
    for row in times.read(path):
        counts[row["file"]] = counts.get(row["file"], 0) + 1
    seconds = times.seconds_by_file(path)
    known |= {file: [count, round(seconds[file], 2)] for file, count in counts.items()}
    (CACHE / "seconds.json").write_text(json.dumps(known))


def _failed(path: Path) -> set[str] | None:
    """Test files that did not pass as a whole; None where pytest did not come to its end."""
    try:
        return set(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _compare(graph: Graph, selection: select.Selection, failed: set[str]) -> int:
    """1 where a test failed that the selection for this change leaves out."""
    if not selection.changed or not failed:
        return 0
    chosen = set(select.affected(graph, set(selection.changed), {}).tests)
    for test in sorted(failed - chosen):
        print(f"check: MISSED: {test} fails, and the selection for this change leaves it out")
    return int(bool(failed - chosen))


# ---------------------------------------------------------------- inputs


def _why(graph: Graph, test: str, changed: frozenset[str]) -> int:
    if test not in graph.facts:
        return _error(f"--why: there is no test file {test!r}")
    inputs = graph.inputs(test)
    print(f"{test}: {len(inputs)} inputs, {len(inputs & changed)} of them changed")
    for path in sorted(inputs & changed):
        print("  " + "\n    -> ".join(graph.why(test, path)))
    return 0


def _list_undeclared(graph: Graph, record: Path) -> None:
    if not record.exists():
        return
    found = recorder.undeclared(graph, record)
    (CACHE / "undeclared.json").write_text(json.dumps(found, indent=1))
    for test, needs in found.items():
        print(f"check: undeclared inputs of {test}: {json.dumps(needs)[:300]}")
    if found:
        print(f"check: {len(found)} test files have undeclared inputs: ./setup.sh check --declare")


def _declare() -> int:
    """Adds what the last ``--all`` found; entries of test files that are gone are dropped."""
    path, new = ROOT / INPUTS, json.loads((CACHE / "undeclared.json").read_text())
    table = json.loads(path.read_text()) if path.exists() else {}
    for test, needs in new.items():
        old = table.setdefault(test, {})
        for kind, names in needs.items():
            old[kind] = sorted({*old.get(kind, ()), *names})
    kept = {test: table[test] for test in sorted(table) if (ROOT / test).exists()}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"check: {INPUTS} declares inputs of {len(kept)} test files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
