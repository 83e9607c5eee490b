"""Verify that an exported folder gives the training state's logits and ids, in a new process, loaded as a user would.

``verify`` writes two fixed batches with the expected logits, and texts with their ids, to a temporary folder and starts
this module as a program, which loads the folder through ``AutoModelForCausalLM`` (and PEFT) and ``AutoTokenizer``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.core.errors import BackendError, CheckpointError
from muster.core.protocols import Shell
from muster.core.typed_json import JsonObject, parse_object, text, texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest ||difference|| / ||logits|| by the exported type: rounding alone. float32 differs by the order of sums
#: (and by merging); bfloat16 keeps 8 bits of each weight.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
BATCHES = 2
SHAPE = (2, 24)
TIMEOUT_S = 1800.0
#: What tokenizers cut differently: digits, runs of blanks, marks, bytes of letters that no vocabulary has.
PLAIN = "Two 12,345 cafés:\n\n  def f(x): return x_1  # 世界 🚀 \n"
CHAT: Sequence[JsonObject] = (
    {"role": "user", "content": "What is 17 and 4?"},
    {"role": "assistant", "content": "It's 21.\n\nIs it?"},
    {"role": "user", "content": " Yes"},
)


@dataclass(frozen=True, kw_only=True)
class TrainingIds:
    """Texts and their ids in training."""

    texts: list[str]
    ids: list[list[int]]
    chat: str | None
    """``CHAT`` as rendered; None: there is no template for it."""
    eos: int | None
    end: int | list[int] | None
    """The end tokens that the folder's generation config must have; None: any."""


def verify(
    folder: Path, reference: PreTrainedModel, *, base: str | None, dtype: str, shell: Shell, ids: TrainingIds | None
) -> JsonObject:
    """Compare the folder with ``reference`` (the training state, float32, on the CPU) and with ``ids`` of training.

    ``base``: the model that an adapter belongs to; None for a whole model. Returns ``relative_difference``,
    ``max_difference``, ``agreement`` (share of equal next tokens), ``limit`` and, for an adapter, ``effect``.

    Raises:
        CheckpointError: logits or ids differ, keys did not match, generation does not end where a turn does, or the
            adapter changes nothing.
        BackendError: the new process failed.
    """
    vocabulary = reference.config.get_text_config().vocab_size
    expected = {}
    for number in range(BATCHES):
        batch = fixed_batch(number, vocabulary)
        expected[f"ids.{number}"] = batch
        expected[f"logits.{number}"] = logits(reference, batch)
    check_adapters(reference)
    with tempfile.TemporaryDirectory(prefix="muster-verify-") as scratch:
        from safetensors.torch import save_file

        file = f"{scratch}/expected.safetensors"
        save_file(expected, file)
        Path(scratch, "ids.json").write_text(json.dumps(asdict(ids) if ids is not None else None))
        program = [sys.executable, "-P", "-m", "muster.train.export.verification"]
        argv = [*program, str(folder), file, f"{scratch}/ids.json"]
        result = shell.run([*argv, *(["--base", base] if base else [])], timeout_s=TIMEOUT_S)
    try:
        report = parse_object(result.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        tail = result.stderr.strip().splitlines()[-1:] or ["no output"]
        raise BackendError(f"the reloading process ended with code {result.returncode}: {tail[0]}") from error
    if "error" in report:
        raise CheckpointError(f"the exported folder does not load: {report['error']}")
    report = {**report, "limit": LIMITS[dtype]}
    check_report(report)
    return report


def check_report(report: JsonObject) -> None:
    """Raise CheckpointError unless the new process's report is that of a correct export."""
    if wrong := text(report, "tokenizer"):
        raise CheckpointError(
            f"the exported tokenizer is not that of training: {wrong}", hint="--no-verify writes it all the same"
        )
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := texts(report, kind):
            raise CheckpointError(f"the exported folder has {len(keys)} {kind} keys, the first is {keys[0]}")
    if "effect" in report and report["effect"] == 0.0:
        raise CheckpointError("the exported adapter changes nothing: the logits are those of the base alone")
    difference, limit = (float(text(report, name, default="nan")) for name in ("relative_difference", "limit"))
    if not difference <= limit:
        raise CheckpointError(
            f"the reloaded model's logits differ from the training state's by {difference:.3g} "
            f"of their norm, more than {limit:.3g}"
        )


def training_ids(tokenizer: Path, end: int | list[int] | None) -> TrainingIds | None:
    """By the run's ``tokenizer``; None without one."""
    from muster.data.chat.template import Template, TemplateRefusal
    from muster.data.tokenizer import Encoder

    if not (tokenizer / "tokenizer.json").is_file():
        return None
    encoder = Encoder(tokenizer)
    chat = None
    if encoder.chat_template is not None:
        template = Template(encoder.chat_template, encoder.template_variables, datetime.date.today().isoformat())
        with contextlib.suppress(TemplateRefusal):  # a template for conversations of another kind
            chat = template.render(CHAT, [], {}, prompt=True)
    both = [PLAIN] if chat is None else [PLAIN, chat]
    return TrainingIds(texts=both, ids=encoder.encode(both), chat=chat, eos=encoder.eos_id, end=end)


def different_ids(folder: Path, expected: TrainingIds) -> str | None:
    """What ``AutoTokenizer`` makes otherwise of the folder than training did; None: nothing."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if expected.chat is not None:
        rendered = tokenizer.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True)
        if rendered != expected.chat:
            return f"a chat is rendered as {rendered[:80]!r}"
    for given, wanted in zip(expected.texts, expected.ids, strict=True):
        ids = tokenizer(given, add_special_tokens=False)["input_ids"]
        if ids != wanted:
            different = (at for at, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1])
            at = next(different, min(len(ids), len(wanted)))
            return f"{given[:40]!r} has the ids {ids[at : at + 4]} from token {at} on, not {wanted[at : at + 4]}"
    if expected.eos not in (None, tokenizer.eos_token_id):
        return f"its end token is {tokenizer.eos_token_id}, not {expected.eos}"
    return None


def check_adapters(model: nn.Module) -> None:
    """Raise CheckpointError if there are adapters and all of them are still zero."""
    halves = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    if halves and not any(bool(parameter.detach().abs().max() > 0) for parameter in halves):
        raise CheckpointError(
            "the adapter is zero: no step has changed it", hint="train at least one step before exporting"
        )


def fixed_batch(number: int, vocabulary: int) -> Tensor:
    """Token ids [2, 24], the same each time."""
    generator = torch.Generator().manual_seed(20_260_101 + number)
    return torch.randint(0, vocabulary, SHAPE, generator=generator)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """float32 [B, S, V], as transformers computes them."""
    output: Tensor = model(input_ids=ids, use_cache=False).logits
    return output.float().contiguous()


def compare(model: nn.Module, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the model's logits are from the expected ones."""
    difference = norm = largest = agree = count = 0.0
    for number in range(BATCHES):
        target = expected[f"logits.{number}"]
        actual = logits(model, expected[f"ids.{number}"])
        if actual.shape != target.shape:
            raise ValueError(f"its logits are {list(actual.shape)}, expected {list(target.shape)}")
        difference += float((actual - target).double().pow(2).sum())
        norm += float(target.double().pow(2).sum())
        largest = max(largest, float((actual - target).abs().max()))
        agree += float((actual.argmax(-1) == target.argmax(-1)).sum())
        count += target.shape[0] * target.shape[1]
    # A non-finite difference must not pass: NaN compares false.
    return {
        "relative_difference": (difference / norm) ** 0.5 if norm > 0 else float("inf"),
        "max_difference": largest,
        "agreement": agree / count,
    }


def reload(folder: Path, expected: Mapping[str, Tensor], base: str | None, end: int | list[int] | None) -> JsonObject:
    """The work of the new process. ``end``: as in ``TrainingIds``."""
    from transformers import AutoModelForCausalLM

    if base is None:
        both: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
        model, info = both
        ends = model.generation_config.eos_token_id
        if end not in (None, ends):
            return {"tokenizer": f"generation ends at {ends}, not at {end}"}
        return {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
            **compare(model.eval(), expected),
        }
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    # The reference is float32: a base of that type shows the adapter's effect instead of rounding.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    plain.eval()
    vocabulary = expected["logits.0"].shape[-1]
    if vocabulary > plain.config.get_text_config().vocab_size:  # tokens that a chat template added
        plain.resize_token_embeddings(vocabulary)
    without = compare(plain, expected)
    model = PeftModel.from_pretrained(plain, folder).eval()
    stored = load_file(folder / "adapter_model.safetensors")
    # Left to itself, peft adds the base of a resized embedding, which no adapter file holds.
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    unequal = [key for key in stored if key in loaded and not torch.equal(stored[key].float(), loaded[key].float())]
    return {
        "missing": sorted(set(loaded) - set(stored)),
        "unexpected": sorted(set(stored) - set(loaded)),
        "mismatched": sorted(unequal),
        "effect": without["relative_difference"],
        **compare(model, expected),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The new process: one JSON object on the last line of stdout."""
    from safetensors.torch import load_file

    parser = argparse.ArgumentParser(prog="muster.train.export.verification")
    parser.add_argument("folder", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--base")
    given = parser.parse_args(argv)
    try:
        read = json.loads(given.ids.read_bytes())
        ids = TrainingIds(**read) if read is not None else None
        wrong = different_ids(given.folder, ids) if ids is not None else None
        expected, end = load_file(given.expected), ids.end if ids is not None else None
        report = {"tokenizer": wrong} if wrong else reload(given.folder, expected, given.base, end)
    except Exception as error:  # noqa: BLE001 (process boundary: any failure is the answer)
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}), flush=True)
        return 1
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
