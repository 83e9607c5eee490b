"""The documents that reports give fit the published schema, and the schema describes every key."""

import json
from pathlib import Path

import pytest
from faulty_run import write
from random_runs import implausible, plausible

from muster.report import api
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.fold import fold
from muster.report.render.document import document

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def wrong(value, schema, at="$"):
    """What in ``value`` does not fit: the part of JSON Schema that ours uses."""
    if "const" in schema:
        return [] if value == schema["const"] else [f"{at}: {value!r} is not {schema['const']!r}"]
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fits = [name for name in allowed if isinstance(value, TYPES[name])]
    if not fits or (isinstance(value, bool) and "boolean" not in allowed):
        return [f"{at}: {value!r} is not {allowed}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is not one of {schema['enum']}"]
    if isinstance(value, list):
        return [line for n, item in enumerate(value) for line in wrong(item, schema["items"], f"{at}[{n}]")]
    if not isinstance(value, dict):
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", False)
    found = [f"{at}: lacks {key}" for key in schema.get("required", []) if key not in value]
    for key, item in value.items():
        if key in known:
            found += wrong(item, known[key], f"{at}.{key}")
        elif rest is False:
            found.append(f"{at}: unknown key {key}")
        else:
            found += wrong(item, rest, f"{at}.{key}")
    return found


def test_a_whole_run_fits(tmp_path):
    write(tmp_path / "events")
    found = json.loads(json.dumps(api.load(tmp_path).to_json()))
    assert wrong(found, SCHEMA) == []
    assert set(SCHEMA["properties"]["categories"]["properties"]) == set(CATEGORIES)


@pytest.mark.parametrize("make", [plausible, implausible])
def test_random_runs_fit(make):
    for seed in range(150):
        assert wrong(json.loads(json.dumps(document(fold(make(seed)), {}).to_json())), SCHEMA) == []


def test_an_empty_log_fits():
    assert wrong(document(fold({}), {}).to_json(), SCHEMA) == []


def test_the_check_can_fail(tmp_path):
    write(tmp_path / "events")
    found = api.load(tmp_path).to_json()
    found["tokens"] = "many"
    del found["cost"]["usd"]
    found["surprise"] = 1
    assert len(wrong(found, SCHEMA)) == 3


def test_every_key_is_described():
    def walk(schema, at):
        assert at == "$" or "description" in schema or "type" in schema, at
        for key, item in schema.get("properties", {}).items():
            assert item.get("description"), f"{at}.{key}"
            walk(item, f"{at}.{key}")

    walk(SCHEMA, "$")
