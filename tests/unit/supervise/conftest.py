"""Every change of phase in these tests is one of the table's."""

import pytest
from fakes.recovery_page import TABLE

from muster.supervise.recovery.context import SupervisorContext


@pytest.fixture(autouse=True)
def transitions(monkeypatch):
    """The (from, to) that occur in a test."""
    seen, enter = set(), SupervisorContext.enter

    def recorded(self, phase):
        seen.add((type(self.state.phase), type(phase)))
        enter(self, phase)

    monkeypatch.setattr(SupervisorContext, "enter", recorded)
    yield seen
    assert seen <= set(TABLE), seen - set(TABLE)
