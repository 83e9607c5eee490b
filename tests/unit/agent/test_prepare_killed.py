"""Data preparation that is killed or fails: restarted, reported, tried again."""

import signal
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost

from muster.agent import programs as programs_module
from muster.agent.programs import RETRY_S
from muster.config.spec import RunSpec

#: A run file that names a file which is not there.
NO_FILE = {
    "name": "case", "model": {"config": {"model_type": "llama"}, "tokenizer": {"vocab_size": 64}},
    "data": {"sources": [{"type": "file", "path": "/nowhere.jsonl"}]},
    "training": {"steps": 1, "sequence_length": 8, "global_batch_size": 1},
}  # fmt: skip


def preparing(run_dir):
    """A host that has data to prepare, its programs, and what is called when their processes exit."""
    calls = []
    hub = SimpleNamespace(watch=lambda fd, call: calls.append(call), unwatch=lambda fd: None)
    host = RecordingHost(run_dir, spec=SimpleNamespace(data={"sources": []}, env={}, setup=None, workdir=None), hub=hub)
    programs = host.programs()
    programs.start()
    return host, programs, calls


def test_a_killed_preparation_is_restarted_once(tmp_path):
    host, programs, calls = preparing(tmp_path)
    for round_ in (1, 2):
        child = programs._prepare
        child.send_signal(signal.SIGKILL)
        calls.pop()()  # its pidfd fired
        assert len(host.notes) == 1 and "signal 9" in host.notes[0]
        assert (programs._prepare is not None and programs._prepare.pid != child.pid) == (round_ == 1)
    (failure,) = host.failures
    assert "ended with code -9" in failure.reason and failure.exit_code == 1
    assert "lack of memory" in failure.hint


def test_its_own_error_is_reported_at_once(tmp_path):
    host, programs, calls = preparing(tmp_path)  # there is no run file in this folder
    programs._prepare.wait()
    calls.pop()()
    assert not host.notes and len(host.failures) == 1


def ended(programs, calls):
    """The preparation that runs ends by itself: there is no run file in its folder."""
    programs._prepare.wait()
    calls.pop()()


@pytest.fixture
def now(monkeypatch):
    at = [1000.0]
    monkeypatch.setattr(programs_module.time, "monotonic", lambda: at[0])
    return at


def test_it_is_tried_again_by_itself_and_the_same_failure_told_once(tmp_path, now):
    """A disk was full when a restarted agent prepared: nobody else would ever start it again."""
    host, programs, calls = preparing(tmp_path)
    ended(programs, calls)
    programs.watch()
    assert programs._prepare is None, "not at once"
    now[0] += RETRY_S
    programs.watch()
    assert programs._prepare is not None
    programs.watch()
    ended(programs, calls)
    assert len(host.failures) == 1 and not calls


def test_an_attempt_that_starts_has_it_tried_and_told_again(tmp_path, now):
    host, programs, calls = preparing(tmp_path)
    programs.on_start()
    assert len(calls) == 1, "the first one still runs"
    ended(programs, calls)
    programs.on_start()
    ended(programs, calls)
    assert len(host.failures) == 2 and host.failures[0] == host.failures[1]


def test_a_wrong_run_file_is_not_tried_again_until_an_attempt_starts(tmp_path, now):
    (tmp_path / "resolved.json").write_text(RunSpec.model_validate(NO_FILE).model_dump_json())
    host, programs, calls = preparing(tmp_path)
    ended(programs, calls)
    assert host.failures[-1].exit_code == 2
    now[0] += 10 * RETRY_S
    programs.watch()
    assert programs._prepare is None
    programs.on_start()
    assert programs._prepare is not None
    ended(programs, calls)


def test_ranks_that_train_are_not_ended_by_a_restarted_agents_preparation(tmp_path, now):
    host, programs, calls = preparing(tmp_path)
    host.has_ranks = True
    ended(programs, calls)
    assert host.failures == [] and "the ranks on host-0 go on" in host.notes[0]
    host.has_ranks = False
    programs.on_start()
    ended(programs, calls)
    assert len(host.failures) == 1
