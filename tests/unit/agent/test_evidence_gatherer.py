"""What an agent captures of processes that stand still, in time, whatever they do. Real processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from muster.agent.evidence import gatherer
from muster.agent.evidence.gatherer import EvidenceGatherer
from muster.agent.evidence.proc import cgroup_state, process_state
from muster.agent.ranks.rank_process import Worker
from muster.core.typed_json import decode
from muster.health.hang.evidence import NO_SPY, RankEvidence, in_words
from muster.health.hang.process_state import CgroupState
from muster.health.verdicts import Finding, Verdict
from muster.protocol.rank_agent import CaptureRank, RankCaptured
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.protocol.to_agent import GatherEvidence, TraceRanks
from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import TraceSteps
from muster.transport.connections import ConnectionPool

OWN_WORDS = 'Thread 0x1 [MainThread] (most recent call first):\n  File "/home/u/train.py", line 9 in step'


@pytest.fixture
def child():
    found = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield found
    found.kill()
    found.wait()
    found.stdin.close()


@pytest.fixture
def hub():
    found = ConnectionPool(token=b"t" * 32, on_gone=lambda *_: None)
    yield found
    found.shutdown()


def worker(pid):
    found = Worker(pid=pid, rank=3, attempt=2, peer=None, pidfd=-1)
    found.step = 17
    return found


def gather(hub, one, *, captured=None, attempt=2):
    """(the answer, seconds)"""
    sent = []
    gatherer = EvidenceGatherer(hub=hub, host="host-0", living=lambda: [one], send=sent.append)
    begun = time.monotonic()
    gatherer.begin(GatherEvidence(attempt=attempt))
    one.captured = captured
    while not sent and time.monotonic() - begun < 20:
        hub.run_once(max(0.0, gatherer.due_s() - time.monotonic()))
        gatherer.watch()
    (answer,) = sent
    return answer, time.monotonic() - begun


def test_a_stopped_process_is_told_within_the_limit(hub, child):
    child.send_signal(signal.SIGSTOP)
    one = worker(child.pid)
    answer, took_s = gather(hub, one)
    found = decode(RankEvidence, answer.ranks[0])
    assert found.process is not None and found.process.stopped
    assert (found.rank, found.host, found.step, found.answers) == (3, "host-0", 17, False)
    assert f"did not answer within {GatherEvidence(attempt=2).limit_s:g} s" in " ".join(found.missing)
    assert took_s < 5.0


def test_a_rank_tells_its_own_stack_and_what_is_no_recorder_is_named(hub, child, monkeypatch):
    monkeypatch.setattr("muster.agent.evidence.gatherer.program", lambda name: None)
    one = worker(child.pid)
    answer, _ = gather(hub, one, captured=RankCaptured(stacks=OWN_WORDS, recorders=("[]",)))
    found = decode(RankEvidence, answer.ranks[0])
    assert found.answers and found.threads is not None and found.threads[0].frames[0].place == "/home/u/train.py:9"
    assert found.recorder is None and "not a JSON object" in found.missing[0]


def test_without_py_spy_its_absence_stands_where_the_line_would(hub, child, monkeypatch):
    monkeypatch.setattr(gatherer, "program", lambda name: None)
    child.send_signal(signal.SIGSTOP)
    answer, _ = gather(hub, worker(child.pid))
    found = decode(RankEvidence, answer.ranks[0])
    assert "the extra inspect" in in_words(found) and NO_SPY in found.missing
    answer, _ = gather(hub, worker(child.pid), captured=RankCaptured(stacks=OWN_WORDS))
    assert NO_SPY not in decode(RankEvidence, answer.ranks[0]).missing, "its own thread has told the line"


def test_a_process_that_is_gone(hub, child):
    child.kill()
    child.wait()
    one = worker(child.pid)
    answer, _ = gather(hub, one)
    found = decode(RankEvidence, answer.ranks[0])
    assert found.process is not None and found.process.dead


def test_ranks_of_another_attempt_are_not_captured(hub, child):
    one = worker(child.pid)
    answer, _ = gather(hub, one, attempt=1)
    assert answer.ranks == ()


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


def test_without_a_descriptor_for_its_looker_the_agent_goes_on(hub, child, monkeypatch, tmp_path):
    """``pidfd_open`` fails as it does at the limit of open files."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 60\n")
    spy.chmod(0o755)
    monkeypatch.setattr(gatherer, "program", lambda name: str(spy))

    def no_more(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_more)
    answer, _ = gather(hub, worker(child.pid), captured=RankCaptured(stacks=OWN_WORDS))
    assert decode(RankEvidence, answer.ranks[0]).threads, "in the rank's own words"


def test_a_terminals_patience_ends_where_a_hang_asks(hub, child):
    """Its limit is longer; the supervisor waits for a hang's evidence no longer than the shorter one."""
    child.send_signal(signal.SIGSTOP)
    sent = []
    gatherer = EvidenceGatherer(hub=hub, host="host-0", living=lambda: [worker(child.pid)], send=sent.append)
    now = time.monotonic()
    gatherer.begin(GatherEvidence(attempt=2, limit_s=30.0))
    assert gatherer.due_s() > now + 25
    gatherer.begin(GatherEvidence(attempt=2, limit_s=0.2))
    assert gatherer.due_s() < now + 5
    while not sent and time.monotonic() < now + 20:
        hub.run_once(max(0.0, gatherer.due_s() - time.monotonic()))
        gatherer.watch()
    assert len(sent) == 1 and time.monotonic() < now + 20


def test_a_trace_is_asked_of_the_ranks_that_are_meant():
    told = []
    hub = SimpleNamespace(send=lambda peer, message: told.append((peer, message)))
    here = [Worker(pid=1, rank=rank, attempt=2, peer=f"peer {rank}", pidfd=-1) for rank in range(3)]
    gatherer = EvidenceGatherer(hub=hub, host="host-0", living=lambda: here, send=told.append)
    trace = TraceSteps(request="a", steps=3)
    gatherer.begin(TraceRanks(attempt=2, ranks=(1, 7), trace=trace))
    gatherer.begin(TraceRanks(attempt=1, ranks=(0,), trace=trace))
    assert told == [("peer 1", trace)]


def exit_of(rank=1, code=-9):
    return RankExit(attempt=2, rank=rank, pid=77, code=code, step=41)


def beside(**more):
    """(gatherer of a host whose rank 1 has exited and whose ranks 0 and 2 live, what it sent, to whom it wrote)."""
    sent, written = [], []
    hub = SimpleNamespace(send=lambda peer, message: written.append((peer, message)))
    living = [Worker(pid=1, rank=rank, attempt=2, peer=f"peer {rank}", pidfd=-1) for rank in (0, 2)]
    found = EvidenceGatherer(hub=hub, host="host-0", living=lambda: living, send=sent.append, **more)
    return found, sent, written, living


def test_an_exit_is_reported_first_and_its_evidence_follows_without_anything_that_waits():
    found, sent, written, living = beside()
    found.report(exit_of())
    assert sent == [exit_of()] and found.due_s() < time.monotonic() + 1
    assert written == [(f"peer {rank}", CaptureRank(recorders=False)) for rank in (0, 2)]
    living[0].captured = RankCaptured(stacks=OWN_WORDS)
    living[1].exit_code = -9  # it was ended before it could answer
    found.watch()
    _, answer = sent
    gone, other = (decode(RankEvidence, text) for text in answer.ranks)
    assert (answer.exited, answer.attempt, gone.rank, gone.step) == (1, 2, 1, 41)
    assert gone.process is not None and gone.process.dead
    assert other.rank == 0 and other.process is None and other.threads is not None
    assert found.due_s() == float("inf")


def test_who_has_not_answered_when_a_hang_is_reported_is_left_out(monkeypatch):
    monkeypatch.setattr("muster.agent.evidence.gatherer.program", lambda name: None)
    found, sent, _, _ = beside()
    found.report(exit_of())
    found.begin(GatherEvidence(attempt=2, limit_s=0.0))
    assert [decode(RankEvidence, text).rank for text in sent[1].ranks] == [1]
    found.watch()
    assert sent[2].exited is None and len(sent[2].ranks) == 2


def test_memory_that_the_kernel_took_since_the_last_exit_alone_is_told(monkeypatch):
    kills = iter([7, 8, 8])
    monkeypatch.setattr(gatherer, "cgroup_state", lambda pid: CgroupState(oom_kills=next(kills)))
    found, sent, _, living = beside()
    living.clear()
    for rank in (1, 2):
        found.report(exit_of(rank))
        found.watch()
    told = [decode(RankEvidence, one.ranks[0]).cgroup for one in sent if not isinstance(one, RankExit)]
    assert told == [CgroupState(oom_kills=1), CgroupState(oom_kills=0)]


def test_errors_of_the_gpu_since_the_others_last_step():
    asked = []
    xid = Finding(check="gpu.xid", verdict=Verdict.REPLACE, message="Xid 79 on GPU 1", gpu=1)
    found, sent, _, living = beside(findings=lambda rank, since_s: asked.append((rank, since_s)) or (xid,))
    living[0].progress_s, living[1].progress_s = 50.0, 49.0
    found.report(exit_of())
    for one in living:
        one.captured = RankCaptured(stacks="")
    found.watch()
    assert asked == [(1, 49.0)] and decode(RankEvidence, sent[1].ranks[0]).findings == (xid,)


@pytest.mark.parametrize("code", [0, 75, 130, RESIZE_EXIT_CODE])
def test_ranks_that_end_as_they_should_are_no_reason_to_look(code):
    found, sent, written, _ = beside()
    found.report(exit_of(code=code))
    assert not written and len(sent) == 1 and found.due_s() == float("inf")


def test_ras_is_asked_where_rank_0_is_and_gpus_are(hub, child, monkeypatch, tmp_path):
    made = []

    def played(of, environ, on_done):
        made.append(SimpleNamespace(done=True, end=lambda: None, report="Job summary", problem="NCCL's RAS: no end"))
        return made[-1]

    monkeypatch.setattr(gatherer, "RasQuery", played)
    one = worker(child.pid)
    for rank, gpus in ((0, tmp_path / "none"), (3, tmp_path), (0, tmp_path)):
        one.rank, sent = rank, []
        found = EvidenceGatherer(hub=hub, host="host-0", living=lambda: [one], send=sent.append, gpus=gpus)
        found.begin(GatherEvidence(attempt=2, limit_s=0.0))
        found.watch()
    assert len(made) == 1 and (sent[0].ras, sent[0].missing) == ("Job summary", ("NCCL's RAS: no end",))
