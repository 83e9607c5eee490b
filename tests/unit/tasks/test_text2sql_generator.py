"""The generator: deterministic, held out by construction, every question answerable and telling."""

import re
import sqlite3
from collections import Counter

import pytest

from muster.tasks.text2sql import generator
from muster.tasks.text2sql.generator import build_database, example
from muster.tasks.text2sql.schemas import BUCKETS, NUMBER_COLUMNS, TABLES, TEXT_COLUMNS, VALUES, is_heldout
from muster.tasks.text2sql.sql_execution import compare, run_query


def generate(*args, **kwargs):
    return list(generator.examples(*args, **kwargs))


@pytest.mark.parametrize("level", generator.LEVELS)
def test_every_gold_query_returns_something(level):
    for heldout in (False, True):
        for found in generate(level, 60, seed=3, heldout=heldout):
            connection = build_database(found)
            result = run_query(found.gold_sql, connection)
            assert result.problem is None, (found.gold_sql, result.message)
            assert any(value not in (None, 0) for row in result.rows for value in row), found.gold_sql
            assert compare(found.gold_sql, [found.gold_sql], connection).correct


@pytest.mark.parametrize("level", generator.LEVELS)
def test_heldout_tables_never_occur_in_training(level):
    def tables(heldout, seed):
        return {table.names for found in generate(level, 300, seed, heldout=heldout) for table in found.tables}

    train, heldout = tables(False, 0) | tables(False, 1), tables(True, 0) | tables(True, 1)
    assert not train & heldout
    # By construction, not by luck: the side is a function of the words alone.
    assert all(is_heldout(words) for words in heldout)
    assert not any(is_heldout(words) for words in train)
    # Every word of a held-out table is known from training.
    assert {word for words in heldout for word in words} <= {word for words in train for word in words}


def test_the_split_holds_out_its_share():
    share = sum(is_heldout({table, column}) for table in TABLES for column in NUMBER_COLUMNS) / (40 * 48)
    assert abs(share - 1 / BUCKETS) < 0.03


@pytest.mark.parametrize("level", generator.LEVELS)
def test_an_example_is_a_function_of_its_number(level):
    whole = generate(level, 20, seed=9)
    assert generate(level, 5, seed=9, start=10) == whole[10:15]
    assert example(level, 9, 3) == whole[3]
    assert generate(level, 20, seed=10) != whole


def test_the_stream_is_pinned():
    """A change of this text changes every prepared data set and published accuracy: raise the generator's version."""
    found = example(1, 0, 0)
    assert found.prompt == PROMPT
    assert found.completion == COMPLETION


PROMPT = "table team : depth , age , manager , cost , theme | how many team ?"
COMPLETION = " SELECT COUNT(*) FROM team"


def test_levels_hold_what_they_promise():
    shapes = {level: Counter(found.shape for found in generate(level, 600, seed=1)) for level in generator.LEVELS}
    assert set(shapes[1]) == {"count", "aggregate", "listing", "aggregate_where"}
    assert len(shapes[2]) >= 8
    queries = [found.gold_sql for found in generate(3, 600, seed=1)]
    joined = {found.shape for found in generate(3, 600, seed=1) if " JOIN " in found.gold_sql}
    assert len(joined) >= 3
    assert any(" GROUP BY " in query for query in queries) and any(" HAVING " in query for query in queries)
    nested = [found.gold_sql for found in generate(4, 600, seed=1)]
    for words in (" IN ( SELECT", " NOT IN ( SELECT", "EXISTS ( SELECT", "> ( SELECT AVG", "= ( SELECT M"):
        assert any(words in query for query in nested), words
    assert not any("( SELECT" in query for query in queries)


def test_level_1_is_small():
    """What two minutes on two cores can learn: one table of five columns, short rows, few words."""
    found = generate(1, 500, seed=0)
    assert all(len(each.tables) == 1 and len(each.tables[0].columns) == 5 for each in found)
    pieces = [re.findall(r"\w+|[^\w\s]+", each.prompt + each.completion) for each in found]
    assert max(map(len, pieces)) <= 40
    assert len({word for each in pieces for word in each}) < 300


def test_words_are_distinct_and_safe_as_names():
    words = [*TABLES, *NUMBER_COLUMNS, *TEXT_COLUMNS, *VALUES]
    assert len(set(words)) == len(words)
    assert len(TABLES) + len(NUMBER_COLUMNS) + len(TEXT_COLUMNS) == 120
    connection = sqlite3.connect(":memory:")
    for word in words:
        connection.execute(f"CREATE TABLE {word} ({word} TEXT)")


@pytest.mark.parametrize("level", generator.LEVELS)
def test_held_out_databases_tell_gold_from_easy_mistakes(level):
    """Dropping the condition, or answering about another column, does not pass."""
    caught = asked = 0
    for found in generate(level, 150, seed=4, heldout=True):
        wrong = re.sub(r" WHERE (?!.*\().*$", "", found.gold_sql)
        if wrong == found.gold_sql or "(" in found.gold_sql.split("WHERE", 1)[1]:
            continue
        asked += 1
        caught += not compare(wrong, [found.gold_sql], build_database(found)).correct
    assert asked > 10 and caught == asked


def test_databases_are_the_same_every_time():
    found = example(3, 0, 0, heldout=True)
    first, second = (list(build_database(found).iterdump()) for _ in range(2))
    assert first == second


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="level 5"):
        example(5, 0, 0)
