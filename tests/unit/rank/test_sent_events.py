"""A rank sends its newest events again: to another agent than the one that had them, and to no other."""

import pytest

from muster.rank.sent_events import KEPT, EventFrame, SentEvents


class Agent:
    """One end of a connection, which may break after some frames."""

    def __init__(self, pid, frames=10**6):
        self.agent_pid, self.left, self.got = pid, frames, []

    def send_frame(self, frame):
        if not self.left:
            raise ConnectionError("killed, too")
        self.left -= 1
        self.got.append(frame)


def test_a_successor_gets_the_newest_and_the_same_agent_nothing():
    sent, first, again, second = SentEvents(), Agent(7), Agent(7), Agent(8)
    sent.send_to_successor(first)
    for number in range(KEPT + 5):
        sent.note(EventFrame(b"%d" % number))
        sent.note(b"a beat")
    sent.send_to_successor(first)
    sent.send_to_successor(again)  # it closed the connection, for what it could not read
    assert first.got == again.got == []
    sent.send_to_successor(second)
    assert second.got == [b"%d" % number for number in range(5, KEPT + 5)]
    sent.send_to_successor(second)
    assert len(second.got) == KEPT


def test_a_successor_that_dies_while_it_is_told_leaves_them_for_the_next():
    sent, third = SentEvents(), Agent(9)
    sent.send_to_successor(Agent(7))
    for number in range(3):
        sent.note(EventFrame(b"%d" % number))
    with pytest.raises(ConnectionError):
        sent.send_to_successor(Agent(8, frames=2))
    sent.send_to_successor(third)
    assert third.got == [b"0", b"1", b"2"]


def test_what_arrived_is_forgotten():
    sent, second = SentEvents(), Agent(8)
    sent.send_to_successor(Agent(7))
    sent.note(EventFrame(b"1"))
    sent.forget()
    sent.send_to_successor(second)
    assert second.got == []
