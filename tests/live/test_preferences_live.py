"""Preferences in real ranks: the same losses in any layout, and the same bits after a kill."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes.preferences import rows_of
from trainranks import Outcome, Script, run_attempt, small

pytestmark = pytest.mark.live

STEPS = 6
#: Another number of ranks sums in another order.
LAYOUT_TOLERANCE = 5e-6
FIGURES = ("margin", "rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected")


def spec_of(folder: Path, objective: Any, **changes: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(labelled=objective == "kto", count=60)))
    return small(
        folder / "cache",
        **{
            "data__sources": [{"type": "file", "path": str(rows)}],
            "data__heldout_fraction": 0.1,
            "training__objective": objective,
            "training__steps": STEPS,
            "checkpoint__every_steps": 2,
            "checkpoint__asynchronous": False,
            "evaluation__num_sequences": 8,
            "evaluation__at_start": True,
            **changes,
        },
    )


def same_bits(one: Outcome, other: Outcome, steps: range) -> None:
    for step in steps:
        assert one.losses[step].hex() == other.losses[step].hex(), step
        assert one.norms[step].hex() == other.norms[step].hex(), step


@pytest.mark.parametrize(("objective", "lora"), [("dpo", False), ("dpo", True), ("kto", False)])
def test_a_kill_in_mid_step_changes_no_bit(tmp_path: Path, objective: str, lora: bool) -> None:
    changes = {"model__lora": {"rank": 4}} if lora else {}
    spec = spec_of(tmp_path, objective, **changes)
    whole = run_attempt(tmp_path / "whole", spec, ranks=2)
    assert whole.codes == [0, 0], whole.errors
    if objective == "dpo":
        assert whole.losses[1] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are one model
    broken = run_attempt(tmp_path / "broken", spec, ranks=2, script=Script(kill_step=4, kill_rank=1))
    assert broken.codes[1] == -9 and max(broken.losses) == 3
    resumed = run_attempt(tmp_path / "broken", spec, ranks=2, attempt=2)
    assert resumed.codes == [0, 0], resumed.errors
    assert min(resumed.losses) == 3  # from the save of step 2, with the reference that was kept
    same_bits(whole, broken, range(1, 4))
    same_bits(whole, resumed, range(3, STEPS + 1))
    last = [outcome.of("eval")[-1].detail for outcome in (whole, resumed)]
    assert last[0]["loss"] == last[1]["loss"] and last[0]["margin"] == last[1]["margin"]


def test_a_lost_reference_ends_a_run_that_has_begun(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dpo")
    broken = run_attempt(tmp_path / "run", spec, ranks=1, script=Script(kill_step=4))
    assert broken.codes == [-9]
    kept = [*(tmp_path / "run" / "checkpoints" / "reference").glob("*/*-0*")]
    assert len(kept) == 2  # training rows and held-out ones
    kept[0].write_bytes(kept[0].read_bytes()[:-3])
    resumed = run_attempt(tmp_path / "run", spec, ranks=1, attempt=2)
    assert resumed.codes != [0] and "lacks the log-probabilities that step 2 was trained with" in resumed.errors[0]


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
def test_any_layout_gives_the_losses_of_one_rank(tmp_path: Path, objective: str) -> None:
    spec = spec_of(tmp_path, objective)
    one = run_attempt(tmp_path / "one", spec, ranks=1)
    assert one.codes == [0], one.errors
    layouts = {
        "ddp": ({"dp_replicate": 2}, {"parallelism__dp_replicate": 2}),
        "fsdp": ({"dp_shard": 2}, {}),
        "stages": ({"pp": 2}, {"parallelism__pp": 2}),
        "tensors": ({"tp": 2}, {"parallelism__tp": 2}),
        "exact": ({"dp_shard": 2}, {"training__exact": True}),
    }
    for name, (layout, changes) in layouts.items():
        other = run_attempt(tmp_path / name, spec_of(tmp_path, objective, **changes), ranks=2, layout=layout)
        assert other.codes == [0, 0], (name, other.errors)
        for step in range(1, STEPS + 1):
            assert other.losses[step] == pytest.approx(one.losses[step], rel=LAYOUT_TOLERANCE), (name, step)
        for mine, theirs in zip(one.of("step"), other.of("step"), strict=True):
            assert theirs.detail["units"] == mine.detail["units"]
            for figure in FIGURES:
                if figure in mine.detail:
                    assert theirs.detail[figure] == pytest.approx(mine.detail[figure], abs=2e-4), (name, figure)
        held = [outcome.of("eval")[-1].detail["loss"] for outcome in (one, other)]
        assert held[0] == pytest.approx(held[1], rel=LAYOUT_TOLERANCE), name
