"""What each test cost, as JSON lines: a pytest plugin where ``MUSTER_TIMES`` names a file, and the table of it.

One line for each test that ran: ``file``, ``name``, ``outcome``, ``wall_s``, ``cpu_s`` (of the process that ran it),
``child_cpu_s`` (of the children that it waited for). Fixtures count for the test that asked first. All processes of
a run append to the same file: one short write each, which the kernel does not interleave.

    python -m tests.plugin.times [FILE]   the table of the slowest tests
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

TIMES = os.environ.get("MUSTER_TIMES") and os.path.abspath(os.environ["MUSTER_TIMES"])
DEFAULT = ".cache/tests/times.jsonl"
ROWS = 15
#: From good to bad: a test's outcome is the worst of its setup, call and teardown.
OUTCOMES = ("passed", "skipped", "failed")
_ENDS: dict[str, str] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    wall, own, children = time.perf_counter(), time.process_time(), _children_cpu_s()
    done = yield
    line = {
        "file": item.nodeid.partition("::")[0],
        "name": item.nodeid.partition("::")[2],
        "outcome": _ENDS.pop(item.nodeid, "unknown"),
        "wall_s": round(time.perf_counter() - wall, 4),
        "cpu_s": round(time.process_time() - own, 4),
        "child_cpu_s": round(_children_cpu_s() - children, 4),
    }
    _append(Path(TIMES), json.dumps(line) + "\n")
    return done


def pytest_runtest_logreport(report):
    _ENDS[report.nodeid] = max(_ENDS.get(report.nodeid, "passed"), report.outcome, key=OUTCOMES.index)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def read(path: Path) -> list[dict]:
    """The lines of the file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def seconds_by_file(path: Path) -> dict[str, float]:
    """What each test file's last run cost: the larger of wall and CPU seconds, summed over its tests."""
    last = {(row["file"], row["name"]): row for row in read(path)}
    totals: dict[str, float] = {}
    for row in last.values():
        totals[row["file"]] = totals.get(row["file"], 0) + max(row["wall_s"], row["cpu_s"] + row["child_cpu_s"])
    return totals


def table(rows: list[dict]) -> str:
    """The slowest by wall and by CPU seconds, live tests apart, and the totals."""
    lines = []
    for title, chosen in (
        ("live tests", [row for row in rows if row["file"].startswith("tests/live/")]),
        ("other tests", [row for row in rows if not row["file"].startswith("tests/live/")]),
    ):
        if not chosen:
            continue
        wall, cpu = sum(row["wall_s"] for row in chosen), sum(map(_cpu_s, chosen))
        lines.append(f"{len(chosen):,} {title}: {wall:,.0f} s wall, {cpu:,.0f} s CPU")
        for by, key in (("wall", lambda row: row["wall_s"]), ("CPU", _cpu_s)):
            lines.append(f"  slowest by {by}:  wall     CPU  (children)")
            for row in sorted(chosen, key=key, reverse=True)[:ROWS]:
                figures = f"{row['wall_s']:14.1f}  {_cpu_s(row):6.1f}  {row['child_cpu_s']:8.1f}"
                lines.append(f"    {figures}  {row['file']}::{row['name']}"[:160])
    return "\n".join(lines)


def _cpu_s(row: dict) -> float:
    return row["cpu_s"] + row["child_cpu_s"]


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT))))
