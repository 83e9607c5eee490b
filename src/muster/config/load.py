"""Reading a run file: YAML plus ``key.path=value`` overrides to a checked ``RunSpec``, or every problem at once."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from muster.config import host_checks, run_environment, schema_keys, user_defaults, validation
from muster.config.backends import BACKENDS
from muster.config.spec import RunSpec
from muster.config.unused_settings import no_effect
from muster.config.yaml import KeyPath, dotted, key_path, parse, scalar
from muster.core import resolved_file
from muster.core.errors import Problem, RunFileError, UsageError
from muster.core.typed_json import Json, reason

COMMAND_LINE = "command line"
MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value was given."""

    source: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A valid run file."""

    spec: RunSpec
    text: str
    """As the user wrote it, before overrides."""
    source: str
    """The file's name, as given."""
    overrides: tuple[str, ...] = ()
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    """Where each explicitly given key is; keys that are absent have their defaults."""
    warnings: tuple[Problem, ...] = ()
    """Settings without effect in this combination."""
    unnamed: tuple[Problem, ...] = ()
    """What has to be named before it is submitted; empty unless it was loaded ``to_plan``."""
    planned_step_s: Mapping[str, float] = field(default_factory=dict)
    """What the plan it came from foresees: item of a step -> seconds. Empty: no plan."""

    @property
    def stood_in(self) -> Mapping[str, Origin]:
        """Keys that neither the run file nor the command line gives, but the user's defaults."""
        given = (self.source, COMMAND_LINE)
        return {dotted(path): origin for path, origin in self.origins.items() if origin.source not in given}

    def placed(self, error: RunFileError) -> RunFileError:
        """What a back end found wrong, each with its place: the key's line, that where it stands commented out, or
        that of the nearest section around it; else the file's first."""
        return RunFileError([self._placed(problem) for problem in error.problems])

    def _placed(self, problem: Problem) -> Problem:
        if problem.line is not None:
            return problem
        path = key_path(problem.key)
        origin = _nearest(self.origins, path)
        commented = re.compile(rf"\s*#\s*{re.escape(str(path[-1]))}\s*:") if path and path not in self.origins else None
        lines = (number for number, line in enumerate(self.text.splitlines(), 1) if commented and commented.match(line))
        line = next(lines, origin.line if origin else 1)
        return replace(problem, source=origin.source if origin else self.source, line=line)


def load(path: str | Path, overrides: Sequence[str] = (), *, environment: bool = True, to_plan: bool = False) -> Loaded:
    """Read and check a run file whole; with ``environment``, this machine's files and folders too. ``to_plan``: names
    that only a submit needs (project, account, image, bucket) may be missing.

    Relative local paths are taken from the current directory and returned absolute.

    Raises:
        RunFileError: everything that is wrong, in the order of the file.
        UsageError: there is no such file, or it is not text.
    """
    source = str(path)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"no run file {source}", hint=_nearby(Path(path))) from error
    except IsADirectoryError as error:
        raise UsageError(f"{source} is a folder, not a run file", hint="give a .yaml file") from error
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source} is not a run file: {len(data)} bytes")
    if Path(path).name == resolved_file.NAME:  # of another run's folder
        data = resolved_file.unsealed(data, source).encode()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{source} is not UTF-8 text (byte {error.start})"
        raise UsageError(message, hint="is it the right file? save it as UTF-8") from error
    return loads(text, overrides, source=source, environment=environment, to_plan=to_plan)


def given(run_file: Loaded | str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """A run file that was loaded, or is now. Raises as ``load``; UsageError: overrides of one that was."""
    if not isinstance(run_file, Loaded):
        return load(run_file, overrides)
    if overrides:
        raise UsageError(
            "overrides are given where the run file is loaded", hint="muster.api.load(RUN_FILE, overrides)"
        )
    return run_file


def loads(
    text: str,
    overrides: Sequence[str] = (),
    *,
    source: str = "run file",
    environment: bool = True,
    to_plan: bool = False,
) -> Loaded:
    """``load`` for a text."""
    parsed = parse(text, source=source)
    if parsed.problems and parsed.value is None:
        raise RunFileError(parsed.problems)
    if parsed.value is not None and not isinstance(parsed.value, dict):
        message = f"must be a mapping, got {schema_keys.shown(parsed.value)}"
        raise RunFileError([Problem("", message, line=1, source=source, hint="begin with `name: ...`")])
    origins = {path: Origin(source=source, line=line) for path, line in parsed.lines.items() if path}
    reading = _Reading(source=source, raw=parsed.value or {}, origins=origins, problems=parsed.problems)
    for override in overrides:
        _override(reading, override)
    for default in user_defaults.stand_in(reading.raw) if environment else ():
        origins[default.path] = Origin(source=default.source, line=default.line)
    spec, bad = _check_values(reading)
    unnamed: list[Problem] = []
    if spec is not None:
        own = BACKENDS.get(spec.backend).checks.rules(spec)
        result = [*validation.problems(spec), *run_environment.problems(spec), *own]
        if environment:
            result += host_checks.problems(spec)
        for problem in result:
            if not _touches(problem.key, bad):
                (unnamed if to_plan and problem.to_submit else reading.problems).append(reading.placed(problem))
    if reading.problems or spec is None:
        raise RunFileError(
            sorted(reading.problems, key=lambda problem: (problem.source == COMMAND_LINE, problem.line or 0))
        )
    given = frozenset(dotted(path) for path in origins)
    return Loaded(
        spec=validation.absolute(spec),
        text=text,
        source=source,
        overrides=tuple(overrides),
        origins=origins,
        warnings=tuple(map(reading.placed, no_effect(spec, given))),
        unnamed=tuple(unnamed),
    )


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """A run file while it is read: its values, where each was given, and what is wrong so far."""

    source: str
    raw: dict[str, Json]
    origins: dict[KeyPath, Origin]
    problems: list[Problem]

    def problem(self, path: KeyPath, message: str, hint: str | None = None) -> Problem:
        """With the place of the key, or of the nearest section around it."""
        origin = _nearest(self.origins, path) or Origin(source=self.source)
        return Problem(dotted(path), message, line=origin.line, source=origin.source, hint=hint)

    def placed(self, problem: Problem) -> Problem:
        """A rule's problem, with the place of its key."""
        return self.problem(key_path(problem.key), problem.message, problem.hint)


def _nearest(origins: Mapping[KeyPath, Origin], path: KeyPath) -> Origin | None:
    """Of the key, or of the nearest section around it."""
    around = (path[:length] for length in range(len(path), 0, -1))
    return next((origins[each] for each in around if each in origins), None)


# ---------------------------------------------------------------- overrides


def _override(reading: _Reading, text: str) -> None:
    """Apply ``key.path=value`` in place, or note why not."""
    raw = reading.raw

    def wrong(message: str, hint: str | None = None, key: str = "") -> None:
        reading.problems.append(Problem(key, message, source=COMMAND_LINE, hint=hint))

    name, equals, value_text = text.partition("=")
    if not equals or not name.strip():
        message = f"{schema_keys.shown(text, key=name)} is not an override"
        wrong(message, hint="write key.path=value, for example training.steps=100")
        return
    path = key_path(name.strip())
    if "" in path:
        wrong(f"`{name}` is not a key path", hint="write key.path=value")
        return
    annotation, _ = schema_keys.at(path, raw)
    try:
        value = _value(value_text, annotation)
    except ValueError as error:
        shown = schema_keys.shown(value_text, key=name)
        wrong(f"cannot read the value {shown}: {error}", "quote it: key='\"text\"'", name)
        return
    here: Json = raw
    for index, part in enumerate(path[:-1]):
        step = dotted(path[: index + 1])
        if isinstance(here, list) and isinstance(part, int):
            if part >= len(here):
                wrong(f"there is no item {part} in `{dotted(path[:index])}`, it has {len(here)}", key=step)
                return
            here = here[part]
        elif isinstance(here, dict):
            inside = schema_keys.at(path[: index + 1], raw)[0]
            if inside is not None and not schema_keys.holds_keys(inside):
                wrong(f"`{step}` is not a section", key=name)
                return
            if not isinstance(here.get(str(part)), dict | list):
                here[str(part)] = {}
            here = here[str(part)]
        else:
            wrong(f"`{dotted(path[:index])}` is not a section", key=step)
            return
    last = path[-1]
    if isinstance(here, list):
        if not isinstance(last, int) or last > len(here):
            wrong(f"there is no item {last} in `{dotted(path[:-1])}`, it has {len(here)}", key=name)
            return
        here[last:] = [value, *here[last + 1 :]]
    else:
        assert isinstance(here, dict)
        here[str(last)] = value
    if value is not None:
        _take_out_excluded(reading, path)
    for known in [known for known in reading.origins if known[: len(path)] == path]:
        del reading.origins[known]
    reading.origins[path] = Origin(source=COMMAND_LINE)


def _take_out_excluded(reading: _Reading, path: KeyPath) -> None:
    """What the run file has instead of the key ``path``; two that exclude each other on the command line stay."""
    partners = [set(pair) - {dotted(path)} for pair in schema_keys.EXCLUSIVE if dotted(path) in pair]
    for partner in (key_path(name) for names in partners for name in names):
        origin = reading.origins.get(partner)
        if origin is not None and origin.source != COMMAND_LINE:
            _remove(reading.raw, partner)
            for inside in [each for each in reading.origins if each[: len(partner)] == partner]:
                del reading.origins[inside]


def _value(text: str, annotation: object) -> Json:
    """What ``text`` means on the command line for a key of this type: where only text is allowed, itself (``a #2``,
    ``a: b``, ``123``), unless it is quoted or null; else YAML. Raises ValueError."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    takes_text_alone = {schema_keys.bare(leaf) for leaf in schema_keys.leaves(annotation)} == {str}
    if takes_text_alone and not quoted and text not in ("", "~", "null"):
        return text
    return scalar(text)


def _check_values(reading: _Reading) -> tuple[RunSpec | None, set[str]]:
    """Types, bounds and unknown keys. Returns what can still be checked further and the keys that cannot.

    Invalid values are removed and the rest is validated again, so that the rules across keys can report on what
    remains.
    """
    bad: set[str] = set()
    rest = copy.deepcopy(reading.raw)
    unknown = list(schema_keys.unknown(rest))
    for path, hint in unknown:
        reading.problems.append(reading.problem(path, "unknown key", hint))
        bad.add(dotted(path))
    for path, _ in unknown:
        _remove(rest, path)
    for _ in range(4):  # taking a value out can uncover a missing one, then a section without its type
        try:
            return RunSpec.model_validate(rest), bad
        except ValidationError as error:
            result = _located(error, rest)
        for path, kind in result.items():
            if dotted(path) not in bad and not any(_within(dotted(path), other) for other in bad):
                reading.problems.append(_value_problem(reading, path, kind))
            bad.add(dotted(path))
        for path in sorted(result, key=lambda path: tuple(map(str, path)), reverse=True):
            if isinstance(path[-1], int):  # a list with a bad item cannot be checked further
                path = path[:-1]
                bad.add(dotted(path))
            _remove(rest, path)
        if any(path == ("name",) for path in result):
            rest["name"] = "unnamed"
        for path, kind in result.items():
            if kind in ("missing", "too_short", "union_tag_not_found", "union_tag_invalid") and len(path) > 1:
                _remove(rest, path[:1])  # a section that is incomplete without it
                bad.add(dotted(path[:1]))
    return None, bad


def _located(error: ValidationError, raw: Json) -> dict[KeyPath, str]:
    """Key path -> kind of error; of errors inside each other the innermost."""
    result: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path: KeyPath = ()
        annotation: object = RunSpec
        here: Json = raw
        for part in detail["loc"]:
            known = schema_keys.fields(annotation, here) if isinstance(here, dict) else {}
            if isinstance(part, str) and part in known:
                path, annotation = (*path, part), known[part].annotation
                here = here.get(part) if isinstance(here, dict) else None
            elif isinstance(part, str) and isinstance(here, dict) and schema_keys.text_of_any_key(annotation):
                path, annotation, here = (*path, part), str, here.get(part)
            elif isinstance(part, int) and isinstance(here, list) and part < len(here):
                path, annotation, here = (*path, part), schema_keys.item(annotation), here[part]
        kind = detail["type"]
        if kind.startswith("union_tag"):
            path = (*path, "type")
        result.setdefault(path, kind)
    return {
        path: kind
        for path, kind in result.items()
        if not any(other != path and other[: len(path)] == path for other in result)
    }


def _value_problem(reading: _Reading, path: KeyPath, kind: str) -> Problem:
    value = _get(reading.raw, path)
    if kind.startswith("union_tag"):
        family = schema_keys.family_of(schema_keys.at(path[:-1])[0])
        known = family.registry.names() if family else []
        got = f", got {schema_keys.shown(value)}" if value is not None else ""
        return reading.problem(path, f"must be one of {', '.join(known)}{got}", _near(value, known))
    annotation, info = schema_keys.at(path, reading.raw)
    requested = schema_keys.expected(annotation, info.metadata if info else None)
    if kind == "missing" and value is None:
        return reading.problem(path, f"is missing: {requested}")
    if kind == "too_short":
        return reading.problem(path, f"must hold at least one item, got {schema_keys.shown(value)}")
    message = f"must be {requested}, got {schema_keys.shown(value, key=dotted(path))}"
    return reading.problem(path, message, _value_hint(value, annotation, info))


def _value_hint(value: Json, annotation: object, info: FieldInfo | None) -> str | None:
    """What the user probably wanted to write."""
    kinds = {schema_keys.bare(leaf) for leaf in schema_keys.leaves(annotation)}
    if isinstance(value, str):
        choices = [name for leaf in schema_keys.leaves(annotation) for name in schema_keys.choices(leaf, info)]
        if choices and (near := _near(value, choices)):
            return near
        if bool in kinds and value.lower() in ("yes", "no", "on", "off"):
            return f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
        if kinds & {int, float}:
            try:
                float(value)
            except ValueError:
                return None
            return "write the number without quotes"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"write {int(value)}"
    if str in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return f'put it in quotes: "{value}"'
    if isinstance(value, str | int | float) and any("list" in str(kind) for kind in kinds) and value is not None:
        return f"write a list: [{value}]"
    return None


def _near(given: Json, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else None


# ---------------------------------------------------------------- small things


def _touches(key: str, bad: set[str]) -> bool:
    return any(_within(key, other) or _within(other, key) for other in bad)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _get(raw: Json, path: KeyPath) -> Json:
    for part in path:
        if isinstance(raw, dict):
            raw = raw.get(str(part))
        elif isinstance(raw, list) and isinstance(part, int) and part < len(raw):
            raw = raw[part]
        else:
            return None
    return raw


def _remove(raw: Json, path: KeyPath) -> None:
    parent = _get(raw, path[:-1]) if len(path) > 1 else raw
    if isinstance(parent, dict) and path:
        parent.pop(str(path[-1]), None)
    elif isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent):
        del parent[path[-1]]


def _nearby(path: Path) -> str | None:
    folder = path.parent
    names = [path.name for path in folder.glob("*.y*ml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"did you mean {folder / near[0]}?" if near else "is the path right?"


def first_problem(error: ValueError) -> str:
    """What is wrong with a file that should hold a spec, in one line."""
    if not isinstance(error, ValidationError):
        return (str(error).splitlines() or [type(error).__name__])[0]
    return reason(error)
