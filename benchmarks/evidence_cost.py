"""What looking at a failure adds to the recovery from it.

    python benchmarks/evidence_cost.py [--pairs 40] [--hangs 10] [--ranks 2] [--json FILE] [--only crash hang]

crash: one run whose ranks are killed one after the other. After every other kill the agent looks around (the other
ranks' stacks, the kernel's words), after the others it does not: a file decides, which a ``sitecustomize`` reads in the
agent, so that nothing in Muster knows of it. Counted is the time from the kill until all ranks of the next attempt
begin their first step; the figure is the median over the pairs of with - without (what else the machine does
lengthens single recoveries by half a second), and its bootstrap 95 % interval. The goal is at most 0.02 s; where the
interval holds that, the answer is "not resolvable".

hang: a rank is stopped; counted is the time from the report of the hang until the ranks may be ended, by the event
``evidence.gathered``. The goal is at most 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "live"), str(HERE / "loops"), str(HERE)]

CRASH_GOAL_S, HANG_GOAL_S = 0.02, 0.3
FEWEST_PAIRS = 10
SWITCH = "MUSTER_BENCHMARK_BLIND"
HOOK = f"""
import os, sys
if "muster.agent.host_agent" in sys.orig_argv:
    from muster.agent.evidence import gathering
    real = gathering.after_exit
    def after_exit(ctx, report):
        if not os.path.exists(os.environ["{SWITCH}"]):
            real(ctx, report)
    gathering.after_exit = after_exit
"""


# ---------------------------------------------------------------- statistics: pure


def interval(differences: Sequence[float], *, draws: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95 % interval of their median."""
    dice = random.Random(seed)
    medians = sorted(statistics.median(dice.choices(differences, k=len(differences))) for _ in range(draws))
    return medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]


def verdict(differences: Sequence[float], goal_s: float) -> str:
    """What they say of a limit."""
    if len(differences) < FEWEST_PAIRS:
        return f"not resolvable with {len(differences)} pairs: {FEWEST_PAIRS} are the fewest"
    low, high = interval(differences)
    if high <= goal_s:
        return f"within {goal_s:g} s"
    if low > goal_s:
        return f"over {goal_s:g} s"
    return f"not resolvable: the noise ({(high - low) / 2:.3f} s either side) is too wide for {goal_s:g} s"


def paired(with_s: Sequence[float], without_s: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(with_s, without_s, strict=True)]


def summary(result: dict[str, Any]) -> str:
    """The verdict in a line, with the load."""
    found = []
    if crash := result.get("crash"):
        low, high = crash["interval_s"]
        added = f"{crash['added_s'] * 1000:+.1f} ms, 95 %: {low * 1000:+.1f} to {high * 1000:+.1f}"
        found.append(f"a crash's evidence is {crash['verdict']} ({added}, {crash['pairs']} pairs)")
    if hang := result.get("hang"):
        found.append(f"a hang's is {hang['verdict']} ({hang['min_max_s'][1]:.3f} s at most, {hang['hangs']} hangs)")
    machine, end = result["machine"], result["load_at_the_end"]
    return f"verdict: {'; '.join(found)}; load {machine['load'][0]} to {end[0]} on {machine['cpus']} processors"


# ---------------------------------------------------------------- runs


@contextmanager
def switched(folder: Path) -> Iterator[Path]:
    """The file that blinds the agents which are started within."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    blind, before = folder / "blind", os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "hook"), before)))
    os.environ[SWITCH] = str(blind)
    try:
        yield blind
    finally:
        del os.environ[SWITCH]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def small(ranks: int, **changes: Any) -> Any:
    from cluster import spec_of

    given: dict[str, Any] = {
        "resources.ranks_per_host": ranks, "training.steps": 10**7, "checkpoint.snapshot_every_steps": 1,
        "recovery.max_restarts_without_progress": 100,
        "limits.max_hours": 2.0,  # it ends by itself, whatever becomes of this program
    }  # fmt: skip
    return spec_of(**{**given, **changes})


def back_s(run: Any, began_ns: int) -> float | None:
    """From the kill until all ranks of the attempt that follows begin their first step; None: not yet."""
    later = [event for event in run.events() if event.mono_ns > began_ns]
    started = [event for event in later if event.kind == "attempt.started"]
    if not started:
        return None
    number = started[-1].attempt
    begun = {
        event.rank: event.mono_ns
        for event in later
        if event.kind == "phase.changed" and event.phase == "warmup" and event.attempt == number
    }
    return (max(begun.values()) - began_ns) / 1e9 if len(begun) == started[-1].detail["world_size"] else None


def killed(run: Any, trial: int, ranks: int) -> float:
    """One kill, some steps after the one before it."""
    at = run.step()
    run.wait_for_step(at + 8)
    time.sleep(trial * 0.37 % 1 * 0.05)  # spread over a step
    pid = run.ranks()[trial // 2 % ranks][0]
    began_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    run.wait_until(lambda: back_s(run, began_ns) is not None, "the next attempt's first step", 120)
    found = back_s(run, began_ns)
    assert found is not None
    return found


def measure_crash(pairs: int, ranks: int) -> dict[str, Any]:
    from cluster import LiveRun

    with_s: list[float] = []
    without_s: list[float] = []
    with tempfile.TemporaryDirectory() as name, switched(Path(name)) as blind:
        with LiveRun(Path(name) / "run", small(ranks)) as run:
            run.start()
            run.wait_for_step(15, 300)
            for pair in range(pairs):
                for looks in (True, False) if pair % 2 else (False, True):
                    blind.unlink(missing_ok=True) if looks else blind.touch()
                    (with_s if looks else without_s).append(killed(run, 2 * pair + looks, ranks))
            seen = len(run.events("evidence.gathered"))
    differences = paired(with_s, without_s)
    low, high = interval(differences)
    return {
        "pairs": pairs, "ranks": ranks, "looked_at": seen,
        "with_s": round(statistics.median(with_s), 4), "without_s": round(statistics.median(without_s), 4),
        "added_s": round(statistics.median(differences), 4), "added_mean_s": round(statistics.fmean(differences), 4),
        "interval_s": [round(low, 4), round(high, 4)], "verdict": verdict(differences, CRASH_GOAL_S),
        "all_s": [[round(one, 4), round(other, 4)] for one, other in zip(with_s, without_s, strict=True)],
    }  # fmt: skip


def measure_hang(hangs: int, ranks: int) -> dict[str, Any]:
    from cluster import LiveRun

    limits = {"recovery.heartbeat_timeout_s": 2.0, "recovery.step_timeout_s": 3.0}
    with tempfile.TemporaryDirectory() as name, LiveRun(Path(name) / "run", small(ranks, **limits)) as run:
        run.start()
        run.wait_for_step(15, 300)
        for hang in range(hangs):
            at = run.step()
            run.wait_for_step(at + 8)
            os.kill(run.ranks()[hang % ranks][0], signal.SIGSTOP)
            run.wait_until(lambda told=hang: len(run.events("evidence.gathered")) > told, "its evidence", 120)
            run.wait_for_step(run.step() + 3, 120)
        found = run.events("evidence.gathered")
    took_s = [event.detail["took_ns"] / 1e9 for event in found]
    return {
        "hangs": hangs, "ranks": ranks, "took_s": round(statistics.median(took_s), 4),
        "min_max_s": [round(min(took_s), 4), round(max(took_s), 4)],
        "named": sum(event.detail.get("culprit") == "stopped" for event in found),
        "verdict": f"{'within' if max(took_s) <= HANG_GOAL_S + 0.005 else 'over'} {HANG_GOAL_S:g} s",
    }  # fmt: skip


def main() -> None:
    import job

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="kills with and without a look")
    parser.add_argument("--hangs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=["crash", "hang"], default=["crash", "hang"])
    given = parser.parse_args()
    result: dict[str, Any] = {"machine": job.machine()}
    if "crash" in given.only:
        result["crash"] = measure_crash(given.pairs, given.ranks)
        shown = {name: value for name, value in result["crash"].items() if name != "all_s"}
        print(f"crash {json.dumps(shown)}", flush=True)
    if "hang" in given.only:
        result["hang"] = measure_hang(given.hangs, given.ranks)
        print(f"hang  {json.dumps(result['hang'])}", flush=True)
    result["load_at_the_end"] = job.machine()["load"]
    print(summary(result), flush=True)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
