"""Predicted against measured peak memory of the real trainer's ranks on CPU, over layouts and options.

Each configuration is trained for a few steps by ``muster.rank.worker.run_rank``, one process a rank. Measured is the
growth of the resident set's high-water mark above the process after its imports (the largest over the ranks);
predicted is the closed form of ``muster.plan.memory`` with the CPU's overheads.

    python benchmarks/plan_memory.py [--only TEXT] [--exactly NAME ...] [--json FILE] [--limit N]

glibc keeps freed blocks below its (growing) mmap threshold in the heap, which no model of tensors predicts: the same
run then stands 67 % above its tensors. Ranks are therefore started with a fixed ``MALLOC_MMAP_THRESHOLD_``, so that
freed tensors go back to the system; ``--default-malloc`` leaves it, and shows the difference.

Prints a row a configuration, then the median and worst error over those that grow enough to count: by at least five
times the baseline, or by 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

GIB = 1 << 30
#: A name, ranks, layout, and what differs from the base run (dotted keys, __ for dots).
BASE_MODEL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 16000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {**BASE_MODEL, "hidden_size": 640, "intermediate_size": 1920, "num_attention_heads": 10, "num_hidden_layers": 8,
        "vocab_size": 48000}  # fmt: skip
TIED = {**WIDE, "tie_word_embeddings": True}
QWEN = {**BASE_MODEL, "model_type": "qwen2"}
QWEN3 = {**BASE_MODEL, "model_type": "qwen3", "head_dim": 64}


def configurations() -> list[tuple[str, int, dict[str, int], dict[str, Any]]]:
    """Every configuration: at least 30, over everything that the closed form takes into account."""
    batch = {"training__micro_batch_size": 4, "training__global_batch_size": 4, "training__sequence_length": 1024}
    small = {"training__micro_batch_size": 1, "training__global_batch_size": 1, "training__sequence_length": 512}
    two, four = ({**batch, "training__global_batch_size": 4 * ranks} for ranks in (2, 4))
    wide = {**small, "model__config": WIDE}
    wide_two = {**wide, "training__global_batch_size": 2}
    fp32, bf16 = {"model__dtype": "float32"}, {"model__dtype": "bfloat16"}
    lora = {"model__lora": {"rank": 16}}
    ends = {"model__lora": {"rank": 16, "train_embeddings": True}}
    found: list[tuple[str, int, dict[str, int], dict[str, Any]]] = []

    def add(name: str, ranks: int, *changes: dict[str, Any], **layout: int) -> None:
        merged = {key: value for each in changes for key, value in each.items()}
        found.append((name, ranks, {"dp_shard": ranks, **layout}, merged))

    for word, dtype in (("fp32", fp32), ("bf16", bf16)):
        # What keeps little beside its activations needs more of them in bfloat16 to grow by a GiB.
        rows = 4 if word == "fp32" else 6
        much = {**batch, "training__micro_batch_size": rows, "training__global_batch_size": rows}
        much_two = {**much, "training__global_batch_size": 2 * rows}
        add(f"{word} none", 1, batch, dtype)
        add(f"{word} selective", 1, much, dtype, {"training__activation_checkpointing": "selective"})
        add(f"{word} full wide", 1, wide, dtype, {"training__activation_checkpointing": "full"})
        add(f"{word} wide", 1, wide, dtype)
        add(f"{word} wide tied", 1, wide, dtype, {"model__config": TIED})
        add(f"{word} wide rounds", 1, wide, dtype, {"training__global_batch_size": 3})
        add(f"{word} logits at once", 1, batch, dtype, {"training__loss_chunk_tokens": 0})
        add(f"{word} lora", 1, much, lora, dtype)
        add(f"{word} lora embeddings", 1, wide, dtype, ends)
        add(
            f"{word} longer",
            1,
            batch,
            dtype,
            {"training__sequence_length": 2048, "training__micro_batch_size": 2, "training__global_batch_size": 2},
        )
        add(f"{word} x2", 2, two, dtype)
        add(f"{word} wide x2", 2, wide_two, dtype)
        add(f"{word} wide x2 no reshard", 2, wide_two, dtype, {"parallelism__reshard_after_forward": False})
        add(f"{word} x2 replicas", 2, wide_two, dtype, dp_replicate=2, dp_shard=1)
        add(f"{word} x2 lora", 2, much_two, lora, dtype)
        add(f"{word} x2 lora embeddings", 2, wide_two, dtype, ends)
        add(f"{word} x2 tp", 2, much, dtype, dp_shard=1, tp=2)
    add("bf16 lora embeddings tied", 1, wide, bf16, {"model__config": TIED}, ends)
    add("bf16 master bf16", 1, wide, bf16, {"model__master_dtype": "bfloat16"})
    add("fp32 exact", 1, wide, fp32, {"training__exact": True})
    add("fp32 qwen2", 1, batch, fp32, {"model__config": QWEN})
    add("fp32 qwen3", 1, batch, fp32, {"model__config": QWEN3})
    add("bf16 qwen3", 1, batch, bf16, {"model__config": QWEN3})
    add("fp32 wide x4", 4, wide, fp32, {"training__global_batch_size": 4})
    add("fp32 wide x4 2 replicas", 4, wide, fp32, {"training__global_batch_size": 4}, dp_replicate=2, dp_shard=2)
    add("fp32 x4", 4, four, fp32)
    half = {**batch, "training__micro_batch_size": 2, **fp32}
    for replicas, shards, tp in (
        (3, 1, 1), (4, 1, 1), (6, 1, 1), (8, 1, 1), (1, 3, 1), (1, 6, 1), (1, 8, 1), (2, 2, 1), (3, 2, 1), (2, 3, 1),
        (4, 2, 1), (2, 4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
    ):  # fmt: skip
        rows = {"training__global_batch_size": 2 * replicas * shards}
        name = f"layout r{replicas} s{shards} t{tp}"
        add(name, replicas * shards * tp, half, rows, dp_replicate=replicas, dp_shard=shards, tp=tp)
    meets = {"training__local_steps": 4, "parallelism__dp_replicate": 2, "parallelism__dp_shard": 1}
    add("fp32 x2 local steps", 2, wide_two, fp32, meets, dp_replicate=2, dp_shard=1)
    return found  # fmt: skip


def spec_of(changes: dict[str, Any]) -> dict[str, Any]:
    """A resolved run file: random tokens, two steps, nothing but training."""
    found: dict[str, Any] = {
        "name": "memory",
        "model": {"config": BASE_MODEL, "dtype": "bfloat16"},
        "data": {"sources": [{"type": "random", "rows": 64}], "workers": 1},
        "training": {
            "steps": 2, "optimizer": {"learning_rate": 1e-3, "schedule": "constant"}, "loss_chunk_tokens": 512,
            "gc_every_steps": 0,
        },
        "evaluation": {"samples": 0, "num_sequences": 0, "at_start": False},
        "checkpoint": {"every_steps": 0, "snapshot_every_steps": 0, "asynchronous": False},
        "resources": {"device": "cpu", "threads_per_rank": 1},
        "output": {"tensorboard": False, "peak_tflops": 1.0},
    }  # fmt: skip
    for key, value in changes.items():
        place = found
        *path, last = key.split("__")
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def predicted(raw: dict[str, Any], layout: dict[str, int], ranks: int) -> Any:
    """The closed form for one rank of this configuration on this machine's CPU."""
    from muster.config.spec import RunSpec
    from muster.core.flops import ModelShape
    from muster.core.types import Layout
    from muster.plan.memory import DeviceOverhead, memory
    from muster.plan.workload import Setting, workload

    spec = RunSpec.model_validate(raw)
    shape = ModelShape.from_config(raw["model"]["config"])
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    setting = Setting(
        layout=Layout(**layout),
        micro_batch_size=spec.training.micro_batch_size,
        activation_checkpointing=spec.training.activation_checkpointing,
    )
    overhead = DeviceOverhead(
        context_bytes=40 << 20,  # threads, logs, kernels' caches: what nine runs grew beyond their tensors
        communicator_bytes=0,
        fragmentation=0.0,  # freed tensors go back to the system
        expanded_kv=True,
        stages_here=True,
        streams=False,
        capacity_bytes=room,
    )
    return memory(workload(spec, shape), setting, overhead)


def measured(raw: dict[str, Any], layout: dict[str, int], ranks: int) -> tuple[int, int]:
    """(largest growth over the ranks, its baseline) in bytes.

    Raises:
        RuntimeError: a rank failed; the message is the end of its log.
    """
    from muster.config.spec import RunSpec
    from muster.data.prepare import prepare

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="plan-memory-") as folder:
        run_dir = Path(folder)
        raw["data"]["cache_dir"] = str(run_dir / "cache")
        spec = RunSpec.model_validate(raw)
        (run_dir / "resolved.json").write_text(spec.model_dump_json())
        prepare(spec, run_dir=run_dir)
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        processes = [
            context.Process(target=rank_main, args=(folder, rank, ranks, layout, port, raw["model"]["config"]))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=600)
            if process.exitcode != 0:
                for other in processes:
                    other.kill()
        results = []
        for rank, process in enumerate(processes):
            if process.exitcode != 0:
                raise RuntimeError((run_dir / f"{rank}.log").read_text()[-2000:])
            results.append(json.loads((run_dir / f"{rank}.json").read_text()))
    return max((each["peak"] - each["baseline"], each["baseline"]) for each in results)


def rank_main(folder: str, rank: int, ranks: int, layout: dict[str, int], port: int, config: dict[str, Any]) -> None:
    """One rank: imports, baseline, the real trainer, peak."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import importlib

    import torch.distributed.fsdp  # noqa: F401

    from muster.core.types import Layout
    from muster.protocol.ranks import RankContext
    from muster.rank import worker
    from muster.rank.standalone_client import StandaloneClient

    family = config["model_type"]
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    importlib.import_module("peft")
    given = RankContext(
        run_id="memory", run_dir=folder, attempt=1, host="h0", rank=rank, local_rank=rank, world_size=ranks,
        local_world_size=ranks, layout=Layout(**layout), master_addr="127.0.0.1", master_port=port,
    )  # fmt: skip
    baseline = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew here
    code = worker.run_rank(given, StandaloneClient(given))
    Path(f"{folder}/{rank}.json").write_text(json.dumps({"baseline": baseline, "peak": status_bytes("VmHWM")}))
    sys.stdout.flush()
    os._exit(code)


def status_bytes(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="configurations whose name contains this text")
    parser.add_argument("--exactly", action="append", help="the configuration of this name; can be repeated")
    parser.add_argument("--limit", type=int, help="at most so many")
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's mmap threshold as it is")
    parser.add_argument("--json", help="write every row to this file")
    asked = parser.parse_args()
    if not asked.default_malloc:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    chosen = [each for each in configurations() if not asked.only or asked.only in each[0]]
    chosen = [each for each in chosen if not asked.exactly or each[0] in asked.exactly][: asked.limit]
    rows = []
    print(f"{'configuration':<22} {'ranks':>5} {'measured':>9} {'predicted':>9} {'error':>7}  {'baseline':>8}  moment")
    for name, ranks, layout, changes in chosen:
        began = time.monotonic()
        raw = spec_of(changes)
        estimate = predicted(raw, layout, ranks)
        try:
            growth, baseline = measured(raw, layout, ranks)
        except RuntimeError as error:
            print(f"{name:<22} {ranks:>5} failed: {str(error).strip().splitlines()[-1]}", flush=True)
            rows.append({"name": name, "ranks": ranks, "failed": str(error)})
            continue
        counts = growth >= 5 * baseline or growth >= GIB
        off = estimate.total_bytes / growth - 1
        rows.append({"name": name, "ranks": ranks, "layout": layout, "measured_bytes": growth, "counts": counts,
                     "predicted_bytes": estimate.total_bytes, "baseline_bytes": baseline, "error": off,
                     "items": dict(estimate.items), "moment": estimate.moment})  # fmt: skip
        print(
            f"{name:<22} {ranks:>5} {growth / GIB:>8.3f}G {estimate.total_bytes / GIB:>8.3f}G {off:>+7.1%}  "
            f"{baseline / GIB:>7.3f}G  {estimate.moment}{'' if counts else ' (grows too little to count)'}"
            f"  [{time.monotonic() - began:.0f} s]",
            flush=True,
        )
    errors = [abs(each["error"]) for each in rows if each.get("counts")]
    if errors:
        print(f"{len(errors)} configurations count: median error {median(errors):.1%}, worst {max(errors):.1%}")
    failed = sum("failed" in each for each in rows)
    if failed:
        print(f"{failed} failed")
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
