"""Held-out questions: the prompt the model was trained on, judged by running or by text; the baseline; the preview."""

import io
import json
import sqlite3

import pytest

from muster.config.spec import TrainedTokenizer
from muster.core.errors import UsageError
from muster.data.prepare import prepare
from muster.data.preview import RenderedPreview, preview, summary
from muster.data.questions import heldout_questions, majority_baseline
from muster.data.tokenizer import Encoder, train
from muster.tasks.text2sql.baseline import abstract, fill, majority_template, names

TEMPLATE = {"prompt": "{schema}\n{question}\n", "completion": "{sql}"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_generated_questions_run(make_spec, tmp_path):
    spec = make_spec([{"type": "text2sql", "rows": 800, "heldout_rows": 30, "level": 1}])
    prepared = prepare(spec, run_dir=tmp_path / "r")
    questions = heldout_questions(spec, prepared, 25)
    assert len(questions) == 25 and len(heldout_questions(spec, prepared, 99)) == 30
    encoder = Encoder(prepared.tokenizer_dir)
    for question in questions:
        assert encoder.decode(question.prompt_ids) == question.prompt_text
        assert question.metric == "execution_accuracy" and question.score(question.gold).correct
        assert question.score(" " + question.gold).correct
        assert question.score(f"Here:\n```sql\n{question.gold};\n```\nDone.").correct
        assert not question.score("SELECT 1").correct
        assert not question.score("DROP TABLE x").correct
    assert [question.prompt_text for question in heldout_questions(spec, prepared, 5)] == [
        question.prompt_text for question in questions[:5]
    ]
    assert prepared.stats["majority_template"] == "SELECT COUNT(*) FROM {table0}"
    counts = sum(question.shape == "count" for question in questions)
    assert majority_baseline(questions) == counts / 25
    assert majority_baseline([]) is None


def test_the_prompt_is_a_prefix_of_a_training_document(make_spec, tmp_path):
    """What generation starts from is what training saw: same ids, cut where supervision starts."""
    spec = make_spec([{"type": "text2sql", "rows": 50, "heldout_rows": 5}], packing=False)
    prepared = prepare(spec, run_dir=tmp_path / "r")
    prompts = {question.prompt_ids for question in heldout_questions(spec, prepared, 5)}
    seen = set()
    for sequence in prepared.heldout:
        first = int((sequence.labels != -100).argmax())
        seen.add(tuple(sequence.input_ids[: first + 1].tolist()))
    assert seen == prompts


def database(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
    connection.executemany("INSERT INTO city VALUES (?, ?)", [("oslo", 7), ("rome", 28)])
    connection.commit()
    connection.close()
    return str(path)


def test_a_sources_database_decides(make_spec, tmp_path):
    rows = [
        {
            "question": "which cities",
            "schema": "CREATE TABLE city (name TEXT, people INT)",
            "sql": "SELECT name FROM city",
        },
        {"question": "none", "schema": "", "sql": "SELECT name FROM city WHERE people > 99"},
        {"question": "broken", "schema": "", "sql": "SELECT missing FROM city"},
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    source = {
        "type": "file",
        "path": path,
        "heldout_path": path,
        "template": TEMPLATE,
        "database": database(tmp_path / "c.sqlite"),
    }
    spec = make_spec([source])
    prepared = prepare(spec, run_dir=tmp_path / "r")
    (question,) = heldout_questions(spec, prepared, 10)  # empty and broken gold queries are no questions
    assert (prepared.stats["questions"], prepared.stats["questions_left_out"]) == (1, 2)
    why = (
        f"1: gold query returns no row; 1: gold query fails; first: {path}:2: no rows: "
        "SELECT name FROM city WHERE people > 99"
    )
    assert prepared.stats["questions_left_out_why"] == why
    assert f"2 of 3 held-out questions are left out; {why}" in summary(preview(prepared))
    assert question.metric == "execution_accuracy" and question.gold == "SELECT name FROM city"
    assert question.score("SELECT name FROM city ORDER BY people DESC").correct
    assert not question.score("SELECT people FROM city").correct
    assert not question.score("DELETE FROM city").correct
    assert question.score(question.gold).correct
    # Other content, other data.
    sqlite3.connect(source["database"]).execute("UPDATE city SET people = 1").connection.commit()
    assert prepare(spec, run_dir=tmp_path / "r").fingerprint != prepared.fingerprint


def asked(make_spec, tmp_path, rows, *, name="r", evaluation=None, **source):
    """The questions of held-out ``rows``."""
    path = jsonl(tmp_path / f"{name}.jsonl", rows)
    spec = make_spec([{"type": "file", "path": path, "heldout_path": path, **source}])
    spec = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update=evaluation or {})})
    return heldout_questions(spec, prepare(spec, run_dir=tmp_path / name), 100)


def test_no_question_that_can_be_scored_is_refused_where_questions_are_asked(make_spec, tmp_path):
    rows = [{"q": f"q {each}", "sql": f"SELECT name\nFROM city WHERE people > {each}"} for each in range(90, 99)]
    source = {"template": {"prompt": "{q}", "completion": "{sql}"}, "database": database(tmp_path / "c.sqlite")}
    none = {"num_questions": 0, "samples": 0}
    assert asked(make_spec, tmp_path, rows, evaluation=none, **source) == []
    for some in ({"samples": 1}, {"num_questions": 5}, {"final_num_questions": 5}):  # cached by now
        with pytest.raises(
            UsageError, match=r"no held-out row .*; 9: gold query returns no row; first: .*r\.jsonl:1: "
        ) as e:
            asked(make_spec, tmp_path, rows, evaluation={**none, **some}, **source)
        assert "\n" not in str(e.value)


def test_the_answer_is_what_the_run_file_says_it_is(make_spec, tmp_path):
    """Not what a column is called: with the wrong gold no answer that was learned could be right."""
    row = {"question": "how many", "query": "the user's query", "answer": "SELECT COUNT(*) FROM city"}
    source = {"database": database(tmp_path / "c.sqlite")}
    template = {"prompt": "{question}", "completion": "{answer}"}
    (question,) = asked(make_spec, tmp_path, [row], template=template, **source)
    assert question.gold == row["answer"] and question.score(row["answer"]).correct
    assert question.majority_answer == row["answer"]
    row = {"prompt": "how many", "completion": "```sql\nSELECT 1\n```", "sql": "SELECT 2"}
    (question,) = asked(make_spec, tmp_path, [row], name="stated", format="prompt_completion", **source)
    assert question.gold == "SELECT 1"
    (question,) = asked(make_spec, tmp_path, [row], name="implied", **source)
    assert question.gold == "SELECT 2"


@pytest.mark.parametrize("column", ["completion", "sql"])
def test_any_of_several_answers_counts_and_the_first_is_learned(make_spec, tmp_path, column):
    golds = ["SELECT name FROM city WHERE people > 9", "SELECT people FROM city WHERE people > 9"]
    row = {"prompt": "the large one", column: [*golds, "SELECT missing FROM city"]}
    source = {"database": database(tmp_path / "c.sqlite")}
    if column == "sql":
        source["template"] = {"prompt": "{prompt}", "completion": "{sql};"}
    (question,) = asked(make_spec, tmp_path, [row], **source)
    assert question.gold == golds[0] + (";" if column == "sql" else "")
    assert [question.score(answer).correct for answer in (*golds, "SELECT 1")] == [True, True, False]


def test_a_row_may_name_its_database(make_spec, tmp_path):
    """Spider's layout."""
    for name in ("one", "two"):
        (tmp_path / "db" / name).mkdir(parents=True)
        database(tmp_path / "db" / name / f"{name}.sqlite")
    with sqlite3.connect(tmp_path / "db" / "two" / "two.sqlite") as connection:
        connection.execute("DELETE FROM city WHERE name = 'oslo'")
    connection.close()
    rows = [{"db_id": name, "question": "all", "query": "SELECT name FROM city"} for name in ("one", "two")]
    source = {
        "template": {"prompt": "{question}", "completion": "{query}"},
        "database": str(tmp_path / "db" / "{db_id}" / "{db_id}.sqlite"),
    }
    questions = asked(make_spec, tmp_path, rows, **source)
    assert [question.score("SELECT 'rome'").correct for question in questions] == [False, True]
    (tmp_path / "db").rename(tmp_path / "elsewhere")  # found in the cache, and where it is now
    moved = {**source, "database": str(tmp_path / "elsewhere" / "{db_id}" / "{db_id}.sqlite")}
    assert [each.score("SELECT 'rome'").correct for each in asked(make_spec, tmp_path, rows, **moved)] == [False, True]
    assert len(list((tmp_path / "cache").glob("?" * 32))) == 1
    rows.append({"db_id": "three", "question": "all", "query": "SELECT name FROM city"})
    with pytest.raises(UsageError, match=r"r\.jsonl:3: database .*three\.sqlite' does not exist"):
        asked(make_spec, tmp_path, rows, **moved)
    with pytest.raises(UsageError, match=r"r\.jsonl:1: template field \{base\} is not a column"):
        asked(make_spec, tmp_path, rows, **{**moved, "database": moved["database"].replace("db_id", "base")})


def test_a_databases_log_is_part_of_it(make_spec, tmp_path):
    path = tmp_path / "c.sqlite"
    database(path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO city VALUES ('bern', 1)")
    rows = [{"prompt": "all", "completion": "SELECT name FROM city"}]
    (question,) = asked(make_spec, tmp_path, rows, database=str(path))
    assert question.score("SELECT 'bern' UNION SELECT 'oslo' UNION SELECT 'rome'").correct
    writer.execute("DELETE FROM city")
    with pytest.raises(UsageError, match="gold query returns no row"):
        asked(make_spec, tmp_path, rows, database=str(path))
    writer.close()


def test_without_a_database_the_text_decides(make_spec, tmp_path):
    rows = [
        {"question": f"q {number}", "schema": "", "sql": f"SELECT a FROM t WHERE b = {number}"} for number in range(20)
    ]
    spec = make_spec(
        [{"type": "file", "path": jsonl(tmp_path / "a.jsonl", rows), "template": TEMPLATE}], heldout_fraction=0.2
    )
    prepared = prepare(spec, run_dir=tmp_path / "r")
    questions = heldout_questions(spec, prepared, 10)
    assert len(questions) == 4 and questions[0].metric == "query_match"
    gold = questions[0].gold
    assert questions[0].score(gold.lower() + " ;").correct
    assert questions[0].score(gold + "0").reason == "query differs"


def test_plain_text_has_no_questions(make_spec, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a b c"}] * 20)
    spec = make_spec([{"type": "file", "path": path}])
    assert heldout_questions(spec, prepare(spec, run_dir=tmp_path / "r"), 10) == []


# ---------------------------------------------------------------- baseline


def test_templates_replace_names_and_literals():
    schema = "CREATE TABLE city (name TEXT, people INT); CREATE TABLE lake (area REAL)"
    assert names(schema) == (["city", "lake"], ["name", "people", "area"])
    sql = "SELECT name FROM city WHERE people > 30 AND name = 'it''s'"
    template = abstract(sql, schema)
    assert template == "SELECT {column0} FROM {table0} WHERE {column1} > {number} AND {column0} = {text}"
    assert fill(template, "table shop : price , stock") == "SELECT price FROM shop WHERE stock > 1 AND price = ''"
    assert fill("SELECT {column5} FROM {table3}", "table shop : price") == "SELECT price FROM shop"
    assert fill("SELECT '{{x}}'", "") == "SELECT '{x}'"


def test_the_commonest_template_wins_and_ties_are_settled():
    schema = "table shop : price"
    pairs = [
        (schema, "SELECT price FROM shop"),
        (schema, "SELECT COUNT(*) FROM shop"),
        (schema, "SELECT price FROM shop"),
    ]
    assert majority_template(pairs) == "SELECT {column0} FROM {table0}"
    assert majority_template(reversed(pairs[:2])) == majority_template(pairs[:2]) == "SELECT COUNT(*) FROM {table0}"
    assert majority_template([]) == ""


# ---------------------------------------------------------------- preview


def test_the_preview_shows_what_is_masked(make_spec, tmp_path):
    rows = [{"prompt": "ask me", "completion": " answer"}] * 20 + [{"prompt": "too long", "completion": " x" * 100}]
    spec = make_spec([{"type": "file", "path": jsonl(tmp_path / "a.jsonl", rows)}], heldout_fraction=0.0)
    found = preview(prepare(spec, run_dir=tmp_path / "r"), examples=2)
    assert [[(each.text, each.supervised) for each in example] for example in found.examples] == [
        [("ask me", False), (" answer</s>", True)]
    ] * 2
    # Of three predicted tokens two count: two thirds.
    assert found.histogram == (0, 0, 0, 0, 0, 0, 20, 0, 0, 0)
    assert "1 too long, dropped" in summary(found)
    json.dumps(found.to_json())


def test_the_masked_part_is_dimmed(make_spec, tmp_path):
    console = pytest.importorskip("rich.console")
    rows = [{"prompt": "ask [bold]me", "completion": " answer"}] * 9
    spec = make_spec([{"type": "file", "path": jsonl(tmp_path / "a.jsonl", rows)}], heldout_fraction=0.0)
    found = preview(prepare(spec, run_dir=tmp_path / "r"), examples=1)
    out = console.Console(force_terminal=True, width=100, color_system="standard", file=io.StringIO())
    out.print(RenderedPreview(found))
    shown = out.file.getvalue()
    assert "2mask [bold]me" in shown and "32m answer" in shown and "33% learned" in shown and "[[" not in shown
    out = console.Console(width=100, color_system=None, file=io.StringIO())
    out.print(RenderedPreview(found))
    assert "ask [bold]me[[ answer</s>]]" in out.file.getvalue()


def test_random_tokens_preview_as_ids(make_spec, tmp_path):
    spec = make_spec([{"type": "random", "rows": 5}], model={"config": {"vocab_size": 9}})
    found = preview(prepare(spec, run_dir=tmp_path / "r"), examples=1)
    assert found.histogram[9] == 4 and any(
        each.text.strip().isdigit() or " " in each.text for each in found.examples[0]
    )


def test_generated_questions_as_chat(make_spec, tmp_path):
    """As an instruct model would get them: schema as DDL in the user's turn, asked through the chat template."""
    pytest.importorskip("transformers")
    train(lambda: ["user assistant"], TrainedTokenizer(kind="bpe", vocab_size=300), tmp_path / "tok")
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "tok" / "chat_template.jinja").write_text(template)
    model = {"config": {"vocab_size": 300}, "tokenizer": str(tmp_path / "tok")}
    source = {"type": "text2sql", "rows": 20, "heldout_rows": 4, "format": "chat"}
    spec = make_spec([source], model=model, training={"sequence_length": 512}, packing=False)
    prepared = prepare(spec, run_dir=tmp_path / "r")
    questions = heldout_questions(spec, prepared, 4)
    assert all(each.prompt_text.startswith("[user]CREATE TABLE ") for each in questions)
    assert all(each.prompt_text.endswith("</s>[assistant]") and each.score(each.gold).correct for each in questions)
    starts = {tuple(each.input_ids[: int((each.labels != -100).argmax()) + 1].tolist()) for each in prepared.heldout}
    assert starts == {each.prompt_ids for each in questions}
