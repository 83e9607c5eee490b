"""Which layers a stage gets, and in which order it works."""

import pytest

from muster.core.flops import ModelShape
from muster.core.layout import cut_layers
from muster.train.pipeline import Action, one_forward_one_backward


@pytest.mark.parametrize(
    ("layers", "stages", "last", "sizes"),
    [
        (8, 1, 3.0, [8]),
        (8, 4, 0.0, [2, 2, 2, 2]),
        (8, 4, 2.0, [3, 2, 2, 1]),
        (32, 4, 2.4, [9, 9, 8, 6]),
        (5, 3, 0.0, [2, 1, 2]),
        (3, 3, 9.0, [1, 1, 1]),
    ],
)
def test_stages_share_layers_and_head(layers, stages, last, sizes):
    ranges = cut_layers(layers, stages, last=last)
    assert [len(own) for own in ranges] == sizes
    assert [index for own in ranges for index in own] == list(range(layers))


def test_no_other_cut_has_a_lighter_heaviest_stage():
    for layers, stages, last in [(7, 3, 1.5), (12, 5, 4.0), (9, 2, 0.4)]:
        found = [len(own) for own in cut_layers(layers, stages, last=last)]
        heaviest = max(*found[:-1], found[-1] + last)
        possible = range(1, layers - stages + 2)
        best = min(max(-(-(layers - own) // (stages - 1)), own + last) for own in possible)
        assert heaviest == pytest.approx(best)


def test_too_few_layers():
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        cut_layers(2, 3)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 7), (4, 2), (4, 8)])
def test_every_stage_gets_on_with_its_neighbours(stages, micro_batches):
    """Each action runs once, needs what its neighbours have sent by then, and no more than ``stages`` are kept."""
    orders = [list(one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)]
    done: list[list[Action]] = [[] for _ in orders]
    most = [0] * stages
    going = True
    while going:
        going = False
        for stage, order in enumerate(orders):
            if len(done[stage]) == len(order):
                continue
            action = order[len(done[stage])]
            source = stage - 1 if action.forward else stage + 1
            if 0 <= source < stages and action not in done[source]:
                continue
            assert action.forward or Action(True, action.micro_batch) in done[stage]
            done[stage].append(action)
            forwards = sum(other.forward for other in done[stage])
            most[stage] = max(most[stage], 2 * forwards - len(done[stage]))
            going = True
    assert done == orders, "a stage waits for ever"
    for stage, order in enumerate(orders):
        assert sorted(order, key=str) == sorted(set(order), key=str) and len(order) == 2 * micro_batches
        assert most[stage] == min(stages - stage, micro_batches)
        numbers = [action.micro_batch for action in order if not action.forward]
        assert numbers == list(range(micro_batches)), "gradients are final after the last micro-batch's backward pass"


def test_the_parts_of_a_model_are_the_whole():
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape = ModelShape.from_config({**config, "intermediate_size": 128, "vocab_size": 500})
    parts = shape.stages(3)
    assert sum(part.parameters for part in parts) == shape.parameters
    assert [part.head_parameters for part in parts] == [0, 0, 32000]
    assert [part.embedding_parameters for part in parts] == [32000, 0, 0]
    assert [part.layers for part in parts] == [2, 2, 2]
    tied = ModelShape.from_config({**config, "intermediate_size": 128, "vocab_size": 500, "tie_word_embeddings": True})
    assert sum(part.parameters for part in tied.stages(2)) == tied.parameters + 32000, "the tied matrix is held twice"
