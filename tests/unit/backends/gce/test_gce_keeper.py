"""A machine's host program: what it starts again, when it ends, and what ends the run because nothing else helps."""

import itertools
import signal

import pytest
from fakes.clock import VirtualClock
from fakes.gcs import GcsFake
from fakes.host_program import Children
from fakes.objects import Objects

from muster.backends.gce.host import GRACE_S, GcePlace, host_program
from muster.backends.gce.machine import HOST, Machine
from muster.backends.gce.provision import Hosts
from muster.backends.host.loop import LONGEST_WAIT_S
from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, RESUME, SUPERVISOR, Noticed
from muster.core.errors import BackendError
from muster.core.typed_json import decode, encode
from muster.protocol.lease import EndRecord
from muster.storage.home import BucketHome, open_home
from muster.storage.store import open_store

HOME, JOB = "gs://bucket/runs/llama", "muster-llama-supervisor"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A machine's run folder, and its home in a bucket."""
    with GcsFake() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        for name, text in {"home": HOME, "run_id": "llama", "submission": "1"}.items():
            (tmp_path / name).write_text(text + "\n")
        yield tmp_path


def end():
    return decode(EndRecord, open_store().get(f"{HOME}/end.json").data)


def write_end(code, *, submission="1"):
    record = EndRecord(job=JOB, submission=submission, term=1, outcome="x", exit_code=code, reason="x", wall_ns=0)
    open_store().put(f"{HOME}/end.json", encode(record))


def machine_of(role, boot="b"):
    return Machine(
        name="m", zone="z", address="127.0.0.1", boot=boot, role=role, run_id="llama", home=HOME, files="",
        submission="1", token_secret="",
    )  # fmt: skip


def bucket_home(local, store):
    (local / "run_id").write_text("llama\n")
    return BucketHome(local, HOME, store, store)


class Kept:
    """A machine in virtual time, under a systemd that starts its program again unless it ends with 0."""

    def __init__(self, folder, role=SUPERVISOR):
        self.clock, self.children, self.removed = VirtualClock(), Children(), 0
        self.role, self.name = role, SUPERVISOR if role == SUPERVISOR else AGENT
        self.place = GcePlace(home=RunState(run_dir=folder, job=JOB), token=b"t" * 64, machine=machine_of(role))
        self.place._remove_run = self.remove_run
        if role == SUPERVISOR:
            self.place.hosts = Hosts(placement=None, compute=None, file=None)
        self.exits, self.program = [], self.start()

    def start(self):
        program = host_program(self.place, {}, open_store())
        program.children, program.clock, program.in_thread = self.children, self.clock, lambda call, name: call()
        return program

    def remove_run(self, hosts):
        self.removed += 1

    @property
    def starts(self):
        return self.children.log.count(self.name)

    def lasts(self, seconds):
        until = self.clock.now_s + seconds
        while self.clock.now_s < until and 0 not in self.exits and RESUME not in self.exits:
            self.program.turn()
            self.clock.sleep(LONGEST_WAIT_S)
            if self.program.ended is not None:
                self.exits.append(self.program.place.leave(self.program.ended, self.program.state))
                self.program = self.start()

    def until_it_runs(self):
        for _ in range(2000):
            if self.children.pid(self.name) is not None:
                return True
            self.lasts(LONGEST_WAIT_S)
        return False

    def plays(self, codes, after=lambda: None, lived_s=1.0):
        """The program ends with one of ``codes`` each time; ``after``: before it ends once more, with 0."""
        for code in codes:
            if not self.until_it_runs():
                break
            self.lasts(lived_s)
            self.children.end(self.name, code)
        if self.until_it_runs():
            after()
            self.children.end(self.name, 0)
            self.lasts(5)
        return self


CASES = {
    "a run file that cannot be used": (SUPERVISOR, [2] * 20, 1.0, ([0], 3, 1)),
    "a plan that cannot be used": (SUPERVISOR, [3] * 20, 1.0, ([0], 3, 1)),
    "crashes without end": (SUPERVISOR, [1, 6, 137, 1, 6, 137, 1, 6, 137, 5, 6], 1.0, ([0], 10, 1)),
    "crashes that are far apart": (SUPERVISOR, [2, 6] * 12, 400.0, ([0], 25, 1)),
    "a result that was not written": (SUPERVISOR, [0], 1.0, ([1, 0], 2, 1)),
    "an agent, which may remove nothing": (HOST, [0, 1, 6, 76, 137, RESUME] * 3, 1.0, ([0], 19, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_started_again_until_the_run_ends_or_nothing_else_helps(folder, case):
    """Exit codes of the host program, starts of its own one, and how often the run's machines were removed. Hosts are
    billed for as long as a supervisor that cannot work is started again."""
    role, codes, lived_s, expected = CASES[case]
    kept = Kept(folder, role).plays(codes, lived_s=lived_s, after=lambda: write_end(0))
    assert (kept.exits, kept.starts, kept.removed) == expected


@pytest.mark.parametrize(
    ("codes", "code", "reason"), [([2] * 3, 2, "run file"), ([3] * 3, 3, "plan"), ([6] * 9 + [5], 5, "10 times")]
)
def test_the_home_says_why_the_run_was_ended(folder, codes, code, reason):
    write_end(130, submission="0")  # an older submission's does not hide it
    assert Kept(folder).plays(codes).exits == [0]
    assert (end().outcome, end().submission, end().exit_code) == ("failed", "1", code) and reason in end().reason


def test_no_machine_is_removed_before_the_home_says_that_the_run_has_ended(folder, monkeypatch):
    store = open_store()
    monkeypatch.setattr(type(store), "put", refused)
    kept = Kept(folder).plays([2] * 6)
    assert (kept.exits, kept.removed) == ([1, 1, 1], 0), "started again by systemd"


def refused(*_):
    raise BackendError("503")


def test_an_end_that_the_supervisor_wrote_stays(folder):
    write_end(2)
    kept = Kept(folder).plays([2])
    assert (kept.exits, kept.starts, kept.removed) == ([0], 0, 1) and end().reason == "x"


def test_a_run_whose_hosts_were_taken_goes_on_where_it_was_saved(folder):
    """75 is withdrawn from the home, also that of before a reboot, and the supervisor started in the same program."""
    write_end(RESUME)
    kept, starts_s = Kept(folder), []
    for _ in range(8):
        assert kept.until_it_runs() and not open_store().list(f"{HOME}/end.json")
        starts_s.append(kept.clock.now_s)
        write_end(RESUME)
        kept.children.end(SUPERVISOR, RESUME)
    assert not kept.exits and not kept.removed
    pauses_s = [after - before for before, after in itertools.pairwise(starts_s)]
    assert pauses_s == sorted(pauses_s) and 28 < pauses_s[-1] < 34, "hosts that go each time are not asked without end"


@pytest.mark.parametrize(
    ("role", "obeys", "signals", "within_s"),
    [
        (HOST, True, [signal.SIGTERM], 5),
        (HOST, False, [signal.SIGTERM, signal.SIGKILL], GRACE_S),
        (SUPERVISOR, True, [signal.SIGKILL], 5),
    ],
)
def test_a_machine_that_shuts_down_lets_its_agent_save(folder, role, obeys, signals, within_s):
    """A supervisor makes room at once: its state is in its log."""
    kept = Kept(folder, role)
    assert kept.until_it_runs()
    kept.children.obey = obeys
    kept.program.post(Noticed())
    began_s = kept.clock.now_s
    kept.lasts(200)
    assert [number for _, number in kept.children.sent] == signals
    assert (kept.exits, kept.removed) == ([RESUME], 0) and kept.clock.now_s - began_s < within_s


def test_a_host_that_was_reset_is_not_shut_out_of_its_run_s_home(tmp_path):
    """A hard reset takes the last lines of a file that the disk had not written; the home has them. After the reboot
    the host writes files of another name, for it could not go on with these."""
    store = Objects()
    before, after = (machine_of(HOST, boot=boot) for boot in ("0f3a-1", "77b2-9"))
    log = bucket_home(tmp_path, store).open_log("llama", before.writer, 3)
    for text in ("one", "two"):
        log.append("run.message", detail={"text": text})
    assert log.sync()
    log.close()
    log.path.write_bytes(log.path.read_bytes().splitlines(keepends=True)[0])
    home = bucket_home(tmp_path, store)
    for attempt in (3, 4):
        log = home.open_log("llama", after.writer, attempt)
        log.append("run.message", detail={"text": "after the reboot"})
        assert log.sync(), log.unsealed


def test_what_a_killed_agent_left_is_shipped_under_the_name_it_wrote(folder):
    name = machine_of(HOST).writer
    log = open_home(folder).open_log("llama", name, 1)
    log.append("run.message", detail={"text": "last words"})
    log.close()
    Kept(folder, HOST).plays([137], after=lambda: write_end(0))
    stored = open_store()
    assert [uri for uri in stored.list(f"{HOME}/events") if b"last words" in stored.get(uri).data]
