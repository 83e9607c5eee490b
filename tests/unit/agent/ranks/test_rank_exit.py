"""A rank that a library aborts says nothing itself: its log is read, and judged."""

import signal

import pytest

from muster.agent.ranks.rank_exit import exit_report, last_words
from muster.agent.ranks.rank_process import Worker
from muster.core.incidents import HOST_UNHEALTHY, RANK_EXIT
from muster.protocol.values import LastWords
from muster.supervise.recovery.rank_exits import classify_rank_exit

ECC = (
    "step 7 loss 2.0\n[rank0]:[E1123 ProcessGroupNCCL.cpp:2068] [PG ID 0] Process group watchdog thread "
    "terminated with exception: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
REMOTE = "ProcessGroupNCCL.cpp:100] NCCL error: ncclRemoteError: A call failed possibly due to a network error\n"


def judged(tmp_path, text, code=-signal.SIGABRT, last=None):
    worker = Worker(pid=5, rank=0, attempt=2, peer=None, pidfd=-1, exit_code=code, last=last)
    if text is not None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rank-0.a2.log").write_text(text)
    worker.last = last_words(worker, tmp_path)
    return classify_rank_exit("host-0", exit_report(worker))


def test_an_abort_by_a_broken_gpu_is_its_hosts_fault(tmp_path):
    kind, evidence, _ = judged(tmp_path, "x" * 50_000 + "\n" + ECC)
    assert kind is HOST_UNHEALTHY and "uncorrectable ECC error" in evidence


def test_an_abort_because_of_a_lost_peer_is_no_failure_of_its_own(tmp_path):
    kind, _, detail = judged(tmp_path, REMOTE)
    assert kind is RANK_EXIT and detail == {"secondary": True}


@pytest.mark.parametrize("text", ["assertion failed\n", "", None])
def test_an_abort_without_such_words_is_a_signal(tmp_path, text):
    assert judged(tmp_path, text) == (RANK_EXIT, "rank 0 on host-0 was killed by SIGABRT", {"signal": 6})


def test_another_signal_is_not_explained_by_an_old_line_of_the_log(tmp_path):
    assert judged(tmp_path, ECC, code=-9)[1] == "rank 0 on host-0 was killed by SIGKILL"


def test_what_the_rank_said_itself_counts_before_its_log(tmp_path):
    said = LastWords(exception="RuntimeError", message="CUDA out of memory")
    assert "ran out of memory" in judged(tmp_path, ECC, last=said)[1]
