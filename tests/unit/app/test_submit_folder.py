"""A folder that holds a run: another run is refused before anything is written, and two submits do not mix."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_verbs import RUN_FILE, STEP, Paper, submitted

from muster.app.inspect import status
from muster.app.run import recover, stop, submit
from muster.config import load
from muster.core import event_log
from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.event_log import EventLog
from muster.core.resolved_file import DamagedRunFile
from muster.core.types import JobHandle, JobRequest, JobState
from muster.storage import run_registry

PRETRAINED = "name: tuned\nmodel: {source: org/small}\ndata: {sources: [{type: text2sql}]}\ntraining: {steps: 5}\n"


@pytest.fixture(name="paper")
def on_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = Paper()
    monkeypatch.setattr("muster.backends.load", lambda name: found)
    return found


@pytest.fixture
def there(paper: Paper, tmp_path: Path) -> Path:
    """A run that has ended at step 3."""
    run = submitted(f"run_dir={tmp_path}/there").run
    with contextlib.closing(EventLog(run.run_id, run.events, "host-0", 1)) as log:
        log.append("step", step=3, rank=0, detail=STEP)
    paper.state = JobState.STOPPED
    return run.path


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def given(there: Path, run_file: str, *overrides: str) -> load.Loaded:
    return load.loads(run_file, (f"run_dir={there}", *overrides))


OTHERS = {
    "model": (RUN_FILE, "model.config.hidden_size=64"),
    "model.tokenizer": (RUN_FILE, "model.tokenizer.vocab_size=600"),
    "source": (PRETRAINED,),
    "lora": (RUN_FILE, "model.lora.rank=4"),
    "data": (RUN_FILE.replace("type: text2sql", "type: random"),),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_in_its_folder_is_refused_before_anything_is_written(paper: Paper, there: Path, what: str):
    before, told = state(there), len(paper.told)
    loaded = given(there, *OTHERS[what])
    verbs: list[Callable[[], object]] = [lambda: submit.submit(loaded), lambda: submit.preview(loaded)]
    for verb in verbs:
        with pytest.raises(UsageError) as caught:
            verb()
        assert caught.value.exit_code == 2
        text = str(caught.value)
        run_id = (there / "run_id").read_text().strip()
        assert f"{there} holds {run_id} (Demo run, llama, step 3)" in text and "run_dir" in (caught.value.hint or "")
    assert state(there) == before and len(paper.told) == told


def test_another_run_is_refused_while_the_first_one_runs(paper: Paper, there: Path):
    paper.state = JobState.RUNNING
    with pytest.raises(UsageError, match="not"):
        submit.submit(given(there, *OTHERS["model"]))


def test_a_command_in_a_model_s_folder_is_refused_and_its_arguments_may_change(paper: Paper, tmp_path: Path):
    script = tmp_path / "loop.py"
    script.write_text("")
    text = f"name: own\ncommand: [{script}, --steps, '5']\n"
    submit.submit(load.loads(text, (f"run_dir={tmp_path}/own",)))
    paper.state = JobState.STOPPED
    assert not submit.submit(load.loads(text.replace("'5'", "'9'"), (f"run_dir={tmp_path}/own",))).again
    with pytest.raises(UsageError, match="holds own-"):
        submit.submit(given(tmp_path / "own", RUN_FILE))
    (tmp_path / "other.py").write_text("")
    with pytest.raises(UsageError, match=r"loop\.py.*not.*other\.py"):
        submit.submit(load.loads(text.replace("loop.py", "other.py"), (f"run_dir={tmp_path}/own",)))


@pytest.mark.parametrize("change", ["training.steps=9", "model.attention=sdpa", "recovery.grace_s=7", "name=Renamed"])
def test_what_may_change_in_a_run_changes(paper: Paper, there: Path, change: str):
    run_id = (there / "run_id").read_text().strip()
    found = submit.submit(given(there, RUN_FILE, change))
    assert found.run.run_id == run_id and paper.told[-1].labels["submission"] == "2"


def test_recover_does_not_change_the_model_either(paper: Paper, there: Path):
    before = state(there)
    with pytest.raises(UsageError, match=r"its model is"):
        recover.recover(str(there), ["model.config.hidden_size=64"])
    assert state(there) == before


def test_a_run_file_that_was_never_written_whole_is_written_anew(paper: Paper, there: Path):
    (there / "resolved.json").write_text("")
    submit.submit(given(there, RUN_FILE))
    assert json.loads((there / "resolved.json").read_text())["name"] == "Demo run"


DAMAGED = {"emptied": b"", "torn": b'{"name": "Demo', "flipped": b"\xff\xfe"}


@pytest.mark.parametrize("how", DAMAGED)
def test_another_model_is_refused_by_the_run_file_where_the_resolved_one_is_damaged(
    paper: Paper, there: Path, how: str
):
    (there / "resolved.json").write_bytes(DAMAGED[how])
    before = state(there)
    with pytest.raises(UsageError, match="its model is"):
        submit.submit(given(there, *OTHERS["model"]))
    assert state(there) == before
    submit.submit(given(there, RUN_FILE))


@pytest.mark.parametrize("run_file", [None, b"", b"\xff", b"name: [\n"])
def test_a_run_that_nothing_identifies_is_refused_in_one_line(paper: Paper, there: Path, run_file: bytes | None):
    for name in ("resolved.json", "resolved.copy.json"):
        (there / name).write_bytes(b"{")
    (there / "run.yaml").unlink()
    if run_file is not None:
        (there / "run.yaml").write_bytes(run_file)
    before = state(there)
    with pytest.raises(UsageError, match=r"neither resolved\.json .* nor run\.yaml .* can be read") as caught:
        submit.submit(given(there, RUN_FILE))
    assert "\n" not in str(caught.value) and state(there) == before


def flipped(folder: Path) -> None:
    """Valid JSON still, and another run."""
    before = (folder / "resolved.json").read_text()
    assert '"steps": 5' in before
    (folder / "resolved.json").write_text(before.replace('"steps": 5', '"steps": 7'))


def said(folder: Path) -> list[str]:
    return [str(event.detail["text"]) for event in event_log.merged(folder / "events") if event.kind == "run.message"]


WORDS = ("model.config.hidden_size=64", "training.global_batch_size=4")
#: What is left of the file -> how.
HARMS: dict[str, Callable[[bytes], bytes]] = {
    "a digit": lambda data: data.replace(b'"steps": 5', b'"steps": 7'),
    "its checksum": lambda data: data.replace(b"sha256:", b"sha256;"),
    "emptied": lambda data: b"",
    "torn": lambda data: data[:300],
}


@pytest.fixture
def typed(paper: Paper, tmp_path: Path) -> Path:
    """A run that has ended, of which part was given on the command line."""
    overrides = (f"run_dir={tmp_path}/typed", *WORDS)
    submit.submit(load.loads(RUN_FILE, overrides), argv=["muster", "submit", "x.yaml", *overrides])
    paper.state = JobState.STOPPED
    return tmp_path / "typed"


@pytest.mark.parametrize("harm", HARMS)
def test_recover_writes_a_damaged_run_file_anew_as_it_was_submitted(paper: Paper, typed: Path, harm: str):
    whole = (typed / "resolved.json").read_bytes()
    damaged = HARMS[harm](whole)
    assert damaged != whole
    (typed / "resolved.json").write_bytes(damaged)
    recover.recover(str(typed), argv=["muster", "recover", str(typed)])
    assert (typed / "resolved.json").read_bytes() == whole and paper.told[-1].labels["submission"] == "2"
    assert (typed / "resolved.json.damaged").read_bytes() == damaged
    (text,) = said(typed)
    assert "resolved.json is damaged" in text and "resolved.json.damaged" in text and "as it was submitted" in text


def test_a_damaged_run_file_of_a_run_whose_log_is_damaged_too_is_told_by_its_copy(paper: Paper, typed: Path):
    """What the command line changed is in neither ``run.yaml`` nor, now, the log."""
    whole = (typed / "resolved.json").read_bytes()
    (log,) = (typed / "events").glob("client.*.jsonl")
    line = log.read_bytes()
    log.write_bytes(line[:60] + line[70:90] + line[60:70] + line[90:])
    flipped(typed)
    recover.recover(str(typed), argv=["muster", "recover", str(typed)])
    assert (typed / "resolved.json").read_bytes() == whole


def test_a_run_file_that_nothing_tells_is_refused(paper: Paper, typed: Path):
    (typed / "run.yaml").write_text(RUN_FILE.replace("steps: 5", "steps: 6"))
    (typed / "resolved.copy.json").write_bytes(b"{}")
    flipped(typed)
    before = state(typed)
    with pytest.raises(UsageError, match=r"is damaged: .*, and .*run\.yaml gives another one today") as caught:
        recover.recover(str(typed))
    assert "\n" not in str(caught.value) and "muster submit" in str(caught.value.hint) and state(typed) == before


def test_submit_writes_a_damaged_run_file_anew_and_says_so(paper: Paper, typed: Path):
    """The model is known to be the same, though the file as given says another one."""
    whole = (typed / "resolved.json").read_bytes()
    flipped(typed)
    submit.submit(load.loads(RUN_FILE, (f"run_dir={typed}", *WORDS)))
    assert (typed / "resolved.json").read_bytes() == whole
    assert b'"steps": 7' in (typed / "resolved.json.damaged").read_bytes()
    (text,) = said(typed)
    assert "is damaged" in text and "this submit rewrites it" in text


def test_a_damaged_run_file_is_told_by_status_and_keeps_nobody_from_ending_the_run(paper: Paper, typed: Path):
    flipped(typed)
    with pytest.raises(DamagedRunFile, match="does not fit its checksum") as caught:
        status.status(str(typed))
    assert "muster recover demo-run" in str(caught.value.hint)
    assert stop.down(str(typed)).left == () and paper.cancelled


def test_a_submit_that_was_killed_before_the_resolved_file_goes_on(paper: Paper, there: Path):
    (there / "resolved.json").unlink()
    assert submit.submit(given(there, RUN_FILE)).run.path == there


class Slow(Paper):
    """Starting takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def submit(self, request: JobRequest) -> JobHandle:
        self.begun.set()
        assert self.go_on.wait(30)
        return super().submit(request)


@pytest.mark.parametrize("refuse", [False, True])
def test_of_two_submits_at_one_moment_the_loser_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paper: Paper, refuse: bool
):
    slow = Slow()
    monkeypatch.setattr("muster.backends.load", lambda name: slow)
    slow.refuse = refuse
    place, failures = f"run_dir={tmp_path}/there", list[Exception]()

    def first() -> None:
        try:
            submitted(place)
        except BackendError as error:
            failures.append(error)

    winner = threading.Thread(target=first)
    winner.start()
    assert slow.begun.wait(30)
    before = state(tmp_path / "there")
    with pytest.raises(ConflictError) as caught:
        submitted(place)
    assert caught.value.exit_code == 1
    run_id = before["run_id"].decode().strip()
    assert f"another muster submit is starting {run_id} in {tmp_path}/there" in str(caught.value)
    assert state(tmp_path / "there") == before
    slow.go_on.set()
    winner.join()
    assert len(failures) == refuse and (tmp_path / "there").exists() != refuse
    slow.refuse = False
    assert submitted(place).again == (not refuse), "and afterwards there is nothing to wait for"
    assert [found for found, _ in run_registry.registry()] == [run_id] or refuse


def test_a_submit_that_is_refused_leaves_no_folder_and_no_lock(paper: Paper, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no run"):
        submitted(f"run_dir={tmp_path}/full")
    assert state(tmp_path / "full") == {"notes.txt": b"mine"}
    paper.render = lambda *words, **more: (_ for _ in ()).throw(BackendError("no"))  # type: ignore[method-assign]
    with pytest.raises(BackendError):
        submitted(f"run_dir={tmp_path}/new")
    assert not (tmp_path / "new").exists()


def test_a_run_in_a_folder_that_all_may_write_in_is_its_owners_alone(paper: Paper, tmp_path: Path):
    """As below /tmp."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o1777)
    run = submitted(f"run_dir={tmp_path}/all/run").run
    assert run.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("refused", ["rendered", "started"])
def test_a_submit_that_fails_leaves_the_user_s_own_empty_folder(paper: Paper, tmp_path: Path, refused: str):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o750)
    inode = mine.stat().st_ino
    if refused == "started":
        paper.refuse = True
    else:
        paper.render = lambda *words, **more: (_ for _ in ()).throw(BackendError("no"))  # type: ignore[method-assign]
    with pytest.raises(BackendError):
        submitted(f"run_dir={mine}")
    assert mine.stat().st_ino == inode and mine.stat().st_mode & 0o777 == 0o750 and not list(mine.iterdir())


def test_what_was_begun_and_cannot_be_ended_is_said_and_its_folder_stays(paper: Paper, tmp_path: Path):
    paper.refuse = True
    paper.cancel = lambda handle: (_ for _ in ()).throw(AccessError("no rights"))  # type: ignore[method-assign]
    with pytest.raises(
        BackendError, match=r"^no; what there may be of demo-run-\S+ could not be ended: no rights$"
    ) as found:
        submitted(f"run_dir={tmp_path}/there")
    ((run_id, path),) = run_registry.registry()
    assert found.value.hint == f"muster down {run_id} tries again" and path == tmp_path / "there"


def test_nobody_begins_a_run_in_a_folder_that_is_being_removed(
    paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, tried = shutil.rmtree, list[str]()

    def removed(path: Path, ignore_errors: bool = False, **given: object) -> None:
        real(path, ignore_errors=ignore_errors)
        if given:  # a temporary folder's own end
            return
        with pytest.raises(ConflictError, match="another muster submit is starting demo-run-") as caught:
            submitted(f"run_dir={tmp_path}/there")
        tried.append(str(caught.value))

    monkeypatch.setattr("shutil.rmtree", removed)
    paper.refuse = True
    with pytest.raises(BackendError):
        submitted(f"run_dir={tmp_path}/there")
    assert tried and not (tmp_path / "there").exists()
