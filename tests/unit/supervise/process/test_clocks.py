"""Clock offsets: measured often, kept nowhere, said seldom."""

import pytest

from muster.protocol.to_supervisor import Pong
from muster.supervise.process.clock_offsets import AGAIN_S, ClockOffsets

S = 1_000_000_000
MS = 1_000_000


def answer(clocks, now_ns, *, ahead_ns=0, half_ns=MS, host="a"):
    """One round trip that ends at ``now_ns``; the supervisor's clock is ``ahead_ns`` of the host's."""
    ping = clocks.ping(host, now_ns - 2 * half_ns)
    return clocks.pong(Pong(number=ping.number, mono_ns=now_ns - half_ns - ahead_ns), now_ns)


def test_the_first_one_is_said():
    found = answer(ClockOffsets(), 100 * S, ahead_ns=7 * S)
    assert (found.host, found.offset_ns, found.error_ns) == ("a", 7 * S, MS)


def test_a_day_of_measurements_leaves_a_line_every_ten_minutes_and_nothing_in_memory():
    clocks, said = ClockOffsets(), 0
    for number in range(2880):
        said += answer(clocks, number * 30 * S + S, half_ns=MS + number % 7) is not None
    assert said == 86400 / AGAIN_S
    assert len(clocks._asked) == 0


@pytest.mark.parametrize(
    ("ahead_ns", "half_ns", "news"), [(1.9, 1.0, False), (2.1, 1.0, True), (0, 0.4, True), (0, 0.6, False)]
)
def test_one_that_moved_for_certain_or_is_much_better_known_is_said(ahead_ns, half_ns, news):
    clocks = ClockOffsets()
    answer(clocks, 100 * S)
    assert (answer(clocks, 130 * S, ahead_ns=int(ahead_ns * MS), half_ns=int(half_ns * MS)) is not None) == news


def test_a_host_that_went_owes_no_answer_and_is_measured_anew():
    clocks = ClockOffsets()
    answer(clocks, 100 * S)
    asked = [clocks.ping("a", 130 * S) for _ in range(3)]
    clocks.ping("b", 130 * S)
    clocks.forget("a")
    assert len(clocks._asked) == 1
    assert clocks.pong(Pong(number=asked[0].number, mono_ns=0), 131 * S) is None
    assert answer(clocks, 132 * S) is not None


def test_an_answer_that_comes_twice_counts_once():
    clocks = ClockOffsets()
    ping = clocks.ping("a", S)
    pong = Pong(number=ping.number, mono_ns=0)
    assert clocks.pong(pong, 2 * S) is not None and clocks.pong(pong, 2000 * S) is None
