"""Is a rank that is ten percent slow named within 30 steps, and nobody where all are alike? On a quiet machine.

    python benchmarks/stragglers.py [--runs 5] [--share 0.8] [--json FILE]

Each slow run trains two ranks on two hosts of this machine; after twelve steps one of them gets 0.8 of a processor
(``tests/live/slow_ranks.py``: needs root and a cpu controller of cgroup v1): steps of 0.11 s then take 11 % longer,
by cpu.stat's throttled time; at 0.9 it is 3 %, since a rank does not compute all the time. It has to be named, with its
host as the cause, within 30 steps. Each healthy run takes 90 steps, in which nobody may be named. The last line is the
verdict, with the load and what other programs took of the processors: a run that failed while they took more than a
quarter says nothing of Muster and is counted apart. By design a healthy run accuses somebody in less than one of 10,000
steps (``train/distributed/last_arrivals.py``), so five healthy runs of 90 steps do in less than one case of twenty.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "live"), str(HERE / "loops"), str(HERE)]


def one(place: Path, share: float | None) -> dict[str, Any]:
    """A run; ``share``: of a processor for its second rank, None: all are alike."""
    import slow_ranks

    waited = slow_ranks.quiet()
    with slow_ranks.run_of(place) as run:
        run.under_way(3)
        others = slow_ranks.beside([pid for pid, _ in run.ranks().values()])
        taken, problem = None, ""
        with slow_ranks.alone(run) as groups:
            try:
                if share is not None:
                    run.wait_for_step(12)
                    taken = slow_ranks.slowed(run, groups, share, within=slow_ranks.WITHIN)
                else:
                    run.wait_for_step(2 * slow_ranks.HEALTHY_STEPS)
                    assert not slow_ranks.named(run), slow_ranks.told(run)
            except AssertionError as error:
                problem = str(error).splitlines()[0][:300]
        return {
            "steps": taken, "problem": problem, "others": round(others(), 3), "before": round(waited, 3),
            "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip


def verdict(slow: list[dict[str, Any]], healthy: list[dict[str, Any]], limit: float) -> str:
    """What all runs say together. Pure."""
    disturbed = [row for row in (*slow, *healthy) if row["problem"] and row["others"] > limit]
    wrong = [row for row in (*slow, *healthy) if row["problem"] and row not in disturbed]
    named = [row["steps"] for row in slow if row["steps"] is not None]
    accused = sum(bool(row["problem"]) for row in healthy)
    found = f"named in {len(named)} of {len(slow)} slow runs"
    found += f" (after {', '.join(map(str, named))} steps)" if named else ""
    found += f", somebody accused in {accused} of {len(healthy)} healthy ones"
    loads = [row["load"] for row in (*slow, *healthy)]
    most = max(row["others"] for row in (*slow, *healthy))
    found += f"; load {min(loads)} to {max(loads)}, others took up to {most:.0%}"
    if wrong:
        return f"NOT SHOWN: {found}"
    if disturbed:
        return f"NOT RESOLVED, {len(disturbed)} runs failed while others worked here: {found}"
    return f"SHOWN: {found}"


def main() -> int:
    import job
    import slow_ranks

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each sort")
    parser.add_argument("--share", type=float, default=0.8, help="of a processor that the slow rank gets")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not slow_ranks.usable():
        print("verdict: NOT RESOLVED: this needs a cpu controller (cgroup v1) that may be written")
        return 1
    result: dict[str, Any] = {"machine": job.machine(), "slow": [], "healthy": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):
            for sort, share in (("slow", given.share), ("healthy", None)):
                result[sort].append(one(Path(folder) / f"{sort}-{number}", share))
                print(f"{sort} {number + 1}: {json.dumps(result[sort][-1])}", flush=True)
    result["verdict"] = verdict(result["slow"], result["healthy"], slow_ranks.OTHERS)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"verdict: {result['verdict']}")
    return 0 if result["verdict"].startswith("SHOWN") else 1


if __name__ == "__main__":
    raise SystemExit(main())
