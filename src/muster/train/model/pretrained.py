"""Safetensors folders, read slice by slice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.config.spec import Model
from muster.core.errors import CheckpointError
from muster.data.weights.model_files import fetch
from muster.train.distributed.reduce import local
from muster.train.model.weights import Ranges, fill, local_ranges, plain_name, transient_buffers

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
    skipped = set(ignored)
    targets: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if name not in skipped
    }
    transient = transient_buffers(model)
    targets |= {name: buffer for name, buffer in model.named_buffers() if name not in transient}
    prefix = f"{model.base_model_prefix}."
    places = {name: place_of(name, folder, prefix) for name in targets}
    missing = [name for name, place in places.items() if place is None]
    if missing:
        raise CheckpointError(
            f"{folder.path} lacks {_some(missing)} of {type(model).__name__}",
            hint="check that the folder is of this architecture and needs no conversion by transformers",
        )
    used = {*places.values(), *(place_of(name, folder, prefix) for name in elsewhere)}
    _refuse_unknown(model, folder, used, transient, prefix)
    growing = {id(module.weight) for module in embeddings_of(model)} if grows else set()
    with ExitStack() as stack:
        files = {path: stack.enter_context(opened(path)) for path in sorted(set(folder.files.values()))}
        for name, tensor in targets.items():
            place = places[name]
            assert place is not None
            path = folder.files[place]
            fill(tensor, read_slice(files[path], place, tensor, path, grows=id(tensor) in growing))


def embeddings_of(model: PreTrainedModel) -> list[nn.Module]:
    """Input embedding and output head, where there are such."""
    return [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]


def place_of(name: str, folder: Folder, prefix: str) -> str | None:
    """The tensor's name in the files: adapters rename their base, and a file may leave out the model's prefix."""
    plain = plain_name(name)
    candidates = (plain, plain.removeprefix(prefix), prefix + plain)
    return next((candidate for candidate in candidates if candidate in folder.files), None)


def read_slice(file: safe_open, place: str, tensor: Tensor, path: Path, *, grows: bool = False) -> Tensor:
    """The part of a stored tensor that ``tensor`` holds on this rank. ``grows``: it may have more rows than stored."""
    from safetensors import SafetensorError

    try:
        stored = file.get_slice(place)
        shape = tuple(stored.get_shape())
        if grows and shape[1:] == tuple(tensor.shape[1:]) and shape[0] < tensor.shape[0]:
            return _grown(stored, shape[0], local_ranges(tensor))
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: {place} has shape {list(stored.get_shape())}, the model's is {list(tensor.shape)}",
                hint="config.json does not belong to these weights",
            )
        if local(tensor).numel() == 0:
            return torch.empty(local(tensor).shape)
        if tensor.ndim == 0:
            part: Tensor = file.get_tensor(place)
        else:
            part = stored[local_ranges(tensor)]
        return part
    except SafetensorError as error:
        raise CheckpointError(f"{path} is corrupt or truncated at {place}: {error}") from error


def _grown(stored: Any, rows: int, ranges: Ranges) -> Tensor:
    """The ``ranges`` of a stored matrix of ``rows`` rows and of rows after them that are the mean of all."""
    columns = ranges[1:]
    start, stop = ranges[0].start, ranges[0].stop
    total = torch.zeros(stored[(slice(0, 1), *columns)].shape[1:], dtype=torch.float64)
    for first in range(0, rows, _BLOCK_ROWS):
        total += stored[(slice(first, min(rows, first + _BLOCK_ROWS)), *columns)].double().sum(0)
    new = (total / rows).float().expand(max(stop, rows) - max(start, rows), *total.shape)
    return new if start >= rows else torch.cat([stored[(slice(start, min(stop, rows)), *columns)].float(), new])


def _refuse_unknown(
    model: PreTrainedModel, folder: Folder, used: set[str | None], transient: set[str], prefix: str
) -> None:
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    known = transient | set(getattr(model, "_tied_weights_keys", None) or ())
    unknown = [
        name
        for name in folder.files
        if name not in used
        and not ({name, prefix + name, name.removeprefix(prefix)} & known)
        and not name.endswith("rotary_emb.inv_freq")
        and not any(pattern.search(name) for pattern in patterns)
    ]
    if unknown:
        raise CheckpointError(
            f"{folder.path} holds {_some(unknown)}, which {type(model).__name__} does not have",
            hint="check that config.json is of the same architecture",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
