"""Eight random trials that are always the same: whatever is struck, the run ends at the undisturbed run's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from striking import References, drive

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

#: Short ones (``tools/strikes.py`` says how long a seed takes) that were survived when they were chosen.
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("seed", SEEDS)
def test_struck_at_random(tmp_path: Path, undisturbed: References, seed: int) -> None:
    outcome = drive(seed, tmp_path / "trial", undisturbed)
    assert outcome.survived, outcome.to_json()
