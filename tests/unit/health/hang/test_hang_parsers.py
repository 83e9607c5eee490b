"""Captures are read as they are; of those that are cut or of another kind a sentence says so."""

import json
import pickle

import pytest
from fakes.hang_captures import (
    ASLEEP,
    FAULTHANDLER_TEXT,
    IN_ALL_REDUCE,
    LOADING,
    RAS_TEXT,
    SPY_TEXT,
    gloo_dump,
    spy_dump,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.typed_json import Unreadable
from muster.health.hang import flight_recorder, process_state, ras, stacks
from muster.health.hang.captures import evidence_of

CALLS = [("all_reduce", [4]), ("broadcast", [2, 3]), ("all_reduce", [4])]


def test_a_dump_of_gloo_says_what_ended_though_its_states_do_not():
    recorder = flight_recorder.parse(gloo_dump(CALLS, done=2))
    assert [(one.number, one.name, one.done) for one in recorder.operations] == [
        (1, "all_reduce", True),
        (2, "broadcast", True),
        (3, "all_reduce", False),
    ]
    assert (recorder.operations[0].backend, recorder.version) == ("gloo", "2.10")
    assert recorder.operations[1].sizes == "2x3 -> 2x3"
    group = recorder.groups["0"]
    assert (group.posted, group.completed, group.members) == (3, 2, ())


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3_20251120.json", 3), ("rank3/trace.json", 3), ("rank3/trace_0.json", 3), ("dump_3_1732100000.json", 3),
        ("frank1/_dump_3.json", 3), ("rank0-node/_dump_3.json", 3), ("7/rank_3", 3),
    ],
)  # fmt: skip
def test_the_rank_of_a_dump_is_in_its_name_or_its_folders(name, rank):
    found = evidence_of([(name, gloo_dump(CALLS, done=2).encode())])
    assert [each.rank for each in found.ranks] == [rank]


def test_a_rank_that_has_called_nothing():
    empty = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    recorder = flight_recorder.parse(empty)
    assert recorder.operations == () and not recorder.groups


def test_a_pickle_is_refused_with_the_way_to_json():
    dump = pickle.dumps(json.loads(gloo_dump(CALLS, done=2)), protocol=2)
    with pytest.raises(Unreadable, match=r"a pickle, which is a program: docs/how-to/why\.md"):
        flight_recorder.parse(dump)


@pytest.mark.parametrize(
    ("captured", "says"),
    [
        ("", "flight recorder: not JSON"),
        ("[1]", "not a JSON object"),
        ('{"version": "2.9"}', "no version and entries"),
        ('{"version": "1.5", "entries": []}', "version '1.5': 2.x are known"),
        ('{"version": "3.0", "entries": []}', "version '3.0'"),
        ('{"version": "2.9", "entries": [{"profiling_name": "nccl:x", "collective_seq_id": "x"}]}', "flight recorder"),
    ],
)
def test_what_is_no_dump_is_refused_with_a_sentence(captured, says):
    with pytest.raises(Unreadable, match=says):
        flight_recorder.parse(captured)


def test_shortened_keeps_all_that_waits_and_the_newest_that_ended():
    recorder = flight_recorder.parse(gloo_dump([("all_reduce", [4])] * 50, done=48))
    short = flight_recorder.shortened(recorder, keep=3)
    assert [one.number for one in short.operations] == [46, 47, 48, 49, 50]
    assert short.groups == recorder.groups


@pytest.mark.parametrize("captured", [SPY_TEXT, FAULTHANDLER_TEXT, spy_dump(ASLEEP)])
def test_the_main_threads_line_in_every_form(captured):
    main = stacks.main_thread(stacks.parse(captured))
    assert main is not None and main.user_line is not None
    assert main.user_line.place.endswith("train.py:31")
    assert not main.in_collective and not main.in_loader


def test_what_a_thread_waits_for():
    waiting, loading, holding = (
        stacks.parse(captured)[0]
        for captured in (spy_dump(IN_ALL_REDUCE), spy_dump(LOADING), spy_dump(ASLEEP, gil=True))
    )
    assert waiting.in_collective and waiting.user_line.place == "/home/u/train.py:17"
    assert loading.in_loader and not loading.in_collective
    assert holding.blocked_in_c
    assert not stacks.parse(spy_dump(ASLEEP, gil=True, active=True))[0].blocked_in_c  # it runs: Python code


def test_a_stack_that_is_cut_keeps_its_whole_threads():
    cut = FAULTHANDLER_TEXT[: FAULTHANDLER_TEXT.index("Thread 0x00007f0a3c")]
    (thread,) = stacks.parse(cut)
    assert thread.name == "muster-link" and len(thread.frames) == 2
    for text in ("", "hello", spy_dump(ASLEEP)[:-4]):
        with pytest.raises(Unreadable):
            stacks.parse(text)


def test_a_number_that_is_none_costs_its_file_alone():
    frames = "    wait (c10d.py:{})\n    step (train.py:3)\n"
    (thread,) = stacks.parse('Thread 42 (idle): "MainThread"\n' + frames.format("1" * 5000))
    assert [frame.function for frame in thread.frames] == ["wait", "step"]
    counted = (
        f"Job summary\nCommunicators...\n#0-0 (27a0)  MISMATCH\n  1 rank has launched up to operation {'1' * 5000}\n"
    )
    counted += "  Rank 3 -- GPU 3 managed by process 4830 on node 172.16.64.213\n"
    found = evidence_of([("ras", counted.encode()), ("rank-0", b'Thread 1 (idle): "MainThread"\n    f (a.py:1)\n')])
    assert [one.rank for one in found.ranks] == [0] and found.missing[0].startswith("ras: ")


def test_states_of_processes():
    stat = "31528 (a (strange) name) T 1 1 1 0 -1 4194304 37282 0 3 0 104 20 0 0 20 0 2"
    state = process_state.parse_stat(stat, "do_signal_stop")
    assert state.stopped and not state.dead and state.cpu_s == 1.24 and state.wchan == "do_signal_stop"
    assert process_state.parse_status("Name:\tpython\nState:\tZ (zombie)\n").dead
    assert process_state.ProcessState(state=process_state.GONE).dead
    for cut in ("", "31528 (python) T 1 1", "nonsense"):
        with pytest.raises(Unreadable):
            process_state.parse_stat(cut)
    with pytest.raises(Unreadable):
        process_state.parse_status("Name:\tpython\n")


@pytest.mark.parametrize(
    ("memory", "cpu"),
    [
        ("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n", "usage_usec 5\nnr_throttled 4\nthrottled_usec 1500000\n"),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "nr_periods 9\nthrottled_time 1500000000\n"),
    ],
)
def test_limits_of_both_versions_of_cgroups(memory, cpu):
    assert process_state.parse_cgroup(memory, cpu) == process_state.CgroupState(oom_kills=2, throttled_s=1.5)
    assert process_state.parse_cgroup() == process_state.CgroupState()


def test_the_report_of_nccl():
    report = ras.parse(RAS_TEXT)
    (silent,) = report.silent
    assert (silent.pid, silent.node, silent.gpu) == (3487984, "host-3", "5")
    (behind,) = report.behind
    assert (behind.rank, behind.pid, behind.launched) == (7, 483079, 6649)
    assert report.complete
    assert not ras.parse(RAS_TEXT[: RAS_TEXT.index("Warnings")]).complete
    with pytest.raises(Unreadable):
        ras.parse("Connection refused")


WHOLE = {
    "recorder": (flight_recorder.parse, gloo_dump(CALLS, done=2)),
    "spy": (stacks.parse, spy_dump(ASLEEP, IN_ALL_REDUCE)),
    "text": (stacks.parse, SPY_TEXT),
    "fault": (stacks.parse, FAULTHANDLER_TEXT),
    "stat": (process_state.parse_stat, "31528 (python) T 1 1 1 0 -1 4194304 37282 0 3 0 104 20 0 0 20 0 2"),
    "ras": (ras.parse, RAS_TEXT),
}


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("form", WHOLE)
def test_cut_or_changed_anywhere_nothing_else_is_raised(form, data):
    parse, whole = WHOLE[form]
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    place = data.draw(st.integers(0, max(0, len(cut) - 1)))
    noise = data.draw(st.binary(max_size=3) if isinstance(cut, bytes) else st.text(max_size=3))
    for captured in (cut, cut[:place] + noise + cut[place:]):
        try:
            parse(captured)
        except Unreadable:
            pass
