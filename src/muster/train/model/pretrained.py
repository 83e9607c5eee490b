"""Safetensors folders, read slice by slice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.config.spec import Model
from muster.core.errors import CheckpointError
from muster.data.weights.model_files import fetch
from muster.train.distributed.reduce import local
from muster.train.model.conversion import Ranges, Shape, View, dequantised, plan_loading
from muster.train.model.weights import local_ranges, plain_name, transient_buffers

if TYPE_CHECKING:
    from safetensors import safe_open
    from transformers import PreTrainedModel

#: Rows of an embedding that are summed at once.
_BLOCK_ROWS = 4096
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Folder:
    """A local folder of safetensors: tensor name -> file."""

    path: Path
    files: dict[str, Path]
    _open: dict[Path, safe_open] = field(default_factory=dict, repr=False, compare=False)

    def opened(self, path: Path) -> safe_open:
        """The file; it stays open (mapped, not read) as long as the folder is used."""
        if path not in self._open:
            self._open[path] = opened(path)
        return self._open[path]

    def stored(self) -> dict[str, View]:
        """Its tensors."""
        return {name: Stored(self, name) for name in self.files}


def open_source(model: Model) -> Folder | None:
    """The pretrained model's folder; None if the run file names none. Raises what ``fetch`` and ``open_folder`` do."""
    return None if model.source is None else open_folder(fetch(model.source, model.revision))


def open_folder(path: Path) -> Folder:
    """Which file holds which tensor. Only headers are read.

    Raises:
        CheckpointError: a file is missing, corrupt or truncated.
    """
    index = path / INDEX
    if not index.is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(
                f"{path} holds neither {SINGLE} nor {INDEX}", hint="weights must be safetensors, not .bin"
            )
        with opened(path / SINGLE) as file:
            return Folder(path, dict.fromkeys(file.keys(), path / SINGLE))
    try:
        listed = json.loads(index.read_text())["weight_map"]
        files = {str(name): path / str(file) for name, file in listed.items()}
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"{index} is unreadable: {error}") from error
    for file_path in sorted(set(files.values())):
        if not file_path.is_file():
            raise CheckpointError(f"{file_path} is missing, {INDEX} names it", hint="download the model again")
        with opened(file_path) as file:
            absent = [name for name, place in files.items() if place == file_path and name not in set(file.keys())]
        if absent:
            raise CheckpointError(f"{file_path} lacks {absent[0]}, which {INDEX} places there")
    return Folder(path, files)


def opened(path: Path) -> safe_open:
    """The file as safetensors opens it; broken ones raise CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is corrupt or truncated: {error}", hint="download or export the model again"
        ) from error


def load(
    model: PreTrainedModel,
    folder: Folder,
    *,
    ignored: Iterable[str] = (),
    grows: bool = False,
    elsewhere: Iterable[str] = (),
) -> None:
    """Fill this rank's parts of all parameters and persistent buffers, converting dtypes and reading only those parts.

    ``model`` is a transformers model, perhaps with adapters in it, whose parameters ``ignored`` names. ``grows``: its
    embedding and head may have more rows than the files; a new token begins as the mean of the others. ``elsewhere``:
    parameters of the model that other stages of a pipeline hold.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape, or a file is corrupt.
    """
    targets, named = stored_tensors(model), dict(model.named_parameters())
    views = found_views(model, folder, elsewhere)
    filled = {id(named[name]) for name in ignored}
    for name, tensor in targets.items():
        if id(tensor) in filled or local(tensor).numel() == 0:
            continue
        filled.add(id(tensor))
        view = fitted(views[name], name, tensor, grows=grows and is_embedding(tensor, model))
        with torch.no_grad():
            view.copy(local_ranges(tensor), local(tensor))


def fitted(view: View, name: str, tensor: Tensor, *, grows: bool) -> View:
    """``view`` in the shape of ``tensor``. ``grows``: that may have more rows.

    Raises:
        CheckpointError: it has another shape.
    """
    shape = tuple(tensor.shape)
    if view.shape == shape:
        return view
    if grows and view.shape[1:] == shape[1:] and view.shape[0] < shape[0]:
        return Grown(view, shape[0])
    raise CheckpointError(
        f"the files' {name} has shape {list(view.shape)}, the model's is {list(shape)}",
        hint="config.json does not belong to these weights",
    )


def is_embedding(tensor: Tensor, model: PreTrainedModel) -> bool:
    """Whether it is the input embedding or the head."""
    return any(tensor is module.weight for module in embeddings_of(model))


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Plain name -> parameter or buffer that files hold; a shared one under each of its names."""
    transient = transient_buffers(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {plain_name(name): tensor for name, tensor in tensors if name not in transient}


def found_views(model: PreTrainedModel, folder: Folder, elsewhere: Iterable[str] = ()) -> dict[str, View]:
    """``stored_tensors`` as views over the folder's files, found by their names alone; nothing is read.

    Raises:
        CheckpointError: tensors are missing or unknown.
    """
    tensors = stored_tensors(model)
    known = {*tensors, *map(plain_name, elsewhere)}
    plan = plan_loading(model, dequantised(folder.stored()), known)
    for name, tensor in tensors.items():
        if name not in plan.views:
            shared = [other for other, value in tensors.items() if value is tensor and other in plan.views]
            if shared:
                plan.views[name] = plan.views[shared[0]]
    missing = [name for name in tensors if name not in plan.views and ".lora_" not in name]
    if missing:
        raise CheckpointError(
            f"{folder.path} lacks {_some(missing)} of {type(model).__name__}",
            hint="check that the folder is of this architecture, and that its config.json says how it is quantised",
        )
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    prefix = f"{model.base_model_prefix}."
    recomputed = transient_buffers(model) | set(getattr(model, "_tied_weights_keys", None) or ())
    unknown = [
        name
        for name in plan.unknown
        if not ({name, prefix + name, name.removeprefix(prefix)} & recomputed)
        and not name.endswith("rotary_emb.inv_freq")
        and not any(pattern.search(name) for pattern in ignored)
    ]
    if unknown:
        raise CheckpointError(
            f"{folder.path} holds {_some(unknown)}, which {type(model).__name__} does not have",
            hint="check that config.json is of the same architecture",
        )
    return plan.views


def embeddings_of(model: PreTrainedModel) -> list[nn.Module]:
    """Input embedding and output head, where there are such."""
    return [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]


@dataclass(frozen=True)
class Stored(View):
    """A tensor of a safetensors file, which is opened when it is first read."""

    folder: Folder
    name: str

    @property
    def path(self) -> Path:
        return self.folder.files[self.name]

    @cached_property
    def shape(self) -> Shape:
        return tuple(self.folder.opened(self.path).get_slice(self.name).get_shape())

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        from safetensors import SafetensorError

        file = self.folder.opened(self.path)
        try:
            part = file.get_slice(self.name)[ranges] if ranges else file.get_tensor(self.name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} is corrupt or truncated at {self.name}: {error}") from error
        if part.shape != into.shape:  # ``copy_`` would repeat what is too small
            raise CheckpointError(f"{self.path}: {self.name} has shape {list(self.shape)}, unlike its neighbours")
        into.copy_(part)


@dataclass(frozen=True)
class Grown(View):
    """A stored matrix with more rows, which are the mean of all that it has."""

    of: View
    rows: int

    @property
    def shape(self) -> Shape:
        return (self.rows, *self.of.shape[1:])

    def copy(self, ranges: Ranges, into: Tensor) -> None:
        (start, stop), rows, columns = (ranges[0].start, ranges[0].stop), self.of.shape[0], ranges[1:]
        held = max(0, min(stop, rows) - start)
        if held:
            self.of.copy((slice(start, start + held), *columns), into[:held])
        if start + held == stop:
            return
        total = torch.zeros(into.shape[1:], dtype=torch.float64)
        for first in range(0, rows, _BLOCK_ROWS):
            last = min(rows, first + _BLOCK_ROWS)
            block = torch.empty(last - first, *into.shape[1:])
            self.of.copy((slice(first, last), *columns), block)
            total += block.double().sum(0)
        into[held:] = (total / rows).to(into.device)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
