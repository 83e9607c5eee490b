"""Every combination that the table refuses is refused by the run file's validation, in one line with its reason."""

import pytest
from test_validation import GOOD

from muster.config import load
from muster.config.compatibility import REFUSALS, cells
from muster.core.errors import RunFileError

#: How a run file asks for what is no axis.
ASKED = {
    "lora": ["model.lora={}"],
    "float8": ["training.precision=fp8", "resources.device=cuda", "model.dtype=bfloat16"],
    "compile": ["training.compile=true"],
    "experts": ["model.config.model_type=mixtral", "model.config.num_local_experts=4"],
    "exact": ["training.exact=true"],
    "split_backward": ["parallelism.pp=2", "parallelism.dp_shard=1", "parallelism.pp_schedule=zero_bubble"],
    "local_steps": ["training.local_steps=2", "parallelism.dp_replicate=2"],
}


def problems(*given: str):
    try:
        load.loads(GOOD, given, environment=False)
    except RunFileError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: f"{each.refused}-{each.other}")
def test_it_is_refused_and_each_of_the_two_alone_is_not(refusal):
    one, other = (ASKED.get(name, [f"parallelism.{name}=2"]) for name in (refusal.refused, refusal.other))
    both, *alone = (
        [p for p in problems(*given) if refusal.reason in p.message] for given in ([*one, *other], one, other)
    )
    assert [(each.key, each.hint) for each in both] == [(refusal.key, refusal.hint)] and alone == [[], []]


def test_the_share_of_refused_cells_only_falls():
    table = list(cells())
    assert sum(refusal is not None for *_, refusal in table) <= 10 and len(table) == 50
    assert len({frozenset((each.refused, each.other)) for each in REFUSALS}) == len(REFUSALS)


def test_adapters_beside_tp_divide_among_the_ranks_that_cut_them():
    def of(*given):
        found = problems("resources.ranks_per_host=6", "parallelism.tp=2", *given)
        return [each.message for each in found if each.key == "model.lora.rank"]

    assert of("model.lora={rank: 16}") == ["16 does not divide among the 3 ranks that cut an adapter beside tp = 2"]
    assert of("model.lora={rank: 12}") == of("model.lora={rank: 16}", "parallelism.dp_replicate=3") == []
