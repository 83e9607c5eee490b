"""Data preparation that is killed: begun again once, then said."""

import signal
from types import SimpleNamespace

from muster.agent.child_processes import Programs


class Host:
    """As much of an agent as ``Programs`` asks for."""

    def __init__(self, run_dir):
        self.run_dir, self.host, self.leaving = run_dir, "host-0", None
        self.spec = SimpleNamespace(data={"sources": []})
        self.hub = SimpleNamespace(watch=lambda fd, call: self.calls.append(call), unwatch=lambda fd: None)
        self.calls, self.notes, self.failures = [], [], []

    def log_event(self, kind, detail):
        self.notes.append((kind, detail["text"]))

    def failed(self, reason, *, exit_code=1, hint=None):
        self.failures.append((reason, exit_code, hint))


def test_a_killed_preparation_is_begun_again_once(tmp_path):
    host = Host(tmp_path)
    programs = Programs(agent=host)
    programs._start_prepare()
    for round_ in (1, 2):
        child = programs._prepare
        child.send_signal(signal.SIGKILL)
        host.calls.pop()()  # its pidfd fired
        assert len(host.notes) == 1 and "signal 9" in host.notes[0][1]
        assert (programs._prepare is not None and programs._prepare.pid != child.pid) == (round_ == 1)
    ((reason, code, hint),) = host.failures
    assert "ended with code -9" in reason and code == 1 and "lack of memory" in hint


def test_its_own_error_is_said_at_once(tmp_path):
    host = Host(tmp_path)
    programs = Programs(agent=host)
    programs._start_prepare()  # there is no run file in this folder
    programs._prepare.wait()
    host.calls.pop()()
    assert not host.notes and len(host.failures) == 1
