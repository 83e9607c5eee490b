"""Processor time of what watches a healthy run's hardware and ranks, which is always on.

    python benchmarks/watching_cost.py [--seconds 30] [--ranks 2] [--length 128] [--trials 7] [--json FILE]

One healthy run. Ranks: who comes last to the sums (``train.distributed.arrivals``) and torch's flight recorder. Agent:
the kernel log, the use of hosts, what waits to gather evidence or to look at the hardware. Each call of these is timed
by the processor time of its thread, through a ``sitecustomize`` of this program; what the timing takes is in it, so
that the figure is an upper bound. The recorder's part is its price for one all_reduce, with and without it in turn,
times the collectives of a step, as torch counts them. The supervisor's judgement of stragglers is not in it: there is
one only while a rank keeps coming last. Processor time hardly depends on what else the machine does; cold caches make
it longer. The goal is at most 0.2 % of the ranks' processor time.
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
sys.path[:0] = [str(HERE.parent / "tests" / "live"), str(HERE / "loops"), str(HERE)]

GOAL = 0.002
FOLDER = "MUSTER_BENCHMARK_WATCHING"
HOOK = f"""
import os, sys
if os.environ.get("{FOLDER}"):
    sys.path.append({str(HERE)!r})
    from watching_cost import hook
    hook(sys.orig_argv)
    sys.path.remove({str(HERE)!r})
"""
#: Part -> (the program that it is in, module, class or none, functions).
WATCHED = {
    "arrivals": ("muster.rank.fork_server", "muster.train.distributed.arrivals", "Arrivals",
                 ("arrive", "released", "interrupt", "learn", "take_news")),
    "kernel log": ("muster.agent.host_agent", "muster.agent.hardware.kernel_lines", "", ("on_line",)),
    "use of hosts": ("muster.agent.host_agent", "muster.agent.hardware.usage", "", ("tick",)),
    "evidence": ("muster.agent.host_agent", "muster.agent.evidence.gathering", "", ("tick", "due_s")),
    "looks": ("muster.agent.host_agent", "muster.agent.hardware.host_check", "", ("tick", "due_s")),
}  # fmt: skip
EVERY_NS = 500_000_000
CALLS = 20_000
RECORDED = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
one = torch.zeros(1)
for _ in range(500):
    dist.all_reduce(one)
began = time.process_time_ns()
for _ in range(int(sys.argv[1])):
    dist.all_reduce(one)
print((time.process_time_ns() - began) / int(sys.argv[1]))
"""


# ---------------------------------------------------------------- inside the run's programs


def hook(argv: list[str]) -> None:
    """Time the parts of this program, and write the sums to a file of its own from time to time."""
    import importlib

    spent: dict[str, int] = {}
    last, forked = [0], [False]
    if "muster.rank.fork_server" in argv:
        os.register_at_fork(after_in_child=lambda: (spent.clear(), forked.__setitem__(0, True)))

    def tell() -> None:
        now = time.monotonic_ns()
        if now - last[0] >= EVERY_NS:
            last[0] = now
            found = {**spent, **(collectives() if forked[0] else {})}
            path = Path(os.environ[FOLDER], str(os.getpid()))
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").rename(path)

    def timed(part: str, real: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return real(*given, **more)
            finally:
                spent[part] = spent.get(part, 0) + time.thread_time_ns() - began
                tell()

        return call

    for part, (program, module, name, methods) in WATCHED.items():
        if program in argv:
            owner = importlib.import_module(module)
            owner = getattr(owner, name) if name else owner
            for method in methods:
                setattr(owner, method, timed(part, getattr(owner, method)))


def collectives() -> dict[str, int]:
    """How many this rank has begun, by torch's own count."""
    import torch

    status = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(onlyActive=False)).get("pg_status", {})
    return {"collectives": sum(max(0, int(group["last_enqueued_collective"])) for group in status.values())}


# ---------------------------------------------------------------- outside


def recorder_ns(trials: int) -> float:
    """What the flight recorder adds to one all_reduce, in processor time; the median of trials in turn."""
    from muster.agent.ranks.rank_environment import RECORDED_CALLS

    added = []
    for _ in range(trials):
        took = {}
        for size in (0, RECORDED_CALLS):
            env = {**os.environ, "TORCH_FR_BUFFER_SIZE": str(size), "OMP_NUM_THREADS": "1"}
            env.pop(FOLDER, None)
            done = subprocess.run(
                [sys.executable, "-c", RECORDED, str(CALLS)], env=env, capture_output=True, text=True, check=True
            )
            took[size] = float(done.stdout)
        added.append(took[RECORDED_CALLS] - took[0])
    return max(0.0, statistics.median(added))


def sums(folder: Path) -> dict[str, int]:
    """Of all processes so far."""
    found: dict[str, int] = {}
    for path in folder.iterdir():
        if path.suffix != ".new":
            for part, value in json.loads(path.read_text()).items():
                found[part] = found.get(part, 0) + value
    return found


def measure(seconds: float, ranks: int, length: int, trials: int) -> dict[str, Any]:
    import processor_time
    import recovery
    from cluster import LiveRun

    recovery.LENGTH = length
    spec = recovery.bench_spec(
        **{"training.steps": 10**8, "resources.ranks_per_host": ranks, "recovery.heartbeat_timeout_s": 3.0,
           "limits.max_hours": 0.5}
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "sitecustomize.py").write_text(HOOK)
        (Path(name) / "sums").mkdir()
        more = {FOLDER: str(Path(name) / "sums"), "PYTHONPATH": os.pathsep.join(
            filter(None, (name, os.environ.get("PYTHONPATH"))))}  # fmt: skip
        os.environ.update(more)
        with LiveRun(Path(name) / "run", spec) as run:
            run.start()
            run.wait_for_step(25, 300)
            kinds = processor_time.kinds_of(run)
            first, before, told = run.step(), processor_time.read(kinds), sums(Path(name) / "sums")
            time.sleep(seconds)
            after, steps, now = processor_time.read(kinds), run.step() - first, sums(Path(name) / "sums")
            if run.events("rank.exited") or processor_time.kinds_of(run) != kinds:
                raise SystemExit(f"the run was not healthy:\n{run.story()}")
    del os.environ[FOLDER]
    found = processor_time.shares(before, after)
    own_s = found[processor_time.RANK].cpu_s + found[processor_time.LINK].cpu_s
    grown = {part: now.get(part, 0) - told.get(part, 0) for part in sorted(now)}
    calls = grown.pop("collectives", 0)
    one_ns = recorder_ns(trials)
    parts = {
        **{part: value / 1e9 / own_s for part, value in grown.items()},
        "flight recorder": calls * one_ns / 1e9 / own_s,
    }
    whole = sum(parts.values())
    return {
        "seconds": seconds, "steps": steps, "ranks": ranks,
        "rank_cpu_s_a_step": round(own_s / max(1, steps) / ranks, 4),
        "collectives_a_step": round(calls / max(1, steps) / ranks, 1), "recorder_us_a_call": round(one_ns / 1e3, 2),
        "of_the_ranks": {part: round(share, 6) for part, share in sorted(parts.items())},
        "sum": round(whole, 6), "verdict": f"{'within' if whole <= GOAL else 'over'} {GOAL:.1%}",
    }  # fmt: skip


def main() -> None:
    import job

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence: how long a step takes")
    parser.add_argument("--trials", type=int, default=7, help="of the recorder's price")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = {"machine": job.machine(), **measure(given.seconds, given.ranks, given.length, given.trials)}
    print(json.dumps(result, indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
