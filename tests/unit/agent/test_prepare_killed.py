"""Data preparation that is killed or fails: restarted, reported, tried again."""

import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost

from muster.agent import programs as programs_module
from muster.agent.programs import RETRY_S
from muster.config.spec import RunSpec
from muster.protocol.to_supervisor import HostPreparing

#: A run file that names a file which is not there.
NO_FILE = {
    "name": "case", "model": {"config": {"model_type": "llama"}, "tokenizer": {"vocab_size": 64}},
    "data": {"sources": [{"type": "file", "path": "/nowhere.jsonl"}]},
    "training": {"steps": 1, "sequence_length": 8, "global_batch_size": 1},
}  # fmt: skip


def preparing(run_dir):
    """A host that has data to prepare, its programs, and what is called when their processes exit."""
    calls = Calls()
    hub = SimpleNamespace(watch=calls.watch, unwatch=calls.unwatch)
    host = RecordingHost(run_dir, spec=SimpleNamespace(data={"sources": []}, env={}, setup=None, workdir=None), hub=hub)
    programs = host.programs()
    programs.start()
    return host, programs, calls


class Calls(list):
    """What is called when a process exits; ``outputs``: when it has said something."""

    def __init__(self):
        super().__init__()
        self.outputs = {}

    def watch(self, fd, call):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            self.outputs[fd] = call
        else:
            self.append(call)

    def unwatch(self, fd):
        self.outputs.pop(fd, None)


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
    host.living = [SimpleNamespace(rank=1)]
    ended(programs, calls)
    assert host.failures == [] and "the ranks on host-0 go on" in host.notes[0]
    host.living = []
    programs.on_start()
    ended(programs, calls)
    assert len(host.failures) == 1


#: A preparation: what it says, at once and once this file is there.
SAYS = """
import sys, time, pathlib
sys.path.insert(0, {source!r})
from muster.protocol.codec import encode
from muster.protocol.pipes import DataPrepared, Preparing
print("a package's own line")
print(encode(Preparing(activity="fetch org/name (2.0 GB)", done=1, total=4)).decode(), flush=True)
go = pathlib.Path({go!r})
while not go.exists():
    time.sleep(0.01)
print(encode(Preparing(activity={later[0]!r}, done={later[1]}, total={later[2]})).decode())
print(encode(DataPrepared(fingerprint="f", tokens=1, sequences=1, cached=False, more={{"weights_bytes": 4}})).decode())
"""


@pytest.mark.parametrize(
    ("later", "note"),
    [
        (("fetch org/name (2.0 GB)", 3, 4), "host-0: fetch org/name (2.0 GB): 75%"),
        (("wait for host-1, which prepares", 0, 0), "host-0: wait for host-1, which prepares"),
    ],
)
def test_what_it_says_while_it_runs_is_told_and_noted_now_and_then(tmp_path, now, monkeypatch, later, note):
    """A download of an hour: the supervisor hears that it moves, the run's log a line each minute."""
    source, go = str(Path(programs_module.__file__).parents[2]), tmp_path / "go"
    code = SAYS.format(source=source, go=str(go), later=later)

    def start(self, log, module, *arguments, stdout, **given):
        return subprocess.Popen([sys.executable, "-c", code], stdout=stdout)

    monkeypatch.setattr(programs_module.HostIdentity, "start_program", start)
    host, programs, calls = preparing(tmp_path)
    written = []
    host.log.write = lambda kind, detail: written.append((kind, detail))
    (output,) = calls.outputs.values()
    fd = next(iter(calls.outputs))
    while not host.sent:
        assert select.select([fd], [], [], 30)[0]
        output()
    assert host.sent == [HostPreparing(activity="fetch org/name (2.0 GB)", done=1, total=4)]
    assert not host.notes and not programs.prepared
    now[0] += programs_module.NOTE_S
    go.touch()
    programs._prepare.wait()
    calls.pop()()
    assert host.sent[1:] == [HostPreparing(activity=later[0], done=later[1], total=later[2])]
    assert host.notes == [note]
    assert written == [
        ("data.prepared", {"fingerprint": "f", "tokens": 1, "sequences": 1, "cached": False, "weights_bytes": 4})
    ]
    assert programs.prepared and not calls.outputs and not host.failures


def test_the_end_of_an_earlier_one_is_not_the_newer_ones(tmp_path):
    host, programs, calls = preparing(tmp_path)
    first = programs._prepare
    programs.prepare_again()
    assert programs._prepare is not first
    first.kill()
    first.wait()
    calls.pop(0)()
    assert programs._prepare is not None and not host.failures and not host.notes
    ended(programs, calls)
    assert len(host.failures) == 1
