"""TRL's SFTTrainer (or the HF Trainer) as a user of it would run it, with the settings that make it fastest here.

    torchrun --nproc-per-node 2 trl_loop.py JOB.json

``job["rows"]`` names a JSONL of prompt/completion rows (with ``job["tokenizer"]``); without it the rows are random
tokens. ``job["prepare_only"]``: tokenise and pack, and leave. Runs in a virtual environment of its own; imports
nothing of Muster. Rank 0 writes ``job["out"]``.

Granted: no activation checkpointing and the precision of the others (its defaults recompute, in bf16), no logging, no
saving, no evaluation, its own packing ("bfd"). On CPU under torchrun it runs DDP: its FSDP needs an accelerator.
"""

import json
import os
import sys
import time
from pathlib import Path

from meeting import meet


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    began = time.monotonic_ns()
    trainer, prepared_ns = (sft if job["kind"] == "trl" else plain)(job)
    found = {"prepared_ns": prepared_ns, "built_ns": time.monotonic_ns() - began}
    if job["rows"]:
        found["prepared"] = count(trainer.train_dataset)
    if not job["prepare_only"]:
        trainer.train()
        found.update(trainer.seen)
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if trainer.is_world_process_zero():
        with open(job["out"], "w") as file:
            json.dump(found, file)


def model_of(job):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**job["config"])
    dtype = torch.bfloat16 if job["lora_rank"] else torch.float32
    with torch.device("cuda" if job["device"] == "cuda" else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    return model


def arguments_of(job):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "output_dir": job["out"] + ".trainer",
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": max(1, job["batch"] // (job["micro"] * world)),
        "max_steps": job["steps"],
        "learning_rate": 1e-4,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": job["dtype"] == "bfloat16",
        "use_cpu": job["device"] == "cpu",
        "gradient_checkpointing": job["checkpointing"],
        "torch_compile": job["compile"],
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": job["device"] == "cuda",
        "ddp_find_unused_parameters": False,
        "seed": 0,
    }


def random_rows(job):
    import torch

    rows = max(256, job["batch"] * 4)
    shape = (rows, job["sequence_length"])
    return torch.randint(0, job["config"]["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).tolist()


def counting(trainer_class):
    """The trainer with a note of each step's end, tokens and supervised tokens of this rank."""

    class Counting(trainer_class):
        seen = None

        def training_step(self, model, inputs, *rest, **more):
            if self.seen is None:
                self.seen = {"ends_ns": [], "cpu_ns": [], "tokens": [], "supervised": [], "losses": []}
                self.add_callback(Clock(self.seen))
                self.seen.update(_tokens=0, _supervised=0)
            mask, labels = inputs.get("attention_mask"), inputs["labels"]
            self.seen["_tokens"] += int(labels.numel() if mask is None else mask.sum())
            self.seen["_supervised"] += int((labels[..., 1:] != -100).sum())
            return super().training_step(model, inputs, *rest, **more)

    return Counting


def Clock(seen):
    import torch
    from transformers import TrainerCallback

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            world = int(os.environ.get("WORLD_SIZE", "1"))
            if state.is_world_process_zero:
                meet(state.global_step)
            seen["ends_ns"].append(time.monotonic_ns())
            seen["cpu_ns"].append(time.process_time_ns())
            seen["tokens"].append(seen.pop("_tokens") * world)
            seen["supervised"].append(seen.pop("_supervised") * world)
            seen.update(_tokens=0, _supervised=0)

    return Noting()


def plain(job):
    """transformers.Trainer on random tokens."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.rows = random_rows(job)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = torch.tensor(self.rows[index])
            return {"input_ids": row, "labels": row}

    model = with_adapters(job, model_of(job))
    return counting(Trainer)(model=model, args=TrainingArguments(**arguments_of(job)), train_dataset=Rows()), 0


def with_adapters(job, model):
    if job["lora_rank"]:
        from peft import get_peft_model

        model = get_peft_model(model, adapters(job))
    return model


def adapters(job):
    from peft import LoraConfig

    return LoraConfig(r=job["lora_rank"], lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)


def sft(job):
    """trl.SFTTrainer, on rows or on random tokens; nanoseconds of reading, tokenising and packing."""
    from datasets import Dataset, disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    packing = bool(job["rows"]) and job["packing"]
    config = SFTConfig(
        **arguments_of(job),
        max_length=job["sequence_length"],
        packing=packing,
        dataset_num_proc=job["workers"] if job["workers"] > 1 else None,
        dataset_kwargs=None if job["rows"] else {"skip_prepare_dataset": True},
        padding_free=False,
    )
    spent = {"ns": 0}

    class Timed(counting(SFTTrainer)):
        def _prepare_dataset(self, *given, **more):
            began = time.monotonic_ns()
            found = super()._prepare_dataset(*given, **more)
            spent["ns"] += time.monotonic_ns() - began
            return found

    began = time.monotonic_ns()
    if job["rows"]:
        rows = load_dataset("json", data_files=job["rows"], split="train", cache_dir=job["out"] + ".cache")
    else:
        rows = Dataset.from_dict({"input_ids": random_rows(job)})
    read_ns = time.monotonic_ns() - began
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    trainer = Timed(
        model=model_of(job),
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapters(job) if job["lora_rank"] else None,
    )
    return trainer, read_ns + spent["ns"]


def count(rows):
    """How many sequences and tokens preparation made."""
    lengths = [len(ids) for ids in rows["input_ids"]]
    found = {"sequences": len(lengths), "tokens": sum(lengths)}
    if "completion_mask" in rows.column_names:
        found["supervised"] = sum(sum(mask) for mask in rows["completion_mask"])
    return found


if __name__ == "__main__":
    main()
