"""Which layers a stage gets, and in which order it works."""

import itertools
from types import SimpleNamespace

import pytest

from muster.core.flops import ModelShape
from muster.core.layout import cut_layers, forwards_ahead, kept_in_v
from muster.train.distributed.pipeline_order import Action, Kind, Schedule, finished, turns
from muster.train.distributed.stage_link import sends_under_way


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


CASES = [
    (schedule, micro_batches)
    for stages in (2, 3, 4)
    for schedule in (
        Schedule(stages),
        Schedule(stages, chunks=2),
        Schedule(stages, chunks=3),
        Schedule(stages, split_backward=True),
        Schedule(stages, chunks=2, split_backward=True, v=True),
    )
    for micro_batches in range(1, 10)
]


def orders_of(schedule, micro_batches):
    return [schedule.order(stage, micro_batches) for stage in range(schedule.stages)]


def case_id(case):
    return (
        f"{case.stages}x{case.chunks}{'-split' * case.split_backward}{'-v' * case.v}"
        if isinstance(case, Schedule)
        else str(case)
    )


@pytest.mark.parametrize(("schedule", "micro_batches"), CASES, ids=case_id)
def test_each_pass_runs_once_and_behind_what_it_needs(schedule, micro_batches):
    orders = orders_of(schedule, micro_batches)
    ends = finished(schedule, orders)
    kinds = [Kind.FORWARD, Kind.BACKWARD, *([Kind.WEIGHTS] if schedule.split_backward else [])]
    everything = {
        Action(kind, number, chunk)
        for kind in kinds
        for number in range(micro_batches)
        for chunk in range(schedule.chunks)
    }
    for stage, order in enumerate(orders):
        assert len(order) == len(everything) and set(order) == everything
        for chunk, kind in itertools.product(range(schedule.chunks), kinds):
            numbers = [action.micro_batch for action in order if (action.kind, action.chunk) == (kind, chunk)]
            assert numbers == list(range(micro_batches)), "gradients are final after the last micro-batch's pass"
        for action in order:
            part, number = schedule.part(stage, action.chunk), action.micro_batch
            if action.kind is Kind.FORWARD:
                needed = [(Kind.FORWARD, part - 1)] if part else []
            elif action.kind is Kind.BACKWARD:
                needed = [(Kind.FORWARD, part), *([(Kind.BACKWARD, part + 1)] if part + 1 < schedule.parts else [])]
            else:
                needed = [(Kind.BACKWARD, part)]
            for kind, of_part in needed:
                where, chunk = schedule.place(of_part)
                assert ends[where, Action(kind, number, chunk)] < ends[stage, action]


@pytest.mark.parametrize(("schedule", "micro_batches"), CASES, ids=case_id)
def test_messages_pair_up_and_nobody_waits_for_a_later_one(schedule, micro_batches):
    """As NCCL does it at its strictest: a stage's batches of messages run one behind the other, each behind the work
    before it; an action waits for all of its batch; and the oldest of too many sends is awaited."""
    plan = turns(schedule, micro_batches)
    pairs = {}
    for stage, own in enumerate(plan):
        for turn in own:
            for message in turn.messages:
                assert stage in (message.sender, message.receiver) and message.sender != message.receiver
                key = message.sender, message.receiver
                pairs.setdefault(key, ([], []))[stage == message.receiver].append(message)
    assert all(sent == received for sent, received in pairs.values())
    between = schedule.parts - 1 - schedule.v  # at the V's tip both parts are on the last stage
    assert sum(len(sent) for sent, _ in pairs.values()) == 2 * between * micro_batches
    limit = sends_under_way(schedule.stages, schedule.chunks)
    at, open_batch, ended = [0] * schedule.stages, [False] * schedule.stages, set()
    going = True
    while going:
        going = False
        for stage, own in enumerate(plan):
            if at[stage] == len(own):
                continue
            turn = own[at[stage]]
            sent = [m for before in own[: at[stage] + 1] for m in before.messages if m.sender == stage]
            if not open_batch[stage] and all(message in ended for message in sent[:-limit]):
                open_batch[stage] = going = True
            if open_batch[stage] and all(message in ended for message in turn.messages):
                at[stage], open_batch[stage], going = at[stage] + 1, False, True
        for message in {m for own in plan for turn in own for m in turn.messages} - ended:
            ends = [plan[stage][at[stage]] for stage in (message.sender, message.receiver) if open_batch[stage]]
            if len(ends) == 2 and all(message in turn.messages for turn in ends):
                ended.add(message)
                going = True
    assert at == [len(own) for own in plan], "a stage waits for ever"
    for stage, own in enumerate(plan):
        there = set()
        for turn in own:
            there |= {message.needed_by for message in turn.messages if message.receiver == stage}
            if turn.action is not None and turn.action.kind is not Kind.WEIGHTS:
                part = schedule.part(stage, turn.action.chunk)
                before = part - 1 if turn.action.forward else part + 1
                here = before in (-1, schedule.parts) or schedule.place(before)[0] == stage
                assert here != (turn.action in there)


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [case for case in CASES if case[1] >= case[0].stages and not case[0].v],
    ids=case_id,
)
def test_the_bubble_is_that_of_the_formula(schedule, micro_batches):
    forward, backward = 1.0, 2.0
    ends = finished(schedule, orders_of(schedule, micro_batches), forward=forward, backward=backward)
    work = micro_batches * schedule.chunks * (forward + backward)
    saved = backward if schedule.split_backward else 0.0  # ZB-H1: (p - 1)(F + B - W) for (p - 1)(F + B + W)
    assert max(ends.values()) - work == pytest.approx((schedule.stages - 1) * (forward + backward - saved))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("takes", [(1.0, 1.0, 1.0), (10.0, 17.0, 8.0), (5.0, 12.0, 9.0), (9.0, 12.0, 10.0)], ids=str)
def test_the_bubble_of_a_v_is_that_of_the_formula(stages, takes):
    schedule, (forward, inputs, weights) = Schedule(stages, chunks=2, split_backward=True, v=True), takes
    for micro_batches in (2 * stages - 1, 2 * stages, 3 * stages + 1):
        orders = orders_of(schedule, micro_batches)
        ends = finished(schedule, orders, forward=forward, backward=inputs, weights=weights)
        found = max(ends.values()) - 2 * micro_batches * sum(takes)
        assert found == pytest.approx((stages - 1) * max(inputs, 2 * (inputs - weights)))
        for stage, order in enumerate(orders) if len(set(takes)) == 1 else ():
            begins = ends[stage, order[0]] - forward
            assert ends[stage, order[-1]] - begins == 2 * micro_batches * sum(takes), "no stage waits once it has begun"


def test_a_v_is_in_the_order_of_torch():
    """Another implementation of the same paper, which knows no messages."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    kinds = {"FORWARD": Kind.FORWARD, "BACKWARD_INPUT": Kind.BACKWARD, "BACKWARD_WEIGHT": Kind.WEIGHTS}
    for stages, micro_batches in itertools.product(range(1, 6), range(1, 14)):
        schedule = Schedule(stages, chunks=2, split_backward=True, v=True)
        theirs = SimpleNamespace(pp_group_size=stages, num_stages=schedule.parts, _n_microbatches=micro_batches)
        for stage in range(stages):
            table = ScheduleZBVZeroBubble._calculate_single_rank_operations(theirs, stage)
            wanted = [
                (
                    stage,
                    Action(kinds[one.computation_type.name], one.microbatch_index, schedule.place(one.stage_index)[1]),
                )
                for one in table
                if one is not None
            ]
            assert [(stage, action) for action in schedule.order(stage, micro_batches)] == wanted
            assert all(schedule.place(one.stage_index)[0] == stage for one in table if one is not None)


def test_where_the_parts_of_a_v_are():
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for stages in range(1, 6):
        schedule = Schedule(stages, chunks=2, split_backward=True, v=True)
        places = [schedule.place(part) for part in range(schedule.parts)]
        assert [schedule.part(*place) for place in places] == list(range(schedule.parts))
        assert {part: stage for part, (stage, _) in enumerate(places)} == generate_stage_to_rank_mapping(
            stages, schedule.parts, style="v"
        )
        assert [schedule.begins_on(stage) for stage in range(stages)] == [stage == 0 for stage in range(stages)]
        assert [schedule.ends_on(stage) for stage in range(stages)] == [stage == 0 for stage in range(stages)]


@pytest.mark.parametrize(("schedule", "micro_batches"), CASES, ids=case_id)
def test_kept_micro_batches_are_bounded(schedule, micro_batches):
    for stage, order in enumerate(orders_of(schedule, micro_batches)):
        kept, most, left = 0, 0, 0
        for action in order:
            kept += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: 0}[action.kind]
            most = max(most, kept)
            left += {Kind.FORWARD: 1, Kind.BACKWARD: 0, Kind.WEIGHTS: -1}[action.kind]
            first = schedule.stages * schedule.chunks
            assert not schedule.split_backward or left <= first, "as many as the first stage of 1F1B"
        if schedule.v:
            assert most <= 2 * min(schedule.stages, micro_batches)
            assert most == 2 * min(schedule.stages, micro_batches) or stage < schedule.stages - 1
            continue
        ahead = forwards_ahead(stage, schedule.stages, schedule.chunks, micro_batches)
        assert most == min(ahead + 1, schedule.chunks * micro_batches)
        assert schedule.chunks > 1 or most <= schedule.stages - stage


@pytest.mark.parametrize("layers", [(5, 1), (1, 5), (3, 3)], ids=str)
def test_a_v_keeps_as_many_layers_as_the_formula_says(layers):
    for stages, micro_batches in itertools.product((2, 3, 4), range(1, 10)):
        schedule = Schedule(stages, chunks=2, split_backward=True, v=True)
        for stage, order in enumerate(orders_of(schedule, micro_batches)):
            kept, most = 0, [0, 0]
            for action in order:
                kept += {Kind.FORWARD: 1, Kind.BACKWARD: 0, Kind.WEIGHTS: -1}[action.kind] * layers[action.chunk]
                if action.forward:
                    most[action.chunk] = max(most[action.chunk], kept)
            planned = kept_in_v(stage, stages, micro_batches, layers)
            assert max(most) == max(planned), (stages, micro_batches, stage)
            assert stage or most[1] == planned[1], "where the loss is"


def test_stages_that_wait_for_each_other_are_found():
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        finished(Schedule(2), [[backward, forward], [forward, backward]])


def test_the_parts_of_a_model_are_the_whole():
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape = ModelShape.from_config({**config, "intermediate_size": 128, "vocab_size": 500})
    parts = shape.stages(3)
    assert sum(part.parameters for part in parts) == shape.parameters
    assert [part.head_parameters for part in parts] == [0, 0, 32000]
    assert [part.embedding_parameters for part in parts] == [32000, 0, 0]
    assert [part.layers for part in parts] == [2, 2, 2]
    chunked = shape.stages(2, chunks=3)
    assert [part.layers for part in chunked] == [3, 3] and sum(part.parameters for part in chunked) == shape.parameters
    v = shape.stages(2, chunks=2, v=True)
    assert sum(part.parameters for part in v) == shape.parameters and [part.layers for part in v] == [3, 3]
    assert [(part.has_embedding, part.has_head) for part in v] == [(True, True), (False, False)]
    tied = ModelShape.from_config({**config, "intermediate_size": 128, "vocab_size": 500, "tie_word_embeddings": True})
    assert sum(part.parameters for part in tied.stages(2)) == tied.parameters + 32000, "the tied matrix is held twice"
    v = tied.stages(2, chunks=2, v=True)
    assert sum(part.parameters for part in v) == tied.parameters, "in a V the first stage has both ends"
