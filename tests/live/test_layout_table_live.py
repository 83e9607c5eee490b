"""Every layout of up to eight CPU ranks computes what one process does, and does so after a kill -9 too."""

import math
from pathlib import Path
from typing import Any

import pytest
from trainranks import Script, run_attempt, small

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.timeout(600)]

STEPS = 6
TOLERANCE = 1e-6
#: dp_replicate, dp_shard, tp. The model has four heads and two of keys: tp 2 is all there is.
LAYOUTS = [
    *((replicas, 1, 1) for replicas in (2, 3, 4, 6, 8)),
    *((1, shards, 1) for shards in (2, 3, 4, 6, 8)),
    *((2, 2, 1), (2, 3, 1), (3, 2, 1), (2, 4, 1), (4, 2, 1)),
    *((1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 3, 2), (3, 1, 2), (2, 2, 2), (1, 4, 2), (4, 1, 2)),
]


def spec_of(cache: Path, layout: tuple[int, int, int], **training: Any) -> dict[str, Any]:
    replicas, shards, tp = layout
    spec = small(cache, training__global_batch_size=12, training__steps=STEPS, checkpoint__every_steps=2)
    spec["training"] |= training
    spec["parallelism"] = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}
    return spec


def attempt(run_dir: Path, spec: dict[str, Any], layout: tuple[int, int, int], number: int = 1, **script: Any) -> Any:
    replicas, shards, tp = layout
    sizes = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}
    ranks = replicas * shards * tp
    return run_attempt(run_dir, spec, ranks=ranks, attempt=number, layout=sizes, script=Script(**script))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process, in float sums and in exact ones."""
    folder = tmp_path_factory.mktemp("one")
    alone = (1, 1, 1)
    found = {
        kind: attempt(folder / kind, spec_of(folder / "cache", alone, exact=kind == "exact"), alone)
        for kind in ("float", "exact")
    }
    assert all(done.codes == [0] for done in found.values())
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "r{}s{}t{}".format(*layout))
def test_it_is_what_one_process_computes(tmp_path: Path, one: Any, layout: tuple[int, int, int]) -> None:
    ranks = layout[0] * layout[1] * layout[2]
    done = attempt(tmp_path / "float", spec_of(tmp_path / "cache", layout), layout)
    assert done.codes == [0] * ranks, done.errors[0]
    for step, loss in one["float"].losses.items():
        assert done.losses[step] == pytest.approx(loss, rel=TOLERANCE), step
        assert done.norms[step] == pytest.approx(one["float"].norms[step], rel=5 * TOLERANCE), step
    exact = layout[2] == 1  # tensor parallel splits sums inside a layer: refused
    spec = spec_of(tmp_path / "cache", layout, exact=exact)
    killed = attempt(tmp_path / "killed", spec, layout, kill_step=4, kill_rank=ranks - 1)
    assert -9 in killed.codes
    again = attempt(tmp_path / "killed", spec, layout, number=2)
    assert again.codes == [0] * ranks, again.errors[0]
    assert again.state_hash == (one["exact"] if exact else done).state_hash


@pytest.mark.parametrize(
    "layout", [{"cp": 2}, {"cp": 4}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}], ids=str
)
def test_context_parallel_at_4k_packed_documents(tmp_path: Path, layout: dict[str, int]) -> None:
    """Against one process, and after a kill -9 against itself. No exact sums: gradients are summed inside a layer."""
    spec = small(
        tmp_path / "cache", training__sequence_length=4096, training__global_batch_size=2, training__steps=4,
        model__config__max_position_embeddings=4096, data__sources=[{"type": "text2sql", "rows": 2000}],
        checkpoint__every_steps=2,
    )  # fmt: skip
    alone = run_attempt(tmp_path / "alone", spec, ranks=1)
    assert alone.codes == [0], alone.errors[0]
    sizes = {"dp_shard": 1, **layout}
    ranks = math.prod(sizes.values())
    spec["parallelism"] = sizes
    done = run_attempt(tmp_path / "shared", spec, ranks=ranks, layout=sizes)
    assert done.codes == [0] * ranks, done.errors[0]
    for step, loss in alone.losses.items():
        assert done.losses[step] == pytest.approx(loss, rel=TOLERANCE), step
        assert done.norms[step] == pytest.approx(alone.norms[step], rel=5 * TOLERANCE), step
    killed = run_attempt(tmp_path / "killed", spec, ranks=ranks, layout=sizes, script=Script(kill_step=4, kill_rank=1))
    assert -9 in killed.codes
    again = run_attempt(tmp_path / "killed", spec, ranks=ranks, layout=sizes, attempt=2)
    assert again.codes == [0] * ranks and again.state_hash == done.state_hash, again.errors[0]
