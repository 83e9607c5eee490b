"""What ``--over`` says: a key of the run file and the values that it may take, checked against the run file.

::

    training.optimizer.learning_rate=1e-4..1e-3:log   between both, evenly in its logarithm
    training.global_batch_size=8..64:8                in steps of 8; whole numbers where the key takes nothing else
    model.lora.rank=4,8,16                            one of these
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.config import load, schema_keys
from muster.config.yaml import key_path, scalar
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, parse_object

_RANGE = re.compile(r"(?P<low>[^.,:]*(?:\.\d[^.,:]*)?)\.\.(?P<high>[^,:]+)(?::(?P<how>.*))?")
_HINT = "--over KEY=LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP or A,B,C"
_NOT_SWEPT = ("name", "backend", "run_dir", "limits", "env", "secrets")
"""Of the sweep as a whole."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """One key and its values: ``choices``, or from ``low`` to ``high``."""

    key: str
    choices: tuple[Json, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False
    """Whole numbers only."""

    def every(self) -> list[Json]:
        """Each of its values, of a grid.

        Raises:
            UsageError: there is no end to them.
        """
        if self.choices:
            return list(self.choices)
        step = self.step or (1 if self.whole else None)
        if step is None or self.log:
            raise UsageError(f"a grid needs steps: {self.key} has none", hint=_HINT)
        count = int((self.high - self.low) / step + 1e-9) + 1
        return [_number(self, self.low + index * step) for index in range(count)]

    def at(self, share: float) -> Json:
        """The value at ``share`` (in [0, 1)) of the range, by its scale; of choices or steps, that of its part."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        if (step := self.step or (1 if self.whole else None)) is not None and not self.log:
            return _number(self, self.low + step * int(share * (int((self.high - self.low) / step + 1e-9) + 1)))
        if self.log:
            value: float = self.low * (self.high / self.low) ** share
            return round(value) if self.whole else value
        return self.low + share * (self.high - self.low)

    def to_json(self) -> JsonObject:
        return {"key": self.key, **self._values()}

    def _values(self) -> JsonObject:
        if self.choices:
            return {"choices": list(self.choices)}
        return {"low": self.low, "high": self.high, "log": self.log, "step": self.step, "whole": self.whole}


def override(key: str, value: Json) -> str:
    """``key=value`` as the run file's loader reads it back, to the last bit."""
    return f"{key}={json.dumps(value)}"


def parse(texts: Sequence[str], run_file: str, overrides: Sequence[str]) -> tuple[Over, ...]:
    """The ranges of all ``--over``.

    Raises:
        UsageError: one that cannot be read, or that makes no range.
        RunFileError: the run file takes no such key, or not these values of it.
    """
    if not texts:
        raise UsageError("a sweep needs something to vary", hint=_HINT)
    raw = parse_object(load.load(run_file, overrides).spec.model_dump_json())
    found: dict[str, Over] = {}
    for text in texts:
        over = _parse(text, raw)
        if over.key in found:
            raise UsageError(f"--over names {over.key} twice", hint="give all of its values in one")
        if any(given.partition("=")[0].strip() == over.key for given in overrides):
            raise UsageError(f"{over.key} is given and swept over", hint="leave one of them out")
        found[over.key] = over
        for value in over.choices or (_number(over, over.low), _number(over, over.high)):
            load.load(run_file, [*overrides, override(over.key, value)])
    return tuple(found.values())


def _parse(text: str, raw: JsonObject) -> Over:
    key, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not key or not values:
        raise UsageError(f"--over {text!r} names no values", hint=_HINT)
    if key.partition(".")[0] in _NOT_SWEPT:
        raise UsageError(f"{key} is the same for all trials of a sweep", hint=f"KEY=VALUE sets it; {_HINT}")
    if (match := _RANGE.fullmatch(values)) is not None:
        return _range(key, match, raw, text)
    choices = [_scalar(part.strip(), text) for part in values.split(",")]
    if len({json.dumps(choice) for choice in choices}) != len(choices) or len(choices) < 2:
        raise UsageError(f"--over {text!r}: two different values at least", hint=_HINT)
    return Over(key=key, choices=tuple(choices))


def _range(key: str, match: re.Match[str], raw: JsonObject, text: str) -> Over:
    low, high = (_scalar(match[end].strip(), text) for end in ("low", "high"))
    how = match["how"]
    if not (isinstance(low, int | float) and isinstance(high, int | float)) or not math.isfinite(high - low):
        raise UsageError(f"--over {text!r}: both ends of a range are numbers", hint=_HINT)
    if low >= high:
        raise UsageError(f"--over {text!r}: {low:g} is not below {high:g}", hint=_HINT)
    log, step = how == "log", None
    if log and low <= 0:
        raise UsageError(f"--over {text!r}: a logarithm needs values above 0, not {low:g}", hint=_HINT)
    whole = isinstance(low, int) and isinstance(high, int) and _takes_whole_numbers(key, raw)
    if how is not None and not log:
        try:
            step = float(how)
        except ValueError:
            step = 0.0
        if not 0 < step <= high - low or (whole and not step.is_integer()):
            raise UsageError(f"--over {text!r}: {how!r} is neither `log` nor a step within the range", hint=_HINT)
    return Over(key=key, low=low, high=high, log=log, step=step, whole=whole)


def _takes_whole_numbers(key: str, raw: JsonObject) -> bool:
    annotation, _ = schema_keys.at(key_path(key), raw)
    return annotation is None or int in {schema_keys.bare(leaf) for leaf in schema_keys.leaves(annotation)}


def _number(over: Over, value: float) -> Json:
    return int(value) if over.whole else value


def _scalar(text: str, whole_text: str) -> Json:
    try:
        return scalar(text)
    except ValueError as error:
        raise UsageError(f"--over {whole_text!r}: {error}", hint=_HINT) from error
