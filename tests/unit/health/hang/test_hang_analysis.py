"""The rank that the others wait for is named, with what keeps it; nobody else is."""

from dataclasses import replace

import pytest
from fakes.hang_captures import ASLEEP, CAPTURED, IN_ALL_REDUCE, LOADING, RAS_TEXT, SITE, gloo_dump, nccl_dump, spy_dump

from muster.health.hang import flight_recorder, ras, stacks, wait_graph
from muster.health.hang.analysis import analyse
from muster.health.hang.evidence import Confidence, Evidence, Kind, RankEvidence
from muster.health.hang.process_state import CgroupState, ProcessState
from muster.health.verdicts import Finding, Verdict

captured = pytest.mark.skipif(CAPTURED is None, reason="the captures are not on this machine")

RUNS = [("all_reduce", [4])] * 4


def rank(number, dump=None, stack=None, state=None, **more):
    return RankEvidence(
        rank=number,
        host=f"host-{number}",
        recorder=None if dump is None else flight_recorder.parse(dump),
        threads=None if stack is None else stacks.parse(stack),
        process=None if state is None else ProcessState(state=state),
        **more,
    )


def waiting(number, **more):
    return rank(number, gloo_dump(RUNS, done=3), spy_dump(IN_ALL_REDUCE), "S", **more)


def late(number, stack, state="S", **more):
    return rank(number, gloo_dump(RUNS[:3], done=3), stack, state, **more)


def only(analysis):
    (culprit,) = analysis.culprits
    return culprit


def megatron():
    assert CAPTURED is not None
    dumps = {int(path.stem.rpartition("_")[2]): path.read_bytes() for path in CAPTURED.glob("_dump_*.json")}
    return [rank(number, dumps[number]) for number in sorted(dumps)]


@captured
def test_both_ranks_of_the_capture_and_nobody_else():
    analysis = analyse(Evidence(ranks=tuple(megatron())))
    assert [one.rank for one in analysis.culprits] == [9, 14]
    assert {one.kind for one in analysis.culprits} == {Kind.GPU}
    assert analysis.victims == 14
    assert analysis.culprits[0].operation == "_all_gather_base"
    assert analysis.culprits[0].group == "TENSOR_MODEL_PARALLEL_GROUP"


@captured
@pytest.mark.parametrize("absent", range(16))
def test_a_rank_without_a_dump_is_the_first_suspect_and_the_others_are_less_sure(absent):
    ranks = tuple(one for one in megatron() if one.rank != absent)
    first, *others = analyse(Evidence(ranks=ranks)).culprits
    assert (first.rank, first.kind, first.confidence) == (absent, Kind.UNKNOWN, Confidence.LOW)
    assert {one.rank for one in others} == {9, 14} - {absent} and {one.confidence for one in others} == {Confidence.LOW}
    assert f"nothing of rank {absent}" in analyse(Evidence(ranks=ranks)).missing
    asked = analyse(Evidence(ranks=ranks, world=16))
    assert {one.rank for one in asked.culprits} == {9, 14} - {absent}, "of a run its hosts are looked after"


def test_a_gap_in_the_numbers_of_files_is_a_rank_that_is_missing():
    """gloo's dumps do not say who is in a group."""
    first, *_ = analyse(Evidence(ranks=(waiting(0), waiting(1), waiting(3)))).culprits
    assert first.rank == 2 and "others wait for it in all_reduce" in first.because
    stopped = analyse(Evidence(ranks=(waiting(0), waiting(1), late(3, spy_dump(ASLEEP), "T"))))
    assert only(stopped).rank == 3 and only(stopped).confidence is Confidence.HIGH, "seen directly"


@captured
def test_where_less_was_captured_than_is_missing_nobody_is_suspected():
    assert {one.rank for one in analyse(Evidence(ranks=tuple(megatron()[8:10]))).culprits} <= {8, 9}


@captured
@pytest.mark.parametrize("absent", [9, 14])
def test_a_culprit_without_a_dump_is_named_by_what_else_there_is(absent):
    ranks = [replace(one, recorder=None) if one.rank == absent else one for one in megatron()]
    stack = stacks.parse(spy_dump(ASLEEP, gil=True))
    ranks = [replace(one, threads=stack) if one.rank == absent else one for one in ranks]
    analysis = analyse(Evidence(ranks=tuple(ranks)))
    assert {one.rank: one.kind for one in analysis.culprits} == {
        absent: Kind.GIL,
        ({9, 14} - {absent}).pop(): Kind.GPU,
    }


@captured
@pytest.mark.parametrize("version", ["2.2", "2.4", "2.11"])
def test_other_versions_of_the_dump(version):
    assert CAPTURED is not None
    ranks = []
    for number in range(16):
        text = (CAPTURED / f"_dump_{number}.json").read_text()
        ranks.append(rank(number, text.replace('"version": "2.9"', f'"version": "{version}"')))
    assert [one.rank for one in analyse(Evidence(ranks=tuple(ranks))).culprits] == [9, 14]


@captured
def test_the_capture_as_the_second_of_two_replicas():
    """Its ranks are counted within the replica; the first replica waits for it in the sums over both."""
    numbered, found = {}, []
    for number, one in enumerate(megatron()):
        assert one.recorder is not None
        local = {name: [16 + member for member in group.members] for name, group in one.recorder.groups.items()}
        recorder = flight_recorder.placed(one.recorder, local)
        found.append(replace(one, rank=16 + number, recorder=recorder))
        across = f"a1/replicas of shard {number}"
        first = flight_recorder.parse(nccl_dump({"0": [*range(16)]}, [], {"0": 13996}))
        ours = flight_recorder.Group(name=across, members=(number, 16 + number), posted=8, completed=7)
        waits = flight_recorder.Operation(group=across, number=8, name="all_reduce", backend="nccl")
        first = replace(first, groups={**first.groups, across: ours}, operations=(*first.operations, waits))
        numbered[number] = flight_recorder.placed(first, {"0": range(16), across: (number, 16 + number)})
    found += [RankEvidence(rank=number, recorder=recorder) for number, recorder in numbered.items()]
    analysis = analyse(Evidence(ranks=tuple(found)))
    assert [(one.rank, one.kind) for one in analysis.culprits] == [(25, Kind.GPU), (30, Kind.GPU)]
    assert analysis.victims == 30


def test_replicas_whose_groups_have_the_same_name():
    """Rank 3 has not come; in its replica's dumps the ranks are 0 and 1, as in the other's, which has ended more."""
    first = nccl_dump({"0": [0, 1]}, [("0", 9, "all_reduce")], {"0": 8})
    dumps = {
        0: first,
        1: first,
        2: nccl_dump({"0": [0, 1]}, [("0", 5, "all_reduce")], {"0": 4}),
        3: nccl_dump({"0": [0, 1]}, [], {"0": 4}),
    }
    ranks = []
    for number, dump in dumps.items():
        members = (0, 1) if number < 2 else (2, 3)
        ranks.append(
            RankEvidence(rank=number, recorder=flight_recorder.placed(flight_recorder.parse(dump), {"0": members}))
        )
    assert [one.rank for one in analyse(Evidence(ranks=tuple(ranks), world=4)).culprits] == [3]


def test_a_group_that_an_earlier_attempt_ended_with_something_unfinished():
    old = nccl_dump({"7": [0, 1]}, [("7", 3, "all_reduce")], {"7": 2})
    placed = flight_recorder.placed(flight_recorder.parse(old), {"0": (0, 1)})
    assert not placed.unfinished and not placed.groups
    assert flight_recorder.placed(flight_recorder.parse(old), {}) == flight_recorder.parse(old)


def test_one_recorder_of_both_libraries_told_twice():
    one = flight_recorder.parse(gloo_dump(RUNS, done=3))
    assert flight_recorder.merged([one, one]) == one


def test_stopped():
    culprit = only(analyse(Evidence(ranks=(waiting(0), late(1, spy_dump(ASLEEP), "T"), waiting(2)))))
    assert (culprit.rank, culprit.host, culprit.kind, culprit.confidence) == (
        1,
        "host-1",
        Kind.STOPPED,
        Confidence.HIGH,
    )
    assert culprit.place == "/home/u/train.py:31"
    assert not culprit.kind.hardware


def test_dead_and_killed_for_memory():
    gone = rank(1, state="", cgroup=CgroupState(oom_kills=1))
    culprit = only(analyse(Evidence(ranks=(waiting(0), gone))))
    assert (culprit.rank, culprit.kind) == (1, Kind.DEAD) and "memory" in culprit.because


@pytest.mark.parametrize("dump", [None, gloo_dump(RUNS[:3], done=3)])
def test_pythons_lock_held_in_c(dump):
    one = rank(1, dump, spy_dump(ASLEEP, gil=True), "S")
    analysis = analyse(Evidence(ranks=(waiting(0), one)))
    culprit = only(analysis)
    assert (culprit.rank, culprit.kind, culprit.place) == (1, Kind.GIL, "/home/u/train.py:31")
    assert analysis.victims == 1


def test_a_rank_that_runs_c_code_and_whose_recorder_does_not_answer():
    one = rank(1, None, spy_dump(ASLEEP, gil=True, active=True), "R")
    assert only(analyse(Evidence(ranks=(waiting(0), one)))).kind is Kind.GIL
    answers = late(1, spy_dump(ASLEEP, gil=True, active=True), "R")
    assert only(analyse(Evidence(ranks=(waiting(0), answers)))).kind is Kind.CODE


def test_a_rank_that_lives_and_whose_python_does_not_answer():
    """Where nothing looks from outside."""
    mute = rank(1, None, None, "S", answers=False)
    culprit = only(analyse(Evidence(ranks=(waiting(0), mute))))
    assert (culprit.rank, culprit.kind, culprit.confidence) == (1, Kind.GIL, Confidence.MEDIUM)


def test_a_rank_that_has_not_called_anything_yet():
    empty = '{"nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    first = [rank(number, gloo_dump(RUNS[:1], done=0), spy_dump(IN_ALL_REDUCE)) for number in (0, 2)]
    culprit = only(analyse(Evidence(ranks=(*first, rank(1, empty, spy_dump(ASLEEP))))))
    assert (culprit.rank, culprit.kind) == (1, Kind.CODE)


def test_a_line_of_the_program():
    analysis = analyse(Evidence(ranks=(waiting(0), waiting(2), late(1, spy_dump(ASLEEP)))))
    culprit = only(analysis)
    assert (culprit.rank, culprit.kind, culprit.place) == (1, Kind.CODE, "/home/u/train.py:31")
    assert (culprit.group, culprit.operation, analysis.victims) == ("default_pg", "all_reduce", 2)
    assert "all_reduce number 4" in analysis.sentence and "2 ranks wait" in analysis.sentence


def test_a_blocked_loader_and_the_thread_that_reads_for_it():
    culprit = only(analyse(Evidence(ranks=(waiting(0), late(1, spy_dump(LOADING))))))
    assert (culprit.kind, culprit.place) == (Kind.LOADER, "/home/u/train.py:22")
    reader = (
        ("read", "/home/u/rows.py", 7),
        ("BatchReader._run", f"{SITE}/muster/train/data_feed/batch_reader.py", 150),
    )
    main = (
        ("get", "/usr/lib/python3.11/queue.py", 171),
        ("next", f"{SITE}/muster/train/data_feed/batch_reader.py", 90),
    )
    culprit = only(analyse(Evidence(ranks=(waiting(0), late(1, spy_dump(main, reader))))))
    assert (culprit.kind, culprit.place) == (Kind.LOADER, "/home/u/rows.py:7")


OTHER = (("broadcast", f"{SITE}/torch/distributed/distributed_c10d.py", 2900), ("main", "/home/u/train.py", 44))


@pytest.mark.parametrize(
    ("calls", "done", "says"),
    [
        ([*RUNS[:3], ("broadcast", [4])], 3, "called broadcast number 4"),
        ([*RUNS[:3], ("broadcast", [4]), ("all_reduce", [4])], 4, "called broadcast number 4"),  # and it went on
        ([*RUNS[:3], ("all_reduce", [5])], 3, r"Float 5 -> 5"),
    ],
    ids=["another", "another that ended", "another shape"],
)
def test_another_collective_or_shape_with_both_lines(calls, done, says):
    odd = rank(1, gloo_dump(calls, done=done), spy_dump(OTHER))
    culprit = only(analyse(Evidence(ranks=(waiting(0), odd, waiting(2)))))
    assert (culprit.rank, culprit.kind, culprit.confidence) == (1, Kind.MISMATCH, Confidence.HIGH)
    assert (culprit.place, culprit.other_place) == ("/home/u/train.py:44", "/home/u/train.py:17")
    assert says in culprit.because


def test_of_two_that_disagree_both_are_named():
    odd = rank(1, gloo_dump([*RUNS[:3], ("broadcast", [4])], done=3), spy_dump(OTHER))
    analysis = analyse(Evidence(ranks=(waiting(0), odd)))
    assert [(one.rank, one.kind, one.confidence) for one in analysis.culprits] == [
        (0, Kind.MISMATCH, Confidence.MEDIUM),
        (1, Kind.MISMATCH, Confidence.MEDIUM),
    ]


def test_collectives_whose_sizes_may_differ_are_no_mismatch():
    dumps = [gloo_dump([("all_to_all", [size])], done=0) for size in (3, 5)]
    analysis = analyse(Evidence(ranks=tuple(rank(number, dump) for number, dump in enumerate(dumps))))
    assert not analysis.culprits and "suspect the link between them" in analysis.summary


def test_a_pipeline_of_victims_ends_at_the_one_that_computes():
    """0 receives from 1, 1 receives from 2, 2 is in no operation."""
    groups = {"1": [0, 1], "2": [1, 2]}
    dumps = (
        nccl_dump({"1": groups["1"]}, [("1", 5, "recv 0<-1")], {}),
        nccl_dump(groups, [("2", 5, "recv 0<-1")], {}),
        nccl_dump({"2": groups["2"]}, [], {"2": 4}),
    )
    culprit = only(analyse(Evidence(ranks=tuple(rank(number, dump) for number, dump in enumerate(dumps)))))
    assert culprit.rank == 2 and culprit.kind is Kind.UNKNOWN and culprit.operation == "recv"


def test_the_order_of_two_groups_is_crossed():
    groups = {"1": [0, 1], "2": [0, 1]}
    dumps = [
        nccl_dump(groups, [(first, 5, "all_reduce")], {second: 4, first: 4})
        for first, second in (("1", "2"), ("2", "1"))
    ]
    analysis = analyse(Evidence(ranks=tuple(rank(number, dump) for number, dump in enumerate(dumps))))
    assert {(one.rank, one.kind, one.confidence) for one in analysis.culprits} == {
        (0, Kind.MISMATCH, Confidence.LOW),
        (1, Kind.MISMATCH, Confidence.LOW),
    }
    assert "ring" in analysis.sentence


def test_faulty_hardware_of_the_one_that_is_waited_for():
    fallen = Finding(check="gpu.xid", verdict=Verdict.REPLACE, message="Xid 79: GPU 3 has fallen off the bus", gpu=3)
    down = Finding(check="net.port", verdict=Verdict.REPLACE, message="port mlx5_2 is down")
    for finding, kind in ((fallen, Kind.GPU), (down, Kind.LINK)):
        culprit = only(analyse(Evidence(ranks=(waiting(0), late(1, spy_dump(ASLEEP), findings=(finding,))))))
        assert (culprit.rank, culprit.kind, culprit.gpu) == (1, kind, finding.gpu)
        assert culprit.kind.hardware and finding.message in culprit.because


def test_an_applications_error_is_not_the_hardwares():
    own = Finding(check="gpu.xid", verdict=Verdict.APP, message="Xid 31")
    culprit = only(analyse(Evidence(ranks=(waiting(0), late(1, spy_dump(ASLEEP), findings=(own,))))))
    assert culprit.kind is Kind.CODE


def test_stacks_alone_name_with_low_confidence():
    ranks = (
        rank(0, None, spy_dump(IN_ALL_REDUCE)),
        rank(1, None, spy_dump(ASLEEP)),
        rank(2, None, spy_dump(IN_ALL_REDUCE)),
    )
    analysis = analyse(Evidence(ranks=ranks))
    culprit = only(analysis)
    assert (culprit.rank, culprit.kind, culprit.confidence) == (1, Kind.CODE, Confidence.LOW)
    assert "no flight recorder of ranks 0, 1 and 2" in analysis.missing


def test_nccls_own_report_names_who_does_not_answer():
    ranks = (rank(21, pid=3487984), rank(7, pid=483079), rank(3, pid=1))
    analysis = analyse(Evidence(ranks=ranks, ras=ras.parse(RAS_TEXT)))
    assert {one.rank for one in analysis.culprits} == {7, 21}
    assert all(one.confidence is Confidence.LOW and one.kind is Kind.UNKNOWN for one in analysis.culprits)


def test_nothing_captured_names_nobody_and_says_so():
    analysis = analyse(Evidence(ranks=(), world=4))
    assert not analysis.culprits
    assert "nothing was captured" in analysis.sentence
    assert "nothing of ranks 0, 1, 2 and 3" in analysis.missing


def test_each_recorder_is_looked_through_once_however_many_ask(monkeypatch):
    looked = []
    real = wait_graph._collectives
    monkeypatch.setattr(wait_graph, "_collectives", lambda *given: (looked.append(given), real(*given))[1])
    graph = wait_graph.WaitGraph(
        {number: (late(number, None) if number == 5 else waiting(number)).recorder for number in range(64)}
    )
    assert graph.holding_up() == ((5,), False)
    assert len(looked) == 64
