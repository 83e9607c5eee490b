"""A Hugging Face folder from a committed checkpoint, written tensor by tensor in one process, and verified.

Run as a program (``python -m muster.train.export.hf_folder --run-dir DIR``) it prints one JSON object: the folder and
the results, or ``error``, ``hint`` and ``exit_code``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch

from muster.checkpoint.shards import ShardReader, read_tensor
from muster.checkpoint_format.reader import open_checkpoint
from muster.core.clock import SystemShell
from muster.core.errors import CheckpointError, MusterError, UsageError
from muster.core.protocols import Shell
from muster.core.typed_json import JsonObject
from muster.data.weights.model_files import hub_id
from muster.storage.run_registry import export_folder
from muster.train.export import verification
from muster.train.export.config_files import (
    copy_tokenizer,
    end_tokens,
    write_card,
    write_config,
    write_generation_config,
)
from muster.train.export.sources import (
    ExportSources,
    Make,
    choose_checkpoint,
    maker_of,
    open_sources,
    read_spec,
    reference_model,
    stored,
)
from muster.train.model import lora, weights
from muster.train.model.causal_lm import DTYPES, on_meta
from muster.train.model.conversion import Made, View, plan_publishing

#: Largest safetensors file, as in transformers.
MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far its logits are from the training state's."""

    folder: Path
    step: int
    kind: str
    """model, merged or adapter."""
    dtype: str
    tensors: int
    bytes: int
    seconds: float
    checked: JsonObject = field(default_factory=dict)
    """From ``verification``; empty if that was disabled."""
    note: str = ""
    """How to load an adapter that does not simply load on its base."""

    def lines(self) -> tuple[str, ...]:
        """Messages for the user."""
        content = f"step {self.step} ({self.kind}, {self.dtype}, {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB)"
        lines = [f"exported {content} to {self.folder}"]
        if self.checked:
            lines.append(
                f"reloaded in a fresh process: logits differ by {self.checked['relative_difference']:.2g} of their norm"
                f" (limit {self.checked['limit']:.2g}), {self.checked['agreement']:.1%} of next tokens equal"
            )
        return (*lines, self.note) if self.note else tuple(lines)


def export(
    run_dir: str | Path,
    out_dir: str | Path | None = None,
    *,
    checkpoint: int | None = None,
    best: bool = False,
    merge_lora: bool = True,
    dtype: str | None = None,
    verify: bool = True,
    shell: Shell | None = None,
    base: str | None = None,
) -> Exported:
    """Write the folder of the newest valid checkpoint (or of step ``checkpoint``) and verify it before it appears.

    LoRA is merged into its base, or written as a PEFT adapter, which names ``base`` as its base (a hub id) or else the
    run's. ``dtype`` defaults to the run's compute type.
    One tensor at a time is in memory, besides one file's output; the verification holds the whole model.

    Raises:
        UsageError: the folder exists, or this export is not possible.
        CheckpointError: there is no such checkpoint, or the reloaded folder gives other logits.
    """
    began = time.monotonic()
    run_dir = Path(run_dir)
    spec = read_spec(run_dir)
    assert spec.model is not None
    dtype = dtype or spec.model.dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    manifest = choose_checkpoint(spec, run_dir, checkpoint, lowest_loss=best)
    adapter = spec.model.lora is not None and not merge_lora
    kind = "adapter" if adapter else "merged" if spec.model.lora else "model"
    target = free_folder(Path(out_dir) if out_dir else export_folder(run_dir, manifest.step, kind))
    reader = ShardReader(open_checkpoint(manifest))
    sources = open_sources(spec, run_dir, reader)
    with temporary_folder_beside(target) as folder:
        if adapter:
            tensors, size = write_adapter(folder, sources, base)
        else:
            tensors, size = write_model(folder, sources, DTYPES[dtype])
        copy_tokenizer(sources.tokenizer, folder)
        note = write_card(folder, sources, adapter=adapter)
        checked = compare(folder, sources, "float32" if adapter else dtype, adapter, shell) if verify else {}
        apply_umask(folder)
        if target.is_dir():
            target.rmdir()
        os.rename(folder, target)
    return Exported(
        folder=target,
        step=manifest.step,
        kind=kind,
        dtype=spec.model.trained_dtype if adapter else dtype,
        tensors=tensors,
        bytes=size,
        seconds=time.monotonic() - began,
        checked=checked,
        note=note,
    )


def compare(folder: Path, sources: ExportSources, dtype: str, adapter: bool, shell: Shell | None) -> JsonObject:
    """The report of ``verification.verify`` on the folder, against the training state."""
    base = str(sources.folder.path) if adapter and sources.folder else None
    ids = verification.training_ids(sources.tokenizer, end_tokens(sources))
    reference = reference_model(sources)
    return verification.verify(folder, reference, base=base, dtype=dtype, shell=shell or SystemShell(), ids=ids)


def free_folder(target: Path) -> Path:
    """``target``. Raises UsageError if it exists and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists", hint="remove it or choose another folder with --out")
    return target


# ---------------------------------------------------------------- the whole model


def write_model(folder: Path, sources: ExportSources, dtype: torch.dtype) -> tuple[int, int]:
    """Weights, config and generation config; returns (tensors, bytes)."""
    shapes = {name: tuple(parameter.shape) for name, parameter in sources.model.named_parameters()}
    # Buffers that are in the model's files but not trained: only a pretrained folder has them.
    transient = weights.transient_buffers(sources.model)
    buffers = {name: tuple(b.shape) for name, b in sources.model.named_buffers() if name not in transient}
    makers = {name: maker_of(name, sources) for name in shapes} | {name: stored(name, sources) for name in buffers}
    made = lru_cache(1)(lambda name: makers[name]())  # one that is published in parts is made once
    held: dict[str, View] = {
        name: Made(partial(made, name), shape)
        for name, shape in (shapes | buffers).items()
        if name not in (sources.model._keys_to_ignore_on_save or ())
    }
    views = plan_publishing(sources.model, held, sources.folder.files if sources.folder else ())
    adapters = {name for name in sources.trained if lora.is_adapter_name(name)}
    adapted = {lora.adapted_name(name) for name in adapters}
    unknown = sorted(sources.trained - adapters - shapes.keys() - buffers.keys()) + sorted(adapted - shapes.keys())
    if unknown:
        raise CheckpointError(f"the checkpoint holds {unknown[0]!r}, which {type(sources.model).__name__} does not")
    itemsize = dtype.itemsize
    sizes = {name: torch.Size(view.shape).numel() * itemsize for name, view in views.items()}
    published = {name: view.make if isinstance(view, Made) else view.whole for name, view in views.items()}
    written = write_safetensors(folder, "model", published, sizes, dtype, max_bytes=MAX_FILE_BYTES)
    write_config(folder, sources, dtype)
    write_generation_config(folder, sources)
    return len(published), written


# ---------------------------------------------------------------- the adapter alone


def write_adapter(folder: Path, sources: ExportSources, base: str | None = None) -> tuple[int, int]:
    """The adapter as PEFT writes it, with the base's name; returns (tensors, bytes)."""
    assert sources.spec.model is not None and sources.spec.model.lora is not None
    if sources.spec.model.source is None:
        raise UsageError("the adapter's base is random and not stored anywhere", hint="export it merged")
    with_adapters = on_meta(sources.config, torch.float32)
    trains_embeddings = sources.spec.trains_embeddings
    config = lora.add_adapters(with_adapters, sources.spec.model.lora, torch.float32, embeddings=trains_embeddings)
    expected = {name for name, parameter in with_adapters.named_parameters() if parameter.requires_grad}
    if expected != sources.trained:
        different = sorted(expected ^ sources.trained)
        problem = f"differ in {len(different)} tensors, the first is {different[0]}"
        raise CheckpointError(f"the checkpoint and the adapter {problem}")
    config.base_model_name_or_path = base or hub_id(sources.spec.model.source) or sources.spec.model.source
    config.revision = sources.spec.model.revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    makers: dict[str, Make] = {}
    sizes = {}
    keys = {f"base_model.model.{lora.stored_name(name, expected)}": name for name in sorted(expected)}
    if trains_embeddings:  # peft holds a tied head as a copy of its own
        modules = lora.embedding_modules(with_adapters)
        keys |= {f"base_model.model.{module}.weight": name for module, name in modules.items()}
    for key, name in keys.items():
        makers[key] = lambda name=name: read_tensor(sources.reader, f"model.{name}")  # type: ignore[misc]
        sizes[key] = int(torch.Size(sources.reader.shapes()[f"model.{name}"]).numel()) * 4
    # In one file of any size: peft reads no others.
    written = write_safetensors(folder, "adapter_model", makers, sizes, None, max_bytes=sum(sizes.values()))
    return len(makers), written


# ---------------------------------------------------------------- files


def write_safetensors(
    folder: Path,
    stem: str,
    makers: Mapping[str, Make],
    sizes: Mapping[str, int],
    dtype: torch.dtype | None,
    *,
    max_bytes: int,
) -> int:
    """One file, or several of at most ``max_bytes`` with an index; a file's tensors are computed just before."""
    from safetensors.torch import save_file

    groups: list[list[str]] = [[]]
    filled = 0
    for name in makers:
        if groups[-1] and filled + sizes[name] > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    places, total = {}, 0
    for number, names in enumerate(groups, 1):
        single = len(groups) == 1
        file = f"{stem}.safetensors" if single else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name in names:
            tensor = makers[name]()
            converts = dtype is not None and tensor.is_floating_point()
            tensors[name] = (tensor.to(dtype) if converts else tensor).contiguous()
            total += tensors[name].numel() * tensors[name].element_size()
            places[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return total


def apply_umask(folder: Path) -> None:
    """Set file modes by the umask: safetensors ignores it and writes files for the owner only."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.iterdir():
        path.chmod(mode)


@contextlib.contextmanager
def temporary_folder_beside(target: Path) -> Iterator[Path]:
    """A folder in the target's file system that is removed if the block fails."""
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The program: one JSON object on the last line of stdout."""
    parser = argparse.ArgumentParser(prog="muster.train.export.hf_folder")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--best", action="store_true", help="the lowest held-out loss")
    parser.add_argument("--adapter", action="store_true", help="LoRA: the adapter alone, not merged")
    parser.add_argument("--base", help="with --adapter: the hub's id of its base")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--no-verify", action="store_true")
    given = parser.parse_args(argv)
    try:
        exported = export(
            given.run_dir,
            given.out,
            checkpoint=given.step,
            best=given.best,
            merge_lora=not given.adapter,
            dtype=given.dtype,
            verify=not given.no_verify,
            base=given.base,
        )
    except MusterError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "exit_code": error.exit_code}), flush=True)
        return error.exit_code
    print(json.dumps({**asdict(exported), "folder": str(exported.folder), "lines": exported.lines()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
