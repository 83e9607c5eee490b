"""The orders of a pipeline beside 1F1B against one process, as in ``test_pipeline_live``: losses and norms to 1e-6, the
state's hash where sums are exact; and what is saved in one order continued in another."""

from pathlib import Path
from typing import Any

import pytest
from test_pipeline_live import alone, assert_close, hashes, model_of, named, run_on
from trainranks import Outcome, Script, run_attempt, small

pytestmark = pytest.mark.live
__all__ = ["alone"]

TWO_CHUNKS, THREE_CHUNKS = (2, False, False), (3, False, False)
WEIGHTS_APART, IN_A_V = (1, True, False), (2, True, True)
KEYS: dict[tuple[int, bool, bool], dict[str, Any]] = {
    TWO_CHUNKS: {"parallelism__pp_schedule": "interleaved"},
    THREE_CHUNKS: {"parallelism__pp_schedule": "interleaved", "parallelism__pp_chunks": 3},
    WEIGHTS_APART: {"parallelism__pp_schedule": "zero_bubble", "parallelism__dp_shard": 1},
    IN_A_V: {"parallelism__pp_schedule": "zbv", "parallelism__dp_shard": 1},
}
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


def keys_of(order: tuple[int, bool, bool] | None) -> dict[str, Any]:
    return {} if order is None else KEYS[order]


def six_layers(**changes: Any) -> dict[str, Any]:
    return {"model__config": model_of(num_hidden_layers=6, **changes)}


def run_in(order: tuple[int, bool, bool], folder: Path, layout: dict[str, int], **changes: Any) -> Outcome:
    script = Script(stage_order=order)
    return run_on(folder, layout, script=script, **changes, **KEYS[order], parallelism__pp=layout["pp"])


def assert_exact(order: tuple[int, bool, bool], folder: Path, alone: Any, layout: dict[str, int]) -> None:
    exact = alone(training__exact=True, **six_layers())
    done = run_in(order, folder / "run", layout, training__exact=True, **six_layers())
    assert hashes(done) == hashes(exact) and None not in hashes(done)
    assert done.losses == exact.losses and done.norms == exact.norms


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=named(layout), marks=() if number < IN_CI else pytest.mark.soak)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_exact_chunks_have_the_hash_of_one_process(tmp_path: Path, alone: Any, layout: dict[str, int]) -> None:
    assert_exact(TWO_CHUNKS, tmp_path, alone, layout)


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
    assert_close(alone(**changes), run_in(THREE_CHUNKS, tmp_path / "run", {"pp": 2, "dp_shard": 2}, **changes))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 3},
        pytest.param({"pp": 2}, marks=pytest.mark.soak),
        pytest.param({"pp": 2, "dp_replicate": 2}, marks=pytest.mark.soak),
        pytest.param({"pp": 4, "dp_replicate": 2}, marks=pytest.mark.soak),
    ],
    ids=named,
)
def test_exact_with_weights_apart_has_the_hash_of_one_process(
    tmp_path: Path, alone: Any, layout: dict[str, int]
) -> None:
    assert_exact(WEIGHTS_APART, tmp_path, alone, layout)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(six_layers(tie_word_embeddings=True), id="tied"),
        pytest.param({**six_layers(), "model__lora": {"rank": 4}}, id="lora", marks=pytest.mark.soak),
        pytest.param(
            {**six_layers(), "training__activation_checkpointing": "full"}, id="recompute", marks=pytest.mark.soak
        ),
        pytest.param(
            {**six_layers(), "training__activation_checkpointing": "selective"}, id="selective", marks=pytest.mark.soak
        ),
        pytest.param({**six_layers(), "data__packing": False}, id="unpacked", marks=pytest.mark.soak),
        pytest.param(six_layers(model_type="qwen2"), id="biases", marks=pytest.mark.soak),
    ],
)
def test_variants_with_weights_apart(tmp_path: Path, alone: Any, changes: dict[str, Any]) -> None:
    assert_close(alone(**changes), run_in(WEIGHTS_APART, tmp_path / "run", {"pp": 2}, **changes))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 3},
        {"pp": 2},
        pytest.param({"pp": 2, "dp_replicate": 2}, marks=pytest.mark.soak),
        pytest.param({"pp": 3, "dp_replicate": 2}, marks=pytest.mark.soak),
    ],
    ids=named,
)
def test_exact_in_a_v_has_the_hash_of_one_process(tmp_path: Path, alone: Any, layout: dict[str, int]) -> None:
    assert_exact(IN_A_V, tmp_path, alone, layout)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param({"pp": 2, "dp_replicate": 2}, six_layers(tie_word_embeddings=True), id="tied"),
        pytest.param({"pp": 2}, {**six_layers(), "model__lora": {"rank": 4}}, id="lora", marks=pytest.mark.soak),
        pytest.param(
            {"pp": 3}, {**six_layers(), "training__activation_checkpointing": "full"}, id="recompute",
            marks=pytest.mark.soak,
        ),
        pytest.param({"pp": 2}, {**six_layers(), "data__packing": False}, id="unpacked", marks=pytest.mark.soak),
        pytest.param({"pp": 2}, six_layers(model_type="qwen2"), id="biases", marks=pytest.mark.soak),
        pytest.param({"pp": 3}, {**six_layers(), "training__global_batch_size": 2}, id="few", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_variants_in_a_v(tmp_path: Path, alone: Any, layout: dict[str, int], changes: dict[str, Any]) -> None:
    assert_close(alone(**changes), run_in(IN_A_V, tmp_path / "run", layout, **changes))


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout", [{"pp": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 2, "dp_replicate": 2, "dp_shard": 2}], ids=named
)
def test_chunks_compute_what_one_process_does(tmp_path: Path, alone: Any, layout: dict[str, int]) -> None:
    assert_close(alone(**six_layers()), run_in(TWO_CHUNKS, tmp_path / "run", layout, **six_layers()))


@pytest.mark.parametrize(
    ("order", "shards"),
    [
        pytest.param(TWO_CHUNKS, 1, id="chunks"),
        pytest.param(IN_A_V, 1, id="v"),
        pytest.param(TWO_CHUNKS, 2, id="shards", marks=pytest.mark.soak),
    ],
)
def test_a_run_goes_on_in_another_order(tmp_path: Path, order: tuple[int, bool, bool], shards: int) -> None:
    """Saved with two chunks a stage, continued by 1F1B; and the reverse. Bit for bit, held-out loss and answers
    included."""
    changes: dict[str, Any] = {
        **six_layers(), "training__exact": True, "checkpoint__every_steps": 2, "evaluation__num_sequences": 4,
        "evaluation__num_questions": 3, "evaluation__max_new_tokens": 6, "evaluation__samples": 1,
        "training__state_hash_every_steps": 1, "parallelism__pp": 2,
    }  # fmt: skip
    layout = {"pp": 2, "dp_shard": shards}
    ends = []
    for name, before, after in [("joined", order, None), ("cut", None, order)]:
        folder = tmp_path / name
        first = {**changes, **keys_of(before), "training__steps": 2}
        run_on(folder, layout, **first, data__cache_dir=str(tmp_path / "cache"))
        spec = small(tmp_path / "cache", **{**changes, **keys_of(after), "training__steps": 4})
        script = Script(stage_order=after or (1, False, False))
        done = run_attempt(folder, spec, ranks=2 * shards, layout=layout, attempt=2, script=script)
        assert done.codes == [0, 0] * shards, done.errors
        assert [event.step for event in done.of("checkpoint.restored")] == [2]
        figures = {key: value for key, value in done.of("eval")[-1].detail.items() if key != "duration_ns"}
        ends.append((hashes(done), figures, [event.detail["completion"] for event in done.of("generation")]))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == 2 and ends[0][1]["questions"] == 3
