"""What TRL's trainers give for the steps of ``fakes.preferences``: ``python trl_objectives.py OUT.json [NAME ...]``.

Run it where TRL and ``muster`` can be imported, from ``tests``. The model's first weights, the rows of each step and
the answers that KTO mismatches are Muster's; everything else is TRL's own: tokens, padding, log-probabilities, losses.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from fakes.preferences import BATCH, RATE, STEPS, prepared_and_built, spec_of, write_tokenizer
from fakes.small_model import process_group
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from muster.data.schedule import plan_step

#: Case -> (objective, adapters).
CASES: dict[str, tuple[Any, bool]] = {
    "dpo": ("dpo", False), "dpo-lora": ("dpo", True), "hinge": ({"name": "dpo", "loss": "hinge"}, False),
    "robust": ({"name": "dpo", "loss": "robust", "label_smoothing": 0.1}, False), "ipo": ("ipo", False),
    "apo_zero": ({"name": "dpo", "loss": "apo_zero"}, False),
    "sigmoid_norm": ({"name": "dpo", "loss": "sigmoid_norm"}, False),
    "kto": ("kto", False), "orpo": ("orpo", False), "simpo": ("simpo", False),
}  # fmt: skip


def ordered(prepared: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of all steps in order, and the mismatched answer of each (labelled rows)."""
    rows, others = [], []
    for step in range(1, STEPS + 1):
        plan = plan_step(
            seed=0, step=step, num_sequences=len(prepared.train), global_batch_size=BATCH, micro_batch_size=BATCH,
            data_ranks=1,
        )  # fmt: skip
        for index in (index for batch in plan.micro_batches for index in batch):
            sides = apart(prepared.train[index])
            if prepared.train.mismatched is None:
                (prompt, good), (_, bad) = sides
                rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
            else:
                ((prompt, answer),), good = sides, bool(prepared.train[index].grades[0] > 0)
                rows.append({"prompt": prompt, "completion": answer, "label": good})
                others.append(apart(prepared.train.mismatched[index])[0][1])
    return rows, others


def apart(sequence: Any) -> list[tuple[str, str]]:
    """Prompt and answer of each document, without the end token that TRL adds."""
    result, begin = [], 0
    for length in sequence.documents.tolist():
        ids = sequence.input_ids[begin : begin + length].tolist()
        labels = sequence.labels[begin : begin + length].tolist()
        first = next(place for place, label in enumerate(labels) if label != -100)
        answer = [label for label in labels if label != -100]
        result.append((words(ids[: first + 1]) + " ", words(answer[:-1])))
        begin += length
    return result


def words(ids: list[int]) -> str:
    return " ".join(f"w{id}" for id in ids)


def run(case: str) -> list[dict[str, float]]:
    given, lora = CASES[case]
    settings = given if isinstance(given, dict) else {"name": given}
    folder = Path(tempfile.mkdtemp())
    spec = spec_of(folder, given, lora=lora)
    with process_group():
        prepared, built = prepared_and_built(spec, folder)
        state = {name: tensor.clone() for name, tensor in built.module.model.state_dict().items()}
        config = built.config.to_dict()
    rows, others = ordered(prepared)

    def model() -> Any:
        made: Any = LlamaForCausalLM(LlamaConfig(**{**config, "attn_implementation": "sdpa"})).float()
        if lora:
            targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in state if ".lora_" in name})
            made = get_peft_model(made, LoraConfig(r=4, lora_alpha=32, target_modules=targets))
        made.load_state_dict({f"base_model.model.{name}" if lora else name: each for name, each in state.items()})
        return made

    tokenizer = write_tokenizer(folder / "tokenizer")
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": BATCH, "max_steps": STEPS,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": False,
        "use_cpu": True, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "train_sampling_strategy": "sequential", "max_length": 64, "max_grad_norm": 1.0,
    }  # fmt: skip
    name, data = settings["name"], Dataset.from_list(rows)
    kind = "ipo" if name == "ipo" else settings.get("loss", "sigmoid")
    if name in ("dpo", "ipo"):
        config_dpo = trl.DPOConfig(
            **common, beta=0.1, loss_type=[kind], label_smoothing=settings.get("label_smoothing", 0.0)
        )
        trainer = trl.DPOTrainer(
            model=model(), ref_model=None if lora else model(), args=config_dpo, train_dataset=data,
            processing_class=tokenizer,
        )  # fmt: skip
    elif name == "kto":
        trainer = trl.KTOTrainer(
            model=model(), ref_model=model(), args=trl.KTOConfig(**common, beta=0.1), train_dataset=data,
            processing_class=tokenizer,
        )  # fmt: skip
        ids = [tokenizer(text + " </s>")["input_ids"] for text in others]
        held = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = held.add_column("KL_completion_ids", ids)
    elif name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer = ORPOTrainer(
            model=model(), args=ORPOConfig(**common, beta=0.1), train_dataset=data, processing_class=tokenizer
        )
    else:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        arguments = CPOConfig(**common, beta=0.1, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5)
        trainer = CPOTrainer(model=model(), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    kept = {"loss": "loss", "grad_norm": "norm", "rewards/accuracies": "accuracy", "rewards/margins": "margin",
            "rewards/chosen": "rewards_chosen", "rewards/rejected": "rewards_rejected"}  # fmt: skip
    return [
        {new: float(entry[old]) for old, new in kept.items() if old in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    out, *names = sys.argv[1:]
    result: dict[str, Any] = {
        "trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "cases": {},
    }  # fmt: skip
    if names and Path(out).exists():
        result["cases"] = json.loads(Path(out).read_text())["cases"]
    for name in names or CASES:
        result["cases"][name] = run(name)
        print(name, result["cases"][name][0], result["cases"][name][-1], flush=True)
        Path(out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
