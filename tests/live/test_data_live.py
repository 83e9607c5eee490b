"""The data floor with real processes and real data: rivals, kills, full disks, hash seeds, reference data."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.config.sections.sources import HubSource
from muster.config.spec import RunSpec
from muster.core.errors import BackendError
from muster.data.prepare import open_prepared, prepare
from muster.data.questions import heldout_questions, majority_baseline
from muster.data.tokenizer import Encoder

pytestmark = pytest.mark.live

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

PROGRAM = """
import json, sys
from pathlib import Path
from muster.core.errors import MusterError
from muster.config.spec import RunSpec
from muster.data.prepare import prepare

def main():
    spec = RunSpec.model_validate_json(sys.argv[1])
    if len(sys.argv) > 3:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        prepared = prepare(spec, run_dir=Path(sys.argv[2]))
    except MusterError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code, "hint": error.hint}))
        raise SystemExit(error.exit_code)
    first = prepared.train[0].input_ids.tolist()
    print(json.dumps({"fingerprint": prepared.fingerprint, "cached": prepared.stats["cached"], "first": first,
                      "sequences": len(prepared.train)}))

if __name__ == "__main__":
    main()
"""


def spec_of(sources, cache, *, model=None, length=128, **data):
    return RunSpec.model_validate(
        {
            "name": "live",
            "model": model or {"config": {"vocab_size": 512}, "tokenizer": {"vocab_size": 512}},
            "data": {"sources": sources, "cache_dir": str(cache), **data},
            "training": {"sequence_length": length},
        }
    )


def start(tmp_path, spec, run, *more, env=None):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [sys.executable, str(program), spec.model_dump_json(), str(tmp_path / run), *map(str, more)]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process):
    out, err = process.communicate(timeout=120)
    assert out.strip(), err
    return json.loads(out.strip().splitlines()[-1])


def present(*parts):
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {path} is not here")
    return str(path)


# ---------------------------------------------------------------- processes


def test_rivals_prepare_the_same_data_once(tmp_path):
    """Four processes, different hash seeds, one cache: one builds, all read the same."""
    spec = spec_of([{"type": "text2sql", "rows": 3000, "heldout_rows": 20}], tmp_path / "cache")
    rivals = [start(tmp_path, spec, f"run-{seed}", env={"PYTHONHASHSEED": str(seed)}) for seed in range(4)]
    for rival in rivals:
        go(rival)
    found = [finish(rival) for rival in rivals]
    assert sum(not each["cached"] for each in found) == 1
    assert len({each["fingerprint"] for each in found}) == 1
    assert all(each["first"] == found[0]["first"] for each in found)
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(left) == 2 and left[0] == found[0]["fingerprint"] and left[1].startswith(f"{left[0]}.")


def test_the_same_bytes_whatever_the_hash_seed_and_the_workers(tmp_path):
    """Built apart, in caches of their own: every file equal, bit for bit."""
    folders = []
    for seed, workers in ((1, 1), (2, 2)):
        sources = [{"type": "text2sql", "rows": 33_000}, {"type": "text2sql", "level": 4, "rows": 1500}]
        spec = spec_of(sources, tmp_path / f"cache-{seed}", workers=workers)
        process = start(tmp_path, spec, f"run-{seed}", env={"PYTHONHASHSEED": str(seed)})
        go(process)
        folders.append(tmp_path / f"cache-{seed}" / finish(process)["fingerprint"])
    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for folder in folders
    )
    assert first.keys() == second.keys() and len(first) > 10
    assert [name for name in first if first[name] != second[name]] == []


def test_a_killed_preparation_is_gone_on_with(tmp_path):
    """Two processes tokenise; a kill -9 of their parent ends them too, and what was done is not done again."""
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number in range(60_000):
            file.write(json.dumps({"prompt": f"row {number} of many", "completion": f" is {number}" * 4}) + "\n")
    bpe = {"config": {"vocab_size": 400}, "tokenizer": {"vocab_size": 400, "kind": "bpe"}}
    source = {"type": "file", "path": str(tmp_path / "rows.jsonl")}
    victim = start(tmp_path, spec_of([source], tmp_path / "cache", model=bpe, workers=2), "run-a")
    go(victim)
    deadline = time.monotonic() + 120
    while sum(path.read_bytes().count(b"\n") for path in kept(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = children(victim.pid)
    victim.kill()
    victim.wait()
    [journal] = kept(tmp_path)
    before = journal.read_bytes().splitlines(keepends=True)
    assert len(before) >= 3 and workers
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), "the tokenising processes outlived their parent"
    inode = journal.stat().st_ino
    again = start(tmp_path, spec_of([source], tmp_path / "cache", model=bpe, workers=2), "run-a")
    watched = open(journal, "rb")  # noqa: SIM115 (it is removed at the end)
    go(again)
    found = finish(again)
    assert os.fstat(watched.fileno()).st_ino == inode and watched.read().startswith(b"".join(before))
    watched.close()
    assert not kept(tmp_path)
    fresh = start(tmp_path, spec_of([source], tmp_path / "cache-b", model=bpe, workers=1), "run-b")
    go(fresh)
    assert finish(fresh)["fingerprint"] == found["fingerprint"]
    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "cache" / found["fingerprint"], tmp_path / "cache-b" / found["fingerprint"])
    )
    assert len(first) > 10 and first == second


def kept(tmp_path):
    return list((tmp_path / "cache").glob(".work-*/kept/chunks.jsonl"))


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path):
    spec = spec_of([{"type": "text2sql", "level": 4, "rows": 200_000}], tmp_path / "cache", workers=1)
    victim = start(tmp_path, spec, "run-a")
    go(victim)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob("[0-9a-f]*.*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    [begun] = (tmp_path / "cache").glob("[0-9a-f]*.*")  # it was killed while building
    small = spec_of([{"type": "text2sql", "rows": 100}], tmp_path / "cache")
    prepared = prepare(small, run_dir=tmp_path / "run-b")
    assert len(prepared.train) > 0
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert prepared.fingerprint in left and not begun.exists()


@pytest.mark.parametrize("limit", [3_000, 200_000])
def test_no_space_is_one_line_and_leaves_nothing(tmp_path, limit):
    """A file-size limit stands in for a full disk: the writes fail in the same places, with EFBIG."""
    spec = spec_of([{"type": "text2sql", "rows": 3000}], tmp_path / "cache", workers=1)
    process = start(tmp_path, spec, "run", limit)
    go(process)
    found = finish(process)
    assert found["error"].startswith("no space left for prepared data in") and "\n" not in found["error"]
    assert found["hint"] and process.returncode == found["exit_code"] == 1
    assert list((tmp_path / "cache").iterdir()) == [] and not (tmp_path / "run").exists()


def test_an_unwritable_cache_is_one_line(tmp_path):
    """Root may write into any ordinary folder, so for root the kernel's own file system has to refuse."""
    cache = tmp_path / "closed"
    cache.mkdir(mode=0o500)
    if os.geteuid() == 0:
        if not Path("/sys/kernel").is_dir():
            pytest.skip("running as root and without /sys: nothing here is unwritable")
        cache = Path("/sys/kernel/muster-data")
    process = start(tmp_path, spec_of([{"type": "text2sql", "rows": 30}], cache), "run")
    go(process)
    found = finish(process)
    assert "cannot be written" in found["error"] and found["exit_code"] == 5 and "cache_dir" in found["hint"]


def test_worker_processes_give_the_rows_in_order(tmp_path):
    """More rows than are tokenised in one process, so that workers are really started."""
    rows = 36_000
    with open(tmp_path / "rows.jsonl", "w") as file:
        file.writelines(
            json.dumps({"prompt": f"row {number}", "completion": f" is {number}"}) + "\n" for number in range(rows)
        )
    model = {"config": {"vocab_size": 400}, "tokenizer": {"vocab_size": 400, "kind": "bpe"}}
    told = []
    spec = spec_of([{"type": "file", "path": str(tmp_path / "rows.jsonl")}], tmp_path / "cache", model=model, workers=2)
    prepared = prepare(spec, run_dir=tmp_path / "run", progress=lambda *args: told.append(args))
    assert prepared.stats["rows"] == prepared.stats["documents"] + prepared.heldout.counts["documents"] == rows
    size = (tmp_path / "rows.jsonl").stat().st_size
    read = [(done, total) for what, done, total in told if what == "tokenise"]
    assert len(read) == -(-rows // 4096) and sorted(read) == read and read[-1] == (size, size)
    encoder = Encoder(prepared.tokenizer_dir)
    text = encoder.decode(prepared.train[5].input_ids[: prepared.train[5].document_lengths[0]].tolist())
    number = text.split()[1]
    assert text.startswith(f"row {number} is {number}")


def test_a_row_that_does_not_fit_is_named_from_a_worker_too(tmp_path):
    from muster.core.errors import UsageError

    with open(tmp_path / "rows.jsonl", "w") as file:
        for number in range(36_000):
            file.write(json.dumps({"prompt": "a", "completion": "b" if number != 35_000 else None}) + "\n")
    bpe = {"config": {"vocab_size": 2048}, "tokenizer": present("tokenizers", "bpe2k")}
    spec = spec_of([{"type": "file", "path": str(tmp_path / "rows.jsonl")}], tmp_path / "cache", model=bpe, workers=2)
    with pytest.raises(UsageError, match=r":35001: column 'completion' must be text, got NoneType"):
        prepare(spec, run_dir=tmp_path / "run")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unreachable_hub_is_one_line():
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import HfApi

    from muster.data import hub

    with pytest.raises(BackendError, match="the Hugging Face hub cannot be reached") as caught:
        # Port 9 of this machine: nobody listens.
        hub.resolve(HubSource(type="hub", name="x/y"), api=HfApi(endpoint="http://127.0.0.1:9"))
    assert "\n" not in str(caught.value) and "local file" in caught.value.hint


# ---------------------------------------------------------------- real data


def test_a_trained_tokenizer_loads_as_a_hugging_face_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    for kind in ("word", "bpe"):
        model = {"config": {"vocab_size": 600}, "tokenizer": {"vocab_size": 600, "kind": kind}}
        spec = spec_of([{"type": "text2sql", "rows": 500}], tmp_path / "cache", model=model)
        prepare(spec, run_dir=tmp_path / kind)
        prepared = open_prepared(spec, tmp_path / kind)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / kind / "tokenizer")
        ours = Encoder(tmp_path / kind / "tokenizer")
        text = "table shop : price , name | how many shop ? SELECT COUNT(*) FROM shop"
        assert theirs(text).input_ids == ours.encode_prompt(text) == ours.encode([text])[0]
        assert theirs.decode(ours.encode([text])[0]) == ours.decode(ours.encode([text])[0])
        assert (theirs.pad_token_id, theirs.eos_token_id) == (prepared.pad_id, prepared.eos_id)


def test_wikisql(tmp_path):
    source = {
        "type": "file",
        "path": present("text2sql", "wikisql_train.jsonl.gz"),
        "heldout_path": present("text2sql", "wikisql_dev.jsonl.gz"),
        "template": {"prompt": "{schema}\n{question}\nSQL: ", "completion": "{sql}"},
    }
    model = {"config": {"vocab_size": 2048}, "tokenizer": present("tokenizers", "bpe2k")}
    spec = spec_of([source], tmp_path / "cache", model=model, length=512)
    prepared = prepare(spec, run_dir=tmp_path / "run")
    assert prepared.stats["rows"] == 56_172 and prepared.stats["fill"] > 0.9
    assert 0 < prepared.stats["dropped"] < 20
    began = time.monotonic()
    assert prepare(spec, run_dir=tmp_path / "run").stats["cached"]
    assert time.monotonic() - began < 1.0
    questions = heldout_questions(spec, prepared, 200)
    assert len(questions) == 200 and all(question.metric == "query_match" for question in questions)
    assert all(question.score(question.gold).correct for question in questions)
    assert majority_baseline(questions) < 0.05


def test_geography(tmp_path):
    source = {
        "type": "file",
        "path": present("text2sql", "geography_train.jsonl"),
        "heldout_path": present("text2sql", "geography_dev.jsonl"),
        "database": present("text2sql", "geography.sqlite"),
        "template": {"prompt": "{schema}\n{question}\n", "completion": "{sql}"},
    }
    model = {"config": {"vocab_size": 2048}, "tokenizer": present("tokenizers", "bpe2k")}
    spec = spec_of([source], tmp_path / "cache", model=model, length=1024)
    prepared = prepare(spec, run_dir=tmp_path / "run")
    questions = heldout_questions(spec, prepared, 100)
    assert 40 <= len(questions) <= 49 and all(question.metric == "execution_accuracy" for question in questions)
    assert all(question.score(question.gold).correct for question in questions)
    assert not any(question.score("SELECT 1 WHERE 0").correct for question in questions)
    # The answer to another question is rarely right by accident.
    others = [question.score(questions[place - 1].gold).correct for place, question in enumerate(questions)]
    assert sum(others) <= len(others) * 0.2


def test_tiny_shakespeare_for_stories260k(tmp_path):
    source = {"type": "file", "path": present("corpora", "tiny_shakespeare.txt")}
    model = {"source": present("models", "stories260k")}
    spec = spec_of([source], tmp_path / "cache", model=model, length=512, on_overlong="split")
    prepared = prepare(spec, run_dir=tmp_path / "run")
    assert prepared.vocab_size == 512 and prepared.stats["split"] == 1 and prepared.stats["fill"] > 0.999
    encoder = Encoder(prepared.tokenizer_dir)
    text = Path(source["path"]).read_text()
    # Every part is a stretch of the text, byte for byte.
    for place in (0, len(prepared.train) // 2, len(prepared.train) - 1):
        assert encoder.decode(prepared.train[place].input_ids[1:].tolist()).strip() in text
    # Every prediction is there once: a token more than predictions, and the end is one of them.
    total = prepared.stats["tokens"] + prepared.stats["heldout"]["tokens"]
    assert total == len(encoder.encode([text])[0])
