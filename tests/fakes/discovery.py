"""Requests checked against Google's own discovery documents (they ship in google-api-python-client).

A request has to be one of the documented methods, with known query parameters and a body whose every field exists, has
the right type, format and enum value, and is not output-only.
"""

from __future__ import annotations

import functools
import json
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APIS = (
    "compute.v1",
    "container.v1",
    "storage.v1",
    "serviceusage.v1",
    "serviceusage.v1beta1",
    "cloudresourcemanager.v1",
    "cloudbilling.v1",
    "artifactregistry.v1",
    "cloudbuild.v1",
    "iam.v1",
)
FORMATS = {
    "google-duration": r"-?\d+(\.\d{1,9})?s",
    "google-datetime": r"\d{4}-\d\d-\d\dT.*",
    "int64": r"-?\d+",
    "uint64": r"\d+",
}
OUTPUT_ONLY = re.compile(r"\s*\[?output[ -]only", re.I)


def folder() -> Path | None:
    """Where the documents lie; None where google-api-python-client is not installed."""
    try:
        import googleapiclient
    except ImportError:
        return None
    return Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"


@dataclass(frozen=True)
class Match:
    """A documented method and what the path says."""

    api: str
    method: dict[str, Any]
    path: dict[str, str]

    @property
    def id(self) -> str:
        return str(self.method["id"])

    @property
    def verb(self) -> str:
        return self.id.rpartition(".")[2]


class Discovery:
    """The methods of several APIs, by host and path."""

    def __init__(self, documents: Path, apis: Sequence[str] = APIS) -> None:
        self._schemas: dict[str, dict[str, Any]] = {}
        self._common: dict[str, dict[str, Any]] = {}
        self._routes: dict[tuple[str, str, int], list[tuple[str, str, dict[str, Any]]]] = {}
        self._hosts: dict[str, str] = {}
        self._judged: dict[tuple[str, str], list[str]] = {}
        for api in apis:
            document = json.loads((documents / f"{api}.json").read_text())
            self._schemas[api] = document["schemas"]
            self._common[api] = document["parameters"]
            host = urllib.parse.urlsplit(document["rootUrl"]).netloc
            if api.startswith("aiplatform."):  # the one whose resources live behind regional hosts alone
                self._hosts |= {urllib.parse.urlsplit(one["endpointUrl"]).netloc: host for one in document["endpoints"]}
            for method in _methods(document):
                template = document["servicePath"] + method.get("flatPath", method["path"])
                pattern = re.sub(r"\\\{\\?\+?(\w+)\\\}", r"(?P<\1>[^/:]+)", re.escape(template))
                key = (host, method["httpMethod"], template.count("/"))
                self._routes.setdefault(key, []).append((pattern, api, method))
                if upload := method.get("mediaUpload", {}).get("protocols", {}).get("simple", {}).get("path"):
                    upload = upload.lstrip("/")
                    at = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/:]+)", re.escape(upload))
                    row = (at, api, {**method, "id": method["id"] + ".upload"})
                    self._routes.setdefault((host, method["httpMethod"], upload.count("/")), []).append(row)
        self.match = functools.lru_cache(maxsize=None)(self._match)

    def _match(self, method: str, host: str, path: str) -> Match | None:
        path, host = path.lstrip("/"), self._hosts.get(host, host)
        for pattern, api, found in self._routes.get((host, method, path.count("/")), []):
            if hit := re.fullmatch(pattern, path):  # most of the thousands of patterns are never needed
                return Match(api, found, hit.groupdict())
        return None

    def complaints(self, match: Match, query: str, body: Any) -> list[str]:
        """Everything in the request that Google's documents do not know."""
        known = {**self._common[match.api], **match.method.get("parameters", {})}
        if match.id.endswith(".upload"):
            known["uploadType"] = {"enum": ["media"]}
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
        found = [f"query {name}: unknown" for name, _ in pairs if name not in known]
        found += [
            f"query {name}: {value!r}" for name, value in pairs if value not in known.get(name, {}).get("enum", [value])
        ]
        sent = {name for name, _ in pairs}
        for name, parameter in match.method.get("parameters", {}).items():
            if parameter.get("required") and parameter["location"] == "query" and name not in sent:
                found.append(f"query {name}: required")
        if body is not None:
            if "request" not in match.method:
                found.append(f"{match.id} takes no body")
            else:
                self._check(match, {"$ref": match.method["request"]["$ref"]}, body, "body", found)
        return found

    def wrong_answer(self, match: Match, value: Any) -> list[str]:
        """Everything in an answer that Google's documents do not know; empty where the method answers nothing."""
        if "response" not in match.method:
            return []
        key = match.id, json.dumps(value, sort_keys=True)
        if key not in self._judged:  # a cloud whose user is killed after each request says the same thousands of times
            found: list[str] = []
            self._check(match, match.method["response"], value, "answer", found)
            self._judged[key] = [one for one in found if not one.endswith(": output-only")]
        return self._judged[key]

    def _check(self, match: Match, schema: dict[str, Any], value: Any, at: str, found: list[str]) -> None:
        if schema.get("readOnly") or OUTPUT_ONLY.match(schema.get("description", "")):
            found.append(f"{at}: output-only")
        if "$ref" in schema:
            schema = self._schemas[match.api][schema["$ref"]]
        kind = schema.get("type", "any")
        if kind == "object":
            self._check_object(match, schema, value, at, found)
        elif kind == "array":
            if not isinstance(value, list):
                found.append(f"{at}: want a list, got {value!r}")
                return
            for index, item in enumerate(value):
                self._check(match, schema["items"], item, f"{at}[{index}]", found)
        elif kind == "string":
            if not isinstance(value, str):
                found.append(f"{at}: want a string, got {value!r}")
                return
            if value not in schema.get("enum", [value]):
                found.append(f"{at}: {value!r} is none of {schema['enum']}")
            rule = FORMATS.get(schema.get("format", "")) or schema.get("pattern")
            if rule and not re.fullmatch(rule, value):
                found.append(f"{at}: {value!r} is not {schema.get('format') or rule}")
        elif kind == "boolean" and not isinstance(value, bool):
            found.append(f"{at}: want true or false, got {value!r}")
        elif kind in ("integer", "number") and (isinstance(value, bool) or not isinstance(value, (int, float))):
            found.append(f"{at}: want a number, got {value!r}")

    def _check_object(self, match: Match, schema: dict[str, Any], value: Any, at: str, found: list[str]) -> None:
        if not isinstance(value, dict):
            found.append(f"{at}: want an object, got {value!r}")
            return
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            if name in properties:
                self._check(match, properties[name], item, f"{at}.{name}", found)
            elif extra:
                self._check(match, extra, item, f"{at}.{name}", found)
            else:
                found.append(f"{at}.{name}: unknown field")
        for name, inner in properties.items():
            if match.id in inner.get("annotations", {}).get("required", []) and name not in value:
                found.append(f"{at}.{name}: required by {match.id}")


def _methods(document: dict[str, Any]) -> list[dict[str, Any]]:
    found = list(document.get("methods", {}).values())
    for resource in document.get("resources", {}).values():
        found += _methods(resource)
    return found
