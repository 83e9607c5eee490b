"""Objects to YAML text that every parser reads alike.

Kubernetes reads YAML 1.1, where ``on``, ``012`` and ``1:30`` are not strings, and ruamel.yaml writes 1.2: so every
string that is not plainly a word is quoted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from muster.core.typed_json import JsonObject

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        block = "\n" in data and all(character == "\n" or character.isprintable() for character in data)
        style: str | None = "|" if block else '"'
        if _PLAIN.fullmatch(data) and data.lower() not in _RESERVED:
            style = None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_float(self, data: float) -> ScalarNode:
        # YAML 1.1 reads 1e-05 as a string.
        node = super().represent_float(data)
        node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)
        return node


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def dump(documents: Iterable[JsonObject]) -> str:
    """A YAML stream of ``documents``; keys keep their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 1_000_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    texts = []
    for document in documents:
        out = io.StringIO()
        yaml.dump(document, out)
        texts.append(out.getvalue())
    return "---\n".join(texts)
