"""Every family of transformers' causal language models, small: does it train as transformers computes it?

``python tests/every_family.py`` tries all and writes the table of docs/reference/models.md.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fakes.small_model import CPU, build, process_group, spec_of, whole
from torch import Tensor

from muster.checkpoint.saver import Saver
from muster.checkpoint.shards import ShardReader
from muster.checkpoint_format.reader import open_checkpoint
from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.storage.store import open_store
from muster.train.data_feed.batch import Batch, make_batch
from muster.train.distributed.reduce import local
from muster.train.export.hf_folder import write_model
from muster.train.export.sources import choose_checkpoint, open_sources
from muster.train.model.causal_lm import BuiltModel
from muster.train.model.loss import loss_sum
from muster.train.model.weights import local_ranges

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
#: Documents of one row, and the row's padding. One document is a token that predicts nothing.
LENGTHS, ROW = (1, 7, 19, 30), 64
VOCABULARY = 100
#: Routers that draw at random in training are compared in evaluation mode.
RANDOM = ("phimoe",)
#: One of each kind: attention, masks, caps, norms, mixtures, states, shared and odd layers, towers.
COVERING = (
    *("llama", "gemma2", "gemma3", "gemma4_text", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi3"),
    *("cohere2", "granite", "olmo2", "glm4", "nemotron", "minicpm3", "deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss"),
    *("llama4_text", "qwen3_next", "jamba", "mamba2", "falcon_h1", "lfm2", "zamba2", "doge"),
)


@dataclass(frozen=True)
class Result:
    """How a family trains, and how far it is from transformers (relative)."""

    documents: str
    """``packed``, or why each has a row of its own."""
    kernel: str
    loss: float
    gradient: float
    lora: float
    """Of the loss, with adapters in a loaded folder; then without them, merged, exported and reloaded."""
    exported: float


def families() -> dict[str, dict[str, Any]]:
    """Family -> its small configuration."""
    stored = json.loads((Path(__file__).with_name("fakes") / "families.json").read_text())
    like = {"base": stored.pop("like base")}
    like["mixture"] = like["base"] | stored.pop("like mixture")

    def whole_of(given: dict[str, Any]) -> dict[str, Any]:
        given = {key: whole_of(value) if key == "text_config" else value for key, value in given.items()}
        return {**like.get(given.pop("like", ""), {}), **given}

    return {name: {"model_type": name, **whole_of(given)} for name, given in stored.items()}


def spec(config: dict[str, Any] | None, **model: Any) -> RunSpec:
    return spec_of(config, training={"sequence_length": ROW}, **model)


def documents() -> list[Tensor]:
    """No token occurs twice in one: a choice of the largest (Doge's keys) would have ties."""
    random = torch.Generator().manual_seed(1)
    return [3 + torch.randperm(VOCABULARY - 3, generator=random)[:length] for length in LENGTHS]


def batch(ids: Sequence[Tensor], *, packed: bool) -> Batch:
    """All in one row, or each in a row of its own; padding is a document."""
    width = ROW if packed else max(LENGTHS) + 2
    rows = [list(ids)] if packed else [[each] for each in ids]
    inputs, labels, positions, lengths = [], [], [], []
    for row in rows:
        padding = torch.zeros(width - sum(map(len, row)), dtype=torch.int64)
        parts = [*row, padding]
        inputs.append(torch.cat(parts))
        targets = [torch.cat([each[1:], torch.tensor([-100])]) for each in row]
        labels.append(torch.cat([*targets, torch.full_like(padding, -100)]))
        positions.append(torch.cat([torch.arange(len(each)) for each in parts]))
        lengths += [len(each) for each in parts]
    return make_batch(torch.stack(inputs), torch.stack(labels), torch.stack(positions), lengths, CPU)


def add_noise(parameters: Sequence[Tensor], deviation: float = 0.1) -> None:
    """Untrained models have ties: zeros, equal experts."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=random) * deviation
            local(parameter).add_(noise[local_ranges(parameter)])


def loss_of(built: BuiltModel, ids: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    given = batch(ids, packed=built.proof is not None and built.proof.unpacked is None)
    return loss_sum(built.module, given, chunk_tokens=16, scale=scale)


def plain_loss(model: Any, ids: Sequence[Tensor]) -> Tensor:
    """By transformers, each document alone."""
    losses = []
    for each in ids:
        logits = model(input_ids=each[None], use_cache=False).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, each[1:], reduction="sum"))
    return torch.stack(losses).sum()


def norm(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(whole(each).double().square().sum()) for each in gradients if each is not None) ** 0.5


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def check(name: str, folder: Path) -> Result:
    """Train from random weights, save as transformers does, train adapters on that, export them merged, reload."""
    from transformers import AutoModelForCausalLM

    ids, trains = documents(), name not in RANDOM
    built = build(spec(families()[name]), vocab_size=VOCABULARY)
    assert built.proof is not None
    plain, expected, loss, gradient = trained_from_random(name, built)
    plain.save_pretrained(folder / "base")

    run = spec(None, source=str(folder / "base"), lora={"rank": 2, "targets": targets(plain)})
    adapted = build(run, vocab_size=VOCABULARY)
    start = loss_of(adapted.module.train(trains) and adapted, ids)
    start.backward()
    before, trained = float(start.detach()), adapted.named_trainable()
    # Others stay: of a choice (DeepSeek's indexer), a tower for images, a matrix that is read past its adapter.
    learning = [parameter for parameter in trained.values() if parameter.grad is not None]
    assert len(learning) > 1
    add_noise(learning, 0.03)
    after = float(loss_of(adapted.module.eval() and adapted, ids).detach())
    save(folder / "run", run, {f"model.{key}": whole(value) for key, value in trained.items()})
    sources = open_sources(run, folder / "run", reader_of(run, folder / "run"))
    (folder / "out").mkdir()
    write_model(folder / "out", sources, torch.float32)
    reloaded, report = AutoModelForCausalLM.from_pretrained(
        folder / "out", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    with torch.no_grad():
        merged = float(plain_loss(reloaded.eval(), ids[1:]))
    assert relative(after, before) > 1e-6, "the adapters change nothing"
    return Result(
        documents=built.proof.unpacked or "packed",
        kernel=built.attention.kernel,
        loss=loss,
        gradient=gradient,
        lora=relative(before, expected),
        exported=relative(merged, after),
    )


def trained_from_random(name: str, built: BuiltModel, *, ranks: int = 1) -> tuple[Any, float, float, float]:
    """transformers' model of the same values, its loss, and how far ours and the norm of its gradient are from that.

    Every one of the ``ranks`` has all documents, and gradients are summed over them.
    """
    from transformers import AutoModelForCausalLM

    ids, trains = documents(), name not in RANDOM
    add_noise(list(built.module.parameters()))
    loss = loss_of(built.module.train(trains) and built, ids, scale=1 / ranks)
    loss.backward()
    gradient = norm([parameter.grad for parameter in built.named_trainable().values()])
    config = copy.deepcopy(built.config)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict({key: whole(value) for key, value in built.module.model.state_dict().items()})
    expected = plain_loss(plain.train(trains), ids[1:])
    expected.backward()
    wanted = norm([parameter.grad for parameter in plain.parameters()])
    reference = float(expected.detach())
    return plain, reference, relative(float(loss.detach()) * ranks, reference), relative(gradient, wanted)


def targets(model: torch.nn.Module) -> str | list[str]:
    """All linear modules; of a mixture those of attention alone."""
    if not any("experts" in name for name, _ in model.named_parameters()):
        return "all-linear"
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    names = {name.rpartition(".")[2] for name in linear if "attn" in name or "attention" in name}
    return sorted(names - {"gate_proj", "up_proj", "down_proj"}) or "all-linear"  # those three experts have, too


def save(run_dir: Path, run: RunSpec, state: dict[str, Tensor]) -> None:
    run_dir.mkdir()
    (run_dir / "resolved.json").write_text(run.model_dump_json())
    saver = Saver(
        str(run_dir / "checkpoints"),
        run_id="r",
        attempt=0,
        layout=Layout(),
        keep_last=1,
        asynchronous=False,
        group=None,
        store=open_store(),
        on_event=lambda kind, **detail: None,
    )
    saver.save(1, state, {})


def reader_of(run: RunSpec, run_dir: Path) -> ShardReader:
    return ShardReader(open_checkpoint(choose_checkpoint(run, run_dir, None)))


def line(name: str, result: Result) -> str:
    """The family's line of the table."""
    if result.documents == "packed":
        return f"| {name} | packed | {result.kernel} |"
    return f"| {name} | one a row | {result.kernel} |"


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for name in families():
        with process_group(), tempfile.TemporaryDirectory() as folder:
            try:
                result = check(name, Path(folder))
                lines.append(line(name, result))
                print(name, result, flush=True)
            except Exception as error:  # noqa: BLE001 (the table of the others is wanted)
                print(name, "FAILED", type(error).__name__, str(error).splitlines()[:1], flush=True)
    head, _, _ = DOCS.read_text().partition("| family |")
    DOCS.write_text(head + "\n".join(["| family | documents | kernel on a CPU |", "|---|---|---|", *lines]) + "\n")


if __name__ == "__main__":
    main()
