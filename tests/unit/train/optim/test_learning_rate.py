"""Learning rates by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.config.spec import Optimizer
from muster.train.optim.learning_rate import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    found = Optimizer.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(found, step=step, total_steps=total) for step in range(1, total + 1)]


def test_warmup_ends_at_the_peak_and_the_schedule_at_its_floor() -> None:
    found = rates(10, warmup_steps=4, schedule="linear", min_lr_fraction=0.1)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[-1] == pytest.approx(0.1)
    assert found[6] == pytest.approx(0.1 + 0.9 * 0.5)


def test_a_share_of_the_steps_is_so_many_of_them() -> None:
    for total, steps in ((400, 100), (60, 15), (3, 1), (1, 0)):
        assert rates(total, warmup_steps=0.25) == rates(total, warmup_steps=steps)
    assert rates(100, warmup_steps=0.07) == rates(100, warmup_steps=7), "0.07 * 100 is a little more than 7 in binary"


def test_cosine_is_half_way_at_half_time() -> None:
    found = rates(9, warmup_steps=1, schedule="cosine", min_lr_fraction=0.0)
    assert found[4] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


def test_constant_stays() -> None:
    assert rates(5, schedule="constant") == [1.0] * 5


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0.0, 1.0))
def test_never_above_the_peak_nor_below_the_floor(warmup: int, total: int, schedule: str, floor: float) -> None:
    found = rates(total, warmup_steps=warmup, schedule=schedule, min_lr_fraction=floor)
    after = found[warmup:]
    assert all(0.0 < rate <= 1.0 + 1e-12 for rate in found[:warmup])
    assert all(floor - 1e-12 <= rate <= 1.0 + 1e-12 for rate in after)
    assert after == sorted(after, reverse=True)
