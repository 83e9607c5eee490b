"""The orders of a pipeline beside 1F1B against one process, as in ``test_pipeline_live``: losses and norms to 1e-6, the
state's hash where sums are exact; and what is saved in one order continued in another."""

from pathlib import Path
from typing import Any

import pytest
from test_pipeline_live import alone, assert_close, hashes, model_of, named, run_on
from trainranks import run_attempt, small

pytestmark = pytest.mark.live
__all__ = ["alone"]

INTERLEAVED = {"parallelism__pp_schedule": "interleaved"}
#: Layouts of interleaved chunks; the first few are of every CI run.
LAYOUTS = [
    {"pp": 3},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "dp_replicate": 3},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"pp": 3, "dp_shard": 2},
]
IN_CI = 2


def six_layers(**changes: Any) -> dict[str, Any]:
    return {"model__config": model_of(num_hidden_layers=6, **changes)}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=named(layout), marks=() if number < IN_CI else pytest.mark.soak)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_exact_chunks_have_the_hash_of_one_process(tmp_path: Path, alone: Any, layout: dict[str, int]) -> None:
    exact = alone(training__exact=True, **six_layers())
    done = run_on(tmp_path / "run", layout, training__exact=True, **six_layers(), **INTERLEAVED)
    assert hashes(done) == hashes(exact) and None not in hashes(done)
    assert done.losses == exact.losses and done.norms == exact.norms


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(six_layers(tie_word_embeddings=True), id="tied"),
        pytest.param({**six_layers(), "model__lora": {"rank": 4}}, id="lora", marks=pytest.mark.soak),
        pytest.param(
            {**six_layers(), "training__activation_checkpointing": "full"}, id="recompute", marks=pytest.mark.soak
        ),
        pytest.param({**six_layers(), "data__packing": False}, id="unpacked", marks=pytest.mark.soak),
        pytest.param({**six_layers(), "training__global_batch_size": 7}, id="padding", marks=pytest.mark.soak),
        pytest.param({**six_layers(), "training__global_batch_size": 2}, id="few", marks=pytest.mark.soak),
    ],
)
def test_variants_of_chunks(tmp_path: Path, alone: Any, changes: dict[str, Any]) -> None:
    chunks = {**INTERLEAVED, "parallelism__pp_chunks": 3}
    assert_close(alone(**changes), run_on(tmp_path / "run", {"pp": 2, "dp_shard": 2}, **changes, **chunks))


@pytest.mark.soak
def test_chunks_with_tensor_parallel(tmp_path: Path, alone: Any) -> None:
    assert_close(alone(**six_layers()), run_on(tmp_path / "run", {"pp": 2, "tp": 2}, **six_layers(), **INTERLEAVED))


def test_a_run_goes_on_in_another_order(tmp_path: Path) -> None:
    """Saved with two chunks a stage, continued by 1F1B; and the reverse. Bit for bit, held-out loss and answers
    included."""
    changes: dict[str, Any] = {
        **six_layers(), "training__exact": True, "checkpoint__every_steps": 2, "evaluation__num_sequences": 4,
        "evaluation__num_questions": 3, "evaluation__max_new_tokens": 6, "evaluation__samples": 1,
        "training__state_hash_every_steps": 1,
    }  # fmt: skip
    ends = []
    for name, before, after in [("joined", INTERLEAVED, {}), ("cut", {}, INTERLEAVED)]:
        folder = tmp_path / name
        run_on(
            folder, {"pp": 2}, **{**changes, **before, "training__steps": 2}, data__cache_dir=str(tmp_path / "cache")
        )
        done = run_attempt(
            folder, small(tmp_path / "cache", **{**changes, **after, "training__steps": 4}), ranks=2, layout={"pp": 2},
            attempt=2,
        )  # fmt: skip
        assert done.codes == [0, 0], done.errors
        assert [event.step for event in done.of("checkpoint.restored")] == [2]
        figures = {key: value for key, value in done.of("eval")[-1].detail.items() if key != "duration_ns"}
        ends.append((hashes(done), figures, [event.detail["completion"] for event in done.of("generation")]))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == 2 and ends[0][1]["questions"] == 3
