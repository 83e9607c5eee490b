"""What `muster check` costs and finds on a machine with GPUs: its rungs, a start with and without it, a run beside it.

    PYTHONPATH=src python benchmarks/check_gpu.py [--json FILE] [--ranks 1] [--trials 5] [--only ...]
    python benchmarks/check_gpu.py --smoke              # a tiny model on the CPU: does it run?

`passive`: 20 looks one after the other: seconds (the target is 2), false alarms (the target is none). `full`: seconds
of each rung (the target is 30 in all on 8 GPUs) and each figure beside the catalogue's floor. `start`: seconds from the
supervisor's start to the first step with `check.mode` off, passive and full, in turn. `beside`: a run's step times
without and with passive looks beside it, and the memory of the GPUs before and during them. One that is sound is
expected: a verdict other than healthy or note is an alarm, to be looked into by hand. Needs torch, transformers,
pydantic, psutil and this repository; nothing is downloaded. On one H100 `passive` and `full` ran (RESULTS.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests" / "live")]
from cluster import RUN_ID, LiveRun, spec_of  # noqa: E402
from loops.job import machine  # noqa: E402

from muster.app.inspect.check import check_hosts_of, check_machine  # noqa: E402
from muster.health.machine.judge import floor_of  # noqa: E402
from muster.health.machine.report import read_probe  # noqa: E402
from muster.health.verdicts import worst  # noqa: E402
from muster.storage.run_registry import RunDir  # noqa: E402

MODES = ("off", "passive", "full")
SOUND = ("healthy", "note")


def look(*, passive: bool) -> dict[str, Any]:
    """One look at this machine: seconds, the verdict, each rung, each figure."""
    began = time.monotonic()
    found = check_machine(passive=passive)
    seconds = time.monotonic() - began
    report = read_probe(found.raw, host="here")
    names = {gpu.index: gpu.name for gpu in report.gpus.gpus} if report.gpus else {}
    figures = []
    for speed in report.speeds:
        floor = floor_of(names.get(speed.gpu, "")) if speed.gpu is not None else None
        least = floor.of(speed.what) if floor is not None else None
        figures.append({**vars_of(speed), "floor": least})
    return {
        "seconds": round(seconds, 3),
        "verdict": worst(found.findings).value,
        "rungs_s": {line.rung: round(line.seconds, 3) for line in report.lines},
        "failed": {line.rung: line.failed for line in report.lines if line.failed},
        "figures": figures,
        "findings": [f"{one.verdict.value}: {one.message}" for one in found.findings],
    }


def vars_of(speed: Any) -> dict[str, Any]:
    names = ("what", "device", "value", "unit", "bits", "failed")
    return {name: getattr(speed, name) for name in names}


def passive_figures(options: argparse.Namespace) -> dict[str, Any]:
    looks = [look(passive=True) for _ in range(options.looks)]
    times = [each["seconds"] for each in looks]
    alarms = [each["findings"] for each in looks if each["verdict"] not in SOUND]
    middle = sorted(looks, key=lambda each: each["seconds"])[len(looks) // 2]
    return {
        "seconds": round(statistics.median(times), 3),
        "min_max_s": [min(times), max(times)],
        "rungs_s": middle["rungs_s"],
        "looks": len(looks),
        "alarms": len(alarms),
        "first_alarm": alarms[0] if alarms else [],
    }


def run_spec(options: argparse.Namespace, mode: str) -> Any:
    given: dict[str, Any] = {
        "training.steps": 1_000_000,
        "resources.ranks_per_host": options.ranks,
        "data.sources": [{"type": "random", "rows": 4096}],
        "check.mode": mode,
    }
    return spec_of(**given if options.smoke else {**given, "resources.device": "cuda"})


def start_figures(options: argparse.Namespace) -> dict[str, Any]:
    """In turn, so that what the machine does besides falls on all alike."""
    times: dict[str, list[float]] = {mode: [] for mode in options.modes}
    for _ in range(options.trials):
        for mode in options.modes:
            with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
                with LiveRun(Path(folder), run_spec(options, mode)) as run:
                    began = time.monotonic()
                    run.start()
                    run.wait_for_step(1, 600)
                    times[mode].append(time.monotonic() - began)
    return {
        mode: {"seconds": round(statistics.median(each), 3), "min_max_s": [round(min(each), 3), round(max(each), 3)]}
        for mode, each in times.items()
    }


def gpu_mib() -> list[int] | None:
    """Memory in use on each GPU; None where nobody says."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        return [int(row) for row in rows]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def beside_figures(options: argparse.Namespace) -> dict[str, Any]:
    """A run's steps without and with looks beside it."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        with LiveRun(Path(folder), run_spec(options, "off")) as run:
            run.start()
            run.wait_for_step(10, 600)
            time.sleep(options.settle_s)
            first, before = run.step(), gpu_mib()
            time.sleep(options.beside_s)
            middle, looks, during = run.step(), [], before
            until = time.monotonic() + options.beside_s
            while time.monotonic() < until or not looks:
                began = time.monotonic()
                verdict = worst(check_hosts_of(RunDir(run.dir, RUN_ID)).findings).value
                looks.append((time.monotonic() - began, verdict))
                during = gpu_mib()
            run.wait_for_step(middle + 1, 60)
            last = run.step()
            steps = {event.step or 0: event.detail["step_ns"] / 1e9 for event in run.events("step")}
    quiet = [seconds for step, seconds in steps.items() if first < step <= middle]
    busy = [seconds for step, seconds in steps.items() if middle < step <= last]
    return {
        "step_s": round(statistics.median(quiet or [0.0]), 4),
        "step_beside_s": round(statistics.median(busy or [0.0]), 4),
        "look_s": round(statistics.median(seconds for seconds, _ in looks), 3),
        "looks": len(looks),
        "verdicts": sorted({verdict for _, verdict in looks}),
        "gpu_mib": before,
        "gpu_mib_beside": during,
    }


def main() -> None:
    parts = {
        "passive": passive_figures,
        "full": lambda options: look(passive=False),
        "start": start_figures,
        "beside": beside_figures,
    }
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="one a GPU")
    parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--trials", type=int, default=5, help="starts with each mode")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does it run?")
    options = parser.parse_args()
    options.looks, options.settle_s, options.beside_s, options.modes = 20, 15.0, 20.0, MODES
    if options.smoke:
        options.looks, options.trials, options.settle_s, options.beside_s, options.modes = 2, 1, 0.0, 1.0, MODES[:2]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
    result: dict[str, Any] = {"machine": {**machine(), "ranks": options.ranks, "smoke": options.smoke}}
    for name in options.only:  # the loaded part before any rank holds a GPU
        result[name] = parts[name](options)
        print(f"{name:8s} {json.dumps(result[name])}", flush=True)
        if options.json:  # as far as it got: a lent GPU may be taken back
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
