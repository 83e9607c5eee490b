"""Show: the run file as it will be taken, every default included, and the schema of run files."""

from __future__ import annotations

import io
import json

from muster.config.spec import RunSpec
from muster.core.redact import redact_value
from muster.core.typed_json import Json


def resolved_yaml(spec: RunSpec) -> str:
    """The spec as YAML, in the order of the reference; it reads back to the same spec. Secrets are hidden."""
    from ruamel.yaml import YAML

    writer = YAML(typ="rt")
    writer.default_flow_style = None
    writer.width = 120
    writer.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    writer.dump(resolved_json(spec), out)
    return out.getvalue()


def resolved_json(spec: RunSpec) -> dict[str, Json]:
    """The same as plain values."""
    return {key: redact_value(key, value) for key, value in spec.model_dump(mode="json").items()}


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
