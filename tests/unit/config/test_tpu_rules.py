"""What the trainer on TPUs does not do is refused by its key."""

import pytest

from muster.config import validation
from muster.config.spec import RunSpec

RUN = {
    "name": "tpu",
    "model": {"config": {"model_type": "llama"}, "tokenizer": {"kind": "word"}, "dtype": "float32"},
    "data": {"sources": [{"type": "text2sql", "level": 1}]},
    "training": {"steps": 3},
    "resources": {"device": "tpu"},
}


def refused(**changes):
    given = {section: {**keys} if isinstance(keys, dict) else keys for section, keys in RUN.items()}
    for key, value in changes.items():
        *path, last = key.split("__")
        place = given
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return {problem.key for problem in validation.problems(RunSpec.model_validate(given))}


def test_tensor_parallel_is_of_a_hosts_chips_and_no_matter_of_ranks():
    spec = RunSpec.model_validate({**RUN, "parallelism": {"tp": 2}})
    assert refused(parallelism__tp=2) == set() and spec.rank_axes["tp"] == 1
    assert "parallelism" in refused(parallelism__tp=2, resources__device="cpu")


@pytest.mark.parametrize("backend", ["local", "gke", "vertex", "gce"])
def test_a_run_without_any_of_it_is_taken(backend):
    assert refused(backend=backend) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training__exact", True),
        ("training__compile", True),
        ("training__optimizer__name", "adamw_8bit"),
        ("model__attention", "sdpa"),
        ("model__lora", {"rank": 4, "dropout": 0.1, "dora": True}),
        ("resources__ranks_per_host", 2),
        ("parallelism__pp", 2),
        ("training__local_steps", 4),
        ("backend", "slurm"),
    ],
)
def test_what_it_does_not_do_is_refused(key, value):
    named = {"model__lora": "model.lora.dropout", "backend": "resources.device"}.get(key, key.replace("__", "."))
    assert named in refused(**{key: value})
    assert ("model.lora.dora" in refused(**{key: value})) == (key == "model__lora")
    elsewhere = ("parallelism__pp", "training__local_steps")
    assert named not in refused(**{key: value}, resources__device="cpu") or key in elsewhere
