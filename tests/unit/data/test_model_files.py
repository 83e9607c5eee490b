"""A model's files: fetched once on a host before its ranks start, from a hub in this process by huggingface_hub's own
client; found in its cache afterwards."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes.model_hub import COMMIT, model_hub

from muster.config import load
from muster.config.spec import Model
from muster.core.errors import BackendError, MusterError, UsageError
from muster.data.hub import fetch_model_files
from muster.data.weights import model_files
from muster.data.weights.model_files import POINTER, fetch, fetch_for_ranks, hub_error, pinned
from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREPARATION, DataFailed, DataPrepared, Preparing

pytest.importorskip("huggingface_hub")
NAME = "org/small"
FILES = {
    "config.json": json.dumps({"model_type": "llama", "vocab_size": 300}).encode(),
    "model-1.safetensors": os.urandom(60_000),
    "model-2.safetensors": os.urandom(40_000),
    "pytorch_model.bin": b"a pickle" * 1000,
    "original/consolidated.00.pth": b"another" * 1000,
}
WANTED = [name for name in FILES if name.endswith(("json", "safetensors"))]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub; its client's cache is empty."""
    with model_hub() as found:
        found.repos[NAME] = FILES
        point_at(monkeypatch, found.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(model_files, "LOOK_S", 0.02)
        yield found


def point_at(monkeypatch, url):
    files = url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (("ENDPOINT", url), ("HUGGINGFACE_CO_URL_TEMPLATE", files)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def model(**given):
    return Model.model_validate({"source": NAME, **given})


def silent(*_):
    pass


def test_weights_are_fetched_and_every_rank_finds_them_without_a_word_to_the_hub(hub, tmp_path):
    said = []
    found = fetch_for_ranks(model(), tmp_path, lambda *told: said.append(told))
    assert found["weights_bytes"] == sum(len(FILES[name]) for name in WANTED) and said
    asked = len(hub.asked)
    for_rank = pinned(model(), tmp_path)
    assert for_rank.revision == COMMIT and pinned(model(revision="main"), tmp_path).revision == "main"
    folder = fetch(for_rank.source, for_rank.revision)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(WANTED), "no pickle"
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert len(hub.asked) == asked, "nothing was asked for it"


def test_how_far_it_is_is_told_while_it_moves_and_only_then(hub, tmp_path):
    hub.gate.clear()
    said = []
    halves = threading.Thread(target=fetch_for_ranks, args=(model(), tmp_path, lambda *told: said.append(told)))
    halves.start()
    total = sum(len(FILES[name]) for name in WANTED)
    try:
        until = time.monotonic() + 20
        while not said or not said[-1][1]:
            assert time.monotonic() < until
            time.sleep(0.01)
        until = time.monotonic() + 20  # until it stands still
        before = -1
        while len(said) != before:
            before = len(said)
            time.sleep(0.3)
            assert time.monotonic() < until
        assert 0 < said[-1][1] < total
    finally:
        hub.gate.set()
        halves.join(30)
    assert not halves.is_alive()
    assert {told[0] for told in said} == {"fetch org/small (0.0 GB)"} and {told[2] for told in said} == {total}
    assert [told[1] for told in said] == sorted(told[1] for told in said)


def test_another_start_fetches_only_what_is_missing(hub, tmp_path, monkeypatch):
    import huggingface_hub.file_download as module

    real, fails, urls = module.http_get, [True], []

    def get(url, *args, **kwargs):
        urls.append(url.rpartition("/")[2])
        if "model-2" in url and fails:
            raise ConnectionError("the connection was reset")
        return real(url, *args, **kwargs)

    monkeypatch.setattr(module, "http_get", get)
    with pytest.raises(BackendError, match="the connection was reset"):
        fetch_for_ranks(model(), tmp_path, silent)
    assert pinned(model(), tmp_path).revision is None, "not all of it is there to be read"
    there = {path.name for path in (tmp_path / "cache" / "models--org--small" / "snapshots" / COMMIT).iterdir()}
    fails.clear()
    urls.clear()
    fetch_for_ranks(model(), tmp_path, silent)
    assert sorted(urls) == sorted(set(WANTED) - there) and "model-2.safetensors" in urls


def test_without_a_hub_the_cache_counts(hub, tmp_path, monkeypatch):
    fetch_for_ranks(model(), tmp_path, silent)
    point_at(monkeypatch, "http://127.0.0.1:9")
    fetch_for_ranks(model(), tmp_path, silent)
    assert (fetch(NAME, COMMIT) / "config.json").read_bytes() == FILES["config.json"]
    with pytest.raises(BackendError, match="org/other is not a local folder and the hub cannot") as error:
        fetch("org/other", None)
    assert "\n" not in str(error.value)


def test_without_a_hub_small_files_come_from_the_cache_too(hub, tmp_path, monkeypatch):
    asked = ("config.json", "tokenizer.json")
    fetch_for_ranks(model(), tmp_path, silent)
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert fetch_model_files(NAME, None, asked)["config.json"].read_bytes() == FILES["config.json"]


def test_a_branch_that_moves_is_no_matter_of_a_run_that_has_begun(hub, tmp_path):
    """Frozen weights are in no checkpoint: a restarted LoRA run has to find those that it began with."""
    fetch_for_ranks(model(), tmp_path, silent)
    hub.commit, hub.repos[NAME] = "b" * 40, {**FILES, "model-1.safetensors": b"new" * 1000}
    fetch_for_ranks(model(), tmp_path, silent)
    again = pinned(model(), tmp_path)
    assert again.revision == COMMIT
    assert (fetch(NAME, again.revision) / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]
    assert pinned(model(source="org/other"), tmp_path).revision is None


@pytest.mark.parametrize(("source", "gated"), [("org/wrong", False), (NAME, True)])
def test_a_wrong_name_and_a_gated_model_are_one_line(hub, tmp_path, source, gated):
    hub.gated |= {NAME} if gated else set()
    with pytest.raises(UsageError, match=f"model.source: {source} is not available on the hub") as error:
        fetch_for_ranks(model(source=source), tmp_path, silent)
    assert "\n" not in str(error.value) and "terms" in error.value.hint
    assert not (tmp_path / POINTER).exists()


def test_a_folder_and_a_copy_that_lies_here_need_no_hub(hub, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    assert fetch_for_ranks(model(source=str(tmp_path / "model")), tmp_path, silent) == {}
    copy = tmp_path / "copies" / "org--small@main"
    (copy / "abc").mkdir(parents=True)
    (copy / "complete").write_text('{"commit": "abc"}')
    monkeypatch.setenv("MUSTER_MODEL_COPIES", str(tmp_path / "copies"))
    assert fetch_for_ranks(model(), tmp_path, silent) == {} and fetch(NAME, None) == copy / "abc"
    assert not hub.asked and not (tmp_path / POINTER).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"source": "org/small"}', '{"source":"org/small","revision":null,"commit":"../../x"}']
)
def test_a_damaged_pointer_is_none(tmp_path, text):
    (tmp_path / POINTER).write_text(text)
    assert pinned(model(), tmp_path) == model()


def test_a_folder_that_is_not_there():
    with pytest.raises(UsageError, match="no folder /nowhere/at/all"):
        fetch("/nowhere/at/all", None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("RepositoryNotFoundError", UsageError), ("GatedRepoError", UsageError), ("ConnectError", BackendError)],
)
def test_errors_of_the_hub_become_ours(name, kind):
    error = type(name, (Exception,), {})("first\nsecond")
    found = hub_error("org/model", error)
    assert isinstance(found, kind) and isinstance(found, MusterError)
    assert "org/model" in str(found) and "second" not in str(found)


def test_a_full_disk_is_said_and_a_signed_address_is_not():
    full = hub_error("org/model", OSError(errno.ENOSPC, "No space left on device"))
    assert "cannot be stored here: No space left on device" in str(full) and "HF_HOME" in full.hint
    signed = "403 Client Error for url: https://cdn.hub.co/repos/ab?Signature=s3cr3t&Key-Pair-Id=K"
    assert "s3cr3t" not in str(hub_error("org/model", RuntimeError(signed)))
    assert "https://cdn.hub.co/repos/ab" in str(hub_error("org/model", RuntimeError(signed)))


RUN_FILE = """\
name: demo
model: {source: org/small}
data: {sources: [{type: random, rows: 20}], cache_dir: CACHE, workers: 1}
training: {steps: 1}
"""


@pytest.mark.parametrize("gated", [False, True])
def test_the_preparation_program_fetches_them_and_says_so(hub, tmp_path, gated):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    hub.gated |= {NAME} if gated else set()
    files = {**FILES, "tokenizer.json": Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str().encode()}
    hub.repos[NAME] = files
    text = RUN_FILE.replace("CACHE", str(tmp_path / "data"))
    (tmp_path / "resolved.json").write_text(load.loads(text, environment=False).spec.model_dump_json())
    token = "hf_" + "t" * 30
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": token}
    env.pop("HF_HUB_OFFLINE", None)
    argv = [sys.executable, "-m", "muster.data", "--run-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, timeout=120, env=env)
    said = [reader_of(PREPARATION)(line) for line in done.stdout.splitlines()]
    assert token.encode() not in done.stdout + done.stderr
    if gated:
        assert isinstance(said[-1], DataFailed) and done.returncode == said[-1].exit_code
        assert "gated" in said[-1].error.lower() and "\n" not in said[-1].error
        return
    assert isinstance(said[-1], DataPrepared), done.stderr.decode()
    assert said[-1].more["weights_bytes"] == sum(len(files[name]) for name in (*WANTED, "tokenizer.json"))
    assert [one.activity for one in said[:-1] if isinstance(one, Preparing)][-1].startswith("fetch org/small")
    assert b"fetch org/small" in done.stderr
    assert json.loads((tmp_path / POINTER).read_text())["commit"] == COMMIT
    assert len(list(Path(tmp_path / "home").rglob("*.safetensors"))) == 2
