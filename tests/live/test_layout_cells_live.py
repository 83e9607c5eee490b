"""Pairs of layout axes, axes with features, and larger layouts train what one process does, after a kill -9 too."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trainranks import Outcome, Script, run_attempt, small

from muster.config.compatibility import AXES, cells

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

AXIS_NAMES = [axis.name for axis in AXES]
#: What one process computes as well, on a CPU.
TRAINED = ("lora", "dora", "compile", "packing", "exact")
PAIRS = [(one.name, other.name) for one, other, refused in cells() if refused is None]
CELLS = [(dict.fromkeys({*pair} & {*AXIS_NAMES}, 2), [*({*pair} - {*AXIS_NAMES})]) for pair in PAIRS
         if pair[1] in (*AXIS_NAMES, *TRAINED)]  # fmt: skip
#: dp_replicate, dp_shard, tp, pp, cp. The model has four heads and two of keys: tp 2 is all there is.
LARGER = [
    (3, 1, 1, 1, 1), (8, 1, 1, 1, 1), (1, 3, 1, 1, 1), (1, 8, 1, 1, 1), (2, 3, 1, 1, 1), (2, 4, 1, 1, 1),
    (1, 3, 2, 1, 1), (3, 1, 2, 1, 1), (2, 2, 2, 1, 1), (1, 4, 2, 1, 1), (1, 1, 1, 4, 1), (1, 2, 1, 4, 1),
    (2, 1, 1, 3, 1), (1, 4, 1, 2, 1), (1, 3, 1, 2, 1), (2, 2, 1, 2, 1), (1, 2, 2, 2, 1), (2, 1, 2, 2, 1),
    (1, 1, 2, 4, 1), (1, 1, 1, 1, 4), (2, 1, 1, 1, 4), (1, 2, 2, 1, 2), (1, 2, 1, 2, 2), (1, 1, 2, 2, 2),
    (2, 1, 2, 1, 2),
]  # fmt: skip
STEPS = 10
LOSS, NORM = 1e-5, 5e-5
#: Those that no other test of CI has; all others at night.
IN_CI = ("dp_shard2-tp2", "cp2-tp2", "cp2-pp2", "dp_shard2-pp2", "cp2-dp_shard2", "tp2-lora", "cp2-lora", "pp2-exact")


def named(case: tuple[dict[str, int], list[str]]) -> str:
    return "-".join([*(f"{axis}{size}" for axis, size in sorted(case[0].items())), *case[1]])


def spec_of(cache_dir: Path, sizes: dict[str, int], *features: str) -> dict[str, Any]:
    """Ten steps of a model with four layers."""
    spec = small(
        cache_dir, training__steps=STEPS, training__global_batch_size=4, model__config__num_hidden_layers=4,
        model__config__head_dim=8, data__packing="packing" in features, training__exact="exact" in features,
        training__compile="compile" in features, parallelism={"dp_shard": 1, **sizes},
    )  # fmt: skip
    if {"lora", "dora"} & {*features}:
        spec["model"]["lora"] = {"rank": 4, "dora": "dora" in features}
    return spec


def trained(run_dir: Path, cache_dir: Path, sizes: dict[str, int], *features: str) -> Outcome:
    size = math.prod(sizes.values())
    layout = {"dp_shard": 1, **sizes}
    spec = spec_of(cache_dir, sizes, *features)
    done = run_attempt(run_dir, spec, ranks=size, layout=layout, script=Script(unit_per_layer=True))
    assert done.codes == [0] * size, done.errors[0]
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process trains with some features."""
    folder = tmp_path_factory.mktemp("one")
    return cache(lambda *features: trained(folder / "-".join(["one", *features]), folder / "cache", {}, *features))


@pytest.mark.parametrize("case", [
    *(pytest.param(case, id=named(case), marks=() if named(case) in IN_CI else pytest.mark.soak) for case in CELLS),
    *(
        pytest.param((dict(zip(AXIS_NAMES, sizes, strict=True)), ["exact" if sizes[2] == sizes[4] == 1 else "packing"]),
                     id="-".join(map(str, sizes)), marks=pytest.mark.soak)
        for sizes in LARGER
    ),
])  # fmt: skip
def test_a_layout_trains_what_one_process_does(tmp_path: Path, one: Any, case: Any) -> None:
    sizes, features = case
    done, alone = trained(tmp_path / "run", tmp_path / "cache", sizes, *features), one(*features)
    if "exact" in features:
        assert (done.losses, done.norms) == (alone.losses, alone.norms)
    assert done.losses == pytest.approx(alone.losses, rel=LOSS) and len(done.losses) == STEPS
    assert done.norms == pytest.approx(alone.norms, rel=NORM)


@pytest.mark.parametrize(("sizes", "features"), [
    ({"cp": 2, "tp": 2}, ["lora"]),
    ({"pp": 2, "cp": 2}, []),
    *(pytest.param({one: 2, other: 2}, [], marks=pytest.mark.soak)
      for one, other in (("dp_shard", "tp"), ("pp", "tp"), ("dp_shard", "cp"), ("dp_replicate", "cp"))),
], ids=str)  # fmt: skip
def test_a_killed_rank_of_a_composed_layout(tmp_path: Path, sizes: dict[str, int], features: list[str]) -> None:
    """The same bits as without the kill -9, and an export that computes what was trained."""
    spec, size = spec_of(tmp_path / "cache", sizes, "packing", *features), math.prod(sizes.values())
    spec["checkpoint"]["every_steps"] = 3
    done = run_attempt(tmp_path / "done", spec, ranks=size, layout=sizes)
    assert done.codes == [0] * size, done.errors[0]
    killed = run_attempt(tmp_path / "killed", spec, ranks=size, layout=sizes, script=Script(kill_step=5, kill_rank=2))
    assert -9 in killed.codes
    again = run_attempt(tmp_path / "killed", spec, ranks=size, layout=sizes, attempt=2)
    assert again.codes == [0] * size, again.errors[0]
    assert min(again.losses) == 4 and again.state_hash == done.state_hash
    program = [sys.executable, "-P", "-m", "muster.train.export.hf_folder"]
    argv = [*program, "--run-dir", str(tmp_path / "killed"), "--out", str(tmp_path / "out")]
    exported = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert json.loads(exported.stdout.splitlines()[-1])["checked"]["relative_difference"] < 1e-5
