"""The plain loop that the trainer is measured against: one process, no sharding, no packing, no chunks, no fusing.

Each document goes through transformers' own model alone; the loss is its own cross-entropy; torch.optim.AdamW
makes the update. Only the first weights, the data and the order of sequences are taken from the trainer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from muster.config.spec import RunSpec
from muster.data.prepare import open_prepared
from muster.data.schedule import plan_step
from muster.train.model import weights
from muster.train.optim.learning_rate import learning_rate


def reference_losses(spec: RunSpec, run_dir: Path, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step."""
    prepared = open_prepared(spec, run_dir)
    assert spec.model is not None and isinstance(spec.model.config, dict)
    keys = {"vocab_size": prepared.vocab_size, **spec.model.config}
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    weights.initialise(model, seed=spec.training.seed, device=torch.device("cpu"))
    settings = spec.training.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        foreach=False,
        fused=False,
    )
    found = []
    for step in range(1, steps + 1):
        plan = plan_step(
            seed=spec.training.seed,
            step=step,
            num_sequences=len(prepared.train),
            global_batch_size=spec.training.global_batch_size,
            micro_batch_size=1,
            data_ranks=1,
        )
        rows = [prepared.train[index] for micro_batch in plan.micro_batches for index in micro_batch]
        supervised = sum(row.supervised_tokens for row in rows)
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            start = 0
            for length in row.document_lengths:
                part = slice(start, start + int(length))
                start += int(length)
                labels = torch.as_tensor(row.labels[part], dtype=torch.int64)
                if not bool((labels != -100).any()):
                    continue
                logits = model(torch.as_tensor(row.input_ids[part], dtype=torch.int64)[None], use_cache=False).logits[0]
                loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / supervised
                loss.backward()
                total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step=step, total_steps=steps)
        optimizer.step()
        found.append((total, float(norm)))
    return found
