"""What decides is pure: it knows no clock, no descriptor and no process, and no value of an agent holds a callable."""

import ast
import collections.abc
import dataclasses
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import muster.agent
from muster.agent.decide import HANDLERS
from muster.agent.values import actions, events, rank, state

ROOM = Path(muster.agent.__file__).parent
DECIDE = (
    "decide.py", "link.py", "unsupervised.py", "programs/fork_server.py", "programs/preparation.py",
    "programs/replicator_child.py", "programs/trackers.py", "ranks/attempts.py", "ranks/exits.py", "ranks/hangs.py",
    "ranks/standbys.py", "evidence/gathering.py", "hardware/kernel_lines.py", "hardware/usage.py", "values/actions.py",
    "values/events.py", "values/kernel_faults.py", "values/rank.py", "values/state.py",
)  # fmt: skip
IMPURE = {"os", "time", "socket", "subprocess", "threading", "select", "selectors", "tempfile", "random"}


@pytest.mark.parametrize("name", DECIDE)
def test_what_decides_does_nothing_itself(name: str) -> None:
    tree = ast.parse((ROOM / name).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
            assert not (node.module or "").startswith(("muster.agent.edge", "muster.transport")), node.module
    assert not imported & IMPURE
    opened = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ("open", "print")]
    assert not opened


def test_every_decision_is_looked_at() -> None:
    edge = {"host_agent.py", "watchdog.py", "heartbeat.py", "preemption_watcher.py", "values/host_identity.py"}
    edge |= {"ranks/processes.py", "ranks/setup_program.py", "ranks/rank_environment.py", "hardware/kernel_log.py"}
    edge |= {"hardware/host_check.py"}  # it asks for the machine's name
    edge |= {f"evidence/{name}.py" for name in ("assemble", "ras_query")}
    names = {str(path.relative_to(ROOM)) for path in ROOM.rglob("*.py") if path.name != "__init__.py"}
    names = {name for name in names if not name.startswith(("edge/", "replicator/"))}
    assert names == edge | set(DECIDE)


def parts_of(hint: Any) -> Iterator[Any]:
    """``hint``, and what it is made of."""
    yield hint
    for part in typing.get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from parts_of(each)


def values() -> list[type]:
    modules = (actions, events, rank, state)
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == module.__name__
    ]


@pytest.mark.parametrize("cls", values(), ids=lambda cls: cls.__name__)
def test_no_value_holds_a_callable(cls: type) -> None:
    hints = [part for hint in typing.get_type_hints(cls).values() for part in parts_of(hint)]
    assert not {Callable, collections.abc.Callable} & {typing.get_origin(hint) or hint for hint in hints}
    if cls.__module__ in (actions.__name__, events.__name__):
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_every_event_and_every_action_is_answered_for() -> None:
    assert set(typing.get_args(events.Event)) == HANDLERS.keys()
    for module, union in ((events, events.Event), (actions, actions.Action)):
        members = set(typing.get_args(union))
        inside = {actions.Program, events.Counters}
        own = {each for each in values() if each.__module__ == module.__name__}
        assert own - inside == members
