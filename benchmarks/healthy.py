"""What fault tolerance costs a healthy run, and how often it sees a failure where there is none.

    python benchmarks/healthy.py [--quick] [--json FILE] [--only overhead alarms processes]

overhead: pairs of runs of one model (a step takes about 0.3 s), one with everything on (agent, supervisor, standbys, a
snapshot in memory after every step, heartbeat limit 0.3 s) and one that is the trainer's loop alone under torchrun, in
turns. What the snapshot holds the loop is counted apart. The figure is the mean over the pairs of on / off - 1 of the
median step, with a bootstrap 95 % interval; where that holds the limit (0.5 %), the answer is "not resolvable".

alarms: a run of two hosts of two ranks at a heartbeat limit of 0.3 s beside as many busy loops as there are cores, for
``--minutes``; every incident is a false one. The bound on their rate is the exact 95 % one (none seen: 3 / time). The
gaps between the hosts' heartbeats are taken from the packets themselves, where that is allowed.

processes: processor time and wakes of each kind of process in a healthy run, against the ranks' own.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "live"), str(HERE / "loops"), str(HERE)]

LIMIT = 0.005
"""Of step time, beside the snapshot's stall: the goal of the issue."""
FEWEST_PAIRS = 6
"""With fewer, drawing pairs again cannot show what differs from pair to pair."""
WARM_UP = 5
MODES = ["overhead", "alarms", "processes"]
ON = {"checkpoint.snapshot_every_steps": 1, "recovery.warm_standby": True, "recovery.heartbeat_timeout_s": 0.3}
OFF = {"checkpoint.snapshot_every_steps": 0, "recovery.warm_standby": False, "checkpoint.replicate_snapshots": False}


# ---------------------------------------------------------------- statistics: pure


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One run's steps after warm-up, in seconds."""

    busy: tuple[float, ...]
    """Step time without the snapshot's stall."""
    stall: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Relative, with its interval; and what it says about a limit."""

    mean: float
    low: float
    high: float
    pairs: int

    def verdict(self, limit: float) -> str:
        if self.pairs < FEWEST_PAIRS:
            return f"not resolvable with {self.pairs} pairs: {FEWEST_PAIRS} are the fewest"
        if self.high <= limit:
            return f"within {limit:.1%}"
        if self.low > limit:
            return f"over {limit:.1%}"
        return f"not resolvable: the noise ({(self.high - self.low) / 2:.2%} either side) is too wide for {limit:.1%}"


def overhead(pairs: Sequence[tuple[Steps, Steps]], *, draws: int = 4000, seed: int = 0) -> Overhead:
    """Mean of on / off - 1 over (on, off) pairs, and a bootstrap 95 % interval.

    Pairs are drawn again, and within each run its steps: a pair is what the machine's drift has in common, and few
    pairs of long runs must not look surer than they are.
    """
    dice = random.Random(seed)

    def once(pair: tuple[Steps, Steps]) -> float:
        on, off = (statistics.median(dice.choices(each.busy, k=len(each.busy))) for each in pair)
        return on / off - 1

    drawn = sorted(statistics.fmean(once(pair) for pair in dice.choices(pairs, k=len(pairs))) for _ in range(draws))
    mean = statistics.fmean(statistics.median(on.busy) / statistics.median(off.busy) - 1 for on, off in pairs)
    low, high = drawn[round(0.025 * (draws - 1))], drawn[round(0.975 * (draws - 1))]
    return Overhead(mean=mean, low=low, high=high, pairs=len(pairs))


def upper_rate(count: int, hours: float) -> float:
    """One-sided 95 % bound on a Poisson rate per hour: the rate at which ``count`` or fewer come in 1 of 20 cases."""
    low, high = 0.0, 10.0 + 3.0 * count
    for _ in range(100):
        middle = (low + high) / 2
        at_most = sum(math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if at_most > 0.05 else (low, middle)
    return high / hours


def steps_of(events: Sequence[Any], warm_up: int = WARM_UP) -> Steps:
    """Of a run's step events, in order of steps."""
    rows = sorted((event for event in events if event.kind == "step"), key=lambda event: event.step)[warm_up:]
    stalls = [event.detail.get("stall_ns", 0) or 0 for event in rows]
    return Steps(
        busy=tuple((event.detail["step_ns"] - stall) / 1e9 for event, stall in zip(rows, stalls, strict=True)),
        stall=tuple(stall / 1e9 for stall in stalls),
    )


# ---------------------------------------------------------------- runs


def with_everything(spec: Any, folder: Path) -> Steps:
    from cluster import LiveRun

    with LiveRun(folder, spec) as run:
        run.start()
        code = run.wait(limit_s(spec))
        events = run.events()
        incidents = [event for event in events if event.kind == "incident.detected"]
        if code != 0 or incidents:
            raise SystemExit(f"the run was not healthy (code {code}):\n{run.story()}")
    return steps_of(events)


def the_loop_alone(spec: Any, folder: Path, ranks: int) -> Steps:
    import job

    from muster.core import event_log

    folder.mkdir()
    (folder / "resolved.json").write_text(spec.model_dump_json())
    program = ["-m", "muster.rank.worker", "--run-dir", str(folder)]
    command, more = job.start_command(sys.executable, ranks, program)
    job.run(command, {**job.environment(ranks, "cpu"), **more}, folder / "log", limit_s(spec))
    return steps_of(event_log.merged(folder / "events"))


def limit_s(spec: Any) -> float:
    """A run that takes so long is none."""
    return 300.0 + 10.0 * spec.training.steps


def measure_overhead(pairs: int, steps: int, ranks: int, **changes: Any) -> dict[str, Any]:
    from recovery import bench_spec

    common = {"training.steps": steps + WARM_UP, "resources.ranks_per_host": ranks, **changes}
    found: list[tuple[Steps, Steps]] = []
    for number in range(pairs):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made: dict[str, Steps] = {}
            for which in ("on", "off") if number % 2 else ("off", "on"):
                if which == "on":
                    made[which] = with_everything(bench_spec(**common, **ON), folder / "on")
                else:
                    made[which] = the_loop_alone(bench_spec(**common, **OFF), folder / "off", ranks)
            found.append((made["on"], made["off"]))
        on, off = (statistics.median(each.busy) for each in found[-1])
        print(f"pair {number + 1}: on {on:.4f} s, off {off:.4f} s ({on / off - 1:+.2%})", flush=True)
    whole = overhead(found)
    stall = statistics.median(one for on, _ in found for one in on.stall)
    step = statistics.median(one for _, off in found for one in off.busy)
    result = {
        "pairs": pairs, "steps_a_run": steps, "ranks": ranks, "step_s": round(step, 4),
        "on_step_s": round(statistics.median(one for on, _ in found for one in on.busy), 4),
        "overhead": round(whole.mean, 5), "interval_95": [round(whole.low, 5), round(whole.high, 5)],
        "limit": LIMIT, "verdict": whole.verdict(LIMIT),
        "stall_s": round(stall, 5), "stall_of_step": round(stall / step, 5),
    }  # fmt: skip
    print(
        f"overhead {whole.mean:+.2%} of a step of {step:.3f} s (95 %: {whole.low:+.2%} to {whole.high:+.2%}): "
        f"{result['verdict']}\nsnapshot: {1e3 * stall:.2f} ms a step besides ({stall / step:.2%})",
        flush=True,
    )
    return result


@contextlib.contextmanager
def busy_loops(count: int) -> Any:
    """As many programs that only compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def measure_alarms(minutes: float, loops: int, **changes: Any) -> dict[str, Any]:
    """Whole incidents of a run to which nothing happens; counted from its first step."""
    import beat_gaps
    from cluster import LiveRun
    from recovery import bench_spec

    shape = {"resources.hosts": 2, "resources.ranks_per_host": 2, "training.steps": 10**8}
    # It ends by itself, whatever becomes of this program.
    spec = bench_spec(**{**shape, "limits.max_hours": minutes / 60 + 0.25, **ON, **changes})
    with tempfile.TemporaryDirectory() as name, LiveRun(Path(name), spec) as run, busy_loops(loops):
        run.start()
        run.wait_for_step(1, 600)
        listening = listen_to_beats(run, spec.recovery.heartbeat_timeout_s)
        began = time.monotonic()
        while (left := 60 * minutes - (time.monotonic() - began)) > 0 and run.supervisor.poll() is None:
            time.sleep(min(5.0, left))
        watched_s = time.monotonic() - began
        if listening is not None:
            listening.stop()
        events = run.events()
        if run.supervisor.poll() is not None:
            raise SystemExit(f"the run ended by itself:\n{run.story()}")
    incidents = [
        f"{event.detail['incident']}: {event.detail['evidence']}"
        for event in events
        if event.kind == "incident.detected"
    ]
    hours = watched_s / 3600
    result = {
        "minutes": round(watched_s / 60, 2), "hosts": 2, "ranks": 4, "heartbeat_timeout_s": 0.3, "busy_loops": loops,
        "steps": max(event.step for event in events if event.kind == "step"),
        "false_alarms": len(incidents), "at_most_an_hour_95": round(upper_rate(len(incidents), hours), 2),
        "incidents": incidents[:20], "gaps": None,
    }  # fmt: skip
    if listening is not None:
        found = list(listening.gaps.values())
        result["gaps"] = {"worst_s": {name: round(each.worst_s, 4) for name, each in listening.gaps.items()},
                          "seen": beat_gaps.rows(found)}  # fmt: skip
        worst = ", ".join(f"{name} {each.worst_s:.3f} s" for name, each in listening.gaps.items())
        print(f"gaps between heartbeats, the worst: {worst}")
        for name, count in beat_gaps.rows(found):
            print(f"  {name:16} {count:8}")
    print(
        f"{len(incidents)} false alarms in {watched_s / 60:.1f} minutes beside {loops} busy loops: "
        f"at most {result['at_most_an_hour_95']} an hour (95 %)",
        flush=True,
    )
    return result


def listen_to_beats(run: Any, limit_s: float) -> Any:
    """From now on; None, and a word about it, where packets may not be looked at."""
    import beat_gaps

    try:
        listening = beat_gaps.Listening(*beat_gaps.watchdogs_of(run), limit_s)
    except PermissionError:
        print("gaps between heartbeats: not measured (this needs CAP_NET_RAW)", flush=True)
        return None
    listening.start()
    return listening


def measure_processes(seconds: float, limits_s: Sequence[float], ranks: int, **changes: Any) -> list[dict[str, Any]]:
    """At each heartbeat limit, one run of one host, after its warm-up."""
    import processor_time
    from recovery import bench_spec

    result = []
    for limit_s in limits_s:
        own = {"training.steps": 10**8, "resources.ranks_per_host": ranks, "limits.max_hours": 0.25 + seconds / 3600}
        spec = bench_spec(**{**ON, **own, "recovery.heartbeat_timeout_s": limit_s, **changes})
        result.append(processor_time.measure(spec, seconds, settle_steps=3 * WARM_UP))
    return result


def main() -> None:
    import job

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a check that it runs: few pairs, one minute")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=None, help="default 12; quick: 3")
    parser.add_argument("--steps", type=int, default=None, help="measured steps of each run; default 100; quick: 20")
    parser.add_argument(
        "--minutes", type=float, default=None, help="of the run beside busy loops; default 30; quick: 1"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of the pairs' runs")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each run whose processor time is read")
    parser.add_argument("--limits", type=float, nargs="*", default=[3.0, 0.3], help="heartbeat limits of those runs")
    parser.add_argument("--length", type=int, help="tokens of a sequence there: the goal is stated for steps of 0.4 s")
    parser.add_argument("--only", nargs="*", choices=MODES, default=MODES)
    given = parser.parse_args()
    pairs, steps, minutes = (3, 20, 1.0) if given.quick else (12, 100, 30.0)
    found: dict[str, Any] = {"machine": job.machine()}
    if "overhead" in given.only:
        found["overhead"] = measure_overhead(given.pairs or pairs, given.steps or steps, given.ranks)
    if "alarms" in given.only:
        found["alarms"] = measure_alarms(given.minutes or minutes, found["machine"]["cpus"])
    if "processes" in given.only:
        changes = {"training.sequence_length": given.length} if given.length else {}
        found["processes"] = measure_processes(given.seconds, given.limits, given.ranks, **changes)
    found["load_at_the_end"] = job.machine()["load"]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
