"""A machine that loses its power once or twice: what no fsync brought to the disk is lost, and memory is empty."""

from __future__ import annotations

from pathlib import Path

import pytest
from striking import References, drive
from thorough import THOROUGH
from trials import POWER_FROM

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.reads("tests/live/weather.cpp")]

#: ``python tools/strikes.py --seeds 3001-3015`` does fifteen.
SEEDS = range(POWER_FROM + 1, POWER_FROM + 16) if THOROUGH else (POWER_FROM + 3,)


def test_the_run_goes_on_from_what_was_on_the_disk(tmp_path: Path) -> None:
    undisturbed = References(tmp_path / "undisturbed")
    for seed in SEEDS:
        outcome = drive(seed, tmp_path / str(seed), undisturbed)
        print(f"python tools/strikes.py --seeds {seed}  # {outcome.to_json()}")
        assert outcome.verdict == "survived", seed
