"""A run of the Hugging Face Trainer that survives: started by `command:` in hf-trainer.yaml, or by torchrun alone.

What was added to a plain script is `callbacks=[MusterCallback()]`.
"""

import sys

import torch
import transformers

from muster.hf import MusterCallback

OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "runs/hf-trainer-output"
STEPS, ROWS, LENGTH = 60, 200, 64


def row(number):
    ids = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(number)).cumsum(0) % 512
    return {"input_ids": ids, "labels": ids}


transformers.set_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, max_position_embeddings=LENGTH, attention_dropout=0.1,
)  # fmt: skip
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config),
    args=transformers.TrainingArguments(
        OUTPUT,
        max_steps=STEPS,  # 2.4 epochs: 200 rows are shuffled anew for each
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=20,
    ),
    train_dataset=[row(number) for number in range(ROWS)],
    callbacks=[MusterCallback(tokens_per_step=8 * LENGTH)],
)
trainer.train()
trainer.save_model(OUTPUT)
