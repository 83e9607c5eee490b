"""``run.message`` informs a person: nothing may be read back from it (a fact has an event of its own)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "muster"
#: What writes an event: the kind is the first argument, or the second after the run.
WRITERS = {"append", "emit", "log", "write", "tell", "log_event", "_append", "_emit", "_on_event"}
#: An event that is made to be sent.
MADE = "RankEvent"
#: What shows events to a person.
SHOWN_BY = {"app/inspect/event_format.py", "cli/watch.py"}
DEFINED_BY = "core/event_details/run.py"


def written(syntax: ast.AST) -> set[int]:
    """Constants that are the kind of an event being written."""
    calls = (node for node in ast.walk(syntax) if isinstance(node, ast.Call) and node.args)
    names = ((getattr(call.func, "attr", None) or getattr(call.func, "id", None), call.args[:2]) for call in calls)
    made = (node for node in ast.walk(syntax) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == MADE)
    return {id(argument) for name, arguments in names if name in WRITERS for argument in arguments} | {
        id(keyword.value) for call in made for keyword in call.keywords if keyword.arg == "kind"
    }


def readers(text: str) -> list[int]:
    """Lines that name the kind, or its class, other than to write it."""
    syntax = ast.parse(text)
    allowed = written(syntax)
    return [
        node.lineno
        for node in ast.walk(syntax)
        if (isinstance(node, ast.Constant) and node.value == "run.message" and id(node) not in allowed)
        or (isinstance(node, ast.Name) and node.id == "RunMessage")
        or (isinstance(node, ast.Attribute) and node.attr == "RunMessage")
    ]


def test_nothing_is_read_back_from_a_message():
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name not in SHOWN_BY and name != DEFINED_BY:
            assert readers(path.read_text()) == [], name


def test_the_check_can_fail():
    assert readers('ctx.log("run.message", {"text": "so"})') == []
    assert readers('RankEvent(kind="run.message", attempt=1)') == []
    assert readers('if event.kind == "run.message": pass') == [1]
    assert readers('target.events("run.message")') == [1]
    assert readers("event.read(run.RunMessage).text") == [1]
