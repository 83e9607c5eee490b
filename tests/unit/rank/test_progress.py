"""Progress outside of steps is reported seldom."""

from muster.rank.agent_connection import ProgressThrottle


def test_many_batches_are_told_twice_a_second() -> None:
    pulse = ProgressThrottle()
    told = [at for at in range(100) if pulse.claimed(at / 10, for_s=0.0)]
    assert told == list(range(0, 100, 5))


def test_nothing_is_told_by_itself_where_nobody_vouched() -> None:
    pulse = ProgressThrottle()
    assert not pulse.goes_on(1.0)
    assert pulse.claimed(1.0, for_s=0.0)
    assert not any(pulse.goes_on(at) for at in (1.0, 2.0, 60.0))


def test_a_save_counts_for_as_long_as_was_said_and_no_longer() -> None:
    pulse = ProgressThrottle()
    pulse.claimed(0.0, for_s=3.0)
    assert [at for at in range(1, 10) if pulse.goes_on(float(at))] == [1, 2]
    pulse.claimed(10.0, for_s=30.0)
    pulse.claimed(11.0, for_s=0.0)  # it is over
    assert not pulse.goes_on(12.0)
