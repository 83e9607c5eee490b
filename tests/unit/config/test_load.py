"""Run files: what is read, what is refused and with which words, what the command line changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config import load, schema_keys
from muster.config.yaml import parse
from muster.core.errors import Problem, RunFileError, UsageError

GOOD = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 64, num_attention_heads: 4}
  tokenizer: {kind: word}
data:
  sources:
    - {type: text2sql, level: 1}
    - type: text2sql
      rows: 5
training:
  steps: 10
"""


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        load.loads(text, overrides, source="f.yaml", environment=False)
    return [problem.render() for problem in caught.value.problems]


def test_a_good_file_loads_and_remembers_what_was_given():
    found = load.loads(GOOD, source="f.yaml")
    assert found.spec.training.steps == 10
    assert found.spec.data.sources[1].rows == 5
    assert found.origins[("data", "sources", 1, "rows")].line == 9
    assert ("training", "seed") not in found.origins
    assert found.warnings == ()


def test_every_problem_is_reported_at_once_with_its_line():
    text = GOOD.replace("steps: 10", "steps: ten\n  stepz: 3\n  seed: -1").replace("level: 1", "level: 9")
    assert problems(text) == [
        "f.yaml:7: data.sources.0.level: must be a whole number of at least 1 and at most 4, got 9",
        'f.yaml:11: training.steps: must be a whole number of at least 1, got "ten"',
        "f.yaml:12: training.stepz: unknown key (hint: did you mean `steps`?)",
        "f.yaml:13: training.seed: must be a whole number of at least 0, got -1",
    ]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("steps: 5", "`steps` belongs under `training`"),
        ("lr: 1", "here it is `training.optimizer.learning_rate`"),
        ("trainng: {}", "did you mean `training`?"),
        ("learning_rate: 1", "`learning_rate` belongs under `training.optimizer`"),
        ("nproc_per_node: 1", "here it is `resources.ranks_per_host`"),
        ("zzzzqqq: 1", "known here: name, backend"),
        ("quantization: nf4", "there are no quantised base models yet; what saves memory is model.lora"),
    ],
)
def test_unknown_keys_say_what_was_meant(extra: str, words: str):
    (found,) = problems(GOOD + extra + "\n")
    assert "unknown key" in found and words in found


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: b: c", 1, "mapping values"),
        ("name: x\n\tmodel: y", 2, "indent with spaces"),
        ("name: [1, 2", 1, "expected ',' or ']'"),
        ("name: 'x", 1, "end of stream"),
        ("name: *nobody", 1, "undefined alias"),
        ("name: x\n---\nname: y", 2, "another document"),
        ("name: !!python/object:os.system x", 1, "tag"),
        ("name: !mine {a: 1}", 1, "tag"),
        ("<<: {name: x}", 1, "merge keys"),
        ("name: x\nname: y", 2, "given twice, first on line 1"),
        ("- a\n- b", 1, "must be a mapping"),
        ("just words", 1, "must be a mapping"),
        ("? [a, b]\n: 1", 1, "a key must be text"),
    ],
)
def test_bad_yaml(text: str, line: int, words: str):
    found = [each for each in problems(text) if words in each]
    assert found and found[0].startswith(f"f.yaml:{line}:")


def test_an_empty_file_names_what_is_missing():
    found = problems("")
    assert any("name: is missing" in each for each in found)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]),
    ],
)
def test_aliases_that_repeat_without_end_are_refused(text: str):
    assert any("without end" in each for each in problems(text))


def test_control_characters_are_refused():
    assert "not YAML" in problems("name: \x00")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2e5", 2e5),
        ("0x10", 16),
        ("1_000", 1000),
        ("012", 12),
        ("yes", "yes"),
        ("no", "no"),
        ("~", None),
        ("true", True),
        ("2026-01-01", "2026-01-01"),
        ("'1'", "1"),
        (".5", 0.5),
        ("", None),
    ],
)
def test_scalars_are_yaml_1_2(text: str, value: object):
    found = parse(f"a: {text}", source="x").value["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
def test_only_finite_numbers(text: str):
    assert any("finite" in each for each in problems(GOOD.replace("steps: 10", f"steps: 10\n  seed: {text}")))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps: '10'", "write the number without quotes"),
        ("steps: 1e3", "write 1000"),
        ("steps: 10\n  compile: yes", "write true"),
        ("steps: 10\n  optimizer: {schedule: cosin}", "did you mean cosine?"),
        ("steps: 10\n  optimizer: 5", "must be a section"),
        ("steps: 10\n  optimizer: {betas: [0.9]}", "must be a list of 2 numbers"),
        ("steps: 10\n  optimizer: {betas: [0.9, x]}", 'betas.1: must be a number, got "x"'),
        ("steps: true", "must be a whole number of at least 1, got true"),
        ("steps: 10\n  activation_checkpointing: ful", "did you mean full?"),
    ],
)
def test_wrong_values_say_what_is_right(change: str, words: str):
    found = problems(GOOD.replace("steps: 10", change))
    assert len(found) == 1 and words in found[0]


def test_a_wrong_source_type_lists_the_right_ones():
    (found,) = problems(GOOD.replace("type: text2sql, level", "type: text2sq, level"))
    assert "data.sources.0.type: must be one of hub, file, text2sql, random" in found
    assert "did you mean text2sql?" in found


def test_a_source_without_a_type():
    (found,) = problems(GOOD.replace("type: text2sql, level", "level"))
    assert "data.sources.0.type: must be one of" in found


def test_rules_across_keys_are_checked_beside_wrong_values():
    text = GOOD.replace("steps: 10", "steps: ten\n  global_batch_size: 5\n  micro_batch_size: 2")
    found = problems(text)
    assert any("training.steps" in each for each in found)
    assert any("2 does not divide global_batch_size = 5" in each for each in found)


def test_secrets_are_never_echoed():
    text = GOOD + "hub_token: hf_abcdefghijklmnopqrstuvwxyz\n"
    assert "hf_abc" not in "\n".join(problems(text))
    found = problems(GOOD.replace("name: demo", "name: [hf_abcdefghijklmnopqrstuvwxyz]"), "api_key=hunter2")
    assert "hf_abc" not in "\n".join(found) and "hunter2" not in "\n".join(found)
    assert "hf_abc" not in problems(GOOD.replace("steps: 10", "steps: hf_abcdefghijklmnopqrstuvwxyz"))[0]


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.steps=7", "training.steps", 7),
        ("data.sources.0.rows=10", "data.sources.0.rows", 10),
        ("training.optimizer.betas=[0.8, 0.9]", "training.optimizer.betas", (0.8, 0.9)),
        ("training.optimizer={learning_rate: 1e-3}", "training.optimizer.learning_rate", 1e-3),
        ("name=123", "name", "123"),
        ("name=a=b", "name", "a=b"),
        ("name=a: b", "name", "a: b"),
        ('name="a # b"', "name", "a # b"),
        ("run_dir=/a/run #2", "run_dir", "/a/run #2"),
        ("run_dir=/a/new\nline", "run_dir", "/a/new\nline"),
        ("run_dir=null", "run_dir", None),
        ("model.lora={rank: 4}", "model.lora.rank", 4),
        ("model.tokenizer=null", "model.tokenizer", None),
        ("checkpoint.every_steps=auto", "checkpoint.every_steps", "auto"),
        ("data.sources.1={type: random}", "data.sources.1.type", "random"),
        ("data.sources.2={type: random}", "data.sources.2.type", "random"),
        ("recovery.keep_hosts_after_failure_s=5", "recovery.keep_hosts_after_failure_s", 5.0),
    ],
)
def test_overrides(override: str, path: str, value: object):
    overrides = [override]
    if override.startswith("model.tokenizer"):
        overrides += ["data.sources=[{type: random}]", "model.config.vocab_size=64"]
    found: object = load.loads(GOOD, overrides, environment=False).spec
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.steps", "is not an override"),
        ("=5", "is not an override"),
        ("training..steps=5", "is not a key path"),
        ("training.stepz=5", "training.stepz: unknown key"),
        ("steps=5", "`steps` belongs under `training`"),
        ("data.sources.7.rows=5", "there is no item 7 in `data.sources`, it has 2"),
        ("data.sources.x.rows=5", "is not a section"),
        ("training.steps=[1", "cannot read the value"),
        ("training.steps=-1", "must be a whole number of at least 1, got -1"),
        ("name.x=1", "name"),
    ],
)
def test_wrong_overrides_cite_the_command_line(override: str, words: str):
    found = problems(GOOD, override)
    assert any(each.startswith("command line:") and words in each for each in found), found


def test_an_override_hides_the_line_it_replaces():
    found = problems(GOOD, "training.steps=0")
    assert found == ["command line: training.steps: must be a whole number of at least 1, got 0"]


# ---------------------------------------------------------------- files


def test_no_such_file_suggests_a_neighbour(tmp_path: Path):
    (tmp_path / "good.yaml").write_text(GOOD)
    with pytest.raises(UsageError) as caught:
        load.load(tmp_path / "god.yaml")
    assert "good.yaml" in (caught.value.hint or "")


def test_a_folder_and_binary_data_are_no_run_files(tmp_path: Path):
    with pytest.raises(UsageError, match="folder"):
        load.load(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(UsageError, match="UTF-8"):
        load.load(tmp_path / "x.yaml")


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    found = load.loads(GOOD, ["data.sources.0={type: file, path: rows.jsonl}", "run_dir=there"])
    assert found.spec.data.sources[0].path == str(tmp_path / "rows.jsonl")
    assert found.spec.run_dir == str(tmp_path / "there")
    assert not (tmp_path / "there").exists()


# ---------------------------------------------------------------- properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
key_paths = st.sampled_from(sorted(path for paths in schema_keys.every_key().values() for path in paths))


@settings(max_examples=150, deadline=None)
@given(path=key_paths, value=json_values)
def test_any_value_anywhere_loads_or_is_refused_in_words(path: str, value: object):
    import json

    try:
        load.loads(GOOD, [f"{path}={json.dumps(value)}"], environment=False)
    except RunFileError as error:
        assert all(problem.message and "\n" not in problem.render() for problem in error.problems)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_words(text: str):
    with pytest.raises(RunFileError):
        load.loads(text, environment=False)


def test_every_key_of_the_spec_is_known_to_the_tree():
    assert "training.optimizer.learning_rate" in schema_keys.every_key()["learning_rate"]
    assert "data.sources.0.rows" in schema_keys.every_key()["rows"]
    for names in schema_keys.OTHER_NAMES.values():
        assert names in schema_keys.every_key()[names.rpartition(".")[2]], names


def test_what_a_back_end_finds_wrong_is_told_with_its_line():
    """A key's own line; that where it stands commented out; that of the section around it; the file's first."""
    text = "name: x\n# run_dir: gs://B/x\nbackend: local\nmodel: {source: a/b}\n" + (
        "data: {sources: [{type: random}]}\ntraining: {steps: 1}\nresources:\n  hosts: 1\n"
    )
    loaded = load.loads(text, ["resources.ranks_per_host=2"], source="x.yaml", environment=False)
    keys = ("resources.hosts", "run_dir", "resources.image", "checkpoint.dir", "resources.ranks_per_host")
    found = loaded.placed(RunFileError([Problem(key, "wrong") for key in keys])).problems
    assert [(problem.source, problem.line) for problem in found] == [
        ("x.yaml", 8), ("x.yaml", 2), ("x.yaml", 7), ("x.yaml", 1), ("command line", None)
    ]  # fmt: skip


def test_a_key_on_the_command_line_takes_the_place_of_the_one_that_it_excludes():
    loaded = load.loads(GOOD, ["training.epochs=3"], environment=False)
    assert (loaded.spec.training.steps, loaded.spec.training.epochs) == (None, 3)
    with pytest.raises(RunFileError, match="cannot be combined with `steps`"):
        load.loads(GOOD, ["training.epochs=3", "training.steps=9"], environment=False)
    kept = load.loads(GOOD, ["training.epochs=null"], environment=False)
    assert kept.spec.training.steps is not None, "no value excludes nothing"
