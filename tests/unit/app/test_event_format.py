"""Texts of events that are templates name fields that the event and its detail have."""

from string import Formatter
from typing import get_type_hints

import pytest

from muster.app.inspect.event_format import _RENDER, _TEXTS, line
from muster.core.events import Event


@pytest.mark.parametrize("cls", _TEXTS, ids=lambda cls: cls.kind)
def test_a_template_names_fields_that_are_there(cls):
    assert cls.kind not in _RENDER
    names = [name for _, name, _, _ in Formatter().parse(_TEXTS[cls]) if name is not None]
    assert names
    for name in names:
        first, *path = name.split(".")
        at = {"event": Event, "detail": cls}[first]
        for part in path:
            hints = get_type_hints(at)
            assert part in hints, f"{cls.kind}: {name}"
            at = hints[part]


def test_text_of_others_is_no_template():
    place = {"run_id": "r", "attempt": 1, "seq": 1, "mono_ns": 0, "wall_ns": 0, "host": "{event.run_id}"}
    lost = Event(**place, kind="host.lost", detail={"evidence": "{detail.__class__} {0}"})
    assert line(lost) == "{event.run_id} is lost: {detail.__class__} {0}"
