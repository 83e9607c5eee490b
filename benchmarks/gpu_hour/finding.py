"""What a probe says: figures, and claims that they prove or refute."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Findings:
    """Figures by name, and what they say of what was only reasoned before."""

    figures: dict[str, Any] = field(default_factory=dict)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def claim(self, text: str, holds: bool | None, value: object = None) -> None:
        """``holds``: true proves ``text``, false refutes it, None leaves it open (``value`` says why)."""
        said = "open" if holds is None else "proves" if holds else "refutes"
        self.claims.append({"says": said, "claim": text, "value": value})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def line(claim: dict[str, Any]) -> str:
    """``proves: varlen attention keeps documents apart (leak 0)``."""
    value = "" if claim["value"] is None else f" ({claim['value']})"
    return f"{claim['says']}: {claim['claim']}{value}"
