"""The closed form of memory against the trace on fake tensors, for large models on many ranks. Needs no weights.

python benchmarks/plan_trace.py [8B,70B] [8,16,32,64,128]
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from muster.app.planning.memory_trace import BARE
from muster.catalog import rows
from muster.config.spec import RunSpec
from muster.core.flops import ModelShape
from muster.core.types import Layout
from muster.plan.memory import memory
from muster.plan.workload import Setting, Workload

SEQUENCE = 4096


def closed(shape: ModelShape, setting: Setting) -> Any:
    """The closed form of tensors alone, with the trace's attention."""
    batch = setting.micro_batch_size * setting.layout.data_ranks
    work = Workload(shape=shape, sequence_length=SEQUENCE, global_batch_size=batch, steps=1, snapshot_every=0)
    return memory(work, setting, BARE)


def traced(shape: ModelShape, setting: Setting) -> Any:
    """The same by ``muster.train.memory_trace``, in a process of its own."""
    layout = setting.layout
    config = {
        "model_type": shape.family, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate, "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    spec = RunSpec.model_validate(
        {
            "name": "trace",
            "model": {"config": config},
            "data": {"sources": [{"type": "random"}]},
            "training": {
                "steps": 2,
                "sequence_length": SEQUENCE,
                "micro_batch_size": setting.micro_batch_size,
                "global_batch_size": setting.micro_batch_size * layout.data_ranks,
                "activation_checkpointing": setting.activation_checkpointing,
            },
            "resources": {"device": "cpu"},
        }
    )
    axes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    request = {"spec": spec.model_dump(mode="json"), "layout": axes, "vocab_size": shape.vocab}
    done = subprocess.run(
        [sys.executable, "-m", "muster.train.memory_trace"], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout)


def main() -> None:
    sizes = (sys.argv[1] if len(sys.argv) > 1 else "8B,70B").split(",")
    ranks = [int(each) for each in (sys.argv[2] if len(sys.argv) > 2 else "8,32,128").split(",")]
    errors = []
    print("| model | ranks | checkpointing | closed form GiB | trace GiB | difference | moments (closed, trace) |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        known = rows.find_model(f"meta-llama/Llama-3.1-{size}")
        assert known is not None, size
        for count in ranks:
            for kind in ("none", "full"):
                setting = Setting(layout=Layout(dp_shard=count), micro_batch_size=1, activation_checkpointing=kind)
                a, b = closed(known.shape, setting), traced(known.shape, setting)
                off = a.total_bytes / b["peak_bytes"] - 1
                errors.append(abs(off))
                print(
                    f"| {size} | {count} | {kind} | {a.total_bytes / 2**30:.2f} | {b['peak_bytes'] / 2**30:.2f} | "
                    f"{off:+.1%} | {a.moment}, {b['moment']} |",
                    flush=True,
                )
    print(f"\n{len(errors)} configurations: median difference {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
