"""References made from the code: run file, events, messages (``python tools/reference_docs.py docs``)."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from muster.app.inspect.show import run_file_schema
from muster.config import schema_keys
from muster.config.compatibility import AXES, BY_NAME, FEATURES, REFUSALS, cells
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.event_details.kinds import KINDS
from muster.core.events import PHASES, SCHEMA_VERSION
from muster.core.heartbeat_timing import MAX_INTERVAL_S
from muster.core.layout import LayoutKey
from muster.core.typed_json import Count, Int64, JsonObject, Name, Port, Seconds, Step
from muster.protocol import tables
from muster.protocol.codec import MAX_BYTES, kind_of
from muster.protocol.hello import BeatInterval
from muster.protocol.version import PROTOCOL
from muster.storage.run_registry import replace_text
from muster.transport.listening import HELLO_S

GENERATED = "<!-- Generated from the code by `python tools/reference_docs.py docs`; do not edit. -->"


def run_file_reference() -> str:
    """Every key of the run file, its values, default and meaning."""
    parts = [
        "# The run file",
        "",
        GENERATED,
        "",
        "YAML 1.2. It is checked whole before anything starts; unknown keys are errors. Every key can be given on",
        "the command line too: `training.steps=100`, `data.sources.0.rows=10`, `model.lora=null`.",
        "`muster show RUN.yaml` prints the file with every default.",
        "Editors: `# yaml-language-server: $schema=docs/run-file.schema.json`.",
        "",
        *_section(RunSpec, "", "The top of the file"),
    ]
    return "\n".join(parts).rstrip() + "\n"


def events_reference() -> str:
    """Every kind of event and its detail."""
    parts = [
        "# Events",
        "",
        GENERATED,
        "",
        f"Schema version {SCHEMA_VERSION}. One JSON object a line in `events/<writer>.<attempt>.jsonl`, with",
        "`run_id`, `attempt`, `seq`, `mono_ns`, `wall_ns`, `host`, `kind`, where they apply `rank`, `phase`, `step`,",
        "the `detail` below, and `prev`, the SHA-256 of the line before (of the run id and the file's name for the",
        "first). Times are integer nanoseconds. A reader must skip kinds and details that it does not know.",
        "",
        "Phases: " + ", ".join(f"`{phase}`" for phase in PHASES) + ".",
        "",
    ]
    for name, kind in KINDS.items():
        parts += [f"## {name}", "", kind.doc, ""]
        parts += [f"* `{key}`: {meaning}" for key, meaning in kind.required().items()]
        parts += [f"* `{key}` (optional): {meaning}" for key, meaning in kind.optional().items()]
        parts += ["* further keys are allowed"] if kind.open else []
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def environment_reference() -> str:
    """Every environment variable that Muster reads or sets."""
    parts = [
        "# Environment variables",
        "",
        GENERATED,
        "",
        "You need none of them. Those that Muster sets itself are listed so that you recognise them in a process.",
        "",
        "| variable | meaning | set by | default |",
        "|---|---|---|---|",
        *(
            f"| `{variable.name}` | {variable.meaning} | {variable.set_by} | {variable.default} |"
            for variable in environment.VARIABLES
        ),
    ]
    return "\n".join(parts) + "\n"


def layouts_reference() -> str:
    """What can be combined with each layout axis, and why the rest cannot."""
    names = [feature.name for feature in (*AXES, *FEATURES)]
    refused = {frozenset((one.name, other.name)) for one, other, refusal in cells() if refusal is not None}
    parts = [
        "# Layouts that compose",
        "",
        GENERATED,
        "",
        "Which layout axes (`parallelism`) can be combined with each other and with other settings. A combination that",
        "is refused is an error of the run file, before hosts are paid for. Tests train every pair of axes that",
        "works, and every axis with LoRA, compile, packing and exact sums, and compare each with one process.",
        "",
        "Some models restrict a layout further: heads must divide by `tp`, only some families can be cut into stages",
        "(`pp`), and `exact` with `pp` needs an embedding that is not tied to the head. `ep` is not built yet.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for axis in AXES:
        row = ["" if name == axis.name else "no" if {axis.name, name} in refused else "yes" for name in names]
        parts.append(f"| **{axis.name}** | {' | '.join(row)} |")
    parts += ["", "## Refused", "", "| what | with | reason | kind | do instead |", "|---|---|---|---|---|"]
    for each in REFUSALS:
        key, other = each.key, BY_NAME[each.other].key
        parts.append(f"| `{key}` | `{other}` | {each.reason} | {each.kind} | `{each.hint}` |")
    return "\n".join(parts) + "\n"


def messages_reference() -> str:
    """Every message between processes."""
    return protocol_reference(GENERATED)


FILES: Mapping[str, Callable[[], str]] = {
    "run-file.schema.json": run_file_schema,
    "reference/run-file.md": run_file_reference,
    "reference/events.md": events_reference,
    "reference/environment.md": environment_reference,
    "reference/protocol.md": messages_reference,
    "reference/layouts.md": layouts_reference,
}


def main() -> None:
    """Write the references into the folder given."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        replace_text(folder / name, make())


def _section(model: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    if model.__doc__ and model is not RunSpec:
        yield " ".join(model.__doc__.split())
        yield ""
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for name, info in model.model_fields.items():
        yield _row(f"{prefix}{name}", info)
    yield ""
    for name, info in model.model_fields.items():
        for inner, place in _inner(info, f"{prefix}{name}"):
            yield from _section(inner, f"{place}.", f"`{place}`" + _kind(inner, info))


def _inner(info: FieldInfo, place: str) -> Iterator[tuple[type[BaseModel], str]]:
    for model in schema_keys.sections(info.annotation):
        yield model, place
    item = schema_keys.item(info.annotation)
    for model in schema_keys.sections(item) if item is not None else []:
        yield model, f"{place}.N"


def _kind(model: type[BaseModel], info: FieldInfo) -> str:
    names = schema_keys.literal(model.model_fields.get("type"))
    return f" of type {names[0]}" if names else ""


def _row(path: str, info: FieldInfo) -> str:
    expected = schema_keys.expected(info.annotation, info.metadata)
    if schema_keys.sections(info.annotation):
        expected = (
            "section" if len(schema_keys.leaves(info.annotation)) == 1 else f"{expected.split(' or ')[0]} or a section"
        )
        expected = expected.replace("a section with the keys", "section:")
    description = " ".join((info.description or "").split()).replace("|", "\\|")
    return f"| `{path}` | {expected.replace('|', chr(92) + '|')} | {_default(info)} | {description} |"


def _default(info: FieldInfo) -> str:
    default: object = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return ""
    if isinstance(default, BaseModel):
        return "its defaults"
    return f"`{json.dumps(default)}`"


# ---------------------------------------------------------------- docs/reference/protocol.md


_WORDS = {
    str: "text", bool: "true or false", type(None): "null", bytes: "text", int: "integer", float: "number",
    Int64: "integer", Count: "count", Step: "step", Port: "port", Seconds: "seconds", LayoutKey: "layout",
    JsonObject: "object", Name: "name", BeatInterval: f"seconds, at most {MAX_INTERVAL_S:g}",
}  # fmt: skip

_INTRODUCTION = f"""Protocol {PROTOCOL}. Each message is one frame, the JSON array `["kind", {{fields}}]`, of at most
{MAX_BYTES >> 20} MiB. Over sockets a frame follows its length and a MAC (`muster.transport.secure_session`); in a pipe
it is a line. Every field is checked once, where the frame arrives: an unknown kind, a kind of another channel, a field
that is missing, unknown or of another type ends the connection, never the process. The first message states the
protocol; processes of two protocols do not speak to each other, and the refusal names both.

The connecting process proves within {HELLO_S:g} s that it knows the run's token, and sends its first message within
{HELLO_S:g} s more; until the proof it is one of a limited number of strangers, of which the oldest is dropped for a new
one. Frames are authenticated and not encrypted (SECURITY.md).

count: an integer from 0 to 2^63 - 1; step: the same, or -1 for none; port: 0 to 65535; seconds: a number from 0 to
10^9; name: text that is not empty; layout: such as `r1s2t1p1c1e1`.

A message is added as a class in `muster/protocol/` and in the union of its channel there. With any change `PROTOCOL` in
`muster/protocol/version.py` rises: a test compares the messages with those of that number."""


def protocol_reference(generated: str) -> str:
    """Every channel and its messages. ``generated``: the line that says so."""
    records = sorted(_nested(), key=lambda cls: cls.__name__)
    return "\n".join(
        [
            "# Messages between processes",
            "",
            generated,
            "",
            _INTRODUCTION,
            "",
            *(line for channel in tables.CHANNELS for line in _channel(channel)),
            "## Values",
            "",
            *(line for cls in records for line in _class(cls.__name__, cls)),
            "## Files",
            "",
            *(line for where, cls in tables.FILES for line in _class(where, cls)),
        ]
    ).rstrip() + "\n"  # fmt: skip


def shape(cls: type) -> Mapping[str, str]:
    """Field -> its type and, where it may be left out, "?"."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: _words(hints[field.name])
        + ("" if field.default is MISSING and field.default_factory is MISSING else "?")
        for field in fields(cls)
    }


def shapes() -> Mapping[str, Mapping[str, str]]:
    """All that is sent or written: class -> its shape."""
    sent = {cls for channel in tables.CHANNELS for cls in channel.messages}
    written = {cls for _, cls in tables.FILES}
    return {cls.__name__: shape(cls) for cls in sorted({*sent, *written, *_nested()}, key=lambda cls: cls.__name__)}


def _channel(channel: tables.AnyChannel) -> Iterator[str]:
    yield f"## {channel.name[0].upper()}{channel.name[1:]}"
    yield ""
    yield f"From: {channel.sender}. To: {channel.receiver}. Over: {channel.over}."
    yield ""
    for cls in channel.messages:
        yield from _class(f"`{kind_of(cls)}`", cls)


def _class(title: str, cls: type) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield " ".join((cls.__doc__ or "").split())
    yield ""
    hints, kinds = get_type_hints(cls, include_extras=True), shape(cls)
    for name, kind in kinds.items():
        notes = [note for note in get_args(hints[name])[1:] if isinstance(note, str)] if _noted(hints[name]) else []
        optional = ", optional" if kind.endswith("?") else ""
        yield f"* `{name}` ({kind.rstrip('?')}{optional})" + "".join(f": {note}" for note in notes).replace("``", "`")
    if kinds:
        yield ""


def _noted(hint: object) -> bool:
    return get_origin(hint) is Annotated


def _words(hint: object) -> str:
    """A type, in words."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bare = [note for note in inner[1:] if not isinstance(note, str)]
        return _words(Annotated[(inner[0], *bare)] if bare else inner[0])
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(one) for one in inner)
    if origin is tuple:
        one = inner[-1] is Ellipsis
        return f"list of {_words(inner[0])}" if one else f"[{', '.join(_words(one) for one in inner)}]"
    if origin is not None and issubclass(origin, Mapping):
        return f"object: {_words(inner[0])} -> {_words(inner[1])}"
    assert isinstance(hint, type) and is_dataclass(hint), hint
    return hint.__name__


def _nested() -> set[type]:
    """The classes of fields, which are no message of their own."""
    sent = {cls for channel in tables.CHANNELS for cls in channel.messages}
    found: set[type] = set()
    waiting = [*sent, *(cls for _, cls in tables.FILES)]
    while waiting:
        for hint in get_type_hints(waiting.pop(), include_extras=True).values():
            new = {cls for cls in _classes(hint) if cls not in found}
            found |= new
            waiting += new
    return found - sent


def _classes(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif hint != JsonObject:
        for inner in get_args(hint):
            yield from _classes(inner)


if __name__ == "__main__":
    main()
