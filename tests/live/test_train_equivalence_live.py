"""Every way of laying a step out computes the same training: against one plain loop, and against stored losses.

Tolerances are float32's: another order of summation moves a loss near 5 by a few 1e-7 over six steps (measured
here: at most 4e-7 in the loss, 1e-6 in the gradient norm).
"""

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_loop import reference_losses
from trainranks import Outcome, Script, prepared_run, run_attempt, small

pytestmark = pytest.mark.live

LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5
STEPS = 6
FACTORS: dict[str, list[Any]] = {
    "ranks": [2, 4],
    "accumulation": [False, True],
    "packing": [True, False],
    "recompute": ["none", "full", "selective"],
    "per_layer": [False, True],
}
#: Every pair of values of any two factors occurs in at least one row (checked below).
CASES: list[tuple[Any, ...]] = [
    (2, True, True, "none", False),
    (4, True, False, "full", True),
    (2, False, False, "selective", False),
    (4, False, True, "full", False),
    (2, False, True, "full", True),
    (4, True, True, "selective", True),
    (4, False, False, "none", True),
]
GOLDEN = Path(__file__).parents[1] / "golden" / "losses"


def test_the_cases_cover_every_pair() -> None:
    names = list(FACTORS)
    for one, two in itertools.combinations(range(len(names)), 2):
        seen = {(case[one], case[two]) for case in CASES}
        wanted = set(itertools.product(FACTORS[names[one]], FACTORS[names[two]]))
        assert wanted <= seen, (names[one], names[two], wanted - seen)


def shaped(cache: Path, ranks: int, accumulation: bool, packing: bool, recompute: str) -> dict[str, Any]:
    batch = 8 if accumulation else 4
    micro = 1 if accumulation else 4 // ranks
    return small(
        cache,
        training__global_batch_size=batch,
        training__micro_batch_size=micro,
        training__steps=STEPS,
        training__activation_checkpointing=recompute,
        data__packing=packing,
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(accumulation, packing) -> the plain loop's (loss, norm) of each step, computed when first asked for."""
    folder = tmp_path_factory.mktemp("reference")
    found: dict[tuple[bool, bool], list[tuple[float, float]]] = {}

    def of(accumulation: bool, packing: bool) -> list[tuple[float, float]]:
        key = (accumulation, packing)
        if key not in found:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            run_dir = folder / f"{accumulation}-{packing}"
            spec = prepared_run(run_dir, shaped(folder / "cache", 2, accumulation, packing, "none"))
            found[key] = reference_losses(spec, run_dir, STEPS)
            torch.set_num_threads(threads)
        return found[key]

    return of


def compare(done: Outcome, reference: list[tuple[float, float]], ranks: int) -> None:
    assert done.codes == [0] * ranks, done.errors[0]
    assert len(done.losses) == len(reference)
    for step, (loss, norm) in enumerate(reference, start=1):
        assert abs(done.losses[step] - loss) < LOSS_TOLERANCE, step
        assert abs(done.norms[step] - norm) < NORM_TOLERANCE, step
    assert done.losses[STEPS] < done.losses[1] - 0.1, "nothing was learned, so equality would mean little"


@pytest.mark.parametrize(("ranks", "accumulation", "packing", "recompute", "per_layer"), CASES)
def test_ranks_agree_with_the_plain_loop(
    tmp_path: Path, references: Any, ranks: int, accumulation: bool, packing: bool, recompute: str, per_layer: bool
) -> None:
    spec = shaped(tmp_path / "cache", ranks, accumulation, packing, recompute)
    done = run_attempt(tmp_path / "run", spec, ranks=ranks, script=Script(unit_per_layer=per_layer))
    compare(done, references(accumulation, packing), ranks)


def test_reducing_every_round_agrees_with_the_plain_loop(tmp_path: Path, references: Any) -> None:
    """What large models do, whose whole gradients no rank can hold between micro-batches."""
    spec = shaped(tmp_path / "cache", 2, True, True, "none")
    script = Script(unit_per_layer=True, reduce_every_round=True)
    done = run_attempt(tmp_path / "run", spec, ranks=2, script=script)
    compare(done, references(True, True), 2)


def test_a_world_size_that_does_not_divide_the_batch(tmp_path: Path, references: Any) -> None:
    spec = shaped(tmp_path / "cache", 2, True, True, "none")
    done = run_attempt(tmp_path / "run", spec, ranks=3)
    compare(done, references(True, True), 3)
    for event in done.of("step"):
        assert event.detail["padding_rounds"] == 1  # 8 micro-batches in 3 rounds of 3


def cpu_model() -> str:
    """All by which libraries choose kernels and block sizes: AVX512 alone names several kinds that round otherwise."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "cache size", "siblings", "flags")
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    found = [value.strip() for key, _colon, value in lines if key.strip() in wanted]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "ranks"), [("one-rank", 1), ("two-ranks", 2), ("exact", 2)])
def test_golden_losses(tmp_path: Path, name: str, ranks: int) -> None:
    """``MUSTER_REGENERATE=1 pytest tests/live/test_train_equivalence_live.py -k golden`` writes them anew.

    To the bit on the kind of machine that wrote them; elsewhere other kernels round otherwise.
    """
    spec = small(tmp_path / "cache", training__steps=STEPS, training__exact=name == "exact")
    done = run_attempt(tmp_path / "run", spec, ranks=ranks)
    assert done.codes == [0] * ranks, done.errors[0]
    machine = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "model": cpu_model()}
    found = {
        "machine": machine,
        "loss": [value.hex() for value in done.losses.values()],
        "grad_norm": [value.hex() for value in done.norms.values()],
    }
    path = GOLDEN / f"{name}.json"
    if os.environ.get("MUSTER_REGENERATE"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(path.read_text())
    if golden["machine"] == machine:
        assert found == golden
        return
    for key, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
        for mine, stored in zip(found[key], golden[key], strict=True):
            assert abs(float.fromhex(mine) - float.fromhex(stored)) < tolerance
