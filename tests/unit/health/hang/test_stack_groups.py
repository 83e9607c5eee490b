"""Ranks by what they do: equal stacks together, the odd ones visible."""

from fakes.hang_captures import ASLEEP, IN_ALL_REDUCE, spy_dump

from muster.core.typed_json import decode, encode
from muster.health.hang import stacks
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.process_state import ProcessState
from muster.health.hang.stack_groups import StackGroup, grouped, ranges


def rank(number, dump=IN_ALL_REDUCE, state="S"):
    threads = None if dump is None else stacks.parse(spy_dump(dump))
    return RankEvidence(rank=number, host=f"host-{number // 4}", process=ProcessState(state=state), threads=threads)


def test_a_thousand_ranks_in_one_sum_and_the_one_that_sleeps_are_two_groups():
    found = grouped(rank(n, ASLEEP if n == 700 else IN_ALL_REDUCE) for n in reversed(range(1000)))
    assert [len(group.ranks) for group in found] == [999, 1]
    assert found[0].title == "ranks 0-699, 701-999 (999) on 250 hosts"
    assert found[1].title == "rank 700 on host-175"
    assert any(frame.place == "/home/u/train.py:31" for frame in found[1].frames)


def test_running_or_sleeping_is_no_difference_and_stopped_is():
    found = grouped([rank(0, state="R"), rank(1, state="S"), rank(2, state="T")])
    assert [group.ranks for group in found] == [(0, 1), (2,)]
    assert found[0].process == "" and "stopped" in found[1].title


def test_ranks_of_which_nothing_was_seen_are_a_group_of_their_own():
    found = grouped([rank(0), rank(1), rank(2, None)])
    assert found[1].ranks == (2,) and found[1].frames == ()
    assert decode(StackGroup, encode(found[0]).decode()) == found[0]


def test_numbers_in_words():
    assert ranges([7, 0, 1, 2, 9, 8]) == "0-2, 7-9"
    assert ranges([3]) == "3" and ranges([]) == ""
