"""Every change of phase in these tests is one of the table's."""

import pytest

from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.phases import TRANSITIONS

ROWS = {(row.source, row.target) for row in TRANSITIONS}


@pytest.fixture(autouse=True)
def transitions(monkeypatch):
    """The (from, to) that occur in a test."""
    seen, enter = set(), SupervisorContext.enter

    def recorded(self, phase):
        seen.add((type(self.state.phase), type(phase)))
        enter(self, phase)

    monkeypatch.setattr(SupervisorContext, "enter", recorded)
    yield seen
    assert seen <= ROWS, seen - ROWS
