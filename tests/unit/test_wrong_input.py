"""Wrong input: one clear line on stderr, the right exit code, an empty stdout, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from muster.cli.main import run
from muster.core import processes

GOOD = """\
name: wrong
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 128}
  dtype: float32
data:
  sources: [{type: text2sql, rows: 50, heldout_rows: 5}]
training: {steps: 3, sequence_length: 64, global_batch_size: 2}
resources: {device: cpu, ranks_per_host: 2}
"""


def rows(*texts: dict[str, object]) -> str:
    return "".join(json.dumps(text) + "\n" for text in texts)


def file_source(name: str, **more: object) -> str:
    return "data.sources=" + json.dumps([{"type": "file", "path": name, **more}])


CHAT = rows({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]})
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<eos>", "special": True}
            | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<eos>": 0, "<unk>": 1, "hi": 2, "ho": 3}, "unk_token": "<unk>"},
    }
)
TEMPLATE = json.dumps(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}",
    }
)

OWN = {"run.yaml": "name: own\nresources: {device: cpu}\n"}
TRAIN = ["train", "run.yaml"]
DATA = ["data", "run.yaml"]

#: name -> (files, command line, exit code, words that must stand in the error)
CASES: dict[str, tuple[dict[str, str], list[str], int, str]] = {
    # -------- the command line
    "no such command": ({}, ["trian"], 2, "No such command 'trian'"),
    "no run file": ({}, ["train"], 2, "Missing argument 'RUN.yaml'"),
    "unknown option": ({}, ["train", "--fast", "run.yaml"], 2, "No such option: --fast"),
    "an option's value": ({}, ["logs", "--rank", "two", "x"], 2, "Invalid value for '--rank'"),
    "file not there": ({}, ["train", "nowhere.yaml"], 2, "no run file nowhere.yaml"),
    "a folder": ({}, ["train", "."], 2, ". is a folder"),
    "no override": ({}, [*TRAIN, "steps"], 2, "is not an override"),
    "override of a key that is not": ({}, [*TRAIN, "training.stpes=4"], 2, "did you mean `steps`?"),
    "override beyond a list": ({}, [*TRAIN, "data.sources.4.rows=1"], 2, "there is no item 4"),
    "no such run": ({}, ["status", "nope"], 2, "no run 'nope'"),
    "no such run to stop": ({}, ["stop", "nope"], 2, "no run 'nope'"),
    "no such run to end": ({}, ["down", "nope"], 2, "no run 'nope'"),
    "no such run to report": ({}, ["report", "nope"], 2, "no run 'nope'"),
    "no such run to export": ({}, ["export", "nope"], 2, "no run 'nope'"),
    "no such run to recover": ({}, ["recover", "nope"], 2, "no run 'nope'"),
    "a folder without a run": ({}, ["status", "."], 2, "holds no run"),
    "no such kind of event": ({}, ["events", "x", "--kind", "stepp"], 2, "did you mean step?"),
    "nothing to give back": ({}, ["down", "run.yaml"], 2, "muster down RUN ends a run"),
    "a run file for a run": ({}, ["status", "run.yaml"], 2, "it is a file"),
    "a name longer than any": ({}, ["status", "x" * 400], 2, "no run 'xxx"),
    "nobody's home": ({}, ["status", "~nobody-of-that-name/run"], 2, "no run '~nobody"),
    "a report of a name longer than any": ({}, ["report", "x" * 400], 2, "no run 'xxx"),
    # -------- the file as text
    "not YAML": ({"run.yaml": "name: [x"}, TRAIN, 2, "run.yaml:1: not YAML"),
    "tabs": ({"run.yaml": "name: x\n\tdata: y"}, TRAIN, 2, "indent with spaces"),
    "twice": ({"run.yaml": GOOD + "name: again\n"}, TRAIN, 2, "run.yaml:10: name: given twice, first on line 1"),
    "a list": ({"run.yaml": "- a"}, TRAIN, 2, "must be a mapping"),
    "python tags": ({"run.yaml": GOOD + "limits: !!python/object:os.x {}\n"}, TRAIN, 2, "is not allowed"),
    # -------- keys and values
    "unknown key": ({"run.yaml": GOOD + "steps: 5\n"}, TRAIN, 2, "`steps` belongs under `training`"),
    "a misspelt section": ({"run.yaml": GOOD + "trainig: {}\n"}, TRAIN, 2, "did you mean `training`?"),
    "another program's key": ({"run.yaml": GOOD + "batch_size: 5\n"}, TRAIN, 2, "training.global_batch_size"),
    "text for a number": ({}, [*TRAIN, "training.steps=many"], 2, "whole number of at least 1, got \"many\""),
    "zero steps": ({}, [*TRAIN, "training.steps=0"], 2, "at least 1, got 0"),
    "not finite": ({}, [*TRAIN, "training.optimizer.learning_rate=.nan"], 2, "finite"),
    "a misspelt choice": ({}, [*TRAIN, "training.optimizer.schedule=cosin"], 2, "did you mean cosine?"),
    "no such source": ({}, [*TRAIN, "data.sources=[{type: web}]"], 2, "must be one of hub, file"),
    "no such back end": ({}, [*TRAIN, "backend=lokal"], 2, "did you mean local?"),
    "another back end's train": ({}, [*TRAIN, "backend=gke"], 2, "muster train runs on this machine"),
    # -------- layouts
    "more shards than ranks": ({}, [*TRAIN, "parallelism.dp_shard=4"], 2, "= 4, but there are 2 ranks"),
    "tp over ranks": ({}, [*TRAIN, "parallelism.tp=4"], 2, "does not divide 2 ranks"),
    "heads over tp": (
        {}, [*TRAIN, "parallelism.tp=2", "model.config.num_attention_heads=1"], 2, "does not divide into tp = 2"
    ),
    "micro-batch": ({}, [*TRAIN, "training.global_batch_size=3", "training.micro_batch_size=2"], 2, "does not divide"),
    "more hosts than hosts": ({}, [*TRAIN, "resources.min_hosts=2"], 2, "more than hosts = 1"),
    "CUDA where there is none": ({}, [*TRAIN, "resources.device=cuda"], 2, "no NVIDIA GPU"),
    "a context too short": ({}, [*TRAIN, "model.config.max_position_embeddings=32"], 2, "context of 32"),
    "a deadline gone by": ({}, [*TRAIN, "limits.deadline=2001-01-01T00:00:00Z"], 2, "is in the past"),
    # -------- files and folders
    "no data file": ({}, [*TRAIN, file_source("rows.jsonl")], 2, "no file rows.jsonl"),
    "data of nobody's": ({}, [*TRAIN, file_source("~nobody-of-that-name/rows.jsonl")], 2, "no file ~nobody"),
    "data with a name longer than any": ({}, [*TRAIN, file_source("x" * 400 + ".jsonl")], 2, "no file xxx"),
    "a model with a name longer than any": (
        {}, [*TRAIN, "model.config=null", "model.tokenizer=null", "model.source=./" + "x" * 400], 2, "no folder ./xxx",
    ),
    "no script": (OWN, [*TRAIN, "command=[mine.py]"], 2, "command: no file mine.py"),
    "a program before the script": (OWN, [*TRAIN, "command=[python, mine.py]"], 2, "it begins with the script itself"),
    "a script as text": (OWN, [*TRAIN, "command=mine.py"], 2, "write a list"),
    "no module": (OWN, [*TRAIN, "command=['-m']"], 2, "names no module"),
    "auto in a loop of one's own": (
        {**OWN, "mine.py": ""}, [*TRAIN, "command=[mine.py]", "checkpoint.every_steps=auto"], 2, "auto is Muster's own",
    ),
    "no model folder": (
        {}, [*TRAIN, "model.config=null", "model.tokenizer=null", "model.source=./weights"], 2, "no folder ./weights"
    ),
    "a folder without weights": (
        {"weights/config.json": "{}"},
        [*TRAIN, "model.config=null", "model.tokenizer=null", "model.source=./weights"], 2, "holds no *.safetensors",
    ),
    "run_dir is a file": ({"there": ""}, [*TRAIN, "run_dir=there"], 2, "is a file, not a folder"),
    "run_dir below a file": ({"there": ""}, [*TRAIN, "run_dir=there/run"], 2, "run_dir: "),
    "run_dir holds other things": ({"there/x": ""}, [*TRAIN, "run_dir=there"], 2, "is not empty and holds no run"),
    "a policy that cannot be imported": (
        {"mine.py": "import nosuch\n"}, ["submit", "run.yaml", "recovery.policy=mine.py"], 2, "failed to import",
    ),
    "a policy not there": ({}, [*TRAIN, "recovery.policy=mine.py"], 2, "no file mine.py"),
    # -------- data
    "an empty file": ({"rows.jsonl": ""}, [*DATA, file_source("rows.jsonl")], 2, "has no rows"),
    "not JSON": ({"rows.jsonl": "{oops\n"}, [*DATA, file_source("rows.jsonl")], 2, "rows.jsonl"),
    "no such column": (
        {"rows.jsonl": rows({"question": "a"})}, [*DATA, file_source("rows.jsonl")], 2, "rows.jsonl:1: no known format",
    ),
    "half a character": (
        {"rows.jsonl": rows({"text": "a"}, {"text": "\ud800"})}, [*DATA, file_source("rows.jsonl")], 2,
        "rows.jsonl:2: half a character",
    ),
    "a key twice": (
        {"rows.jsonl": '{"text": "a", "text": "b"}\n'}, [*DATA, file_source("rows.jsonl")], 2,
        "rows.jsonl:1: key 'text' occurs twice",
    ),
    "a template's column": (
        {"rows.jsonl": rows({"question": "a"})},
        [*DATA, file_source("rows.jsonl", template={"prompt": "{q}", "completion": "x"})], 2, "question",
    ),
    "chats without a template": (
        {"rows.jsonl": CHAT}, [*DATA, file_source("rows.jsonl")], 2, "has no chat template",
    ),
    "all labels masked": (
        {"rows.jsonl": CHAT, "tokenizer/tokenizer.json": TOKENIZER, "tokenizer/tokenizer_config.json": TEMPLATE},
        [*DATA, file_source("rows.jsonl"), "data.train_on=[system]", "model.tokenizer=./tokenizer"], 2, "masked",
    ),
    "every row too long": (
        {"rows.jsonl": rows({"prompt": "a " * 400, "completion": "b"})}, [*DATA, file_source("rows.jsonl")], 2, "",
    ),
    "a vocabulary larger than the model's": ({}, [*DATA, "model.config.vocab_size=5"], 2, "5"),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (folder / "run.yaml").write_text(GOOD)
    return folder


def listing(folder: Path) -> list[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in found if "__pycache__" not in path)  # Python's own, beside an imported policy


def processes_of(place: Path) -> list[list[str]]:
    """Command lines of runs of this place: other tests may run beside this one."""
    found = [processes.look(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    return [process.argv for process in found if process and str(place.parent) in " ".join(process.argv)]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, argv, code, words = CASES[name]
    for path, text in files.items():
        (place / path).parent.mkdir(exist_ok=True)
        (place / path).write_text(text)
    before = listing(place)
    found, out, err = refused(argv, capsys)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert found == code, err
    assert out == ""
    assert errors and words in err, err
    if argv[0] in ("train", "submit"):
        assert all(
            line.startswith(("error: ", "hint: ", "warning: ")) or "problems" in line for line in err.splitlines()
        )
    assert len(errors) == 1 or all("run.yaml" in line or "command line" in line for line in errors), "each problem once"
    assert "Traceback" not in err
    assert listing(place) == before, "nothing is left in the folder"
    assert not (place.parent / "home" / "runs").exists(), "no run is left"


def test_at_least_forty_cases() -> None:
    assert len(CASES) >= 40


def test_a_folder_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = place / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if os.access(locked, os.W_OK):  # root writes anywhere: /proc refuses even root
        locked = Path("/proc/1")
    code, out, err = refused([*TRAIN, f"run_dir={locked}/run"], capsys)
    assert (code, out) == (2, "")
    assert "cannot write in" in err or "cannot make the run's folder" in err
    assert err.count("error: ") == 1


def test_a_home_that_cannot_be_written_is_named_before_a_run_elsewhere_is_made(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_HOME", "/proc/1/home")
    code, _, err = refused([*TRAIN, f"run_dir={place}/run"], capsys)
    assert code == 2
    assert "cannot make /proc/1/home: " in err and "MUSTER_HOME=DIR" in err
    assert not (place / "run").exists()


def test_a_memory_folder_whose_path_is_too_long_for_a_socket(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(place / ("long" * 20)))
    code, out, told = refused([*TRAIN], capsys)
    assert (code, out) == (2, "")
    assert "bytes too many for the sockets" in told and "shorter path" in told and told.count("error: ") == 1


def test_no_space_for_the_run(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("muster.storage.run_registry.replace_text", full)
    code, out, err = refused([*TRAIN, "run_dir=there"], capsys)
    assert (code, out) == (2, "")
    assert "No space left on device" in err and err.count("error: ") == 1


def test_a_hub_that_cannot_be_reached(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, out, err = refused([*DATA, "data.sources=[{type: hub, name: nobody/nothing}]"], capsys)
    assert code in (5, 6) and out == ""
    assert "nobody/nothing" in err and err.count("error: ") == 1
    assert "Traceback" not in err


def test_a_job_that_cannot_start_leaves_no_folder(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    code, out, err = refused(["submit", "run.yaml"], capsys)
    assert (code, out) == (6, "")
    assert "error: cannot start /no/such/python" in err
    assert listing(place.parent / "home" / "runs") == []
    assert processes_of(place) == []


def test_an_unexpected_exception_is_one_line_and_a_file(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops hf_abcdefghijklmnopqrstuv")

    monkeypatch.setattr("muster.config.load.load", bug)
    code, out, err = refused(TRAIN, capsys)
    assert (code, out) == (1, "")
    assert "unexpected ZeroDivisionError: oops ***" in err
    path = Path(err.rsplit(" in ", 1)[1].strip())
    text = path.read_text()
    path.unlink()
    assert "Traceback" in text and "hf_abc" not in text
