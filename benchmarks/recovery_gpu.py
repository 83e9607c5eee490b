"""Recovery on GPUs, seconds by stage, after kill -9, out of memory and a device assert; what a snapshot costs a GB.

    PYTHONPATH=src python benchmarks/recovery_gpu.py [--json FILE] [--ranks 1] [--shape 300m] [--only ...]
    python benchmarks/recovery_gpu.py --smoke           # a tiny model on the CPU: does it run?

The whole product on this machine: supervisor, agent, fork server on CUDA, one rank a GPU, a snapshot of every step in
/dev/shm. L runs from the fault to the end of the next step beyond the last one applied before it; its stages add up to
it. `rank_kill_imports` is `rank_kill` with standbys that hold no CUDA context. Snapshots stand beside plain copies of
the same run: into pageable memory, pinned memory, and a file of /dev/shm that was registered. Needs torch,
transformers, pydantic, psutil and this repository; nothing is downloaded.
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
from cluster import LiveRun, spec_of  # noqa: E402
from loops.job import machine  # noqa: E402

from muster.checkpoint_format.snapshot_ring import Ring  # noqa: E402

LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
#: State in memory is 12 bytes a parameter; a ring holds it more than once.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "300m": {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
             "num_attention_heads": 16, "num_key_value_heads": 8},
    "1b": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
#: Case -> (deed of muster.rank.fault_injection on a GPU, on the CPU); None: SIGKILL.
CASES: dict[str, tuple[str | None, str | None]] = {
    "rank_kill": (None, None),
    "out_of_memory": ("device-memory", "memory"),
    "device_assert": ("device-assert", "exception"),
    "rank_kill_imports": (None, None),
}
STAGES = ("noticed", "decided", "placed", "started", "built", "restored", "stepped")
#: Best of a few copies of so many bytes each; on the CPU the "device" is other memory.
COPY = """
import json, mmap, sys, tempfile, time
import torch
device, size = sys.argv[1], int(sys.argv[2])
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
source = torch.ones(size, dtype=torch.uint8, device=device)
def rate(target):
    best = 0.0
    for _ in range(4):
        wait(); began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(); best = max(best, size / (time.perf_counter() - began) / 1e9)
    return round(best, 2)
found = {"pageable_gb_per_s": rate(torch.zeros(size, dtype=torch.uint8))}
with tempfile.TemporaryFile(dir="/dev/shm") as file:
    file.truncate(size)
    shared = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    found["dev_shm_gb_per_s"] = rate(shared)
    if device == "cuda":
        found["pinned_gb_per_s"] = rate(torch.zeros(size, dtype=torch.uint8, pin_memory=True))
        began = time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), size, 1))
        found["register_s_per_gb"] = round((time.perf_counter() - began) / size * 1e9, 3) if code == 0 else None
        found["dev_shm_registered_gb_per_s"] = rate(shared) if code == 0 else None
        found["register_code"] = code
print(json.dumps(found))
"""


def run_spec(options: argparse.Namespace, *, warm_standby: bool | str) -> Any:
    """The run file of every case."""
    given: dict[str, Any] = {
        "training.steps": 1_000_000,
        "resources.ranks_per_host": options.ranks,
        "recovery.heartbeat_timeout_s": 1.0,
        "recovery.grace_s": 5.0,
        "recovery.warm_standby": warm_standby,
        "checkpoint.snapshot_every_steps": 1,  # what is measured redoes no applied step
        "data.sources": [{"type": "random", "rows": 4096}],
    }
    if not options.smoke:
        given |= {
            "model.config": SHAPES[options.shape],
            "model.dtype": "bfloat16",
            "training.sequence_length": 1024,
            "training.global_batch_size": 8 * options.ranks,
            "training.micro_batch_size": 4,
            "training.deterministic": False,
            "resources.device": "cuda",
        }
        if options.shape == "tiny":
            del given["model.config"]
            given["training.sequence_length"] = 64
    return spec_of(**given)


def strike(run: LiveRun, deed: str | None) -> int:
    """Break rank 0; the wall clock's nanosecond at which it happened."""
    if deed is None:
        began = time.time_ns()
        run.kill_rank(0)
        return began
    order, done = run.dir / "inject_fault.json", run.dir / f"inject_fault.{deed}.done"
    order.unlink(missing_ok=True)
    done.unlink(missing_ok=True)
    part = run.dir / "inject_fault.part"
    part.write_text(json.dumps({"fault": deed, "rank": 0, "always": False}))
    part.rename(order)
    run.wait_until(done.exists, f"the rank to do it ({deed})", 120)
    return done.stat().st_mtime_ns


def trial(run: LiveRun, deed: str | None, settle_s: float) -> dict[str, Any]:
    """One fault in a stepping run: L, its stages, how many applied steps were taken again."""
    run.wait_for_step(run.step() + 3, 300)
    time.sleep(settle_s)  # standbys warm up once the world steps
    began = strike(run, deed)
    before = max(event.step or 0 for event in run.events("step") if event.wall_ns < began)
    run.wait_until(lambda: run.step() > before, "a new step", 300)
    found = [event for event in run.events() if event.wall_ns >= began]
    again = {event.step for event in found if event.kind == "step" and (event.step or 0) <= before}
    marks = marks_of(found, began=began, before=before)
    return {"l_s": (marks["stepped"] - began) / 1e9, "stages_s": stages(marks, began), "steps_again": len(again)}


def marks_of(events: list[Any], *, began: int, before: int) -> dict[str, int]:
    """Stage -> the wall clock's nanosecond at which it was over; one that left no event is over with the one before."""

    def first(kind: str, **wanted: Any) -> Any:
        return next((e for e in events if e.kind == kind and all(getattr(e, k) == v for k, v in wanted.items())), None)

    attempt = first("attempt.started")
    number = attempt.attempt if attempt else -1
    ranks = [event for event in events if event.kind == "rank.started" and event.attempt == number]
    seen = {
        "noticed": first("incident.detected"),
        "decided": first("incident.decided"),
        "placed": attempt,
        "started": ranks[-1] if ranks else None,
        "built": first("phase.changed", attempt=number, rank=0, phase="restore"),
        "restored": first("checkpoint.restored", attempt=number),
        "stepped": next(e for e in events if e.kind == "step" and e.step == before + 1),
    }
    found, last = {}, began
    for name in STAGES:
        last = max(last, seen[name].wall_ns) if seen[name] is not None else last
        found[name] = last
    return found


def stages(marks: dict[str, int], began: int) -> dict[str, float]:
    """Stage -> seconds; together they are L."""
    ends = [began, *(marks[name] for name in STAGES)]
    return {name: (end - start) / 1e9 for name, start, end in zip(STAGES, ends, ends[1:], strict=False)}


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    times = [each["l_s"] for each in trials]
    return {
        "l_s": round(statistics.median(times), 3),
        "min_max_s": [round(min(times), 3), round(max(times), 3)],
        "stages_s": {n: round(statistics.median(each["stages_s"][n] for each in trials), 3) for n in STAGES},
        "steps_again": max(each["steps_again"] for each in trials),
        "trials": len(trials),
    }


def snapshot_figures(run: LiveRun) -> dict[str, Any]:
    """What a snapshot held the loop for: the first one of the run (memory not registered yet), and the later ones."""
    rings = sorted(run.memory().glob("own.*.ring"))
    ring = Ring.open(rings[0])
    size = ring.slot_bytes
    ring.close()
    first = [event for event in run.events("step") if event.attempt == 1]
    stalls = [event.detail["stall_ns"] / 1e9 for event in first if event.detail.get("stall_ns")]
    later = stalls[len(stalls) // 2 :]
    return {
        "bytes_a_rank": size,
        "first_stall_s": round(stalls[0], 4),
        "stall_s": round(statistics.median(later), 4),
        "stall_s_per_gb": round(statistics.median(later) / size * 1e9, 4),
        "gb_per_s": round(size / statistics.median(later) / 1e9, 2),
        "step_s": round(statistics.median(event.detail["step_ns"] for event in first) / 1e9, 4),
    }


def copy_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Plain copies, in a process that gives its memory back."""
    words = ["cpu", str(1 << 24)] if options.smoke else ["cuda", str(1 << 30)]
    done = subprocess.run([sys.executable, "-c", COPY, *words], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def standby_mib(run: LiveRun) -> int | None:
    """Memory of a GPU that the largest process beside the ranks holds (a standby); None where nobody says."""
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        held = dict(tuple(map(int, row.split(","))) for row in rows)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    ranks = {pid for pid, _ in run.ranks().values()}
    return max((mib for pid, mib in held.items() if pid not in ranks), default=None) if ranks & held.keys() else None


def play(
    names: list[str], options: argparse.Namespace, result: dict[str, Any], keep: Any, *, warm_standby: bool | str
) -> None:
    """The cases of one run, one after another; each figure is kept as soon as it is known."""
    spec = run_spec(options, warm_standby=warm_standby)
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder, LiveRun(Path(folder), spec) as run:
        began = time.monotonic()
        run.start()
        run.wait_for_step(12 if not options.smoke else 4, 600)
        result.setdefault("start_s", round(time.monotonic() - began, 2))
        if warm_standby is True and "snapshot" not in result:
            result["snapshot"] = {**snapshot_figures(run), "copies": result.pop("copies")}
            print(f"snapshot {json.dumps(result['snapshot'])}", flush=True)
        for name in names:
            deed = CASES[name][1 if options.smoke else 0]
            trials = [trial(run, deed, options.settle_s) for _ in range(options.trials)]
            result["cases"][name] = summary(trials)
            if warm_standby is True:
                result["standby_mib"] = standby_mib(run)
            print(f"{name:18s} {json.dumps(result['cases'][name])}", flush=True)
            keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="one a GPU: NCCL takes no two on one device")
    parser.add_argument("--shape", choices=list(SHAPES), default="300m")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=15.0, help="before each fault: standbys warm up")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does it run?")
    options = parser.parse_args()
    if options.smoke:
        options.trials, options.settle_s = 1, 1.0
    os.environ["MUSTER_DRILL"] = "1"  # ranks obey inject_fault.json
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
    result: dict[str, Any] = {
        "machine": {**machine(), "ranks": options.ranks, "shape": "smoke" if options.smoke else options.shape},
        "cases": {},
        "copies": copy_figures(options),
    }

    def keep() -> None:
        if options.json:  # as far as it got: a lent GPU may be taken back
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    with_context = [name for name in options.only if not name.endswith("_imports")]
    without = [name for name in options.only if name.endswith("_imports")]
    if with_context:
        play(with_context, options, result, keep, warm_standby=True)
    if without:
        play(without, options, result, keep, warm_standby="imports")
    keep()


if __name__ == "__main__":
    main()
