"""A run file's rehearsal on one small machine: the same image, mounts, secrets and data, and two steps. Pure.

What keeps hosts waiting in vain shows on one of them: an image that cannot be pulled, a bucket that cannot be written,
a token that opens no gate, data that do not parse, a script that does not start. What it cannot show is everything that
needs the real GPUs: memory, NCCL, speed. The model is a tiny one of the same tokenizer, so that it fits anything.
"""

from __future__ import annotations

from muster.config.spec import RunSpec, Training
from muster.core.typed_json import JsonObject
from muster.storage import run_registry

STEPS = 2
LARGEST_VOCABULARY = 262_144
"""More than any published tokenizer that we know of: a vocabulary's size is not known before it is loaded."""
TINY: JsonObject = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": LARGEST_VOCABULARY,
    "max_position_embeddings": 32_768,
}


def rehearsal(
    spec: RunSpec, *, machine: str | None = None, mode: str | None = None, queue: str | None = None
) -> RunSpec:
    """The run file of the rehearsal; without ``machine`` it runs on the cluster's CPU nodes, by ``queue`` if given."""
    placed: JsonObject = {
        "machine": machine,
        "device": "auto" if machine else "cpu",
        "queue": None if machine else queue,
        "provisioning_model": (mode or "spot") if machine else "owned",
    }
    return small(spec, placed)


def small(spec: RunSpec, placed: JsonObject) -> RunSpec:
    """The rehearsal's run file with one rank on one host; ``placed``: what ``resources`` says of that host."""
    document = spec.model_dump(mode="json")
    name = run_registry.slug(spec.name, 50) + "-preflight"
    document |= {"name": name, "run_dir": f"{spec.run_dir.rstrip('/')}-preflight" if spec.run_dir else None}
    document["resources"] |= {
        "hosts": 1, "min_hosts": None, "spare_hosts": 0, "ranks_per_host": 1, "threads_per_rank": None,
        "accelerator": None, "reservation": None, **placed,
    }  # fmt: skip
    document["recovery"] |= {
        "policy": "default",
        "keep_hosts_after_failure_s": 0.0,
        "max_restarts_without_progress": 0,
        "warm_standby": False,
    }
    document["limits"] = {"max_hours": 1.0}
    directory = spec.checkpoint.dir
    document["checkpoint"] |= {
        "every_steps": 1,
        "asynchronous": False,
        "resume": False,
        "keep_last": 1,
        "dir": f"{directory.rstrip('/')}/preflight/{name}" if directory else None,
    }
    if spec.model is not None:
        document["training"] |= _training(spec.training)
        document["parallelism"] |= {"dp_replicate": 1, "dp_shard": -1, "tp": 1}
        document["evaluation"] |= {"every_steps": 0, "at_start": False, "num_sequences": 0,
                                   "num_questions": 0, "samples": 0, "final_num_questions": None}  # fmt: skip
        # The tokenizer is the real one's, so that its gate is opened and its data are cut by it.
        tokenizer = document["model"]["tokenizer"] or document["model"]["source"]
        document["model"] |= {"source": None, "revision": None, "config": TINY, "tokenizer": tokenizer,
                              "dtype": "float32", "attention": "auto"}  # fmt: skip
    return RunSpec.model_validate(document, strict=False)


def _training(training: Training) -> JsonObject:
    return {
        "steps": STEPS,
        "epochs": None,
        "global_batch_size": training.micro_batch_size,
        "sequence_length": min(2048, training.sequence_length),
        "compile": False,
        "profile": {"trace_step": None, "memory_step": None},
    }
