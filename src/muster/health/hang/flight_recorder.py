"""PyTorch's flight recorder: the operations among ranks that one rank has called, as torch 2.x dumps them.

JSON, as ``_dump_nccl_trace_json`` and ``_dump_fr_trace_json`` return it. NCCL's watchdog writes a pickle of the same,
which is a program and is refused. Form as of torch 2.13; of the versions, 2.x are known.

What the sources of a dump do differently: gloo's operations stay "scheduled" forever and only ``retired`` says that
they ended; gloo names no group under ``pg_config``; numbers are texts in one form and numbers in the other; NCCL's
watchdog leaves out what has ended, and ``pg_status`` is keyed by the rank's own count of its groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muster.core.typed_json import Json, JsonObject, Record, Unreadable, at, child, children, parse_object, text, whole

#: More than any ring of operations that torch keeps by default; a larger file is none.
LARGEST_BYTES = 256 * 2**20

#: Of the part of a group that another library than the first recorder's has.
_OTHER = "+"
_P2P = re.compile(r"^(send|recv) (\d+)(?:->|<-)(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Operation(Record):
    """One call. ``group``: the group's name; ``order``: its place among all calls of the rank."""

    group: str
    number: int
    """Among the group's collectives, or among its sends and receives."""
    name: str
    """Without the library's prefix: ``all_reduce``."""
    backend: str = ""
    """The library: ``nccl``, ``gloo``; empty: the dump does not say."""
    order: int = 0
    done: bool = False
    peer: int | None = None
    """Of a send or receive: the other side, as numbered in the group."""
    sizes: str = ""
    """Of inputs and outputs, as the dump prints them."""
    dtypes: str = ""
    created_ns: int = 0
    """The rank's wall clock."""

    @property
    def p2p(self) -> bool:
        return self.peer is not None


@dataclass(frozen=True, kw_only=True)
class Group(Record):
    name: str
    description: str = ""
    members: tuple[int, ...] = ()
    """Ranks of the run; empty: the dump does not say."""
    posted: int | None = None
    """Number of the last operation that was called; None: not in the dump."""
    completed: int | None = None

    @property
    def words(self) -> str:
        name = self.name.partition("@")[0]
        return self.description if self.description not in ("", "undefined") else f"group {name or 'default'}"


@dataclass(frozen=True, kw_only=True)
class Recorder(Record):
    """What one rank's recorder holds: operations in the order of their calls."""

    version: str
    groups: Mapping[str, Group] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()

    @property
    def unfinished(self) -> tuple[Operation, ...]:
        return tuple(one for one in self.operations if not one.done)


def parse(captured: bytes | str) -> Recorder:
    """A dump.

    Raises:
        Unreadable: it is cut, is no dump, or is of an unknown version; the sentence says which.
    """
    if isinstance(captured, bytes) and captured[:1] == b"\x80":
        raise Unreadable("a pickle, which is a program: docs/how-to/why.md has the command that makes JSON of it")
    if len(captured) > LARGEST_BYTES:
        raise Unreadable(f"flight recorder of {len(captured)} bytes: more than {LARGEST_BYTES} are not read")
    try:
        dump = parse_object(captured)
    except Unreadable as error:
        raise Unreadable(f"flight recorder: {error}") from None
    if "version" not in dump or not {"entries", "pg_status"} & dump.keys():  # no entries: nothing was called
        raise Unreadable("no dump of a flight recorder: it has no version and entries")
    version = text(dump, "version")
    if not version.startswith("2."):
        raise Unreadable(f"flight recorder of version {version!r}: 2.x are known")
    try:
        return _recorder(dump, version)
    except (ValueError, TypeError) as error:
        raise Unreadable(f"flight recorder: {error}") from None


def shortened(recorder: Recorder, *, keep: int = 8) -> Recorder:
    """The same without all but the newest ``keep`` ended operations of each group: enough to compare ranks by."""
    kept: list[Operation] = []
    ended: dict[tuple[str, bool], int] = {}
    for one in reversed(recorder.operations):
        key = (one.group, one.p2p)
        ended[key] = ended.get(key, 0) + one.done
        if not one.done or ended[key] <= keep:
            kept.append(one)
    return replace(recorder, operations=tuple(reversed(kept)))


def merged(recorders: Sequence[Recorder]) -> Recorder:
    """What one process recorded apart for each library, as one: NCCL's first.

    A group of torch's may have both libraries, each with its own count: gloo's part of it is another group.
    A build that keeps all operations in one recorder tells that one twice.
    """
    first, *others = recorders
    groups, operations = dict(first.groups), list(first.operations)
    seen = {_call(one) for one in operations}
    for other in others:
        new = [one for one in other.operations if _call(one) not in seen]
        called = {one.group for one in new}
        for name, group in other.groups.items():
            if name in called:
                groups[f"{name}{_OTHER}"] = replace(group, name=f"{name}{_OTHER}")
        operations += [replace(one, group=f"{one.group}{_OTHER}") for one in new]
    operations.sort(key=lambda one: one.created_ns)
    ordered = tuple(replace(one, order=order) for order, one in enumerate(operations))
    return replace(first, groups=groups, operations=ordered)


def placed(recorder: Recorder, ranks: Mapping[str, Iterable[int]]) -> Recorder:
    """The same with the run's ranks in its groups. ``ranks``: of each group that exists, as the process itself says.

    In a dump the groups of each replica have the same names, and gloo's no members; NCCL's are counted within the
    replica. Groups that ``ranks`` does not have were ended: no rank waits for unfinished operations in them. Without
    any (the process could not say) nothing changes.
    """
    known = {name: tuple(members) for name, members in ranks.items() if members}
    if not known:
        return recorder
    names: dict[str, str] = {}
    groups: dict[str, Group] = {}
    for name, group in recorder.groups.items():
        members = known.get(name.removesuffix(_OTHER))
        if members is not None:
            names[name] = f"{name}@{min(members)}"
            groups[names[name]] = replace(group, name=names[name], members=members)
        elif not name.removesuffix(_OTHER):  # made by the program outside torch's registry
            names[name], groups[name] = name, group
    operations = tuple(replace(one, group=names[one.group]) for one in recorder.operations if one.group in names)
    return replace(recorder, groups=groups, operations=operations)


def _call(one: Operation) -> tuple[str, int, str, bool, int]:
    return one.group, one.number, one.name, one.p2p, one.created_ns


def _recorder(dump: JsonObject, version: str) -> Recorder:
    rows = children(dump, "entries")
    names = {text(row, "pg_id"): _group_name(row) for row in rows}
    operations = [_operation(row, order) for order, row in enumerate(rows)]
    descriptions = {_group_name(row): text(row, "process_group", 1) for row in rows}
    config = {name: child(dump, "pg_config", name) for name in child(dump, "pg_config") if name}
    status = _by_name(child(dump, "pg_status"), names, list(config))
    mixed = {one.group for one in operations if one.p2p}
    groups = {
        name: Group(
            name=name,
            description=text(config.get(name), "desc") or descriptions.get(name, ""),
            members=tuple(int(number) for number in re.findall(r"\d+", text(config.get(name), "ranks"))),
            # sends count into the same two figures, which then cannot be compared with another rank's
            posted=_told(status, name, "last_enqueued_collective") if name not in mixed else None,
            completed=_told(status, name, "last_completed_collective") if name not in mixed else None,
        )
        for name in {**config, **descriptions}
    }
    return Recorder(version=version, groups=groups, operations=tuple(operations))


def _operation(row: JsonObject, order: int) -> Operation:
    backend, colon, name = text(row, "profiling_name").partition(":")
    if not colon:
        backend, name = "", backend
    found = _P2P.match(name)
    is_p2p = row.get("is_p2p") is True and found is not None
    number = whole(row, "p2p_seq_id" if is_p2p else "collective_seq_id")
    return Operation(
        group=_group_name(row),
        number=number,
        name=found[1] if found else name,
        backend=backend,
        order=order,
        done=row.get("retired") is True or text(row, "state") == "completed",
        peer=int(found[3]) if is_p2p and found else None,
        sizes=_sizes(row),
        dtypes=" ".join(str(one) for one in _list(row, "input_dtypes") + _list(row, "output_dtypes")),
        created_ns=whole(row, "time_created_ns"),
    )


def _sizes(row: JsonObject) -> str:
    shown = (
        " ".join("x".join(str(n) for n in _list({"s": size}, "s")) or "-" for size in _list(row, key))
        for key in ("input_sizes", "output_sizes")
    )
    return " -> ".join(shown)


def _list(row: JsonObject, key: str) -> list[Json]:
    found = at(row, key)
    return list(found) if isinstance(found, (list, tuple)) else []


def _group_name(row: JsonObject) -> str:
    found = _list(row, "process_group")
    return str(found[0]) if found and isinstance(found[0], (str, int)) else text(row, "pg_id")


def _by_name(status: JsonObject, names: Mapping[str, str], configured: list[str]) -> dict[str, JsonObject]:
    """``pg_status`` by the group's name.

    It is keyed by the rank's own count of its groups, which operations in the dump translate. For groups without any,
    the order does: both lists are in the order in which the groups were made. It is believed only where the lists are
    of one length and agree with every operation.
    """
    keys = sorted((key for key in status if key.isdigit()), key=int)
    if len(keys) == len(configured) and all(name.isdigit() for name in configured):
        paired = dict(zip(keys, sorted(configured, key=int), strict=True))
        if all(paired.get(key) == name for key, name in names.items()):
            names = paired
    return {names[key]: child(status, key) for key in keys if key in names}


def _told(status: Mapping[str, JsonObject], name: str, key: str) -> int | None:
    found = text(status.get(name), key)
    return int(found) if re.fullmatch(r"\d+", found) else None
