"""References made from the code: run file, events, messages (``python -m muster.app.reference_docs docs``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from muster.app.protocol_reference import protocol_reference
from muster.config import schema_keys
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.event_details.kinds import KINDS
from muster.core.events import PHASES, SCHEMA_VERSION
from muster.storage.run_registry import replace_text

GENERATED = "<!-- Generated from the code by `python -m muster.app.reference_docs docs`; do not edit. -->"


def run_file_schema() -> str:
    """The JSON schema of run files, for editors."""
    schema = RunSpec.model_json_schema()
    result = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:muster:run-file",
        **schema,
        "title": "Muster run file",
    }
    return json.dumps(result, indent=1) + "\n"


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


def messages_reference() -> str:
    """Every message between processes."""
    return protocol_reference(GENERATED)


FILES: Mapping[str, Callable[[], str]] = {
    "run-file.schema.json": run_file_schema,
    "run-file.md": run_file_reference,
    "events.md": events_reference,
    "environment.md": environment_reference,
    "protocol.md": messages_reference,
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


if __name__ == "__main__":
    main()
