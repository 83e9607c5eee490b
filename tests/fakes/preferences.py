"""Twenty steps of an objective on a tiny model and made-up preferences, in this process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from fakes.small_model import CPU, process_group
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from muster.config.spec import RunSpec
from muster.core.batch_schedule import BatchSchedule
from muster.core.types import Layout
from muster.data.prepare import Prepared, prepare
from muster.train.data_feed.batch_reader import plan_work
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.reduce import FloatReducer, ReduceGroups
from muster.train.evaluation.evaluated_model import TorchModel
from muster.train.evaluation.reference import References
from muster.train.model.causal_lm import BuiltModel, build_model
from muster.train.model.loss import loss_sum
from muster.train.optim.optimizer import clip_scale, make_optimizer
from muster.train.state.training_state import named_without_wrappers

WORDS, PAIRS, STEPS, BATCH = 200, 96, 20, 4
RATE = 5e-3
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.02,
}  # fmt: skip


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    vocab = {f"w{number}": number for number in range(WORDS)} | {"</s>": WORDS, "<pad>": WORDS + 1, "<unk>": WORDS + 2}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    made.save_pretrained(folder)
    return made


def rows_of(*, labelled: bool, count: int = PAIRS, longest: int = 14) -> list[dict[str, Any]]:
    draw = random.Random(7)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randrange(least, most)))

    result = []
    for _ in range(count):
        prompt, good, bad = words(3, 12) + " ", words(2, longest), words(2, longest)
        if labelled:
            label = draw.random() < 0.5
            result.append({"prompt": prompt, "completion": good if label else bad, "label": label})
        else:
            result.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return result


def spec_of(
    folder: Path, objective: dict[str, Any] | str | None, *, packing: bool = False, lora: bool = False, **training: Any
) -> RunSpec:
    """With its tokenizer and rows written to ``folder``."""
    write_tokenizer(folder / "tokenizer")
    name = objective["name"] if isinstance(objective, dict) else objective
    rows = folder / "rows.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(labelled=name == "kto")))
    return RunSpec.model_validate(
        {
            "name": "preferences",
            "model": {
                "config": LLAMA, "tokenizer": str(folder / "tokenizer"), "dtype": "float32",
                **({"lora": {"rank": 4}} if lora else {}),
            },
            "data": {
                "sources": [{"type": "file", "path": str(rows)}], "packing": packing, "heldout_fraction": 0,
                "cache_dir": str(folder / "cache"), "workers": 1,
            },
            "training": {
                "sequence_length": 64, "global_batch_size": BATCH, "micro_batch_size": BATCH, "steps": STEPS,
                "objective": objective, "loss_chunk_tokens": 16,
                "optimizer": {"learning_rate": RATE, "betas": (0.9, 0.999), "schedule": "constant"}, **training,
            },
            "evaluation": {"samples": 0},
        }
    )  # fmt: skip


def prepared_and_built(spec: RunSpec, folder: Path) -> tuple[Prepared, BuiltModel]:
    """Within ``process_group``."""
    prepared = prepare(spec, run_dir=folder / "run")
    meshes = make_meshes(Layout(), "cpu")
    built = build_model(spec, device=CPU, vocab_size=prepared.vocab_size, mesh=meshes, seed=3)
    return prepared, built


def run_steps(spec: RunSpec, folder: Path, *, steps: int = STEPS) -> list[dict[str, float]]:
    """The loss, the gradient's norm and the figures of each step."""
    result = []
    with process_group():
        prepared, built = prepared_and_built(spec, folder)
        groups, meshes = ReduceGroups(), make_meshes(Layout(), "cpu")
        module, objective = built.module, built.module.objective
        assert objective is not None
        groups.along = lambda: objective.totals
        model = TorchModel(module)
        reference = References.of(spec, prepared, str(folder / "reference"))
        if reference.stores:
            reference.make(model, groups, meshes, Silent(), CPU, step=0, writes=True)  # type: ignore[arg-type]
        named = named_without_wrappers(built.named_trainable())
        optimizer = make_optimizer(named, spec.training.optimizer, elementwise=False)
        reducer = FloatReducer(module, groups, accumulate_locally=True)
        for step in range(1, steps + 1):
            work = plan_work(
                prepared.train, spec.training, step=step, data_rank=0, data_ranks=1, device=CPU, static_shapes=False,
                count_flops=None, batch_schedule=BatchSchedule.of(spec.training.global_batch_size),
            )  # fmt: skip
            objective.begin(CPU)
            others = [(part.index, part.mismatched) for part in work.rounds if part.mismatched is not None]
            if others:
                objective.look_at(model.documents, others, groups)
            reducer.begin(micro_batches=work.micro_batches)
            for number, part in enumerate(work.rounds, start=1):
                reducer.before_forward(last=number == len(work.rounds))
                loss = loss_sum(module, part.batch, chunk_tokens=spec.training.loss_chunk_tokens, scale=part.scale)
                loss.backward()  # type: ignore[no-untyped-call]
                reducer.add_loss(loss)
            total, norm, fault = reducer.finish()
            scale = clip_scale(norm, spec.training.optimizer.max_grad_norm)
            optimizer.step(step=step, learning_rate=spec.training.optimizer.learning_rate, scale=scale, skip=fault)
            assert objective.totals is not None
            figures = objective.figures(objective.totals.tolist())
            result.append({"loss": float(total), "norm": float(norm), "units": float(work.units), **figures})
    return result


class Silent:
    """An agent that wants to know nothing."""

    def progress(self, for_s: float = 0.0) -> None: ...


def set_threads() -> None:
    torch.set_num_threads(1)
