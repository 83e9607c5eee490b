"""The pages for newcomers name keys, commands, files and exit codes that there are."""

import json
import re
from pathlib import Path

import pytest

from muster.cli.main import GROUPS
from muster.core import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("coming-from", "tracking", "troubleshooting")]
VERBS = {name for names in GROUPS.values() for name in names}
SCHEMA = json.loads((ROOT / "docs" / "run-file.schema.json").read_text())


def properties(node: object) -> dict[str, object]:
    """Of a section, through references and choices."""
    if not isinstance(node, dict):
        return {}
    if "$ref" in node:
        return properties(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    found = dict(node.get("properties", {}))
    for each in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        found |= properties(each)
    return found


def is_key(path: str) -> bool:
    node: object = SCHEMA
    for part in path.split("."):
        known = properties(node)
        if part not in known:
            return False
        node = known[part]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_verbs_and_links_are_there(page: Path) -> None:
    text = page.read_text()
    tops = "|".join(properties(SCHEMA))
    keys = set(re.findall(rf"`((?:{tops})(?:\.[a-z_]+)+)", text))
    assert [key for key in keys if not is_key(key)] == []
    verbs = set(re.findall(r"`muster (?:--\S+ )?([a-z][a-z-]*)", text))
    assert verbs and verbs <= VERBS
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_exit_codes_are_the_ones_that_are_named() -> None:
    codes = {each.exit_code for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "exit_code")}
    named = {int(code) for code in re.findall(r"exit code (\d+)", PAGES[2].read_text())}
    assert named and named - {75, 130} <= codes


def test_a_key_that_is_none_is_found() -> None:
    assert is_key("training.optimizer.warmup_steps") and is_key("model.lora.rank")
    assert not is_key("training.learning_rate") and not is_key("wishes")
