"""Variants of pipeline stages against one process; and what is saved by one layout continued by another."""

from pathlib import Path
from typing import Any

import pytest
from trainranks import Outcome, Script, run_attempt, small

pytestmark = pytest.mark.live

RELATIVE = 1e-6


def named(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


def model_of(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256,
    }  # fmt: skip
    return {**found, **changes}


def run_on(folder: Path, layout: dict[str, int], *, script: Script | None = None, **changes: Any) -> Outcome:
    ranks = 1
    for size in layout.values():
        ranks *= size
    spec = small(
        folder.parent / "cache",
        **{"model__config": model_of(), "training__state_hash_every_steps": 1, "training__steps": 4, **changes},
    )
    done = run_attempt(folder, spec, ranks=ranks, layout=layout, script=script)
    assert done.codes == [0] * ranks, done.errors[0] + done.errors[-1]
    return done


def hashes(done: Outcome) -> list[str]:
    return [event.detail["state_hash"] for event in done.of("step")]


def assert_close(one: Outcome, other: Outcome) -> None:
    assert one.losses.keys() == other.losses.keys() and len(one.losses) >= 3
    for step, loss in one.losses.items():
        assert other.losses[step] == pytest.approx(loss, rel=RELATIVE)
        assert other.norms[step] == pytest.approx(one.norms[step], rel=10 * RELATIVE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keys of the run file -> the run of one process."""
    found: dict[str, Outcome] = {}

    def of(**changes: Any) -> Outcome:
        key = repr(sorted(changes.items()))
        if key not in found:
            folder = tmp_path_factory.mktemp("alone")
            found[key] = run_on(folder / "run", {"dp_shard": 1}, **changes)
        return found[key]

    return of


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model__config": model_of(tie_word_embeddings=True)}, id="tied"),
        pytest.param({"training__activation_checkpointing": "full"}, id="recompute", marks=pytest.mark.soak),
        pytest.param({"training__global_batch_size": 7}, id="padding", marks=pytest.mark.soak),
    ],
)
def test_variants(tmp_path: Path, alone: Any, changes: dict[str, Any]) -> None:
    assert_close(alone(**changes), run_on(tmp_path / "run", {"pp": 2, "dp_shard": 2}, **changes))


def test_a_run_goes_on_at_another_number_of_stages(tmp_path: Path) -> None:
    """Saved at pp 3, continued at pp 1; and the reverse. Bit for bit, held-out loss and answers included."""
    changes: dict[str, Any] = {
        "training__exact": True, "checkpoint__every_steps": 2, "evaluation__num_sequences": 4,
        "evaluation__num_questions": 3, "evaluation__max_new_tokens": 6, "evaluation__samples": 1,
    }  # fmt: skip
    ends = {}
    for name, (before, after) in {"joined": (3, 1), "cut": (1, 3)}.items():
        folder = tmp_path / name
        cache = {"data__cache_dir": str(tmp_path / "cache")}
        run_on(folder, {"pp": before}, **{**changes, "training__steps": 2}, **cache)
        spec = small(
            tmp_path / "cache",
            **{"model__config": model_of(), "training__state_hash_every_steps": 1, "training__steps": 4, **changes},
        )
        done = run_attempt(folder, spec, ranks=after, layout={"pp": after}, attempt=2)
        assert done.codes == [0] * after, done.errors
        assert [event.step for event in done.of("checkpoint.restored")] == [2]
        figures = {key: value for key, value in done.of("eval")[-1].detail.items() if key != "duration_ns"}
        ends[name] = (hashes(done), figures, [event.detail["completion"] for event in done.of("generation")])
    assert ends["joined"] == ends["cut"]
    assert len(ends["joined"][0]) == 2 and ends["joined"][1]["questions"] == 3
