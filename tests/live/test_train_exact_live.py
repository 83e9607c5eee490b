"""``training.exact``: one hash of the whole state at any number of ranks. The float path, beside it, has several."""

from pathlib import Path

import pytest
from trainranks import Script, run_attempt, small

pytestmark = pytest.mark.live

VARIANTS = {
    "plain": {},
    "lora": {"model__lora": {"rank": 4, "dropout": 0.1}},
    "bf16": {"model__dtype": "bfloat16"},
    "accumulation": {"training__global_batch_size": 10, "training__micro_batch_size": 1},
}
LAYOUTS = [{"dp_shard": 1}, {"dp_shard": 2}, {"dp_shard": 3}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}]


@pytest.mark.parametrize(
    "variant", [each if each in ("plain", "lora") else pytest.param(each, marks=pytest.mark.soak) for each in VARIANTS]
)
def test_one_hash_at_any_world_size(tmp_path: Path, variant: str) -> None:
    seen = set()
    for number, layout in enumerate(LAYOUTS):
        ranks = layout.get("dp_replicate", 1) * layout["dp_shard"]
        spec = small(tmp_path / "cache", training__exact=True, training__steps=5, **VARIANTS[variant])
        done = run_attempt(tmp_path / str(number), spec, ranks=ranks, layout=layout, script=Script(unit_per_layer=True))
        assert done.codes == [0] * ranks, done.errors[0]
        assert min(done.norms.values()) > 1.0 or variant == "lora", "clipping must have been at work"
        last = max(done.losses)
        seen.add((done.state_hash, done.losses[last].hex(), done.norms[last].hex()))
    assert len(seen) == 1, seen


def test_float_sums_differ_between_world_sizes(tmp_path: Path) -> None:
    """The control: without fixed point the same comparison finds the difference that it looks for."""
    hashes = {
        run_attempt(tmp_path / str(ranks), small(tmp_path / "cache", training__steps=5), ranks=ranks).state_hash
        for ranks in (1, 3)
    }
    assert len(hashes) == 2


def test_a_gradient_beyond_the_range_is_refused(tmp_path: Path) -> None:
    """With room for 2**-10 instead of 2**22, ordinary gradients are out of range."""
    spec = small(tmp_path / "cache", training__exact=True)
    done = run_attempt(tmp_path / "run", spec, ranks=2, script=Script(exact_range_bits=-10))
    assert done.codes[0] not in (0, None)
    assert "step 1: a gradient is beyond the range of exact sums" in done.errors[0]
    assert not done.of("step")
