"""What a kill, a stop or another number of ranks does to a run: nothing that shows in its losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainranks import Outcome, Script, run_attempt, small

from muster.checkpoint.shards import ShardReader, read_tensor
from muster.checkpoint_format.reader import open_checkpoint
from muster.config.spec import RunSpec
from muster.protocol.ranks import Command
from muster.train.export.sources import choose_checkpoint

pytestmark = pytest.mark.live

STEPS = 8
#: Another number of ranks sums in another order (``test_train_equivalence_live`` states what that moves).
LAYOUT_TOLERANCE = 5e-6
#: With a bias for each expert, a buffer that follows the load.
MIXTURE = {
    "model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "lora": {"model__lora": {"rank": 4, "dropout": 0.1}},
    "dora": {"model__lora": {"rank": 4, "dropout": 0.1, "dora": True}},
    "mixture": {"model__config": MIXTURE},
    "accumulation": {"training__global_batch_size": 8},
}


def spec_of(cache: Path, **changes: Any) -> dict[str, Any]:
    return small(cache, training__steps=STEPS, checkpoint__every_steps=2, checkpoint__asynchronous=False, **changes)


def same(one: Outcome, other: Outcome, steps: range) -> None:
    for step in steps:
        assert one.losses[step].hex() == other.losses[step].hex(), step
        assert one.norms[step].hex() == other.norms[step].hex(), step


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The run that nothing happened to, made once a variant."""
    found: dict[str, Outcome] = {}

    def of(variant: str) -> Outcome:
        if variant not in found:
            folder = tmp_path_factory.mktemp("unfailed")
            found[variant] = run_attempt(folder / "whole", spec_of(folder / "cache", **VARIANTS[variant]), ranks=2)
            assert found[variant].codes == [0, 0], found[variant].errors[0]
        return found[variant]

    return of


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=pytest.mark.soak) if each == "accumulation" else each for each in VARIANTS]
)
def test_resume_to_the_bit_after_a_kill_in_mid_step(
    tmp_path: Path, variant: str, unfailed: Callable[[str], Outcome]
) -> None:
    spec = spec_of(tmp_path / "cache", **VARIANTS[variant])
    whole = unfailed(variant)
    broken = run_attempt(tmp_path / "broken", spec, ranks=2, script=Script(kill_step=6, kill_rank=1))
    assert broken.codes[1] == -9
    assert max(broken.losses) == 5
    resumed = run_attempt(tmp_path / "broken", spec, ranks=2, attempt=2)
    assert resumed.codes == [0, 0], resumed.errors[0]
    assert [event.step for event in resumed.of("checkpoint.restored")] == [4]
    assert sorted(resumed.losses) == [5, 6, 7, 8]
    same(whole, resumed, range(5, STEPS + 1))
    assert resumed.state_hash == whole.state_hash
    if variant == "mixture":
        last = choose_checkpoint(RunSpec.model_validate(spec), tmp_path / "broken", None)
        reader = ShardReader(open_checkpoint(last))
        (name,) = [name for name in reader.shapes() if name.endswith("e_score_correction_bias")]
        assert read_tensor(reader, name).any(), "it is saved, and was moved"


@pytest.mark.parametrize("variant, moment", [("plain", "data"), ("plain", "marker"), ("lora", "marker")])
def test_resume_to_the_bit_after_a_kill_in_mid_save(
    tmp_path: Path, variant: str, moment: str, unfailed: Callable[[str], Outcome]
) -> None:
    spec = spec_of(tmp_path / "cache", **VARIANTS[variant])
    if (variant, moment) == ("lora", "marker"):
        spec["checkpoint"]["asynchronous"] = True
    whole = unfailed(variant)
    broken = run_attempt(tmp_path / "broken", spec, ranks=2, script=Script(kill_in_save=moment, kill_save_step=4))
    assert broken.codes[0] == -9
    resumed = run_attempt(tmp_path / "broken", spec, ranks=2, attempt=2)
    assert resumed.codes == [0, 0], resumed.errors[0]
    assert [event.step for event in resumed.of("checkpoint.restored")] == [2]
    same(whole, resumed, range(3, STEPS + 1))
    assert resumed.state_hash == whole.state_hash


@pytest.mark.parametrize("worlds", [(1, 2), pytest.param((4, 3, 2), marks=pytest.mark.soak)])
def test_resume_on_another_number_of_ranks(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """The same sequences in the same order, and the loss within the tolerance."""
    spec = spec_of(tmp_path / "cache", training__global_batch_size=6)
    whole = run_attempt(tmp_path / "whole", spec, ranks=worlds[0])
    kills = [4, 6][: len(worlds) - 1]
    losses: dict[int, float] = {}
    tokens: dict[int, tuple[int, int]] = {}
    for number, ranks in enumerate(worlds):
        script = Script(kill_step=kills[number] if number < len(kills) else None)
        done = run_attempt(tmp_path / "moved", spec, ranks=ranks, attempt=number + 1, script=script)
        assert number < len(kills) or done.codes == [0] * ranks, done.errors[0]
        losses.update(done.losses)
        tokens.update({e.step: (e.detail["tokens"], e.detail["supervised_tokens"]) for e in done.of("step") if e.step})
    for event in whole.of("step"):
        assert event.step is not None
        assert abs(losses[event.step] - whole.losses[event.step]) < LAYOUT_TOLERANCE
        assert tokens[event.step] == (event.detail["tokens"], event.detail["supervised_tokens"])


def test_a_stop_saves_at_one_step_and_leaves_130(tmp_path: Path) -> None:
    """Only rank 1 hears of it; both stop after the same step, and the next attempt goes on from there."""
    spec = spec_of(tmp_path / "cache", training__global_batch_size=6)
    spec["checkpoint"]["every_steps"] = 0
    order = Command(kind="stop", exit_code=130)
    stopped = run_attempt(tmp_path / "run", spec, ranks=2, script=Script(order=order, order_step=0, order_rank=1))
    assert stopped.codes == [130, 130], stopped.errors[0]
    (saved,) = stopped.of("checkpoint.committed")
    assert saved.step == max(stopped.losses) < STEPS
    resumed = run_attempt(tmp_path / "run", spec, ranks=2, attempt=2)
    assert resumed.codes == [0, 0]
    assert min(resumed.losses) == saved.step + 1


def test_an_order_without_time_or_wish_for_a_save_writes_none(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "cache")
    spec["checkpoint"]["every_steps"] = 0
    order = Command(kind="stop", exit_code=75, save=False)
    stopped = run_attempt(tmp_path / "run", spec, ranks=2, script=Script(order=order))
    assert stopped.codes == [75, 75]
    assert not stopped.of("checkpoint.begun")


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "cache", training__optimizer={"learning_rate": 1e38, "max_grad_norm": None})
    done = run_attempt(tmp_path / "run", spec, ranks=2)
    assert 0 not in done.codes
    last = max(done.losses)
    message = done.errors[0]
    assert f"step {last + 1}:" in message and "the update was not applied" in message
    assert "sequences" in message
    assert all(event.step is None or event.step <= last for event in done.of("step"))
    (note,) = [event for event in done.of("run.message") if event.step == last + 1]
    assert "not applied" in note.detail["text"]


def test_resume_from_a_snapshot_in_memory(tmp_path: Path) -> None:
    """The tier that outlives a rank: same layout, to the bit; the checkpoint folder is not looked at."""
    from muster.checkpoint_format.snapshot_ring import file_name
    from muster.core.snapshots import SnapshotCopy
    from muster.core.types import Layout
    from muster.protocol.ranks import Restore, ShardSource

    memory = tmp_path / "memory"
    memory.mkdir()
    spec = spec_of(tmp_path / "cache")
    spec["checkpoint"]["every_steps"] = 0
    whole = run_attempt(tmp_path / "whole", spec, ranks=2)
    broken = run_attempt(tmp_path / "broken", spec, ranks=2, script=Script(kill_step=6, snapshot_dir=str(memory)))
    assert broken.codes[0] == -9
    layout = Layout(dp_shard=2)
    sources = {
        rank: ShardSource(
            path=str(memory / file_name("own", layout.key, rank)),
            copy=SnapshotCopy(step=5, attempt=1, rank=rank, layout=layout.key, host="host-0", tier="memory"),
        )
        for rank in range(2)
    }
    restore = Restore(step=5, attempt=1, sources=sources, layout=layout)
    resumed = run_attempt(
        tmp_path / "broken", spec, ranks=2, attempt=2, script=Script(snapshot_dir=str(memory), restore=restore)
    )
    assert resumed.codes == [0, 0], resumed.errors[0]
    assert sorted(resumed.losses) == [6, 7, 8]
    same(whole, resumed, range(6, STEPS + 1))
    assert resumed.state_hash == whole.state_hash
