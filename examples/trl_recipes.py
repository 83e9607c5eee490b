"""Supervised fine-tuning (LoRA) or DPO with TRL that survives: `command: [examples/trl_recipes.py, sft]`, or `dpo`.

What was added to plain TRL is `callbacks=[MusterCallback()]`. Needs `pip install trl peft datasets`.
"""

import sys

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from muster.hf import MusterCallback

RECIPE, OUTPUT, BASE = [*sys.argv[1:], *("sft", "runs/trl-output", "Qwen/Qwen2.5-0.5B")[len(sys.argv) - 1 :]]
ARGS = {
    "output_dir": OUTPUT,
    "max_steps": 30,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_cpu": not torch.cuda.is_available(),
    "bf16": torch.cuda.is_available(),
    "report_to": "none",
    "save_strategy": "no",  # Muster saves
    "logging_steps": 5,
}

transformers.set_seed(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = transformers.AutoModelForCausalLM.from_pretrained(BASE)
common = {"model": model, "processing_class": tokenizer, "callbacks": [MusterCallback()]}
if RECIPE == "sft":
    rows = [{"prompt": f"The square of {n} is", "completion": f" {n * n}"} for n in range(48)]
    lora = LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear")
    args = SFTConfig(**ARGS, learning_rate=1e-4, max_length=64)
    trainer = SFTTrainer(args=args, train_dataset=Dataset.from_list(rows), peft_config=lora, **common)
else:
    rows = [{"prompt": f"The square of {n} is", "chosen": f" {n * n}", "rejected": f" {n + n}"} for n in range(48)]
    args = DPOConfig(**ARGS, learning_rate=1e-5)
    trainer = DPOTrainer(args=args, train_dataset=Dataset.from_list(rows), **common)
trainer.train()
trainer.save_model(OUTPUT)
