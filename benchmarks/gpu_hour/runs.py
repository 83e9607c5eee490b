"""Probes that train: the whole stack, exact sums, a trace, snapshots, memory beside the plan's."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loops import job as jobs
from trainer_gpu import SHAPES, TINY

from gpu_hour.finding import Findings

#: Rows of a trace at which the host waits for the GPU.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def spec_of(folder: Path, *, smoke: bool, shape: str = "tiny", **changes: Any) -> dict[str, Any]:
    """A run file: ``shape`` of ``trainer_gpu.py``, or two small layers."""
    small = {
        **TINY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config, lora = SHAPES[shape] if shape in SHAPES and not smoke else (TINY if smoke else small, 0)
    job = jobs.job(
        config, steps=20, batch=8, micro=2, device="cpu" if smoke else "cuda", lora_rank=lora,
        sequence_length=32 if smoke else 512, dtype="float32" if smoke else "bfloat16", threads=1 if smoke else 8,
    )  # fmt: skip
    return jobs.muster_spec(job, folder / "cache", ranks=1, **changes)


def whole(found: Findings, *, smoke: bool) -> None:
    """``muster train`` twice, deterministic: every part of the product, and one state."""
    hashes: list[dict[int, str]] = []
    changes = {"training__deterministic": True, "training__state_hash_every_steps": 5}
    if smoke:
        changes |= {"training__steps": 5}
    with tempfile.TemporaryDirectory(prefix="muster-hour-") as folder:
        for number in (1, 2):
            spec = spec_of(Path(folder), smoke=smoke, **changes)
            events, began = jobs.run_muster(spec, Path(folder) / str(number), ranks=1, timeout_s=120)
            hashes.append(hashes_of(events))
            found.figures[f"start_s_{number}"] = round(first_step(events, began), 2)
            found.figures["attention"] = next(e.detail["attention"] for e in events if e.kind == "model.ready")
    found.figures["hashes"] = hashes
    found.claim("`muster train` runs on this machine to its end", bool(hashes[0]), found.figures["attention"])
    found.claim("a deterministic run has the same state a second time", bool(hashes[0]) and hashes[0] == hashes[1])


def exact(found: Findings, *, smoke: bool) -> None:
    """Fixed-point sums over four micro-batches: five runs, and one with launches that block, have one state."""
    last: list[str] = []
    changes: dict[str, Any] = {
        "training__exact": True, "training__deterministic": True, "training__state_hash_every_steps": 5,
        "model__dtype": "float32",
        "training__steps": 5 if smoke else 10,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="muster-hour-") as folder:
        for number in range(2 if smoke else 6):
            blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if number == 5 else {}
            with variables(blocking):
                spec = spec_of(Path(folder), smoke=smoke, **changes)
                events, _ = jobs.run_muster(spec, Path(folder) / str(number), ranks=1, how="worker", timeout_s=48)
            last.append(list(hashes_of(events).values())[-1])
            found.figures["hashes"] = last
    found.claim("exact sums on one GPU have one state, however launches fall", len(set(last)) == 1, len(last))


def trace(found: Findings, *, smoke: bool) -> None:
    """One traced step of the compiled 1B model: the GPU's busy share, the host's waits, the copies."""
    traced(found, smoke=smoke, shape="1b", micro=4)


def trace_8b_lora(found: Findings, *, smoke: bool) -> None:
    """The same of 8B LoRA, whose heads of 128 another rate of attention than 1B's of 64 is planned for."""
    traced(found, smoke=smoke, shape="8b-lora", micro=2)


def traced(found: Findings, *, smoke: bool, shape: str, micro: int) -> None:
    """One traced step of ``shape``, compiled, eight sequences of 4,096."""
    changes: dict[str, Any] = {
        "training__profile__trace_step": 8 if not smoke else 3, "training__steps": 10 if not smoke else 4,
        "training__compile": not smoke,
    }  # fmt: skip
    if not smoke:
        changes |= {"training__sequence_length": 4096, "training__micro_batch_size": micro}
    with tempfile.TemporaryDirectory(prefix="muster-hour-") as folder:
        spec = spec_of(Path(folder), smoke=smoke, shape=shape, **changes)
        jobs.run_muster(spec, Path(folder) / "run", ranks=1, how="worker", timeout_s=200)
        (file,) = Path(folder).glob("run/run/traces/*.json")
        rows = json.loads(file.read_text())["traceEvents"]
    found.figures["trace"] = table = read_trace(rows)
    found.claim("a step can be traced", table["rows"] > 0, f"{table['rows']} rows")
    if not smoke:
        found.claim("the GPU is busy for 95 % of a step", table["busy_share"] >= 0.95, table["busy_share"])
        waits = sum(table["waits"].values())
        found.claim("the host waits for the GPU twice a step at most", waits <= 2, table["waits"])


def read_trace(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace: kernels by time, the GPU's busy share, gaps, copies and the host's waits."""
    whole = [row for row in rows if row.get("ph") == "X"]
    device = sorted(
        (float(row["ts"]), float(row["ts"]) + float(row["dur"]), row["name"], row["cat"])
        for row in whole if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )  # fmt: skip
    busy, until, gaps = 0.0, device[0][0] if device else 0.0, []
    by_name: dict[str, float] = {}
    for start, end, name, _ in device:
        by_name[name] = by_name.get(name, 0.0) + end - start
        if start > until:
            gaps.append(start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - device[0][0] if device else 0.0
    copies = {
        kind: round(
            sum(end - start for start, end, name, cat in device if cat == "gpu_memcpy" and kind in name) / 1e3, 3
        )
        for kind in ("HtoD", "DtoH", "DtoD")
    }
    return {
        "rows": len(whole),
        "span_ms": round(span / 1e3, 3),
        "busy_share": round(busy / span, 4) if span else None,
        "largest_gaps_us": [round(each, 1) for each in sorted(gaps, reverse=True)[:10]],
        "copies_ms": copies,
        "waits": {name: n for name in WAITS if (n := sum(row.get("name") == name for row in whole))},
        "kinds_ms": kinds_of(by_name),
        "longest_ms": {
            name: round(us / 1e3, 3) for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:25]
        },
    }


#: Kind of kernel -> words of its names, in this order. nvjet are cuBLAS's own of Hopper.
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "matrices": ("nvjet", "gemm", "cutlass", "cublas", "xmma"),
    "triton": ("triton",),
    "optimizer": ("multi_tensor", "adam"),
}


def kinds_of(by_name: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of each kind of kernel, from microseconds by name. "other": what no word names."""
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, us in by_name.items():
        low = name.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")
        found[kind] += us / 1e3
    return {kind: round(ms, 3) for kind, ms in found.items()}


def snapshots(found: Findings, *, smoke: bool) -> None:
    """The 1B model without snapshots and with one a step: the first ten steps, then the rate and the stall."""
    medians: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="muster-hour-") as folder:
        for every in (0, 1):
            changes: dict[str, Any] = {
                "checkpoint__snapshot_every_steps": every, "training__steps": 16 if smoke else 30,
            }  # fmt: skip
            if not smoke:
                changes |= {"training__sequence_length": 2048}
            spec = spec_of(Path(folder), smoke=smoke, shape="1b", **changes)
            events, _ = jobs.run_muster(spec, Path(folder) / str(every), ranks=1, timeout_s=180)
            steps = [event.detail for event in events if event.kind == "step"]
            times = [each["step_ns"] / 1e9 for each in steps]
            medians[every] = statistics.median(times[10:])
            found.figures[f"every_{every}"] = {
                "first_steps_s": [round(each, 4) for each in times[:10]],
                "step_s": round(medians[every], 4),
                "stalls_s": [round((each.get("stall_ns") or 0) / 1e9, 4) for each in steps],
            }
    share = medians[1] / medians[0] - 1
    found.figures["share"] = round(share, 4)
    if not smoke:
        found.claim("a snapshot each step costs the 1B model 15 % at most", share <= 0.15, f"{100 * share:.1f} %")
        first, usual = max(found.figures["every_1"]["stalls_s"][:10]), found.figures["every_1"]["stalls_s"][-1]
        found.claim("the first snapshots stall ten times as long at most", first <= 10 * usual, f"{first} s, {usual} s")


def memory(found: Findings, *, smoke: bool) -> None:
    """The plan's bytes beside the allocator's and the driver's; segments that expand or not; a standby or none."""
    from muster.config.spec import RunSpec
    from muster.core.flops import ModelShape
    from muster.core.types import Layout
    from muster.plan.memory import memory as planned
    from muster.plan.workload import Setting, workload

    variants: dict[str, tuple[dict[str, str], Any]] = {
        "as it is": ({}, True),
        "expandable": ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        "no context in the standby": ({}, "imports"),
    }
    changes: dict[str, Any] = {"training__steps": 12}
    if not smoke:
        changes |= {"training__sequence_length": 4096, "training__micro_batch_size": 4}
    with tempfile.TemporaryDirectory(prefix="muster-hour-") as folder:
        for name, (more, standby) in list(variants.items())[: 1 if smoke else 3]:
            spec = spec_of(Path(folder), smoke=smoke, shape="1b", recovery__warm_standby=standby, **changes)
            with variables(more), Sampled() as sampled:
                events, _ = jobs.run_muster(spec, Path(folder) / name[:2], ranks=1, timeout_s=100)
            allocated = max(event.detail["memory_bytes"] or 0 for event in events if event.kind == "step")
            found.figures[name] = {"allocated_gib": gib(allocated), "driver_gib": sampled.most and gib(sampled.most)}
    run = RunSpec.model_validate(spec)
    work = workload(run, ModelShape.from_config(spec["model"]["config"]))
    micro = run.training.micro_batch_size
    setting = Setting(
        layout=Layout(dp_replicate=1, dp_shard=1, tp=1), micro_batch_size=micro, activation_checkpointing="none"
    )
    estimate = planned(work, setting)
    found.figures["plan"] = {"total_gib": gib(estimate.total_bytes), **{k: gib(v) for k, v in estimate.items.items()}}
    if not smoke:
        measured, plan = found.figures["as it is"]["driver_gib"], gib(estimate.total_bytes)
        near = None if measured is None else abs(plan - measured) <= 0.1 * measured
        found.claim("the plan's memory is within 10 % of the driver's", near, f"{plan} planned, {measured} used")


class Sampled:
    """The most memory in use on the first GPU while this is open; None where nobody says."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self._done.wait(0.5):
            try:
                said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout
                self.most = max(self.most or 0, int(said) << 20)
            except (OSError, subprocess.SubprocessError, ValueError):
                return


@contextmanager
def variables(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def hashes_of(events: list[Any]) -> dict[int, str]:
    """Step -> the hash of the state after it."""
    return {e.step: e.detail["state_hash"] for e in events if e.kind == "step" and e.detail.get("state_hash")}


def first_step(events: list[Any], began_ns: int) -> float:
    """Seconds from the command to the end of the first step."""
    return (min(event.mono_ns for event in events if event.kind == "step") - began_ns) / 1e9


def gib(value: float) -> float:
    return round(value / 2**30, 3)
