"""A run of the Hugging Face Trainer that survives: started by `command:` in hf-trainer.yaml, or by torchrun alone.

What was added to a plain script is the callback `Survive` and the line that hands it over.
"""

import sys

import torch
import transformers
from torch.utils.data import IterableDataset

import muster.run as muster

OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "runs/hf-trainer-output"
STEPS, ROWS_PER_STEP, LENGTH = 60, 8, 64


class Rows(IterableDataset):
    """Rows in an order that follows from their number alone, so that a step count says where to go on."""

    first_step = 0

    def __iter__(self):
        row = self.first_step * ROWS_PER_STEP
        while True:
            ids = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(row)).cumsum(0) % 512
            yield {"input_ids": ids, "labels": ids}
            row += 1


class Survive(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        self.held = {"model": model, "optimizer": optimizer, "schedule": lr_scheduler}
        state.global_step = rows.first_step = muster.restore(self.held)

    def on_step_end(self, args, state, control, **_):
        muster.save(state.global_step, self.held)
        muster.heartbeat(state.global_step, tokens=ROWS_PER_STEP * LENGTH)
        control.should_training_stop |= muster.should_stop()

    def on_train_end(self, args, state, control, **_):
        muster.finish(state.global_step, self.held)


transformers.set_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, max_position_embeddings=LENGTH,
)  # fmt: skip
rows = Rows()
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config),
    args=transformers.TrainingArguments(
        OUTPUT,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=20,
    ),
    train_dataset=rows,
    callbacks=[Survive()],
)
trainer.train()
trainer.save_model(OUTPUT)
