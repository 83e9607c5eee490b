"""Progress outside of steps: told seldom, passed on seldom, and what resets the step watchdog."""

from muster.rank.agent_connection import ProgressThrottle


def test_many_batches_are_told_twice_a_second() -> None:
    throttle = ProgressThrottle()
    told = [at for at in range(100) if throttle.grant(at / 10, for_s=0.0)]
    assert told == list(range(0, 100, 5))


def test_nothing_is_told_by_itself_where_nobody_vouched() -> None:
    throttle = ProgressThrottle()
    assert not throttle.repeat(1.0)
    assert throttle.grant(1.0, for_s=0.0)
    assert not any(throttle.repeat(at) for at in (1.0, 2.0, 60.0))


def test_a_save_counts_for_as_long_as_was_said_and_no_longer() -> None:
    throttle = ProgressThrottle()
    throttle.grant(0.0, for_s=3.0)
    assert [at for at in range(1, 10) if throttle.repeat(float(at))] == [1, 2]
    throttle.grant(10.0, for_s=30.0)
    throttle.grant(11.0, for_s=0.0)  # it is over
    assert not throttle.repeat(12.0)
