"""The supervisor's process without hosts: what it does before it acts, and what a full disk does to its log."""

import errno
import signal
import socket
from types import SimpleNamespace

import pytest
from fakes.chains import check_directory
from fakes.idle_supervisor import idle_supervisor
from fakes.virtual_run import spec

from muster.core import resolved_file
from muster.core.errors import ConflictError
from muster.core.event_log import EventLog, read
from muster.protocol.client import RestartRun
from muster.supervise.process.loop import SupervisorLoop
from muster.supervise.process.supervisor import Supervisor
from muster.supervise.recovery.inputs import End, Log, RestartRequest, Tick
from muster.supervise.recovery.phases import Held
from muster.transport.connections import ConnectionPool

TOKEN = b"t" * 32


@pytest.fixture
def supervisor(tmp_path):
    of = spec(hosts=1, recovery={"keep_hosts_after_failure_s": 60.0})
    (tmp_path / "resolved.json").write_text(of.model_dump_json())
    return idle_supervisor(tmp_path, of)


def test_a_deposed_supervisor_acts_on_nothing(supervisor):
    handled = []
    supervisor.term.decisions.machine = SimpleNamespace(handle=lambda *given: handled.append(given))

    def deposed():
        raise ConflictError("another supervisor took the lease")

    supervisor.term.world.home.lease = SimpleNamespace(hold=deposed)
    with pytest.raises(ConflictError):
        supervisor.term.decisions.give(Tick())
    assert not handled and not supervisor.term.world.pool.sent


def test_the_end_is_known_before_agents_are_waited_for(supervisor):
    """A supervisor that is killed while it waits leaves a run that has ended."""
    happened = []
    supervisor.term.world.agents["host-0"] = None
    world = supervisor.term.world
    world.pool.poll = lambda timeout_s: (happened.append("wait"), world.agents.clear(), ())[-1]
    supervisor.term.world.home.declare = lambda end: happened.append(end.reason)
    supervisor.term.world.home.finish = lambda log, end, status: happened.append("finish")
    supervisor.shut_down(End(exit_code=0, outcome="succeeded", reason="done"))
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
    supervisor.term.world.journal.say("before")
    supervisor.term.world.journal.log._file = disk = FullDisk(supervisor.term.world.journal.log._file, 50)
    for number in range(5):
        supervisor.term.world.journal.say(f"full {number}")
        supervisor.term.world.journal.log.sync()
        supervisor.term.world.journal.tend()
    assert supervisor.term.world.journal.log.trouble == "No space left on device"
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["before"], "a torn end is left out"
    assert check_directory(tmp_path / "events", run_id="r")["supervisor.1.jsonl"].problem is None
    disk.room = 10**6
    supervisor.term.world.journal.tend()
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
    (supervisor.term.world.run_dir / "resolved.json").write_text(of.model_dump_json())


def test_a_corrected_file_brings_its_policy_times_and_limits(supervisor):
    supervisor.term.world.machine.state.phase = Held(exit_code=1, reason="bad")
    supervisor.term.limits.asked = True
    corrected(supervisor, policy="none")
    supervisor._from_client(None, RestartRun())
    (order,) = supervisor.pending
    assert isinstance(order, RestartRequest) and type(order.policy).__name__ == "NoRecovery"
    assert supervisor.term.heartbeats.liveness.timing.timeout_s == 9.0
    assert supervisor.term.limits.guard.limits.max_hours == 2.0
    assert not supervisor.term.limits.asked


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
    held = supervisor.term.world.machine.settings.spec
    (tmp_path / "job.json").write_text("{}")
    resolved_file.write(tmp_path, held.model_dump_json(indent=1) + "\n")
    whole = (tmp_path / "resolved.json").read_bytes()
    supervisor.term.world.append(BEGINS)
    assert not texts(tmp_path), "there is nothing to mend"
    HARMS[harm](tmp_path / "resolved.json")
    supervisor.term.world.append(WAITS)
    assert not texts(tmp_path)
    supervisor.term.world.append(BEGINS)
    assert (tmp_path / "resolved.json").read_bytes() == whole
    assert (tmp_path / "resolved.json.damaged").exists() == (harm != "gone")
    (text,) = texts(tmp_path)
    assert ("is gone" if harm == "gone" else "is damaged") in text and "written again" in text
    supervisor.term.world.append(BEGINS)
    assert len(texts(tmp_path)) == 1


def test_nothing_is_written_where_the_whole_folder_is_away(supervisor, tmp_path):
    (tmp_path / "resolved.json").unlink()
    supervisor.term.world.append(BEGINS)
    assert not (tmp_path / "resolved.json").exists() and not texts(tmp_path)


def test_what_a_restart_wrote_is_no_damage(supervisor, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    corrected(supervisor)
    before = (tmp_path / "resolved.json").read_bytes()
    supervisor.term.world.append(BEGINS)
    assert (tmp_path / "resolved.json").read_bytes() == before and not texts(tmp_path)


def test_a_corrected_file_with_a_broken_policy_leaves_the_run_held(supervisor, tmp_path):
    supervisor.term.world.machine.state.phase = Held(exit_code=1, reason="bad")
    policy = tmp_path / "mine.py"
    policy.write_text("raise RuntimeError('oops')\n")
    corrected(supervisor, policy=str(policy))
    supervisor._from_client(None, RestartRun())
    assert not supervisor.pending and supervisor.term.heartbeats.liveness.timing.timeout_s == 3.0
    texts = [event.detail["text"] for _, event in read(tmp_path / "events")]
    assert any("not restarted" in text and "oops" in text for text in texts)


@pytest.mark.parametrize(
    ("ignore_term", "codes"), [(False, [130, 75]), (True, [130])], ids=["terminal", "scheduler tells by a message"]
)
def test_a_closed_terminal_ends_nothing_and_the_log_says_what_does(tmp_path, ignore_term, codes):
    process = Supervisor(run_dir=tmp_path, ignore_term=ignore_term)
    process.run_id = "r"
    process._on_signal(signal.SIGHUP, None)
    process.detached("stdout takes no more (Input/output error)")  # the same terminal
    assert not process._requests
    assert list(process._notes) == ["its terminal was closed (SIGHUP): the run goes on; muster stop r ends it"]
    process._on_signal(signal.SIGINT, None)
    process._on_signal(signal.SIGTERM, None)
    assert [order.exit_code for order in process._requests] == codes


def test_notes_of_other_threads_are_logged(supervisor, tmp_path):
    supervisor.term.world.journal.notes.append("a note")
    supervisor.term.world.journal.tend()
    assert texts(tmp_path) == ["a note"]


def test_what_is_queued_is_not_sent_once_the_lease_is_lost(supervisor, tmp_path, monkeypatch):
    """A successor has acted meanwhile: an order that a peer had no room for is stale."""
    ours, theirs = socket.socketpair()
    pool = supervisor.term.world.pool = ConnectionPool(token=TOKEN)
    pool.adopt(ours, server=True).pending += b"an order"

    def lost(_loop):
        raise ConflictError("the lease was taken from us")

    (tmp_path / "job.json").write_text('{"run_id": "r"}')
    monkeypatch.setattr("muster.supervise.process.supervisor.open_term", lambda *_, **__: supervisor.term)
    monkeypatch.setattr(SupervisorLoop, "run", lost)
    with theirs:
        with pytest.raises(ConflictError):
            Supervisor(run_dir=tmp_path).serve()
        assert b"an order" not in theirs.recv(1 << 16)


def test_no_host_is_judged_between_listening_and_its_deadline(supervisor):
    """The deadline comes while the supervisor looks: what lies in the watchdog's socket counts all the same."""
    times = iter(range(10**12 + 2_999_999_998, 10**12 + 3_000_000_100))
    supervisor.term.clock.monotonic_ns = lambda: next(times)
    heartbeats = supervisor.term.heartbeats
    heartbeats.liveness.agent_connected("a", 10**12)
    heartbeats.liveness.watchdog_connected("a", 10**12)
    heard = []
    heartbeats.listen_to_silent = lambda now_ns: heard.extend(heartbeats.liveness.silent(now_ns))
    supervisor.term.decisions.give = heard.append
    while not heard:
        supervisor._check_liveness()
    assert heard[0] == "a", "listened to before it is given up"
