"""``checkpoint.snapshot_every_steps: auto`` on real ranks: one interval for all, by the slowest, the same training."""

import pytest

pytest.importorskip("torch")

from trainranks import Script, run_attempt, small

from muster.checkpoint_format.snapshot_ring import Ring

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_ranks_agree_on_the_interval_of_the_slowest_and_train_as_ever(tmp_path):
    """Rank 1's snapshots take 0.3 s, rank 0's nothing: both go on with the interval that rank 1 needs."""
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    base = small(tmp_path / "cache", training__steps=20, training__state_hash_every_steps=1)
    auto = {**base, "checkpoint": {"every_steps": 0, "snapshot_every_steps": "auto"}}
    script = Script(slow_snapshots=(1, 0.3), snapshot_dir=str(memory))
    found = run_attempt(tmp_path / "auto", auto, ranks=2, script=script)
    assert found.codes == [0, 0], found.errors
    said = [event.detail["every_steps"] for event in found.of("snapshot.interval")]
    assert said and said[0] > 1, found.of("snapshot.interval")
    steps = {event.step: event.detail.get("snapshot_step") for event in found.of("step")}
    assert steps[7] == 7, "each step at first"
    rings = [Ring.open(path) for path in memory.iterdir() if path.name.startswith("own")]
    held = [{version.step for version in ring.versions()} for ring in rings]
    assert len(held) == 2 and held[0] == held[1], "the same steps on both ranks"
    assert any(steps[step] < step for step in range(10, 21)), (steps, said)
    plain = run_attempt(tmp_path / "plain", {**base, "checkpoint": {"every_steps": 0}}, ranks=2)
    assert plain.state_hash == found.state_hash and plain.losses == found.losses


def test_a_small_state_has_a_snapshot_of_each_step(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    spec = small(tmp_path / "cache", training__steps=12, checkpoint__snapshot_every_steps="auto")
    found = run_attempt(tmp_path / "run", spec, ranks=2, script=Script(snapshot_dir=str(memory)))
    assert found.codes == [0, 0], found.errors
    steps = {event.step: event.detail.get("snapshot_step") for event in found.of("step")}
    assert [steps[step] for step in range(1, 13)] == list(range(1, 13))
    (said,) = found.of("snapshot.interval")
    assert (said.step, said.detail["every_steps"]) == (1, 1) and "state is small" in said.detail["reason"]
