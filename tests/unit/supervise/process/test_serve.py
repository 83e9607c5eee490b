"""The supervisor's process without hosts: what it does before it acts, and what a full disk does to its log."""

import errno
import signal
from types import SimpleNamespace

import pytest
from fakes.idle_supervisor import idle_supervisor
from fakes.virtual_run import spec

from muster.core import resolved_file
from muster.core.errors import ConflictError
from muster.core.event_log import EventLog, check_directory, read
from muster.protocol.client import RestartRun
from muster.supervise.recovery.inputs import End, Log, RestartRequest, Tick
from muster.supervise.recovery.phases import Held


@pytest.fixture
def supervisor(tmp_path):
    of = spec(hosts=1, recovery={"keep_hosts_after_failure_s": 60.0})
    (tmp_path / "resolved.json").write_text(of.model_dump_json())
    return idle_supervisor(tmp_path, of)


def test_a_deposed_supervisor_acts_on_nothing(supervisor):
    handled = []
    supervisor.machine = SimpleNamespace(handle=lambda *given: handled.append(given))

    def deposed():
        raise ConflictError("another supervisor took the lease")

    supervisor.lease = SimpleNamespace(hold=deposed)
    with pytest.raises(ConflictError):
        supervisor._handle(Tick())
    assert not handled and not supervisor.pool.sent


def test_the_end_is_known_before_agents_are_waited_for(supervisor):
    """A supervisor that is killed while it waits leaves a run that has ended."""
    happened = []
    supervisor.result = End(exit_code=0, outcome="succeeded", reason="done")
    supervisor.agents = {"host-0": None}
    supervisor.lease = SimpleNamespace(hold=lambda: None, renew=lambda: True, repairs=[])
    supervisor.pool.run_once = lambda timeout_s: (happened.append("wait"), supervisor.agents.clear())
    supervisor.home.declare = lambda end: happened.append(end.reason)
    supervisor.home.finish = lambda log, end, status: happened.append("finish")
    supervisor._shutdown()
    assert happened == ["done", "wait", "finish"]


class FullDisk:
    """A file that takes ``room`` bytes and then nothing."""

    def __init__(self, inner, room):
        self.inner, self.room = inner, room

    def write(self, data):
        part = bytes(data[: self.room])
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(part)
        return self.inner.write(part)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_full_disk_neither_ends_the_supervisor_nor_breaks_its_log(supervisor, tmp_path):
    supervisor.journal.say("before")
    supervisor.journal.log._file = disk = FullDisk(supervisor.journal.log._file, 50)
    for number in range(5):
        supervisor.journal.say(f"full {number}")
        supervisor.journal.log.sync()
        supervisor.journal.tend()
    assert supervisor.journal.log.trouble == "No space left on device"
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["before"], "a torn end is left out"
    assert check_directory(tmp_path / "events", run_id="r")["supervisor.1.jsonl"].problem is None
    disk.room = 10**6
    supervisor.journal.tend()
    texts = [event.detail["text"] for _, event in read(tmp_path / "events")]
    assert texts[:6] == ["before", *(f"full {number}" for number in range(5))]
    assert "it is complete again" in texts[6] and "No space left" in texts[6]
    assert check_directory(tmp_path / "events", run_id="r")["supervisor.1.jsonl"].problem is None


def test_a_writer_killed_on_a_full_disk_leaves_a_file_that_its_successor_goes_on_with(tmp_path):
    log = EventLog("r", tmp_path, "supervisor", 1)
    log.append("run.message", detail={"text": "one"})
    log._file = FullDisk(log._file, 20)
    log.append("run.message", detail={"text": "two"})
    log._file.inner.close()
    again = EventLog("r", tmp_path, "supervisor", 1)
    again.append("run.message", detail={"text": "three"})
    again.close()
    assert [event.detail["text"] for _, event in read(tmp_path)] == ["one", "three"]


def corrected(supervisor, **recovery):
    of = spec(hosts=1, recovery={"keep_hosts_after_failure_s": 60.0, "heartbeat_timeout_s": 9.0, **recovery})
    of = of.model_copy(update={"limits": of.limits.model_copy(update={"max_hours": 2.0})})
    (supervisor.run_dir / "resolved.json").write_text(of.model_dump_json())


def test_a_corrected_file_brings_its_policy_times_and_limits(supervisor):
    supervisor.machine.state.phase = Held(exit_code=1, reason="bad")
    supervisor.limits.asked = True
    corrected(supervisor, policy="none")
    supervisor._from_client(None, RestartRun())
    (order,) = supervisor._pending
    assert isinstance(order, RestartRequest) and type(order.policy).__name__ == "NoRecovery"
    assert supervisor.liveness.timing.timeout_s == 9.0 and supervisor.limits.guard.limits.max_hours == 2.0
    assert not supervisor.limits.asked


def texts(folder):
    return [event.detail["text"] for _, event in read(folder / "events") if event.kind == "run.message"]


BEGINS = Log(kind="attempt.started", detail={"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}})
WAITS = Log(kind="run.waiting", detail={"hosts": [], "needed_hosts": 1})
HARMS = {
    "flipped": lambda path: path.write_text(path.read_text().replace('"name": "', '"name": "q', 1)),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_run_file_is_written_anew_before_an_attempt_begins(supervisor, tmp_path, harm):
    held = supervisor.machine.settings.spec
    (tmp_path / "job.json").write_text("{}")
    resolved_file.write(tmp_path, held.model_dump_json(indent=1) + "\n")
    whole = (tmp_path / "resolved.json").read_bytes()
    supervisor._log_decided(BEGINS)
    assert not texts(tmp_path), "there is nothing to mend"
    HARMS[harm](tmp_path / "resolved.json")
    supervisor._log_decided(WAITS)
    assert not texts(tmp_path)
    supervisor._log_decided(BEGINS)
    assert (tmp_path / "resolved.json").read_bytes() == whole
    assert (tmp_path / "resolved.json.damaged").exists() == (harm != "gone")
    (text,) = texts(tmp_path)
    assert ("is gone" if harm == "gone" else "is damaged") in text and "written anew" in text
    supervisor._log_decided(BEGINS)
    assert len(texts(tmp_path)) == 1


def test_nothing_is_written_where_the_whole_folder_is_away(supervisor, tmp_path):
    (tmp_path / "resolved.json").unlink()
    supervisor._log_decided(BEGINS)
    assert not (tmp_path / "resolved.json").exists() and not texts(tmp_path)


def test_what_a_restart_wrote_is_no_damage(supervisor, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    corrected(supervisor)
    before = (tmp_path / "resolved.json").read_bytes()
    supervisor._log_decided(BEGINS)
    assert (tmp_path / "resolved.json").read_bytes() == before and not texts(tmp_path)


def test_a_corrected_file_with_a_broken_policy_leaves_the_run_held(supervisor, tmp_path):
    supervisor.machine.state.phase = Held(exit_code=1, reason="bad")
    policy = tmp_path / "mine.py"
    policy.write_text("raise RuntimeError('oops')\n")
    corrected(supervisor, policy=str(policy))
    supervisor._from_client(None, RestartRun())
    assert supervisor._pending == [] and supervisor.liveness.timing.timeout_s == 3.0
    texts = [event.detail["text"] for _, event in read(tmp_path / "events")]
    assert any("not restarted" in text and "oops" in text for text in texts)


def test_a_closed_terminal_ends_nothing_and_the_log_says_what_does(supervisor, tmp_path):
    supervisor.run_id = "r"
    supervisor._on_signal(signal.SIGHUP)
    supervisor.detached("stdout takes no more (Input/output error)")  # the same terminal
    supervisor.journal.tend()
    assert supervisor._pending == []
    texts = [event.detail["text"] for _, event in read(tmp_path / "events")]
    assert texts == ["its terminal was closed (SIGHUP): the run goes on; muster stop r ends it"]
    supervisor._on_signal(signal.SIGINT)
    assert [order.exit_code for order in supervisor._pending] == [130]


def test_no_host_is_judged_between_listening_and_its_deadline(supervisor):
    """The deadline comes while the supervisor looks: what lies in the watchdog's socket counts all the same."""
    times = iter(range(10**12 + 2_999_999_998, 10**12 + 3_000_000_100))
    supervisor.clock = SimpleNamespace(monotonic_ns=lambda: next(times))
    supervisor.liveness.agent_connected("a", 10**12)
    supervisor.liveness.watchdog_connected("a", 10**12)
    heard = []
    supervisor.heartbeats.listen_to_silent = lambda now_ns: heard.extend(supervisor.liveness.silent(now_ns))
    supervisor._handle = lambda given: heard.append(given)
    while not heard:
        supervisor._check_liveness()
    assert heard[0] == "a", "listened to before it is given up"
