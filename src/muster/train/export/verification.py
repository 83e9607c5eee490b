"""Does an exported folder give the training state's logits? Asked in a fresh process, as a user would load it.

``verify`` writes two fixed batches and the expected logits into the folder's neighbour and starts this module as
a program, which loads the folder through ``AutoModelForCausalLM`` (and PEFT) and compares.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.core.errors import BackendError, CheckpointError
from muster.core.protocols import Shell

#: Largest ||difference|| / ||logits|| by the exported type: rounding alone. float32 differs by the order of sums
#: (and by merging); bfloat16 keeps 8 bits of each weight.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
BATCHES = 2
SHAPE = (2, 24)
TIMEOUT_S = 1800.0


def verify(folder: Path, reference: Any, *, base: str | None, dtype: str, shell: Shell) -> dict[str, Any]:
    """Compare the folder with ``reference`` (the training state, float32, on the CPU).

    ``base``: the model that an adapter belongs to; None for a whole model. Returns ``relative_difference``,
    ``max_difference``, ``agreement`` (share of equal next tokens), ``limit`` and, for an adapter, ``effect``.

    Raises:
        CheckpointError: the logits differ, keys did not match, or the adapter changes nothing.
        BackendError: the fresh process broke.
    """
    vocabulary = reference.config.get_text_config().vocab_size
    expected = {}
    for number in range(BATCHES):
        ids = fixed_batch(number, vocabulary)
        expected[f"ids.{number}"] = ids
        expected[f"logits.{number}"] = logits(reference, ids)
    check_adapters(reference)
    with tempfile.TemporaryDirectory(prefix="muster-verify-") as scratch:
        from safetensors.torch import save_file

        save_file(expected, Path(scratch) / "expected.safetensors")
        argv = [
            sys.executable,
            "-P",
            "-m",
            "muster.train.export.verification",
            str(folder),
            f"{scratch}/expected.safetensors",
        ]
        done = shell.run([*argv, *(["--base", base] if base else [])], timeout_s=TIMEOUT_S)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise BackendError(f"the reloading process ended with code {done.returncode}: {tail[0]}") from error
    if "error" in found:
        raise CheckpointError(f"the exported folder does not load: {found['error']}")
    found["limit"] = LIMITS[dtype]
    judge(found)
    return found


def judge(found: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless what the fresh process found is what an export should give."""
    for what in ("missing", "unexpected", "mismatched"):
        if found[what]:
            raise CheckpointError(
                f"the exported folder has {len(found[what])} {what} keys, the first is {found[what][0]}"
            )
    if "effect" in found and found["effect"] == 0.0:
        raise CheckpointError("the exported adapter changes nothing: the logits are those of the base alone")
    if not found["relative_difference"] <= found["limit"]:
        raise CheckpointError(
            f"the reloaded model's logits differ from the training state's by {found['relative_difference']:.3g} "
            f"of their norm, more than {found['limit']:.3g}"
        )


def check_adapters(model: Any) -> None:
    """Raise CheckpointError where there are adapters and all of them are still zero."""
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
def logits(model: Any, ids: Tensor) -> Tensor:
    """float32 [B, S, V], as transformers computes them."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found.float().contiguous()


def compare(model: Any, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the model's logits are from the expected ones."""
    difference = norm = largest = agree = count = 0.0
    for number in range(BATCHES):
        want = expected[f"logits.{number}"]
        have = logits(model, expected[f"ids.{number}"])
        if have.shape != want.shape:
            raise ValueError(f"its logits are {list(have.shape)}, expected {list(want.shape)}")
        difference += float((have - want).double().pow(2).sum())
        norm += float(want.double().pow(2).sum())
        largest = max(largest, float((have - want).abs().max()))
        agree += float((have.argmax(-1) == want.argmax(-1)).sum())
        count += want.shape[0] * want.shape[1]
    # A non-finite difference must not pass: NaN compares false.
    return {
        "relative_difference": (difference / norm) ** 0.5 if norm > 0 else float("inf"),
        "max_difference": largest,
        "agreement": agree / count,
    }


def reload(folder: Path, expected: Mapping[str, Tensor], base: str | None) -> dict[str, Any]:
    """What the fresh process does."""
    from transformers import AutoModelForCausalLM

    model: Any
    if base is None:
        loaded_with_info: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        model, info = loaded_with_info
        found: dict[str, Any] = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        }
        return {**found, **compare(model.eval(), expected)}
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    # The adapter was trained beside a float32 reference: a base of that type shows its effect, not rounding.
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    without = compare(plain, expected)
    model = PeftModel.from_pretrained(plain, folder).eval()
    stored = load_file(folder / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(model)
    unequal = [key for key in stored if key in loaded and not torch.equal(stored[key].float(), loaded[key].float())]
    return {
        "missing": sorted(set(loaded) - set(stored)),
        "unexpected": sorted(set(stored) - set(loaded)),
        "mismatched": sorted(unequal),
        "effect": without["relative_difference"],
        **compare(model, expected),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The fresh process: one JSON object on the last line of stdout."""
    from safetensors.torch import load_file

    parser = argparse.ArgumentParser(prog="muster.train.export.verification")
    parser.add_argument("folder", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("--base")
    given = parser.parse_args(argv)
    try:
        found = reload(given.folder, load_file(given.expected), given.base)
    except Exception as error:  # noqa: BLE001 (a process's edge: whatever broke is the answer)
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}), flush=True)
        return 1
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
