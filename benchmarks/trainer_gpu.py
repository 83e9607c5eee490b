"""Muster's trainer on one GPU against the HF Trainer (or TRL) and a bare FSDP2 loop: Llama 1B and 3B full, 8B LoRA.

    PYTHONPATH=src python benchmarks/trainer_gpu.py [--json FILE] [--only 1b 3b 8b-lora] [--systems muster bare hf]
    python benchmarks/trainer_gpu.py --smoke           # tiny shapes on the CPU: does it run?

Random weights, random tokens in full sequences of 4096. Every system is a process of its own and tries its micro-batch
sizes from the largest down, until one fits: what counts is the best a user gets. Printed beside tokens/s: MFU in three
conventions against the GPU's data sheet, the share of a matmul ceiling probed in this same run before and after, and
the peak of the allocator. Needs torch, transformers and this repository's src; peft for LoRA; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
from loops import job as jobs  # noqa: E402

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
#: Name -> (config, LoRA rank). Shapes of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "1b": ({**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}, 0),
    "3b": ({**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128,
            "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}, 0),
    "8b-lora": ({**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}, 16),
}  # fmt: skip
TINY = {
    "model_type": "llama", "vocab_size": 512, "max_position_embeddings": 256, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
WARMUP = 4
PROBE = """
import sys, torch
device, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import time
kind = torch.bfloat16 if device == "cuda" else torch.float32
torch.set_num_threads(1)
a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
for _ in range(3): a @ b
best = 0.0
for _ in range(5):
    wait(); began = time.monotonic()
    for _ in range(rounds): a @ b
    wait(); best = max(best, 2 * size ** 3 * rounds / (time.monotonic() - began))
print(best / 1e12, torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread")
"""


def probe(device: str, smoke: bool) -> tuple[float, str]:
    """(best TFLOP/s of a square matmul, the device's name), in a process that gives its memory back."""
    size, rounds = ("256", "4") if smoke else ("8192", "20")
    command = [sys.executable, "-c", PROBE, device, size, rounds]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(maxsplit=1)
    return float(words[0]), words[1].strip()


def peak_of(name: str) -> float | None:
    """The data sheet's dense bf16 TFLOP/s; None for a GPU not in the catalogue: no MFU is better than a guessed one."""
    from muster.catalog.devices import bf16_peak

    peak = bf16_peak(name)
    return None if peak is None else peak / 1e12


def play(system: str, job: dict[str, Any], folder: Path) -> jobs.Measured:
    """One training of ``system``."""
    if system.startswith("muster"):
        no_saves = {"every_steps": 0, "snapshot_every_steps": 0}
        precision = next((name for name in ("mxfp8", "fp8") if name in system), "bf16")
        spec = jobs.muster_spec(job, folder / "cache", ranks=1, checkpoint=no_saves, training__precision=precision)
        events, began = jobs.run_muster(spec, folder / system, ranks=1, how="worker", timeout_s=420)
        return jobs.measured(jobs.steps_of(events), began, warmup=WARMUP)
    python = sys.executable
    if system == "trl":
        python = str(jobs.peer_python("trl") or sys.executable)
        job = {**job, "tokenizer": job["tokenizer"] or str(word_tokenizer(folder, job["config"]["vocab_size"]))}
    loop = "bare_loop" if system.startswith("bare") else "trl_loop"
    found, began = jobs.run_loop(
        loop, {**job, "kind": system}, ranks=1, folder=folder / system, python=python, timeout_s=420
    )
    return jobs.measured(found, began, warmup=WARMUP)


def word_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A tokenizer for TRL, which wants one even for rows that are tokens already; it encodes nothing here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    place = folder / "tokenizer"
    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, min(vocab_size, 64))}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(place)
    return place


def fitting(system: str, job: dict[str, Any], micros: list[int], folder: Path) -> tuple[jobs.Measured | None, str]:
    """The first of the micro-batch sizes that fits, and which it was; or None and why not."""
    why = ""
    for micro in micros:
        try:
            return play(system, {**job, "micro": micro, "batch": max(micro, job["batch"])}, folder), f"micro {micro}"
        except RuntimeError as error:
            why = str(error)
            if "out of memory" not in why.lower():
                return None, why.strip().splitlines()[-1][-300:]
    return None, "out of memory at every micro-batch size tried"


def figures(seen: jobs.Measured, job: dict[str, Any], peak: float | None, ceiling: float) -> dict[str, Any]:
    """What is reported of a training: MFU by CAUSAL, FULL and N6 against the data sheet, CAUSAL against the ceiling."""
    from muster.core.flops import Convention, ModelShape, flops_per_token, lora_factor

    shape = ModelShape.from_config(job["config"])
    factor = lora_factor(shape, shape.lora_parameters(job["lora_rank"])) if job["lora_rank"] else 1.0
    tflops = {
        str(kind): factor * flops_per_token(shape, job["sequence_length"], kind) * seen.tokens_per_s / 1e12
        for kind in Convention
    }
    return {
        "tokens_per_s": round(seen.tokens_per_s, 1),
        "step_s": round(seen.step_s, 4),
        "start_s": round(seen.start_s, 2),
        "peak_gib": round(seen.peak_bytes / 2**30, 2) if seen.peak_bytes else None,
        "tflops": {kind: round(value, 3) for kind, value in tflops.items()},
        "mfu": {kind: round(value / peak, 4) for kind, value in tflops.items()} if peak else None,
        "of_ceiling": round(tflops["causal"] / ceiling, 4),
        "losses": [round(value, 4) for value in seen.losses],
    }


def systems_of(asked: list[str] | None, smoke: bool) -> list[str]:
    """Which systems run: Muster and the bare loop with and without compile, TRL or else the HF Trainer."""
    if asked:
        return asked
    third = "trl" if jobs.peer_python("trl") else "hf"
    return ["muster", "bare", third] if smoke else ["muster", "muster_compiled", "bare_compiled", "bare", third]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--systems", nargs="*", help="muster, bare (also _compiled), muster_(mx)fp8_compiled, hf, trl")
    parser.add_argument("--micro", nargs="*", type=int, default=[8, 4, 2, 1], help="sizes tried, from the first on")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, at least the micro-batch")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--distinct", type=int, default=0, help="random rows in all: with few, the loss shows learning")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU: does it run?")
    arguments = parser.parse_args()
    device = "cpu" if arguments.smoke else "cuda"
    if arguments.smoke:
        arguments.micro, arguments.batch, arguments.steps, arguments.length = [2], 2, WARMUP + 3, 32
    ceiling, name = probe(device, arguments.smoke)
    peak = peak_of(name)
    print(f"{name}: matmul ceiling {ceiling:.3f} TFLOP/s, data sheet {peak}", flush=True)
    result: dict[str, Any] = {"machine": {**jobs.machine(), "device": name, "data_sheet_tflops": peak}, "shapes": {}}
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        for shape in arguments.only:
            config, lora = SHAPES[shape]
            job = jobs.job(
                TINY if arguments.smoke else config, steps=arguments.steps, batch=arguments.batch, device=device,
                sequence_length=arguments.length, lora_rank=lora, dtype="float32" if arguments.smoke else "bfloat16",
                threads=1 if arguments.smoke else 8, distinct=arguments.distinct,
            )  # fmt: skip
            result["shapes"][shape] = rows = {}
            for system in systems_of(arguments.systems, arguments.smoke):
                variant = {**job, "compile": system.endswith("_compiled")}
                seen, note = fitting(system, variant, arguments.micro, Path(folder) / shape)
                row = {"failed": note} if seen is None else {**figures(seen, variant, peak, ceiling), "at": note}
                rows[system] = row
                print(f"  {shape:8s} {system:16s} {json.dumps(rows[system])}", flush=True)
                if arguments.json:  # as far as it got: a lent GPU may be taken back
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    after, _ = probe(device, arguments.smoke)
    result["ceiling_tflops"] = {"before": round(ceiling, 3), "after": round(after, 3)}
    print(f"matmul ceiling after: {after:.3f} TFLOP/s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
