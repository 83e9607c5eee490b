"""The supervisor's machine: what it starts again, and what ends the run because starting it again cannot help."""

import signal
import sys

import pytest
from fakes.gcs import GcsFake
from fakes.objects import Objects

from muster.backends.gce import host
from muster.backends.gce.host import Keeper
from muster.backends.gce.machine import HOST, SUPERVISOR, Machine
from muster.backends.host.run_state import RunState
from muster.core.typed_json import decode, encode
from muster.protocol.lease import EndRecord
from muster.storage.home import BucketHome, open_home
from muster.storage.store import open_store

HOME, JOB = "gs://bucket/runs/llama", "muster-llama-supervisor"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A supervisor's own run folder, and its home in a bucket."""
    monkeypatch.setattr(host, "SHORTEST_PAUSE_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    with GcsFake() as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        for name, text in {"home": HOME, "run_id": "llama", "submission": "1"}.items():
            (tmp_path / name).write_text(text + "\n")
        yield tmp_path
    signal.signal(signal.SIGTERM, before)


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


def keep(folder, codes, *, role=SUPERVISOR, after=lambda: None):
    """Keep a program that ends with one of ``codes`` at each start; returns (exit code, starts, times cleared up).
    ``after`` is called once they are used up, where the program is started once more."""
    starts, cleared = [], []
    machine = machine_of(role)

    class Counted(Keeper):
        def _start(self):
            starts.append(1)
            if len(starts) > len(codes):
                after()
            self.argv = [sys.executable, "-S", "-c", f"raise SystemExit({codes[min(len(starts), len(codes)) - 1]})"]
            super()._start()

    keeper = Counted(
        machine=machine, argv=(), environ={}, state=RunState(run_dir=folder, job=JOB),
        clear=lambda: cleared.append(1), look_s=0.02,
    )  # fmt: skip
    return keeper.run(), len(starts), len(cleared)


@pytest.mark.parametrize(("code", "what"), [(2, "run file"), (3, "plan")])
def test_a_run_file_that_no_supervisor_can_use_ends_the_run(folder, code, what):
    """Before, it was started again without limit while the hosts were billed."""
    assert keep(folder, [code] * 20) == (0, 3, 1)
    assert (end().outcome, end().exit_code, end().term) == ("failed", code, 0) and what in end().reason


def test_the_end_of_an_older_submission_does_not_hide_it(folder):
    write_end(130, submission="0")
    assert keep(folder, [2] * 20) == (0, 3, 1)
    assert (end().submission, end().exit_code) == ("1", 2)


def test_an_end_that_the_supervisor_wrote_stays(folder):
    write_end(2)
    assert keep(folder, [2]) == (0, 0, 1) and end().reason == "x"


def test_errors_long_ago_do_not_count(folder, monkeypatch):
    monkeypatch.setattr(host, "IN_A_ROW_S", 0.0)
    assert keep(folder, [2] * 5, after=lambda: write_end(0)) == (0, 6, 1) and end().exit_code == 0


@pytest.mark.parametrize(("codes", "role"), [([1, 6, 1, 6], SUPERVISOR), ([2, 2, 2, 2], HOST)])
def test_other_ends_and_an_agents_are_started_again(folder, codes, role):
    assert keep(folder, codes, role=role, after=lambda: write_end(0)) == (0, len(codes) + 1, 1)


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
    keep(folder, [137], role=HOST, after=lambda: write_end(0))
    stored = open_store()
    assert [uri for uri in stored.list(f"{HOME}/events") if b"last words" in stored.get(uri).data]
