"""The run file's keys as a tree: which keys are allowed where, what was probably meant, and what a value must be."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from muster.config.sections.section import MemberOf, SectionOf
from muster.config.spec import RunSpec
from muster.config.yaml import KeyPath
from muster.core.redact import HIDDEN, is_secret, redact
from muster.core.typed_json import Json

#: Key here -> its names in other programs.
_NAMES_ELSEWHERE = {
    "training.optimizer.learning_rate": "lr",
    "training.steps": "max_steps num_steps",
    "training.epochs": "num_train_epochs num_epochs",
    "training.global_batch_size": "batch_size train_batch_size gradient_accumulation_steps",
    "training.micro_batch_size": "per_device_train_batch_size local_batch_size",
    "training.sequence_length": "seq_len max_length max_seq_length context_length",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.optimizer.max_grad_norm": "max_grad_norm",
    "model.source": "model_name model_name_or_path",
    "resources.hosts": "nodes num_nodes nnodes",
    "resources.ranks_per_host": "gpus gpus_per_node nproc_per_node",
    "parallelism.tp": "tensor_parallel tensor_parallel_size",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree",
    "parallelism.pp_schedule": "pipeline_parallel_schedule",
    "parallelism.pp_chunks": "virtual_pipeline_model_parallel_size",
    "parallelism.dp_shard": "fsdp",
    "data.sources": "dataset datasets",
    "checkpoint.every_steps": "save_steps",
    "evaluation.every_steps": "eval_steps",
    "model.dtype": "precision",
    "run_dir": "output_dir",
    "output.tracker": "wandb",
    "resources.queue": "partition",
    "resources.locations": "zone region",
}
#: Pairs of which a run file has one; given on the command line, a key takes the place of its partner in the file.
EXCLUSIVE = (
    ("training.steps", "training.epochs"),
    ("model.source", "model.config"),
    ("vertex.network", "vertex.network_attachment"),
)
#: What people ask for by a key that is not there -> what there is.
_INSTEAD = {
    ("quantization", "quantize", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "qlora"): (
        "there are no quantised base models yet; what saves memory is model.lora, "
        "training.optimizer.name: adamw_8bit, training.activation_checkpointing and parallelism.dp_shard"
    ),
}
INSTEAD = {name: text for names, text in _INSTEAD.items() for name in names}
OTHER_NAMES = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()}


def leaves(annotation: object) -> list[object]:
    """The members of a union, at any depth; ``None`` left out, ``Annotated`` kept."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in leaves(member)]
    if origin is Annotated and get_origin(get_args(annotation)[0]) in (Union, types.UnionType):
        return leaves(get_args(annotation)[0])
    return [] if annotation is type(None) else [annotation]


def bare(annotation: object) -> object:
    """Without ``Annotated``."""
    return bare(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def sections(annotation: object, raw: Json = None) -> list[type[BaseModel]]:
    """The sections allowed here; where ``raw`` names its ``type``, that one alone."""
    family = family_of(annotation)
    if family is not None:
        return list(family.sections(raw))
    return [leaf for leaf in map(bare, leaves(annotation)) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


def family_of(annotation: object) -> SectionOf | None:
    """The family whose members' sections are allowed here."""
    notes = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((note for note in notes if isinstance(note, SectionOf)), None)


def fields(annotation: object, raw: Json = None) -> dict[str, FieldInfo]:
    """Keys of the section."""
    return {name: info for model in sections(annotation, raw) for name, info in model.model_fields.items()}


def holds_keys(annotation: object) -> bool:
    """Whether a section, a mapping or a list is allowed here."""
    kinds = [bare(leaf) for leaf in leaves(annotation)]
    return bool(sections(annotation)) or any((get_origin(kind) or kind) in (list, tuple, dict) for kind in kinds)


def item(annotation: object) -> object:
    """Type of a list's items; None where no list is allowed."""
    for leaf in map(bare, leaves(annotation)):
        if get_origin(leaf) in (list, tuple):
            return get_args(leaf)[0]
    return None


def text_of_any_key(annotation: object) -> object:
    """``str`` where a mapping of names to texts is allowed; None elsewhere."""
    return str if any(get_args(bare(leaf)) == (str, str) for leaf in leaves(annotation)) else None


def at(path: KeyPath, raw: Json = None) -> tuple[object, FieldInfo | None]:
    """The annotation (and field) that ``path`` leads to; ``(None, None)`` where it leads nowhere."""
    annotation: object = RunSpec
    info: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            annotation, info = item(annotation), None
            raw = raw[part] if isinstance(raw, list) and part < len(raw) else None
        else:
            info = fields(annotation, raw).get(part)
            annotation = info.annotation if info else text_of_any_key(annotation)
            raw = raw.get(part) if isinstance(raw, dict) else None
        if annotation is None:
            return None, None
    return annotation, info


@cache
def every_key() -> dict[str, list[str]]:
    """Key name -> the dotted paths where it is allowed (list items as ``sources.0``)."""
    result: dict[str, list[str]] = {}
    for path, name in _walk(RunSpec, ""):
        result.setdefault(name, []).append(path)
    return result


def _walk(annotation: object, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in fields(annotation).items():
        path = f"{prefix}{name}"
        yield path, name
        yield from _walk(info.annotation, f"{path}.")
        inner = item(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}.0.")


def unknown(raw: Json, annotation: object = RunSpec, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str | None]]:
    """Every key in a place where it is not allowed, with what was probably meant."""
    if isinstance(raw, list):
        inner = item(annotation)
        for index, value in enumerate(raw if inner is not None else []):
            yield from unknown(value, inner, (*path, index))
    if not isinstance(raw, dict) or not sections(annotation, raw):
        return
    known = fields(annotation, raw)
    for name, value in raw.items():
        if name in known:
            yield from unknown(value, known[name].annotation, (*path, name))
        else:
            yield (*path, name), meant(name, list(known), path)


def meant(name: str, siblings: list[str], path: KeyPath) -> str | None:
    """A suggestion for an unknown key: a sibling, the same key elsewhere, or what others call it."""
    lower = name.lower()
    if lower in INSTEAD:
        return INSTEAD[lower]
    if near := difflib.get_close_matches(lower, siblings, n=1, cutoff=0.75):
        return f"did you mean `{near[0]}`?"
    elsewhere = [place.rpartition(".")[0] for place in every_key().get(lower, [])]
    if elsewhere == [""]:
        return f"`{name}` belongs at the top of the file"
    if elsewhere:
        sections = elsewhere[:1] if len(set(elsewhere)) == 1 else elsewhere[:3]
        return f"`{name}` belongs under {' or '.join(f'`{section}`' for section in sections)}"
    if lower in OTHER_NAMES:
        return f"here it is `{OTHER_NAMES[lower]}`"
    if near := difflib.get_close_matches(lower, siblings, n=1, cutoff=0.6):
        return f"did you mean `{near[0]}`?"
    if near := difflib.get_close_matches(lower, list(every_key()), n=1, cutoff=0.8):
        return f"did you mean `{every_key()[near[0]][0]}`?"
    return f"known here: {', '.join(siblings)}" if siblings else None


def expected(annotation: object, metadata: list[object] | None = None) -> str:
    """What a value must be, in words: ``a whole number of at least 1``."""
    result: list[str] = []
    for leaf in leaves(annotation):
        notes = list(metadata or [])
        while get_origin(leaf) is Annotated:
            for note in get_args(leaf)[1:]:
                notes += note.metadata if isinstance(note, FieldInfo) else [note]
            leaf = get_args(leaf)[0]
        text = _words(leaf, notes)
        if text not in result:
            result.append(text)
    return " or ".join(result) or "left out"


_SIMPLE: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLURAL: dict[object, str] = {str: "texts", int: "whole numbers", float: "numbers"}


def _words(leaf: object, notes: list[object]) -> str:
    origin = get_origin(leaf)
    if origin is Literal:
        names = [json.dumps(name) if not isinstance(name, str) else name for name in get_args(leaf)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    members = _members(notes)
    if members:
        return f"one of {', '.join(members)}"
    if origin is list:
        return f"a list of {_plural(get_args(leaf)[0])}"
    if origin is tuple:
        return f"a list of {len(get_args(leaf))} numbers"
    if origin is dict or leaf is dict:
        return "a mapping"
    if isinstance(leaf, type) and issubclass(leaf, BaseModel):
        return f"a section with the keys {', '.join(list(leaf.model_fields)[:6])}"
    return _SIMPLE.get(leaf, str(leaf)) + _bounds(leaf, notes)


def _bounds(leaf: object, notes: list[object]) -> str:
    low: list[str] = []
    for note in notes:
        for name, comparison in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            limit = getattr(note, name, None)
            if limit is not None:
                low.append(f"{comparison} {limit:g}" if isinstance(limit, int | float) else f"{comparison} {limit}")
        if leaf is str and getattr(note, "min_length", None):
            low.append("not empty")
        if leaf is str and (most := getattr(note, "max_length", None)):
            low.append(f"at most {most} characters")
    if not low:
        return ""
    return (", " if leaf is str else " of " if low[0].startswith("at") else " ") + " and ".join(low)


def choices(leaf: object, info: FieldInfo | None = None) -> list[str]:
    """The values of a leaf of which there are few."""
    kind = bare(leaf)
    if get_origin(kind) is Literal:
        return [str(name) for name in get_args(kind)]
    return _members(info.metadata if info else [])


def _members(notes: list[object]) -> list[str]:
    return [name for note in notes if isinstance(note, MemberOf) for name in note.registry.names()]


def _plural(annotation: object) -> str:
    return _PLURAL.get(bare(annotation), "sections")


def shown(value: Json, *, key: str = "") -> str:
    """A value for a message: short, secrets hidden."""
    if is_secret(key):
        return HIDDEN
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "nothing (null)"
    text = redact(value) if isinstance(value, str) else value
    shortened = (
        json.dumps(text, ensure_ascii=False) if not isinstance(value, int) or value < 10**30 else "a huge number"
    )
    return shortened if len(shortened) <= 80 else shortened[:77] + "..."


def literal(info: FieldInfo | None) -> tuple[object, ...]:
    return get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()
