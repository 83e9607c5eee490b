"""Strike runs at random: ``python tools/strikes.py --seeds 1-150 --jobs 2 --resume``.

Each seed is a run and one to five faults (``tests/live/trials.py``). One line of JSON a seed is added to
``benchmarks/STRIKES.jsonl``; ``--resume`` leaves out those that it holds of this commit, ``--report`` prints its table
and runs nothing. The same seed is the same trial, but what meets at one moment differs: ``--seeds 75,146 --times 10``
repeats each. Seeds from 1000 on are runs with two pipeline stages, from 2000 on a rendezvous store is a target, too,
and from 3000 on the machine loses its power. Exit code 1 where a run was not survived: its folder stays.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "live"), str(ROOT / "tests"), str(ROOT / "src")]

from striking import References, drive  # noqa: E402
from trials import draw  # noqa: E402

RECORD = ROOT / "benchmarks" / "STRIKES.jsonl"


def commit() -> str:
    """What was struck: HEAD, with a + where the program itself is changed (the record itself may be)."""
    told = _git("rev-parse", "--short=12", "HEAD").strip()
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "tests", "tools")
    return told + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(found: Sequence[Mapping[str, object]]) -> str:
    """Faults by kind and target: trials in which each was done, survived and not; then what was not survived."""
    applied = Counter[str]()
    lost = Counter[str]()
    for row in found:
        names = {str(name).split(" (")[0] for name in _list(row["applied"])}
        applied.update(names)
        if row["verdict"] == "not survived":
            lost.update(names)
    lines = [f"{'fault':<34}{'survived':>9}{'not survived':>14}"]
    lines += [f"{name:<34}{count - lost[name]:>9}{lost[name]:>14}" for name, count in sorted(applied.items())]
    verdicts = Counter(str(row["verdict"]) for row in found)
    counted = verdicts["survived"] + verdicts["not survived"]
    faults, skipped = (sum(len(_list(row[key])) for row in found) for key in ("applied", "skipped"))
    lines.append(
        f"{counted} trials with {faults} faults: {verdicts['survived']} survived, {verdicts['not survived']} not; "
        f"{skipped} faults could not be done, {verdicts['empty']} trials had none that could and do not count"
    )
    for row in found:
        if row["verdict"] == "not survived":
            lines.append(f"not survived: seed {row['seed']} on {row['commit']}: {str(_list(row['problems'])[0])[:200]}")
    return "\n".join(lines)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def trial(seed: int, folder: Path, references: References, here: str) -> dict[str, object]:
    """The line of the record for ``seed``."""
    load = os.getloadavg()[0]
    outcome = drive(seed, folder, references)
    return {
        "seed": seed, "commit": here, "date": datetime.date.today().isoformat(), **outcome.to_json(),
        "load": round(load, 1), "spec": draw(seed).to_json(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1-20", help="A-B, both included, or A,B,...")
    parser.add_argument("--times", type=int, default=1, help="trials of each seed")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time; the record is written by one at a time")
    parser.add_argument("--resume", action="store_true", help="leave out what the record holds of this commit")
    parser.add_argument("--report", action="store_true", help="print the record's table and run nothing")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "muster-strikes")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    if given.report:
        print(report(rows(given.record)))
        return 0
    here, folder = commit(), given.folder.resolve()
    held = [row["seed"] for row in rows(given.record) if row["commit"] == here] if given.resume else []
    due = to_do(_seeds(given.seeds), given.times, held)
    references, made = References(folder / "references" / here), []
    with ThreadPoolExecutor(given.jobs) as pool:
        begun = [pool.submit(trial, seed, folder / f"{seed}.{time}", references, here) for seed, time in due]
        for done in as_completed(begun):
            row = done.result()
            made.append(row)
            with given.record.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"[{len(made)}/{len(due)}] {_line(row)}", flush=True)
    print(report(made))
    return 1 if any(row["verdict"] == "not survived" for row in made) else 0


def to_do(seeds: Sequence[int], times: int, held: Sequence[object]) -> list[tuple[int, int]]:
    """(seed, which time), each seed once before any a second time; less the trials ``held`` of each."""
    there = Counter(held)
    return [(seed, time) for time in range(1, times + 1) for seed in seeds if time > there[seed]]


def _seeds(text: str) -> list[int]:
    parts = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in parts for seed in range(int(first), int(last or first) + 1)]


def _line(row: Mapping[str, object]) -> str:
    applied = "; ".join(map(str, _list(row["applied"])))
    problems = "".join(f"\n    {problem}" for problem in _list(row["problems"]))
    return f"seed {row['seed']}: {row['verdict']}, {row['seconds']} s: {applied}{problems}"


if __name__ == "__main__":
    sys.exit(main())
