"""Data preparation that is killed: restarted once, then reported."""

import signal
from types import SimpleNamespace

from fakes.host import RecordingHost


def preparing(run_dir):
    """A host that has data to prepare, its programs, and what is called when their processes exit."""
    calls = []
    hub = SimpleNamespace(watch=lambda fd, call: calls.append(call), unwatch=lambda fd: None)
    host = RecordingHost(run_dir, spec=SimpleNamespace(data={"sources": []}), hub=hub)
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
