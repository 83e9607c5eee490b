"""How a rank's end is learned, and what is reported of it: whose exit, once, and in which order."""

import signal

import pytest
from fakes.host import FORK_SERVER, SUPERVISOR, VirtualHost
from test_rank_states import context

from muster.agent.values.actions import DropCopies, Log, ReportSnapshots, SendTo
from muster.agent.values.events import (
    ForkServerMessage,
    PeerLost,
    ProcessGone,
    RankExiting,
    RankThreadsEnded,
    SupervisorMessage,
)
from muster.agent.values.rank import RankState
from muster.core.errors import CheckpointError
from muster.core.incidents import HOST_UNHEALTHY, RANK_EXIT
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.protocol.codec import MAX_BYTES, encode
from muster.protocol.fork_server import ChildExited
from muster.protocol.rank_agent import Pause, Paused, RankBeat, TakePlace
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded, StartFailed
from muster.protocol.values import LastWords
from muster.rank.standby import last_words
from muster.supervise.recovery.rank_exits import classify_rank_exit

MEMORY = LastWords(exception="RuntimeError", message="DefaultCPUAllocator: can't allocate memory")
END = SupervisorMessage(EndAttempt(attempt=1, why="i1"))
GONE = ProcessGone(99)


def reaped(code, pid=99, tail=""):
    return ForkServerMessage(ChildExited(pid=pid, code=code), tail)


@pytest.fixture
def host():
    """Its fork server reports every exit code."""
    return VirtualHost().supervised().with_fork_server()


def exits(host):
    return [(one.rank, one.code, one.last) for one in host.of(RankExit)]


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_somebody_killed_before_the_agent_did_is_told(host, first):
    """Its memory is freed before its exit code is known; a peer's broken connection ends the attempt meanwhile."""
    host.rank(99, 1)
    if first:
        host.exiting.add(99)
    host.give(END, END)  # again, from a supervisor that took over
    assert host.sent == [] and host.killed == [99, 99]
    host.give(GONE, reaped(-9))
    assert exits(host) == ([(1, -9, None)] if first else [])
    assert isinstance(host.sent[-1], RanksEnded)


@pytest.mark.parametrize("known", ["its end", "its code"])
def test_the_ranks_have_ended_only_once_the_exit_of_each_is_told(host, known):
    """An exit is known from a pidfd and from the fork server, in any order, and the order to end the ranks comes
    between the two: reported after the answer it would be of an old attempt, and the cause would be lost."""
    host.rank(99, 1, words=MEMORY)
    one, other = (GONE, reaped(1)) if known == "its end" else (reaped(1), GONE)
    host.give(one, END)
    assert host.sent == []
    host.give(other)
    exited, ended = host.sent
    assert (exited.rank, exited.code, exited.last) == (1, 1, MEMORY) and isinstance(ended, RanksEnded)


@pytest.mark.parametrize("said", [MEMORY, LastWords(left=75), None])
def test_a_rank_that_had_said_why_it_ends_was_not_ended_by_the_agent(host, said):
    """Python takes a while from there to the end of the process, and peers may meet its broken connection meanwhile."""
    rank = host.rank(99, 1)
    host.give(END)
    if said is not None:
        host.says(rank, said)
    host.give(GONE, reaped(-9))
    assert exits(host) == ([] if said is None else [(1, 75 if said.left else 1, said)])
    assert isinstance(host.sent[-1], RanksEnded)


@pytest.mark.parametrize("code", [None, -signal.SIGABRT])
def test_what_the_agent_has_killed_is_not_waited_for_where_the_fork_server_stands_still(host, code):
    """Or the supervisor would count the host as lost. A line in its log is nothing that the rank had said before."""
    host.rank(99, 1)
    host.give(END)
    if code is not None:
        host.give(reaped(code, tail="terminate called: CUDA error: unspecified launch failure\n"))
    host.give(GONE)
    (ended,) = host.sent
    assert isinstance(ended, RanksEnded) and host.state.ranks.table == {}


CASES = {
    "killed": (3, None, -9),
    "it was done": (3, LastWords(left=0), 0),
    "it was stopped": (3, LastWords(left=130), 130),
    "it said why": (3, LastWords(exception="ValueError", message="bad row"), 1),
    "its parent lives": (7, LastWords(message="x"), 3),
}


@pytest.mark.parametrize(("parent", "last", "code"), CASES.values(), ids=list(CASES))
def test_the_code_of_an_orphan(host, parent, last, code):
    """Its fork server died first: its exit code is unknown, but its last message tells a failure from a kill."""
    host.rank(99, 1, words=last).parent = parent
    host.give(GONE)
    if parent == 7:
        assert host.sent == [], "the fork server's report is waited for"
        host.give(reaped(3))
    assert exits(host) == [(1, code, last)]


def test_codes_that_a_lost_fork_server_has_not_reported_are_assumed(host):
    host.rank(99, 1)
    host.give(GONE)
    assert host.of(RankExit) == []
    host.give(PeerLost(FORK_SERVER))
    assert exits(host) == [(1, -9, None)] and type(host.sent[0]).__name__ == "StoreLost"


def test_a_new_step_that_is_read_after_the_last_ranks_exit_does_not_prevent_its_report(host):
    rank = host.rank(99, 0, step=3, first=2, stepped=True)
    host.give(reaped(-9))
    host.says(rank, RankBeat(step=4, micro=0)).give(GONE)
    assert [(one.rank, one.step) for one in host.of(RankExit)] == [(0, 4)]


def test_a_standby_that_was_reaped_before_it_became_a_rank_is_reported(host):
    """Nothing was: its attempt waited for ``start_timeout_s``."""
    host.state.preparation.prepared = True
    host.standby(99)
    host.gone.add(99)
    host.give(SupervisorMessage(StartAttempt(attempt=1, contexts=(context(0),))))
    assert exits(host) == [(0, -9, None)] and host.state.ranks.table == {}
    host.give(reaped(0))
    assert len(host.of(RankExit)) == 1, "reported once"


def test_an_older_attempts_rank_that_a_start_kills_is_none_of_the_new_ones(host):
    host.rank(99, 0)
    host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=())), GONE)
    assert host.state.ranks.exits == {} == dict(exits(host))


# ---------------------------------------------------------------- before the process is gone


def on_cpu():
    host = VirtualHost().supervised().with_fork_server()
    host.state.spec = host.state.spec.model_copy(update={"command": None})
    return host


def test_a_killed_rank_is_told_at_once_and_its_attempt_ends_with_it(host):
    rank = host.rank(99, 1, step=7)
    host.give(RankExiting(99, 9))
    assert exits(host) == [(1, -9, None)] and list(host.state.ranks.exits) == [1] and rank.is_living
    host.give(END)
    assert host.of(RanksEnded) == [], "nothing that its end precedes has begun"
    host.give(GONE, reaped(-9))
    assert isinstance(host.sent[-1], RanksEnded) and len(host.of(RankExit)) == 1 and not host.state.ranks.table


def test_on_the_cpu_an_attempt_ends_once_nothing_of_its_ranks_runs():
    host = on_cpu()
    host.rank(99, 1)
    host.give(END, RankThreadsEnded(99, True))
    assert [type(one) for one in host.sent] == [RanksEnded] and [one[0] for one in host.logged] == ["rank.exited"]
    assert list(host.state.ranks.table) == [99] and not host.state.ranks.living(), "its memory is not free yet"
    host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=())), GONE, reaped(-9))
    assert len(host.sent) == 1 and len(host.logged) == 1 and not host.state.ranks.exits


def test_on_the_cpu_an_attempt_ends_after_a_killed_rank_is_told():
    host = on_cpu()
    host.rank(99, 1)
    host.give(RankExiting(99, 9), RankThreadsEnded(99, True), END)
    assert [type(one) for one in host.sent] == [RankExit, RanksEnded] and host.state.ranks.table


@pytest.mark.parametrize("what", ["on a GPU", "a user's program", "no room"])
def test_what_may_not_be_passed_by_is_waited_for(what):
    """A GPU's memory is given up after the host's; what the next user's program needs is unknown."""
    host = on_cpu()
    if what == "on a GPU":
        resources = host.state.spec.resources.model_copy(update={"device": "cuda"})
        host.state.spec = host.state.spec.model_copy(update={"resources": resources})
    if what == "a user's program":
        host.state.spec = host.state.spec.model_copy(update={"command": ["train.py"]})
    host.rank(99, 1)
    host.give(END, RankThreadsEnded(99, what != "no room"))
    assert host.sent == []
    host.give(GONE)
    assert [type(one) for one in host.sent] == [RanksEnded]


def test_one_that_left_by_itself_is_waited_for_because_its_code_says_why():
    host = on_cpu()
    host.exiting.add(99)
    host.rank(99, 1)
    host.give(RankExiting(99, None), RankThreadsEnded(99, True), END)
    assert host.sent == []


@pytest.mark.parametrize("why", ["killed by the agent", "retained"])
def test_an_end_that_nothing_waits_for_is_not_told_early(host, why):
    """One that is retained may be given a place in the next attempt meanwhile, whose failure its end is then."""
    rank = host.rank(99, 1)
    keep = (1,) if why == "retained" else ()
    host.give(SupervisorMessage(EndAttempt(attempt=1, why="i", keep=keep, pause_s=9.0)), RankExiting(99, 9))
    assert host.sent == [] and rank.state is not RankState.EXITING


# ---------------------------------------------------------------- what the report says

ECC = (
    "step 7 loss 2.0\n[rank0]:[E1123 ProcessGroupNCCL.cpp:2068] [PG ID 0] Process group watchdog thread "
    "terminated with exception: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
REMOTE = "ProcessGroupNCCL.cpp:100] NCCL error: ncclRemoteError: A call failed possibly due to a network error\n"


def judged(host, text, code=-signal.SIGABRT, last=None):
    host.rank(99, 0, words=last)
    host.give(reaped(code, tail=text), GONE)
    return classify_rank_exit("host-0", host.of(RankExit)[0])


def test_an_abort_by_a_broken_gpu_is_its_hosts_fault(host):
    kind, evidence, _ = judged(host, ECC)
    assert kind is HOST_UNHEALTHY and "uncorrectable ECC error" in evidence


def test_an_abort_that_is_told_early_has_the_librarys_words_too(host):
    host.rank(99, 0)
    host.give(RankExiting(99, signal.SIGABRT, ECC))
    assert classify_rank_exit("host-0", host.of(RankExit)[0])[0] is HOST_UNHEALTHY


def test_an_abort_because_of_a_lost_peer_is_no_failure_of_its_own(host):
    kind, _, detail = judged(host, REMOTE)
    assert kind is RANK_EXIT and detail == {"secondary": True}


@pytest.mark.parametrize("text", ["assertion failed\n", ""])
def test_an_abort_without_such_words_is_a_signal(host, text):
    assert judged(host, text) == (RANK_EXIT, "rank 0 on host-0 was killed by SIGABRT", {"signal": 6})


def test_another_signal_is_not_explained_by_an_old_line_of_the_log(host):
    assert judged(host, ECC, code=-9)[1] == "rank 0 on host-0 was killed by SIGKILL"


def test_what_the_rank_said_itself_counts_before_its_log(host):
    said = LastWords(exception="RuntimeError", message="CUDA out of memory")
    assert "ran out of memory" in judged(host, ECC, last=said)[1]


COPY = SnapshotCopy(step=9, attempt=2, rank=1, layout="r1s2t1p1c1e1", host="host-0", tier="memory")


def test_only_an_error_about_copies_names_copies():
    words = last_words(SnapshotNotIntact("step 9 does not match its checksum", copies=(COPY,)))
    assert (words.exception, words.rejected) == ("SnapshotNotIntact", (COPY,))
    assert last_words(CheckpointError("no room")).rejected == () == last_words(ValueError("x")).rejected


def test_they_are_dropped_before_the_supervisor_hears_of_it(host):
    """The log comes first, evidence last."""
    host.rank(99, 1, words=last_words(SnapshotNotIntact("it is damaged", copies=(COPY,))))
    host.rank(98, 0, peer=2)
    host.done.clear()
    host.give(GONE, reaped(1))
    done = [action for action in host.done if getattr(action, "peer", None) != FORK_SERVER]
    assert [type(action) for action in done[:3]] == [Log, DropCopies, SendTo]
    assert host.did(DropCopies)[0].copies == (COPY,) and host.of(RankExit)[0].last.rejected == (COPY,)
    assert [action.peer for action in done if isinstance(action, SendTo)] == [SUPERVISOR, 2]


@pytest.mark.parametrize("text", ["no file \udcff.bin", "x" * (MAX_BYTES + 1)], ids=["a lone surrogate", "too long"])
def test_what_no_frame_can_hold_does_not_silence_a_rank(text):
    for error in (SnapshotNotIntact(text, copies=(COPY,)), CheckpointError("no room", hint=text), ValueError(text)):
        with pytest.raises(type(error)):
            report(error)


def report(error):
    try:
        raise error
    except Exception as raised:
        assert len(encode(last_words(raised))) < MAX_BYTES  # its traceback is the current exception's
        raise


# ---------------------------------------------------------------- ranks that are retained


def keep(*ranks, pause_s=31.0):
    return SupervisorMessage(EndAttempt(attempt=1, why="i", keep=ranks, pause_s=pause_s))


def test_they_have_the_time_that_the_supervisor_gives(host):
    mine, other = host.rank(99, 0, peer=1), host.rank(98, 1, peer=2)
    host.give(keep(0))
    assert (host.to[-1], host.killed) == ((1, Pause()), [98])
    host.tick(30.9)
    assert mine.state is RankState.PAUSING
    host.tick(0.1)
    assert host.killed == [98, 99]
    host.tick(5.0)
    assert host.killed == [98, 99], "once: its driver may hold it for minutes"
    assert other.killed


def test_a_paused_one_is_waited_for_no_longer_and_is_asked_again_by_a_repeated_order(host):
    mine = host.rank(99, 0)
    host.give(keep(0)).says(mine, Paused(attempt=1, step=7))
    assert host.of(RanksEnded)[0].kept == {0: 7}
    host.tick(500.0)
    assert host.killed == [] and mine.state is RankState.PAUSED
    host.give(keep(0))
    assert [peer for peer, message in host.to if message == Pause()] == [1, 1] and mine.state is RankState.PAUSING
    host.says(mine, Paused(attempt=1, step=7))
    assert len(host.of(RanksEnded)) == 2


def test_a_rank_that_cannot_be_asked_is_not_retained(host):
    host.rank(99, 0, peer=None)
    host.give(keep(0))
    assert host.killed == [99]


def test_two_that_exchange_their_numbers_get_each_others_place(host):
    """All numbers change before any is looked up again."""
    one, other = host.rank(99, 0, peer=1), host.rank(98, 1, peer=2)
    host.give(keep(0, 1)).says(one, Paused(attempt=1, step=7)).says(other, Paused(attempt=1, step=7))
    contexts = (context(0, attempt=2, kept_rank=1), context(1, attempt=2, kept_rank=0))
    host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=contexts)))
    places = {peer: message.context.rank for peer, message in host.to if isinstance(message, TakePlace)}
    assert places == {1: 1, 2: 0} and (one.rank, other.rank) == (1, 0)
    assert one.state is other.state is RankState.RUNNING and host.killed == []


def test_a_stopped_one_is_not_waited_for(host):
    """It will never pause: after the silence that a stopped rank is allowed elsewhere it counts as lost."""
    host.rank(99, 0)
    host.give(keep(0, pause_s=90.0))
    host.tick(10.0)
    assert host.killed == [], "silent, but it runs: it may be in a long kernel"
    host.stopped.add(99)
    host.tick(2.25)
    assert host.killed == [], "it may be held for a moment"
    host.tick(0.65)
    assert host.killed == []
    host.tick(0.1)
    assert host.killed == [99]


# ---------------------------------------------------------------- a start that fails


def test_it_is_told_and_the_next_attempt_starts(host):
    host.full = "[Errno 28] No space left on device"
    host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=(context(0, attempt=2),))))
    (failure,) = host.of(StartFailed)
    assert "host-0 cannot start attempt 2" in failure.reason and "No space left" in failure.reason
    assert host.state.ranks.queue == []
    host.full = None
    host.give(SupervisorMessage(StartAttempt(attempt=3, contexts=(context(0, attempt=3),))))
    assert [each.attempt for each in host.state.ranks.queue] == [3] and len(host.of(StartFailed)) == 1


def test_a_start_looks_at_the_memory_first_then_kills_then_prepares_the_state(host):
    host.rank(99, 0)
    host.done.clear()
    host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=(context(0, attempt=2),))))
    assert [type(action).__name__ for action in host.done][:3] == ["CheckMemory", "Kill", "PrepareState"]
    assert not host.did(ReportSnapshots)
