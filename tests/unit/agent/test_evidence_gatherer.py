"""What an agent captures of processes that stand still, in time, whatever they do; and after another rank's exit."""

import os
import signal
import subprocess
import sys

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.evidence import gathering
from muster.agent.evidence.assemble import assemble, cgroup_state, process_state
from muster.agent.evidence.gathering import EXIT_LIMIT_S, SPY
from muster.agent.values.actions import AskRas, ReadOomKills, ReportEvidence, SendTo, StopProgram
from muster.agent.values.events import (
    HardwareListed,
    KernelLine,
    OomKills,
    ProcessGone,
    ProgramEnded,
    RasAnswered,
    SupervisorMessage,
)
from muster.core.typed_json import decode
from muster.health.hang.evidence import NO_SPY, RankEvidence, in_words
from muster.health.hang.process_state import CgroupState
from muster.health.verdicts import Verdict
from muster.protocol.rank_agent import CaptureRank, RankCaptured
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.protocol.to_agent import GatherEvidence, TraceRanks
from muster.protocol.to_supervisor import EvidenceReady, RankExit, StartFailed
from muster.protocol.values import LastWords, TraceSteps

OWN_WORDS = 'Thread 0x1 [MainThread] (most recent call first):\n  File "/home/u/train.py", line 9 in step'


@pytest.fixture
def child():
    found = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield found
    found.kill()
    found.wait()
    found.stdin.close()


@pytest.fixture
def host():
    """Without py-spy. What is gathered is assembled as its edge does it."""
    host = VirtualHost(spec=spec_of(resources={"device": "cuda", "ranks_per_host": 1})).supervised()
    host.answers[ReportEvidence] = lambda action: host.sent.append(assemble(action, "host-0")) or ()
    return host


def without_spy(host, pid):
    host.refused[f"{SPY}{pid}"] = StartFailed(reason="No such file or directory")


def gather(host, pid, *, captured=None, attempt=2, spy=False):
    """(the answer, its one rank's evidence)"""
    rank = host.rank(pid, 3, 2, step=17)
    if not spy:
        without_spy(host, pid)
    host.give(SupervisorMessage(GatherEvidence(attempt=attempt)))
    if captured is not None:
        host.says(rank, captured)
    host.tick()
    if captured is None:
        assert not host.of(EvidenceReady) or attempt != 2
        host.tick(GatherEvidence(attempt=attempt).limit_s)
    answer = host.of(EvidenceReady)[-1]
    return answer, decode(RankEvidence, answer.ranks[0]) if answer.ranks else None


def test_a_stopped_process_is_told_within_the_limit(host, child):
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    _, found = gather(host, child.pid)
    assert found.process is not None and found.process.stopped
    assert (found.rank, found.host, found.step, found.answers) == (3, "host-0", 17, False)
    assert f"did not answer within {GatherEvidence(attempt=2).limit_s:g} s" in " ".join(found.missing)


def test_a_rank_tells_its_own_stack_and_what_is_no_recorder_is_named(host, child):
    _, found = gather(host, child.pid, captured=RankCaptured(stacks=OWN_WORDS, recorders=("[]",)))
    assert found.answers and found.threads is not None and found.threads[0].frames[0].place == "/home/u/train.py:9"
    assert found.recorder is None and "not a JSON object" in found.missing[0]


def test_without_py_spy_its_absence_stands_where_the_line_would(host, child):
    _, found = gather(host, child.pid)
    assert "the extra inspect" in in_words(found) and NO_SPY in found.missing
    host.state.ranks.table.clear()
    _, found = gather(host, child.pid, captured=RankCaptured(stacks=OWN_WORDS))
    assert NO_SPY not in found.missing, "its own thread has told the line"


@pytest.mark.parametrize("code", [0, 1])
def test_what_py_spy_saw_from_outside_counts_first_and_is_waited_for(host, child, code):
    rank = host.rank(child.pid, 3, 2)
    host.give(SupervisorMessage(GatherEvidence(attempt=2)))
    host.says(rank, RankCaptured(stacks=OWN_WORDS)).tick()
    assert not host.of(EvidenceReady)
    seen = '[{"thread_name": "MainThread", "os_thread_id": 1, "thread_id": 1, "active": true, "owns_gil": true, '
    seen += '"pid": 1, "frames": [{"name": "f", "filename": "/seen.py", "short_filename": "seen.py", "line": 3}]}]'
    host.give(ProgramEnded(f"{SPY}{child.pid}", code, seen.encode())).tick()
    found = decode(RankEvidence, host.of(EvidenceReady)[0].ranks[0])
    assert found.threads[0].frames[0].place.startswith("/seen.py" if code == 0 else "/home/u/train.py")


def test_one_that_still_looks_when_the_time_is_over_is_left(host, child):
    gather(host, child.pid, spy=True)
    assert StopProgram(f"{SPY}{child.pid}", leave=True) in host.done


def test_a_process_that_is_gone(host, child):
    child.kill()
    child.wait()
    _, found = gather(host, child.pid)
    assert found.process is not None and found.process.dead


def test_ranks_of_another_attempt_are_not_captured(host, child):
    answer, found = gather(host, child.pid, attempt=1)
    assert answer.ranks == () and found is None


def test_the_kernels_words_in_both_versions_of_cgroups(tmp_path):
    assert process_state(os.getpid()).state == "R"
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("2:memory:/a\n1:cpu,cpuacct:/b\n0::/c\n")
    for name, file, text in (
        ("memory/a", "memory.oom_control", "oom_kill 2\n"),
        ("cpu/b", "cpu.stat", "throttled_time 1500000000\n"),
        ("c", "memory.events", "oom_kill 9\n"),
    ):
        (root / name).mkdir(parents=True)
        (root / name / file).write_text(text)
    assert cgroup_state(7, proc, root) == CgroupState(oom_kills=2, throttled_s=1.5)
    (proc / "7" / "cgroup").write_text("0::/c\n")
    assert cgroup_state(7, proc, root) == CgroupState(oom_kills=9)
    assert cgroup_state(8, proc, root) == CgroupState()


def test_a_terminals_patience_ends_where_a_hang_asks(host, child):
    """Its limit is longer; the supervisor waits for a hang's evidence no longer than the shorter one."""
    host.rank(child.pid, 3, 2)
    host.give(SupervisorMessage(GatherEvidence(attempt=2, limit_s=30.0)))
    assert gathering.due_s(host.state) == host.now_s + 30
    host.give(SupervisorMessage(GatherEvidence(attempt=2, limit_s=0.2)))
    assert gathering.due_s(host.state) == host.now_s + 0.2
    host.tick(0.2)
    assert len(host.of(EvidenceReady)) == 1 and gathering.due_s(host.state) == float("inf")


def test_a_trace_is_asked_of_the_ranks_that_are_meant(host):
    for number in range(3):
        host.rank(90 + number, number, 2, peer=number)
    trace = TraceSteps(request="a", steps=3)
    host.give(SupervisorMessage(TraceRanks(attempt=2, ranks=(1, 7), trace=trace)))
    host.give(SupervisorMessage(TraceRanks(attempt=1, ranks=(0,), trace=trace)))
    assert host.to == [(1, trace)]


# ---------------------------------------------------------------- after an exit


def beside(host, *, code=1, kills=0):
    """Rank 1 exits with an error while ranks 0 and 2 live; the host."""
    ranks = [host.rank(90 + number, number, 2, peer=number, step=41) for number in (0, 2)]
    dead = host.rank(77, 1, 2, peer=1, step=41)
    dead.words = LastWords(left=code)
    host.answers[ReadOomKills] = lambda action: [OomKills(action.exit, kills)]
    host.to.clear()
    host.give(ProcessGone(77))
    return ranks


def test_an_exit_is_reported_first_and_its_evidence_follows_without_anything_that_waits(host):
    first, second = beside(host)
    assert [type(message) for message in host.sent] == [RankExit]
    assert host.to == [(number, CaptureRank(recorders=False)) for number in (0, 2)]
    assert host.done.index(host.did(SendTo)[-1]) > host.done.index(host.did(ReadOomKills)[0])
    assert gathering.due_s(host.state) == host.now_s + EXIT_LIMIT_S
    host.says(first, RankCaptured(stacks=OWN_WORDS))
    second.code = -9  # it was ended before it could answer
    host.tick()
    (answer,) = host.of(EvidenceReady)
    gone, other = (decode(RankEvidence, text) for text in answer.ranks)
    assert (answer.exited, answer.attempt, gone.rank, gone.step) == (1, 2, 1, 41)
    assert gone.process is not None and gone.process.dead
    assert other.rank == 0 and other.process is None and other.threads is not None
    assert gathering.due_s(host.state) == float("inf")


def test_who_has_not_answered_when_a_hang_is_reported_is_left_out(host):
    beside(host)
    host.give(SupervisorMessage(GatherEvidence(attempt=2, limit_s=0.0))).tick()
    exited, hang = host.of(EvidenceReady)
    assert [decode(RankEvidence, text).rank for text in exited.ranks] == [1]
    assert hang.exited is None and len(hang.ranks) == 2


def test_a_second_exit_meanwhile_begins_nothing_new(host):
    beside(host)
    host.state.ranks.table[90].words = LastWords(left=1)
    host.give(ProcessGone(90)).tick(EXIT_LIMIT_S)
    assert len(host.of(RankExit)) == 2 and len(host.of(EvidenceReady)) == 1


def test_memory_that_the_kernel_took_is_told(host):
    beside(host, kills=1)
    host.tick(EXIT_LIMIT_S)
    told = decode(RankEvidence, host.of(EvidenceReady)[0].ranks[0]).cgroup
    assert told == CgroupState(oom_kills=1)


def test_errors_of_the_gpu_since_the_others_last_step(host):
    host.give(HardwareListed({"0000:19:00.0": 0, "0000:3b:00.0": 1}, None, False, True))
    host.give(KernelLine("4,1,100,-;NVRM: Xid (PCI:0000:19:00): 31, long before"))
    host.now_s += 100
    host.give(KernelLine("4,2,900000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"))
    beside(host)
    host.tick(EXIT_LIMIT_S)
    (finding,) = decode(RankEvidence, host.of(EvidenceReady)[0].ranks[0]).findings
    assert finding.verdict is Verdict.REPLACE and finding.gpu == 1


@pytest.mark.parametrize("code", [0, 75, 130, RESIZE_EXIT_CODE])
def test_ranks_that_end_as_they_should_are_no_reason_to_look(host, code):
    beside(host, code=code)
    assert not host.to and len(host.sent) == 1 and gathering.due_s(host.state) == float("inf")


@pytest.mark.parametrize(("rank", "gpus", "asked"), [(0, {}, False), (3, {"a": 0}, False), (0, {"a": 0}, True)])
def test_ras_is_asked_where_rank_0_is_and_gpus_are(host, child, rank, gpus, asked):
    host.state.hardware.gpus = gpus
    host.rank(child.pid, rank, 2)
    host.give(SupervisorMessage(GatherEvidence(attempt=2, limit_s=0.2)))
    assert bool(host.did(AskRas)) == asked
    if asked:
        host.give(RasAnswered("Job summary", "NCCL's RAS: no end"))
    host.tick(0.2)
    answer = host.of(EvidenceReady)[0]
    assert (answer.ras, answer.missing) == (("Job summary", ("NCCL's RAS: no end",)) if asked else ("", ()))
