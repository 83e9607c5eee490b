"""Models' SQL runs in a child that is ended at the limit of time or memory; the next question finds another."""

import os
import resource
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing

import pytest

from muster.core.errors import MusterError, UsageError
from muster.tasks.text2sql import judge, judge_process
from muster.tasks.text2sql.judge import Ask
from muster.tasks.text2sql.task import TASK

#: Calls of a function that is quadratic in its text, 5 to 11 s each: no progress handler sees the middle of one.
SLOW_FUNCTION = """
SELECT instr(a.x, b.x) + instr(a.x, b.x || 'c') + instr(a.x, b.x || 'd') + instr(a.x, b.x || 'e')
FROM (SELECT printf('%.*c', 900000, 'a') x) a, (SELECT printf('%.*c', 450000, 'a') || 'b' x) b
"""
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT {})"
GIGABYTES = f"{NUMBERS.format(2000)} SELECT printf('%.*c', 500000, 'y') FROM n"
GIGABYTES_SORTED = f"{NUMBERS.format(4000)} SELECT printf('%.*c', 900000, 'y') || x FROM n ORDER BY 1"


@pytest.fixture
def process():
    found = judge_process.JudgeProcess()
    yield found
    found.close()


@pytest.fixture
def path(tmp_path):
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as connection:
        connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(1, "x"), (2, "y")])
        connection.commit()
    return str(tmp_path / "t.sqlite")


def ask(path, predicted, gold="SELECT a FROM t", timeout_s=2.0):
    return Ask(golds=(gold,), predicted=predicted, path=path, timeout_s=timeout_s)


def pid(process):
    return process._child._process.pid


def test_rows_decide_and_are_shown(process, path):
    outcome = process.judge(ask(path, "SELECT a FROM t ORDER BY a DESC"))
    assert (outcome.correct, outcome.reason, outcome.rows) == (True, None, (("2",), ("1",)))
    assert process.judge(ask(path, "SELECT b FROM t")).reason == "rows differ"
    assert process.judge(ask(path, "DELETE FROM t")).reason == "forbidden"
    assert process.judge(ask(path, "nonsense")).reason.startswith("error: ")


def test_one_slow_function_is_ended_at_the_limit_and_the_next_question_is_answered(process, path):
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    first, began = pid(process), time.monotonic()
    outcome = process.judge(ask(path, SLOW_FUNCTION, timeout_s=0.5))
    assert outcome.timed_out and time.monotonic() - began < 30  # 1.0 on an idle machine; the query itself: over 20
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_result_of_a_gigabyte_is_refused(process, path):
    assert process.judge(ask(path, GIGABYTES, timeout_s=30)).reason == "too many bytes"
    assert process.judge(ask(path, "SELECT a FROM t")).correct


def test_memory_has_a_limit_that_no_disk_replaces(process, path):
    assert process.judge(ask(path, GIGABYTES_SORTED, timeout_s=60)).reason == "memory"
    assert process.judge(ask(path, "SELECT a FROM t")).correct


def test_a_child_that_was_killed_is_replaced(process, path):
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    os.kill(pid(process), signal.SIGKILL)
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    # In mid-query too: a kill that was not the query's doing changes no score.
    killer = threading.Timer(1.0, os.kill, (pid(process), signal.SIGKILL))
    killer.start()
    assert (
        process.judge(ask(path, f"{NUMBERS.format(2 * 10**6)} SELECT x FROM n WHERE x < 0", timeout_s=30)).reason
        == "rows differ"
    )
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    killer.join()


#: A second or two, with no rows.
LONG = f"{NUMBERS.format(2 * 10**6)} SELECT x FROM n WHERE x < 0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_what_a_job_is_signalled_is_not_for_the_judge(process, path, number):
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    first = pid(process)
    killer = threading.Timer(0.3, os.kill, (first, number))
    killer.start()
    assert process.judge(ask(path, LONG, timeout_s=30)).reason == "rows differ"
    killer.join()
    assert process.judge(ask(path, "SELECT a FROM t")).correct and pid(process) == first


def test_any_signal_that_ends_it_once_changes_no_score(process, path):
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    killer = threading.Timer(0.3, os.kill, (pid(process), signal.SIGQUIT))
    killer.start()
    assert process.judge(ask(path, LONG, timeout_s=30)).reason == "rows differ"
    killer.join()


def test_the_limits_of_its_machine_hold_where_they_are_lower(process, path, tmp_path, monkeypatch):
    memory = 800 * 2**20
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -v {memory // 1024}\nulimit -t 20\nexec "{sys.executable}" "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setattr(judge_process.sys, "executable", str(limited))
    assert process.judge(ask(path, "SELECT a FROM t", timeout_s=60)).correct
    assert resource.prlimit(pid(process), resource.RLIMIT_AS) == (memory, memory)
    assert resource.prlimit(pid(process), resource.RLIMIT_CPU) == (20, 20)


@pytest.mark.parametrize("path_variable", ["", os.pathsep, "."])
def test_no_module_of_the_current_folder_is_imported(process, path, tmp_path, monkeypatch, path_variable):
    """An ``inspect.py`` of the user's, for example. PYTHONPATH=. asks for it; its end is no wrong answer."""
    (tmp_path / "inspect.py").write_text("print('mine', flush=True)\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path_variable)
    if path_variable == ".":
        with pytest.raises(MusterError, match="the judge of SQL"):
            process.judge(ask(path, "SELECT a FROM t"))
    else:
        assert process.judge(ask(os.path.basename(path), "SELECT a FROM t")).correct


@pytest.mark.parametrize("said", ["", "mine\n", '{"verdict": {"correct": true}}\n'])
def test_a_child_that_is_no_judge_gives_no_verdict(process, path, tmp_path, monkeypatch, said):
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\nread line\nexit 1\n")
    other.chmod(0o700)
    monkeypatch.setattr(judge_process.sys, "executable", str(other))
    monkeypatch.setattr(judge_process, "_START_LIMIT_S", 0.5)
    with pytest.raises(MusterError, match="the judge of SQL"):
        process.judge(ask(path, "SELECT a FROM t"))


def test_a_child_that_fails_by_itself_gives_no_verdict(process, path):
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    child = process._child
    child._process.stdin.write(b"no question\n")
    with pytest.raises(MusterError, match=r"failed with code 1; it wrote: (.|\n)*Unreadable"):
        process.judge(ask(path, "SELECT a FROM t"))
    assert process.judge(ask(path, "SELECT a FROM t")).correct


def test_an_interrupted_question_leaves_no_answer_for_the_next(process, path, monkeypatch):
    assert process.judge(ask(path, "SELECT a FROM t")).correct

    def interrupted(child, deadline):
        raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(judge_process._Child, "_line", interrupted)
        process.judge(ask(path, "SELECT b FROM t"))
    assert process.judge(ask(path, "SELECT a FROM t")).correct


def test_a_slow_gold_query_is_said_to_be_one(process, path):
    outcome = process.judge(ask(path, "SELECT 1", gold=SLOW_FUNCTION, timeout_s=0.1))
    assert (outcome.correct, outcome.reason, outcome.timed_out) == (False, "gold query: timeout", False)


def test_gold_queries_are_tried_one_by_one(process, path):
    golds = ("SELECT a FROM t", "SELECT a FROM t WHERE a > 9", "SELECT c FROM t", SLOW_FUNCTION, "SELECT b FROM t")
    assert process.unusable(Ask(golds=golds, path=path, timeout_s=0.5)) == (
        None,
        "no rows",
        "error: no such column: c",
        "timeout",
        None,
    )


def test_a_database_that_changes_is_read_anew(process, path):
    assert not process.judge(ask(path, "SELECT 9")).correct
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM t WHERE a = 1")
        connection.execute("UPDATE t SET a = 9")
    assert process.judge(ask(path, "SELECT 9")).correct


def test_what_is_wrong_with_the_data_is_an_error(process, path, tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        process.judge(ask(str(tmp_path / "none.sqlite"), "SELECT 1"))
    with pytest.raises(UsageError, match="gold query does not run"):
        process.judge(ask(path, "SELECT 1", gold="SELECT missing FROM t"))
    assert process.judge(ask(path, "SELECT a FROM t")).correct


def test_a_child_that_does_not_start_says_what_it_wrote(process, path, monkeypatch):
    monkeypatch.setattr(judge_process.sys, "executable", "/bin/false")
    with pytest.raises(MusterError, match="does not start: nothing"):
        process.judge(ask(path, "SELECT 1"))


def test_it_ends_with_its_caller(process, path):
    """Also in the middle of a function that runs for minutes: by the processor time that a query may take."""
    assert process.judge(ask(path, "SELECT a FROM t")).correct
    child = process._child
    child._process.stdin.write(judge.encode(ask(path, SLOW_FUNCTION, timeout_s=0.1)) + b"\n")
    child._process.stdin.close()
    assert child._process.wait(timeout=60) == -signal.SIGXCPU
    process._child = None


def test_an_answer_is_scored_whatever_it_says(path):
    scorer = TASK.scorer({"golds": ["SELECT a FROM t"]}, {"database": path}, timeout_s=2.0)
    assert scorer.metric == "execution_accuracy" and scorer.score("```sql\nSELECT a FROM t;\n```").correct
    for said in ("", "\0", "\ud800", "x" * 100_000, '{"golds": 1}\n{}\n'):
        assert scorer.score(said).reason.startswith("error"), said
    assert scorer.score("SELECT '\ud800'").reason == "rows differ"
