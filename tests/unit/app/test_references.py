"""What ships beside the code holds: examples resolve without hub or token, references are up to date."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from muster.app.inspect.show import resolved_yaml
from muster.config import load
from muster.core.event_details.kinds import KINDS
from tools import reference_docs

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_resolve_without_hub_or_token(path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found = load.load(path)
    assert found.warnings == (), [warning.render() for warning in found.warnings]
    assert load.loads(resolved_yaml(found.spec)).spec == found.spec, "`muster show` prints what was meant"


def test_the_promised_examples_are_there():
    names = {path.stem for path in EXAMPLES}
    assert names >= {"text2sql-cpu", "text2sql-cpu-hard", "llama3-70b-text2sql", "llama3-8b-lora", "llama3-1b-full"}


def test_the_70b_job_is_the_tutorials():
    found = load.load(ROOT / "examples" / "llama3-70b-text2sql.yaml").spec
    resources = found.resources
    assert (found.backend, resources.provisioning_model, resources.machine) == (
        "gke",
        "flex_start_queued",
        "a4-highgpu-8g",
    )
    assert resources.hosts * (resources.ranks_per_host or 0) == 16 and resources.accelerator == "B200"


@pytest.mark.parametrize("name", sorted(reference_docs.FILES))
def test_references_are_up_to_date(name: str):
    assert (ROOT / "docs" / name).read_text() == reference_docs.FILES[name](), (
        "run: python tools/reference_docs.py docs"
    )


def test_the_schema_knows_every_key_and_refuses_others():
    schema = json.loads(reference_docs.run_file_schema())
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Training"]["properties"]["steps"]
    assert all(section.get("additionalProperties") is False for section in schema["$defs"].values())


def test_every_event_is_in_the_reference():
    text = reference_docs.events_reference()
    for name, kind in KINDS.items():
        assert f"\n## {name}\n" in text
        assert all(f"* `{key}`" in text for key in (*kind.required(), *kind.optional()))
