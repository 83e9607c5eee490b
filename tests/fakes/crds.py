"""Objects checked against CustomResourceDefinitions: the schema, strictly (unknown fields are errors), and CEL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CRDS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "crds"


class Definitions:
    """The schemas of every served version found in a folder."""

    def __init__(self, folder: Path = CRDS) -> None:
        import yaml

        self.schemas: dict[tuple[str, str], dict[str, Any]] = {}
        for path in sorted(folder.glob("*.yaml")):
            for crd in filter(None, yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader)):
                for version in crd["spec"]["versions"]:
                    key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                    self.schemas[key] = version["schema"]["openAPIV3Schema"]

    def knows(self, document: dict[str, Any]) -> bool:
        return (document["apiVersion"], document["kind"]) in self.schemas

    def errors(self, document: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        """Everything that an API server would refuse in ``document`` (as an update of ``old``, where given)."""
        found: list[str] = []
        _check(self.schemas[document["apiVersion"], document["kind"]], document, old, document["kind"], found)
        return found


def _check(schema: dict[str, Any], value: Any, old: Any, at: str, found: list[str]) -> None:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            found.append(f"{at}: want a whole number or a string, got {value!r}")
        elif "pattern" in schema and not _matches(schema["pattern"], str(value)):
            found.append(f"{at}: {value!r} does not match {schema['pattern']}")
        return
    kind = schema.get("type")
    expected = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    if kind and (not isinstance(value, expected[kind]) or (kind != "boolean" and isinstance(value, bool))):
        found.append(f"{at}: want {kind}, got {value!r}")
        return
    if isinstance(value, dict):
        _check_object(schema, value, old, at, found)
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)) or len(value) < schema.get("minItems", 0):
            found.append(f"{at}: {len(value)} items")
        for index, item in enumerate(value):
            _check(schema["items"], item, None, f"{at}[{index}]", found)
    else:
        _check_plain(schema, value, at, found)
    _check_rules(schema, value, old, at, found)


def _check_object(schema: dict[str, Any], value: dict[str, Any], old: Any, at: str, found: list[str]) -> None:
    properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", []):
        if name not in value:
            found.append(f"{at}.{name}: required")
    if (at.endswith(".metadata") and not properties) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, item in value.items():
        before = old.get(name) if isinstance(old, dict) else None
        if name in properties:
            _check(properties[name], item, before, f"{at}.{name}", found)
        elif isinstance(extra, dict):
            _check(extra, item, before, f"{at}.{name}", found)
        else:
            found.append(f"{at}.{name}: unknown field")


def _check_plain(schema: dict[str, Any], value: Any, at: str, found: list[str]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is none of {schema['enum']}")
    if isinstance(value, str):
        if "pattern" in schema and not _matches(schema["pattern"], value):
            found.append(f"{at}: {value!r} does not match {schema['pattern']}")
        if len(value) > schema.get("maxLength", len(value)) or len(value) < schema.get("minLength", 0):
            found.append(f"{at}: {value!r} has {len(value)} characters")
    elif isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{at}: {value} is out of range")


def _matches(pattern: str, text: str) -> bool:
    """Go's syntax allows ``(?i)`` after the caret."""
    return re.search(pattern.replace("(?i)", ""), text, re.IGNORECASE if "(?i)" in pattern else 0) is not None


def _check_rules(schema: dict[str, Any], value: Any, old: Any, at: str, found: list[str]) -> None:
    import cel

    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        try:
            holds = cel.evaluate(rule["rule"], {"self": value, "oldSelf": old})
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            # As the API server: a rule that cannot be evaluated refuses the object.
            holds, rule = False, {**rule, "message": f"{rule['rule']}: {error}"}
        if holds is not True:
            found.append(f"{at}: {rule.get('message') or rule['rule']}")
