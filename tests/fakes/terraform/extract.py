"""Writes ``provider_google.json`` anew, from the wheel that carries the provider's schema:

    pip download --no-deps cdktf-cdktf-provider-google==16.12.1
    python tests/fakes/terraform/extract.py cdktf_cdktf_provider_google-16.12.1-py3-none-any.whl

The wheel (49 MB, generated from hashicorp/google 6.50.0, the last that was published) holds TypeScript declarations: an
interface for each resource and each block, a property for each argument, with its type, a ``?`` where it may be left
out, and in its link to the documentation the argument's own name. The table keeps names, types and what is required of
the resources that Muster writes.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
RESOURCES = (
    "artifact_registry_repository", "artifact_registry_repository_iam_member", "compute_firewall", "compute_network",
    "compute_router", "compute_router_nat", "compute_subnetwork", "container_cluster", "container_node_pool",
    "project_iam_custom_role", "project_iam_member", "project_service", "secret_manager_secret_iam_member",
    "service_account", "service_account_iam_member", "storage_bucket", "storage_bucket_iam_member",
)  # fmt: skip
INTERFACE = re.compile(r"^export interface (\w+)(?: extends [\w.]+)? \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
PROPERTY = re.compile(r"/\*\*(.*?)\*/\s*readonly (\w+)(\??): (\{[^}]*\}|[^;]+);", re.DOTALL)
PLAIN = {
    "string": "string",
    "number": "number",
    "boolean | cdktf.IResolvable": "bool",
    "string[]": "list(string)",
    "number[]": "list(number)",
    "{\n        [key: string]: string;\n    }": "map(string)",
}


def main(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as outer:
        packed = io.BytesIO(outer.read(next(one for one in outer.namelist() if one.endswith(".jsii.tgz"))))
    declared: dict[str, str] = {}
    wanted = {resource.replace("_", "-") for resource in RESOURCES}
    with tarfile.open(fileobj=packed) as inner:
        for member in inner:
            parts = Path(member.name).parts
            if len(parts) > 3 and parts[2] in wanted and member.name.endswith(".d.ts"):
                declared[parts[2]] = declared.get(parts[2], "") + inner.extractfile(member).read().decode()
    table = {f"google_{name}": _resource(name, declared[name.replace("_", "-")]) for name in RESOURCES}
    (HERE / "provider_google.json").write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")


def _resource(name: str, text: str) -> dict[str, object]:
    interfaces = {found[1]: found[2] for found in INTERFACE.finditer(text)}
    camel = "".join(word.capitalize() for word in name.split("_"))
    return _arguments(f"{camel}Config", interfaces)


def _arguments(interface: str, interfaces: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for comment, _, optional, kind in PROPERTY.findall(interfaces[interface]):
        name = re.search(r"#(\w+) \w+#\w+\}", comment)[1]
        if name == "id" or name == "timeouts":  # of the library and of the program, not of the provider
            continue
        mark = "" if optional else "!"
        first = re.split(r"\[\]| \| ", kind)[0]
        if first in interfaces:
            found[name] = {"block": _arguments(first, interfaces), "many": "[]" in kind, "required": not optional}
        else:
            found[name] = PLAIN[kind] + mark
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
