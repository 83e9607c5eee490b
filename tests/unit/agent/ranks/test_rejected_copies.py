"""A rank that was to start from a damaged copy names it, and its host holds that copy no longer."""

import pytest
from fakes.host import RecordingHost

from muster.agent.ranks.pool_calls import Snapshots
from muster.agent.ranks.rank_process import Worker
from muster.core.errors import CheckpointError
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.protocol.codec import MAX_BYTES, encode
from muster.rank.standby import last_words

COPY = SnapshotCopy(step=9, attempt=2, rank=1, layout="r1s2t1p1c1e1", host="host-0", tier="memory")


def test_only_an_error_about_copies_names_copies():
    words = last_words(SnapshotNotIntact("step 9 does not match its checksum", copies=(COPY,)))
    assert (words.exception, words.rejected) == ("SnapshotNotIntact", (COPY,))
    assert last_words(CheckpointError("no room")).rejected == () == last_words(ValueError("x")).rejected


def test_they_are_dropped_before_the_supervisor_hears_of_it(monkeypatch):
    monkeypatch.setattr("muster.agent.ranks.rank_process.os.close", lambda fd: None)
    host = RecordingHost()
    done = host.sent
    pool = host.rank_pool(
        snapshots=Snapshots(
            begin=lambda order: order.contexts,
            held=tuple,
            drop=done.append,
            on_ready=lambda: None,
            on_step=lambda _: None,
        )
    )
    words = last_words(SnapshotNotIntact("it is damaged", copies=(COPY,)))
    pool.workers[99] = Worker(pid=99, rank=1, attempt=3, peer=None, pidfd=5, last=words)
    pool._on_exit(pool.workers[99])
    dropped, report = done
    assert dropped == (COPY,) and report.last.rejected == (COPY,)


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
