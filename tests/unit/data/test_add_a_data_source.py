"""A data source (and a task) that another package adds: its own file and one entry point, nothing in ``src``."""

import json
import sys

import pytest
from fakes.extra_package import install

from muster.config import load
from muster.config.sections.sources import SOURCE_TYPES
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.data.cache import code_version
from muster.data.prepare import prepare
from muster.data.questions import heldout_questions, majority_baseline
from muster.data.task import TASKS
from muster.data.tokenizer import Encoder

SUMS = '''
"""Sums of two numbers, made up."""

from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.sources import Source
from muster.data.source_type import OpenedSource, SourceType


class SumsSource(Source):
    """Questions such as ``3 + 4``."""

    type: Literal["sums"]
    largest: Annotated[int, Field(ge=1)] = 9


def _rows(section, first, last):
    for number in range(first, last):
        left, right = number % (section.largest + 1), number // (section.largest + 1)
        yield {"prompt": f"{left} + {right} =", "completion": f" {left + right}"}


def _open(section):
    count = (section.largest + 1) ** 2
    return OpenedSource(
        type=SOURCE,
        section=section,
        label="sums",
        identity=section.model_dump(),
        rows=lambda: _rows(section, 0, count - 5),
        heldout_rows=lambda: _rows(section, count - 5, count),
    )


SOURCE = SourceType(section=SumsSource, open=_open, task=TASK_NAME)
'''
TASK = """
from dataclasses import dataclass

from muster.data.task import MajorityAnswer, Scorer


@dataclass(frozen=True)
class Mark:
    correct: bool
    timed_out: bool = False
    rows: tuple = ()


class Sums:
    def question(self, row, context):
        return {"gold": row.answers[0]}

    def scorer(self, entry, context, *, timeout_s):
        return Scorer(metric="exact_match", score=lambda answer: Mark(answer.strip() == entry["gold"]))

    def majority_answer(self, rows):
        answers = [row.answers[0] for row in rows]
        commonest = max(sorted(set(answers)), key=answers.count)
        return MajorityAnswer(commonest, lambda entry: commonest)


TASK = Sums()
"""
RUN = """\
name: added
model: {config: {model_type: llama, vocab_size: 128}, tokenizer: {kind: word, vocab_size: 128}}
data: {sources: [{type: sums, KEY: 6}], workers: 1, cache_dir: CACHE}
training: {steps: 1, sequence_length: 16}
"""


@pytest.fixture
def added(tmp_path, monkeypatch):
    """``added(task)`` installs the source; its rows ask questions of ``task``."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.delitem(sys.modules, "sums", raising=False)

    def add(task=None):
        source = SUMS.replace("TASK_NAME", repr(task))
        install(folder, monkeypatch, SOURCE_TYPES, "sums", "sums:SOURCE", {"sums.py": source})
        return folder

    yield add
    for name in ("sums", "sums_task"):
        sys.modules.pop(name, None)


def run_file(tmp_path, key="largest"):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("KEY", key).replace("CACHE", str(tmp_path / "cache")))
    return path


def test_a_run_file_names_it_and_its_rows_become_sequences(added, tmp_path):
    added()
    spec = load.load(run_file(tmp_path)).spec
    assert (spec.data.sources[0].type, spec.data.sources[0].largest) == ("sums", 6)
    spec = RunSpec.model_validate_json(spec.model_dump_json())
    prepared = prepare(spec, run_dir=tmp_path / "run")
    assert (prepared.stats["rows"], prepared.stats["documents"], prepared.stats["questions"]) == (44, 44, 0)
    assert [source["name"] for source in prepared.stats["sources"]] == ["sums"]
    text = Encoder(prepared.tokenizer_dir).decode(prepared.train[0].input_ids.tolist())
    assert " + " in text and " = " in text
    assert prepared.heldout.counts["documents"] == 5


def test_an_unknown_key_in_it_is_refused_with_the_one_that_was_meant(added, tmp_path):
    added()
    with pytest.raises(RunFileError, match=r"data\.sources\.0\.largets") as caught:
        load.load(run_file(tmp_path, "largets"))
    assert "largest" in str(caught.value) + str(caught.value.hint)


def test_its_code_counts_in_the_fingerprint(added, tmp_path):
    folder = added()
    spec = load.load(run_file(tmp_path)).spec
    first = prepare(spec, run_dir=tmp_path / "run")
    assert prepare(spec, run_dir=tmp_path / "run").fingerprint == first.fingerprint
    (folder / "sums.py").write_text((folder / "sums.py").read_text() + "\n# Another edition.\n")
    assert prepare(spec, run_dir=tmp_path / "run").fingerprint != first.fingerprint


def test_the_code_of_a_shipped_task_counts_too():
    SOURCE_TYPES.get("text2sql"), TASKS.get("text2sql")
    alone, with_task = code_version(), code_version(["muster.tasks.text2sql.task"])
    assert alone != with_task == code_version(["muster.tasks.text2sql.source"])


def test_a_task_is_added_in_the_same_way(added, tmp_path, monkeypatch):
    added("sums")
    other = tmp_path / "task"
    other.mkdir()
    install(other, monkeypatch, TASKS, "sums", "sums_task:TASK", {"sums_task.py": TASK})
    spec = load.load(run_file(tmp_path)).spec
    prepared = prepare(spec, run_dir=tmp_path / "run")
    questions = heldout_questions(spec, prepared, 10)
    asked = [(question.prompt_text, question.gold) for question in questions]
    assert asked[3:] == [("5 + 6 =", "11"), ("6 + 6 =", "12")]
    assert {question.metric for question in questions} == {"exact_match"}
    assert questions[0].score(questions[0].gold).correct and not questions[0].score("0").correct
    assert prepared.stats["majority_template"] == "6" and majority_baseline(questions) == 0.0
    json.dumps(dict(prepared.stats["sources"][0]))
