"""Strike runs at random: ``python tools/strikes.py --seeds 1-150 [--resume]``.

Each seed is a run and one to five faults (``tests/live/strikes.py``). One line of JSON a seed is added to
``benchmarks/STRIKES.jsonl``; ``--resume`` leaves out those that it holds of this commit. Exit code 1 where a run was
not survived: its folder stays.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "live"), str(ROOT / "tests"), str(ROOT / "src")]

from strikes import draw  # noqa: E402
from striking import References, drive  # noqa: E402

RECORD = ROOT / "benchmarks" / "STRIKES.jsonl"


def commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    return told.stdout.decode().strip()


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(found: Sequence[Mapping[str, object]]) -> str:
    applied = Counter[str]()
    lost = Counter[str]()
    for row in found:
        names = {str(name).split(" (")[0] for name in _list(row["applied"])}
        applied.update(names)
        if row["verdict"] != "survived":
            lost.update(names)
    skipped = sum(len(_list(row["skipped"])) for row in found)
    survived = sum(row["verdict"] == "survived" for row in found)
    lines = [f"{'fault':<34}{'trials':>8}{'not survived':>14}"]
    lines += [f"{name:<34}{count:>8}{lost[name]:>14}" for name, count in sorted(applied.items())]
    lines.append(f"{len(found)} trials: {survived} survived, {len(found) - survived} not; {skipped} strikes skipped")
    return "\n".join(lines)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1-20", help="A-B, both included, or one")
    parser.add_argument("--resume", action="store_true", help="leave out what the record holds of this commit")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "muster-strikes")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    here = commit()
    held = {row["seed"] for row in rows(given.record) if row["commit"] == here} if given.resume else set()
    made = []
    for seed in range(int(first), int(last or first) + 1):
        if seed in held:
            continue
        outcome = drive(seed, given.folder / str(seed), References(given.folder / "references"))
        trial = draw(seed)
        row = {"seed": seed, "commit": here, "date": datetime.date.today().isoformat(), **outcome.to_json()}
        row |= {"hosts": trial.hosts, "spares": trial.spares, "replicas": trial.replicas, "exact": trial.exact}
        made.append(row)
        with given.record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"seed {seed}: {row['verdict']}, {outcome.seconds} s: {'; '.join(outcome.applied)}", flush=True)
        for problem in outcome.problems:
            print(f"    {problem}", flush=True)
    print(summary(made))
    return 1 if any(row["verdict"] != "survived" for row in made) else 0


if __name__ == "__main__":
    sys.exit(main())
