"""What resources come to with given values, worked out by Terraform itself (``console``), which has no providers here.

Each resource becomes a local value: ``for_each`` and ``dynamic`` blocks are comprehensions, an inner block is a list
named ``blocks_NAME``, and what a provider would know of another resource is text: ``google_compute_network.NAME.id``.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from fakes.terraform import Block, parse

ATTRIBUTES = ("id", "name", "email")
VARIABLE = re.compile(r'^variable "(\w+)" \{\n(?:.*\n)*?\}\n', re.MULTILINE)
OF_PROVIDER = re.compile(r"\bgoogle_\w+\.(\w+)\b")


def evaluated(text: str, values: dict[str, Any], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Type -> the arguments of every resource of it; those that are null are left out."""
    blocks = parse(text)
    resources = [one for one in blocks if one.kind == "resource"]
    lines = [match[0] for match in VARIABLE.finditer(text)]
    declared = [match[1] for match in VARIABLE.finditer(text)]
    lines.append("locals {")
    for block in blocks:
        if block.kind == "locals":
            lines += [f"{name} = {_expression(value, {})}" for name, value in block.arguments.items()]
    for block in resources:
        kind, name = block.labels
        over = re.sub(r"toset\((.*)\)", r"{ for k in \1 : k => k }", block.arguments["for_each"])
        known = [f'{one} = "{kind}.${{k}}.{one}"' for one in ATTRIBUTES]
        known.append(f'member = "serviceAccount:{kind}.${{k}}.email"')
        lines.append(f"of_{name} = {{ for k, v in {over} : k => {{ {', '.join(known)} }} }}")
        body = _object(block, {"each.key": "k", "each.value": "v"})
        lines.append(f"out_{name} = {{ for k, v in {over} : k => {body} }}")
    (folder / "main.tf").write_text("\n".join([*lines, "}", ""]))
    given = {name: one for name, one in values.items() if name in declared}
    (folder / "terraform.tfvars.json").write_text(json.dumps(given))
    asked = ", ".join(f"{one.labels[0]} = values(local.out_{one.labels[1]})" for one in resources)
    done = subprocess.run(
        ["terraform", "console"], cwd=folder, input=f"jsonencode({{{asked}}})\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return without_nulls(json.loads(json.loads(done.stdout)))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None and one != []}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _expression(text: str, names: dict[str, str]) -> str:
    for name, other in names.items():
        text = re.sub(rf"\b{re.escape(name)}\b", other, text)
    return OF_PROVIDER.sub(r"local.of_\1", text.replace("data.google_project.this.number", '"NUMBER"'))


def _object(block: Block, names: dict[str, str]) -> str:
    rows = [
        f"{name} = {_expression(value, names)}"
        for name, value in block.arguments.items()
        if name not in ("for_each", "depends_on")
    ]
    inner: dict[str, list[str]] = {}
    for one in block.blocks:
        if one.kind == "dynamic":
            name, (content,) = one.labels[0], [each for each in one.blocks if each.kind == "content"]
            body = _object(content, {**names, f"{name}.value": f"{name}_v"})
            over = _expression(one.arguments["for_each"], names)
            inner.setdefault(name, []).append(f"[for {name}_v in {over} : {body}]")
        elif one.kind != "lifecycle":
            inner.setdefault(one.kind, []).append(f"[{_object(one, names)}]")
    rows += [f"blocks_{name} = concat({', '.join(each)})" for name, each in inner.items()]
    return "{\n" + "\n".join(rows) + "\n}"
