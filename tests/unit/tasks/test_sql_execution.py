"""Predicted SQL is run read-only and bounded; rows are compared as multisets, or in order where gold orders."""

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from muster.core.errors import UsageError
from muster.tasks.text2sql.databases import open_database
from muster.tasks.text2sql.sql_execution import compare, match, normalise, orders_its_result, run_query


@pytest.fixture
def connection():
    found = sqlite3.connect(":memory:")
    found.execute("CREATE TABLE t (a INTEGER, b TEXT)")
    found.executemany("INSERT INTO t VALUES (?, ?)", [(1, "x"), (2, "y"), (2, "y"), (3, None)])
    found.commit()
    yield found
    found.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.sqlite"
    found = sqlite3.connect(path)
    found.execute("CREATE TABLE t (a INTEGER)")
    found.execute("INSERT INTO t VALUES (1)")
    found.commit()
    found.close()
    return path


LOOP = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT MAX(x) FROM n"


@pytest.mark.parametrize(
    "sql",
    [LOOP, "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n ORDER BY x"],
)
def test_a_loop_is_stopped(connection, sql):
    began = time.monotonic()
    outcome = compare(sql, ["SELECT a FROM t"], connection, timeout_s=0.1)
    assert (outcome.correct, outcome.reason, outcome.timed_out) == (False, "timeout", True)
    assert time.monotonic() - began < 2
    # The guard is off again and the connection works.
    assert compare("SELECT a FROM t", ["SELECT a FROM t"], connection).correct


def test_endless_rows_are_cut(connection):
    loop = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
    assert run_query(loop, connection, timeout_s=5).problem == "too many rows"


def test_a_result_is_bounded_in_bytes(connection):
    wide = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 40) SELECT printf('%.*c', 500000, 'y')"
    assert run_query(f"{wide} FROM n", connection, timeout_s=5).problem == "too many bytes"
    outcome = compare(f"{wide} || a FROM t", ["SELECT a FROM t"], connection, timeout_s=5)
    assert outcome.reason == "rows differ" and {len(cell) for row in outcome.rows for cell in row} == {200}


def test_any_of_several_gold_queries_counts(connection):
    golds = ["SELECT a FROM t WHERE a = 1", "SELECT b FROM t WHERE a = 2"]
    assert [compare(sql, golds, connection).correct for sql in (*golds, "SELECT 3")] == [True, True, False]
    assert [match(sql, golds).correct for sql in (*golds, "SELECT 3")] == [True, True, False]


WRITES = [
    "DELETE FROM t",
    "UPDATE t SET a = 0",
    "INSERT INTO t VALUES (9, 'z')",
    "DROP TABLE t",
    "CREATE TABLE u (a)",
    "CREATE TEMP TABLE u AS SELECT * FROM t",
    "ATTACH DATABASE '/tmp/never-made.sqlite' AS other",
    "PRAGMA writable_schema = ON",
    "PRAGMA table_info(t)",
    "VACUUM INTO '/tmp/never-made.sqlite'",
    "BEGIN",
    "SELECT load_extension('x')",
    "SELECT length(randomblob(999999999))",
    "SELECT * FROM pragma_table_info('t')",
]


@pytest.mark.parametrize("sql", WRITES)
def test_anything_but_reading_is_refused(connection, sql):
    before = list(connection.iterdump())
    outcome = compare(sql, ["SELECT a FROM t"], connection)
    assert not outcome.correct and outcome.reason
    assert list(connection.iterdump()) == before


@pytest.mark.parametrize("sql", ["DELETE FROM t", "DROP TABLE t", "INSERT INTO t VALUES (2)"])
def test_a_file_is_opened_read_only(file, sql):
    before = file.read_bytes()
    with closing(open_database(file)) as opened:
        assert run_query(sql, opened).problem == "forbidden"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            opened.execute(sql)
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["t.sqlite"]


@pytest.mark.parametrize(
    "sql",
    ["", ";", "nonsense", "SELECT", "SELECT a FROM missing", "SELECT 1; SELECT 2", "SELECT 'open", "\0", "x" * 50_000],
)
def test_broken_sql_is_wrong_not_an_error(connection, sql):
    outcome = compare(sql, ["SELECT a FROM t"], connection)
    assert not outcome.correct and outcome.reason.startswith("error")


def test_huge_strings_are_refused(connection):
    """SQLite answers NULL or an error where a string would pass the limit; either way none is built."""
    for sql in (
        "SELECT printf('%.*c', 900000000, 'x')",
        "SELECT replace(hex(zeroblob(500000)), '0', 'yyyyyyyyyy')",
        "WITH RECURSIVE s(x) AS (SELECT 'y' UNION ALL SELECT x || x FROM s) SELECT MAX(x) FROM s",
    ):
        found = run_query(sql, connection, timeout_s=0.2)
        assert found.problem or found.rows == ((None,),), sql


@pytest.mark.parametrize(
    ("predicted", "gold", "correct"),
    [
        ("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t", True),
        ("SELECT DISTINCT a FROM t", "SELECT a FROM t", False),
        ("SELECT a FROM t WHERE a < 3", "SELECT a FROM t", False),
        ("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t ORDER BY a", False),
        ("SELECT a FROM t", "SELECT a FROM (SELECT a FROM t ORDER BY a DESC)", True),
        ("SELECT SUM(a) * 1.0 FROM t", "SELECT SUM(a) FROM t", True),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
        ("SELECT 0.30001", "SELECT 0.3", False),
        ("SELECT '2'", "SELECT 2", False),
        ("SELECT b, a FROM t", "SELECT a, b FROM t", False),
        ("SELECT a AS z FROM t", "SELECT a FROM t", True),
        ("SELECT b FROM t WHERE a = 3", "SELECT NULL", True),
        ("select count(*) from T", "SELECT COUNT(*) FROM t", True),
        ("WITH c AS (SELECT a FROM t) SELECT a FROM c", "SELECT a FROM t", True),
    ],
)
def test_rows_decide(connection, predicted, gold, correct):
    assert compare(predicted, [gold], connection).correct is correct


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 1", True),
        ("SELECT a FROM t WHERE a IN (SELECT a FROM t ORDER BY a)", False),
        ("SELECT 'ORDER BY a' FROM t", False),
        ('SELECT "ORDER" FROM t', False),
        ("SELECT ROW_NUMBER() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t -- ORDER BY a", False),
    ],
)
def test_order_counts_at_the_top_level_only(sql, ordered):
    assert orders_its_result(sql) is ordered


def written(path, *, journal_mode):
    """A database with a committed change beside it: what a killed writer leaves."""
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute(f"PRAGMA journal_mode = {journal_mode}")
    writer.execute("CREATE TABLE t (a INTEGER)")
    writer.execute("INSERT INTO t VALUES (1)")
    return writer


def test_a_write_ahead_log_is_read_and_nothing_is_written(tmp_path):
    with closing(written(tmp_path / "live.sqlite", journal_mode="WAL")):
        for ending in ("", "-wal"):
            (tmp_path / f"w.sqlite{ending}").write_bytes((tmp_path / f"live.sqlite{ending}").read_bytes())
    for path in tmp_path.glob("live*"):
        path.unlink()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    left = set(Path(tempfile.gettempdir()).glob("muster-sql-*"))
    with closing(open_database(tmp_path / "w.sqlite")) as opened:
        assert run_query("SELECT a FROM t", opened).rows == ((1,),)
        assert set(Path(tempfile.gettempdir()).glob("muster-sql-*")) <= left
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_a_change_that_was_cut_off_is_not_read(tmp_path):
    """With the journal of a writer that died in mid-change, the last committed rows are read."""
    writer = written(tmp_path / "live.sqlite", journal_mode="DELETE")
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN")
    writer.execute(
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 9999) INSERT INTO t SELECT x FROM n"
    )
    for ending in ("", "-journal"):
        (tmp_path / f"j.sqlite{ending}").write_bytes((tmp_path / f"live.sqlite{ending}").read_bytes())
    writer.close()
    with closing(open_database(tmp_path / "j.sqlite")) as opened:
        assert run_query("SELECT COUNT(*) FROM t", opened).rows == ((1,),)


def test_a_gold_query_that_fails_is_an_error(connection):
    with pytest.raises(UsageError, match="gold query does not run"):
        compare("SELECT 1", ["SELECT missing FROM t"], connection)


def test_missing_and_foreign_databases_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.sqlite"):
        open_database(tmp_path / "none.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, only text " * 50)
    with pytest.raises(UsageError, match="not a SQLite database"):
        open_database(tmp_path / "text.sqlite")


@pytest.mark.parametrize(
    ("predicted", "gold", "correct"),
    [
        ('SELECT "no" FROM t WHERE "a"=\'X\'', "select no from T where a = 'x' ;", True),
        ("SELECT a FROM t WHERE a != 1", "SELECT a FROM t WHERE a <> 1", True),
        ("SELECT a FROM t WHERE a = 1", "SELECT a FROM t WHERE a = 2", False),
        ("SELECT a FROM t WHERE b = 'p q'", "SELECT a FROM t WHERE b = 'pq'", False),
        ("", "SELECT a FROM t", False),
    ],
)
def test_query_match_ignores_spelling_only(predicted, gold, correct):
    outcome = match(predicted, [gold])
    assert outcome.correct is correct


def test_normalising_keeps_values_apart_from_names():
    assert normalise("SELECT 'a'") != normalise('SELECT "a"')
