"""Data preparation that is killed: restarted once, then reported."""

import signal
from types import SimpleNamespace

from fakes.host import RecordingHost, events

from muster.agent.child_processes import ChildProcesses


def preparing(run_dir):
    """Children of a host that has data to prepare, what is called when their processes exit, and their failures."""
    calls, failures = [], []
    host = RecordingHost(run_dir, spec=SimpleNamespace(data={"sources": []}))
    host.hub = SimpleNamespace(watch=lambda fd, call: calls.append(call), unwatch=lambda fd: None)
    children = ChildProcesses(host=host, events=events(on_failure=failures.append))
    children._start_prepare()
    return host, children, calls, failures


def test_a_killed_preparation_is_restarted_once(tmp_path):
    host, children, calls, failures = preparing(tmp_path)
    for round_ in (1, 2):
        child = children._prepare
        child.send_signal(signal.SIGKILL)
        calls.pop()()  # its pidfd fired
        assert len(host.notes) == 1 and "signal 9" in host.notes[0]
        assert (children._prepare is not None and children._prepare.pid != child.pid) == (round_ == 1)
    (failure,) = failures
    assert "ended with code -9" in failure["reason"] and failure["exit_code"] == 1
    assert "lack of memory" in failure["hint"]


def test_its_own_error_is_reported_at_once(tmp_path):
    host, children, calls, failures = preparing(tmp_path)  # there is no run file in this folder
    children._prepare.wait()
    calls.pop()()
    assert not host.notes and len(failures) == 1
